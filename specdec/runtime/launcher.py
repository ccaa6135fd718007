"""Starts rounds and prompt chunks on the device, and brings back what came out in one copy.

It chooses the shape of a round, seats the rows, uploads what the host has changed, and runs the round: as it is, or on
a GPU as a captured one. The host waits for a step only when it asks for the result. Captured rounds may be launched
before the one before them has been settled: `lag` of them, for which slots are reserved.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from specdec.config import MAX_FORCED_TOKENS, SamplingParams, SpecConfig
from specdec.gpu.captures import CaptureUse
from specdec.gpu.mirrored_array import IntArray, upload
from specdec.kvcache.table import row_cells
from specdec.runtime.request import Request, rows_of
from specdec.runtime.rounds.captured_prompts import ChunkGraphs
from specdec.runtime.rounds.captured_rounds import Between, RoundGraphs, batch_sizes, nothing, run_programs
from specdec.runtime.rounds.decode_round import DECODE_STAGES, decode_programs
from specdec.runtime.rounds.grouping import WORTH_A_FORWARD, WORTH_ON_CPU, group_chunks, padded_size
from specdec.runtime.rounds.prompt_scoring import Scoring, Span, score_chunk
from specdec.runtime.rounds.result import RoundResult, RoundShape, unpack
from specdec.runtime.rounds.round import PREFILL_STAGES, Chunk, Round
from specdec.sampling.grammars.grammar import Place, make_masks, tree_masks
from specdec.sampling.log_probs import TokenScores
from specdec.sampling.sampling_table import Uses
from specdec.sampling.token_bitmaps import RowMasks, write_masks

FULL_DEPTH = 1 << 30


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A round or a group of prompt chunks on the device, and the requests that had a row in it.

    row_epochs: of each request at the launch; a request that has lost its row since has no part in the result.
    drawing: of prompt chunks, the numbers in the batch of the requests that draw their first token; None: a round.
    packed: the result on its way to the host, of this shape and these stages. forced: of each request that has a
    result, [B], how many of its tokens its grammar gave. scores: of prompt tokens, what was asked for and the numbers.
    done: reached when all of it is on the host; None: it is there.
    """

    requests: Sequence[Request]
    row_epochs: list[int]
    drawing: list[int] | None
    shape: RoundShape
    stages: tuple[str, ...]
    packed: torch.Tensor
    forced: IntArray
    scores: "tuple[Scoring, torch.Tensor] | None"
    done: torch.cuda.Event | None

    def present(self) -> list[int]:
        """Numbers in the batch of the requests that still have the row."""
        seats = enumerate(zip(self.requests, self.row_epochs, strict=True))
        return [i for i, (request, epoch) in seats if request.row_epoch == epoch]

    def gaining(self) -> list[Request]:
        """Those of them that are sure to get a token."""
        return [self.requests[i] for i in self.present() if self.drawing is None or i in self.drawing]

    def result(self) -> RoundResult:
        """Of a round, of all its requests; of chunks, of those that draw. Waits for the device."""
        drawn = self.requests if self.drawing is None else [self.requests[i] for i in self.drawing]
        asked = [request.params.logprobs for request in drawn]
        return unpack(self._on_host(self.packed), self.shape, self.stages, asked, self.forced)

    def prompt_scores(self) -> list[tuple[Span, TokenScores]]:
        """What was scored of prompts. Waits for the device."""
        return [] if self.scores is None else self.scores[0].split(self._on_host(self.scores[1]))

    def _on_host(self, numbers: torch.Tensor) -> IntArray:
        if self.done is not None:
            self.done.synchronize()
        array: IntArray = numbers.numpy()
        return array


class Launcher:
    """Runs the steps of one engine. graphs, chunks: None where nothing is captured."""

    def __init__(self, round: Round, spec: SpecConfig, graphs: RoundGraphs | None, chunks: ChunkGraphs | None) -> None:
        self.round = round
        self.spec = spec
        self.graphs = graphs
        self.chunks = chunks
        round.masks.max_nodes = max(spec.num_nodes, 1 + MAX_FORCED_TOKENS)

    @property
    def lag(self) -> int:
        """Rounds that may be unsettled when one more is launched."""
        return 0 if self.graphs is None else 1

    def capture_use(self) -> CaptureUse:
        """What is captured, and what ran without."""
        return CaptureUse() if self.graphs is None else self.graphs.store.use()

    def clear(self) -> None:
        """Let go of all that was captured."""
        for captures in (self.graphs, self.chunks):
            if captures is not None:
                captures.clear()

    def warm_up(self) -> Iterator[int]:
        """Capture greedy rounds of full drafts at the shortest tables, the largest batch first, with no row seated.

        Yields each batch size when it is done. Other shapes are captured when they first occur.
        """
        if self.graphs is None:
            return
        no_rows = np.zeros(0, dtype=np.int64)
        draft = None if self.round.worker is None else self.spec
        for size in reversed(batch_sizes(self.round.cache.table.max_requests)):
            shape = self.graphs.bucket(self._shape(no_rows, [], [(draft, FULL_DEPTH)], 0)._replace(batch=size))
            for _ in range(2):  # as it is, then captured
                self.round.seat(no_rows)
                self.round.flush()
                self.graphs.run(shape)
            yield size
        self.graphs.store.uncaptured["rounds"] = 0  # no request has asked for any so far

    def load(self, requests: Sequence[Request]) -> None:
        """These requests have been given their rows: their tokens and parameters go there with the next upload."""
        round, rows = self.round, rows_of(requests)
        length = np.array([request.settled.num_tokens for request in requests], dtype=np.int64)
        tokens = chain.from_iterable(request.tokens for request in requests)
        round.tokens[row_cells(rows, np.zeros_like(rows), length)] = np.fromiter(tokens, dtype=np.int64)
        round.sampling.load(rows, [(request.params, request.seed) for request in requests])
        round.max_drafts[rows] = np.array([request.max_drafts for request in requests], dtype=np.int64)
        round.prompt_len[rows] = np.array([len(request.prompt) for request in requests], dtype=np.int64)
        if round.seen_bits is not None:
            held = [request for request in requests if request.params.repetition_penalty != 1]
            round.seen_bits.load(rows_of(held), [request.tokens for request in held])

    def group(self, chunk_len: IntArray) -> list[IntArray]:
        """Numbers of the prompt chunks [B] that share a forward."""
        worth = WORTH_ON_CPU if self.round.device.type == "cpu" else WORTH_A_FORWARD
        return group_chunks(chunk_len, padded_size if self.chunks is None else self.chunks.size, worth)

    def prefill(
        self, requests: Sequence[Request], chunk_len: IntArray, drawing: list[int], scoring: Scoring | None
    ) -> LaunchedStep:
        """The next `chunk_len` [B] tokens of these prompts; the requests numbered `drawing` draw their first token.

        scoring: tokens of the chunks whose log-probabilities are asked for.
        """
        rows, drawn = rows_of(requests), [requests[i] for i in drawing]
        params = [request.params for request in drawn]
        uses, logprobs = Uses.of(params), _max_logprobs(params)
        shape = RoundShape(len(drawn), 0, 0, 1, 1, uses, logprobs)
        chosen = np.array(drawing, dtype=np.int64)
        self.round.sampling.load_biases(rows[chosen], params, uses)
        self.round.flush()
        self.round.clock.start(*PREFILL_STAGES)
        chunk = self._read(rows, chunk_len)
        scores = None
        if scoring is not None:
            cells = upload(scoring.cells(), self.round.device)
            scores = scoring, _copy_to_host(score_chunk(self.round, chunk, cells, scoring.alternatives))
        packed = self.round.prefill(chunk, chosen, uses, logprobs, _root_masks([request.place for request in drawn]))
        forced = np.zeros(len(drawn), dtype=np.int64)
        return self._launched(requests, drawing, shape, PREFILL_STAGES, packed, forced, scores)

    def decode(self, requests: Sequence[Request], to_go: Sequence[int], rounds_ahead: int) -> LaunchedStep:
        """One round of these requests, after `rounds_ahead` others that are not settled.

        to_go: tokens that each may still get, at least 1.
        """
        rows, params = rows_of(requests), [request.params for request in requests]
        places = [request.place for request in requests]
        drafts = [(request.draft, most) for request, most in zip(requests, to_go, strict=True)]
        shape = self._shape(rows, params, drafts, rounds_ahead)
        masked = any(place is not None for place in places)  # a request's rules may have ended before it does
        shape = shape._replace(uses=shape.uses._replace(masked=masked))
        forced = np.array([len(request.forced) for request in requests], dtype=np.int64)
        if forced.any():
            shape = self._widened(shape, rows, int(forced.max()))
            forced = forced.clip(max=shape.width - 1)
        if self.graphs is not None:
            shape = self.graphs.bucket(shape)
        self.round.seat(rows)
        self.round.sampling.load_biases(rows, params, shape.uses)
        if shape.forced:
            for request, count in zip(requests, forced.tolist(), strict=True):
                tokens = np.array([count, *request.forced[:count]], dtype=np.int64)
                self.round.forced[request.row, : 1 + count] = tokens
        self.round.flush()
        between: Between = nothing
        if masked:
            between = GrammarSteps(self.round, shape, places).between
        if self.graphs is None:
            packed = run_programs(decode_programs(self.round, shape), between)
        else:
            packed = self.graphs.run(shape, between)
        return self._launched(requests, None, shape, DECODE_STAGES, packed, forced, None)

    def _launched(
        self,
        requests: Sequence[Request],
        drawing: list[int] | None,
        shape: RoundShape,
        stages: tuple[str, ...],
        packed: torch.Tensor,
        forced: IntArray,
        scores: tuple[Scoring, torch.Tensor] | None,
    ) -> LaunchedStep:
        epochs = [request.row_epoch for request in requests]
        on_host = _copy_to_host(packed)
        return LaunchedStep(requests, epochs, drawing, shape, stages, on_host, forced, scores, _event(packed.device))

    def _read(self, rows: IntArray, chunk_len: IntArray) -> Chunk:
        """The target's part of prompt chunks, captured where they are few."""
        chunk = None if self.chunks is None else self.chunks.read(rows, chunk_len)
        if chunk is None:
            length = upload(chunk_len, self.round.device)
            chunk = self.round.read(self.round.cache.table.rows(rows), length, int(chunk_len.max()))
        return chunk

    def _widened(self, shape: RoundShape, rows: IntArray, forced: int) -> RoundShape:
        """With room for forced tokens, as far as all rows have slots; captured rounds have few sizes."""
        table = self.round.cache.table
        last = np.minimum(table.capacity[rows], table.slots.host.shape[1] - 1)
        room = int((last - table.committed_len.host[rows]).min())
        width = min(1 + forced, room)
        if self.graphs is not None:
            width = self.graphs.forced_width(width, room, shape.num_nodes)
        return shape._replace(forced=max(shape.num_nodes, width))

    def _shape(
        self,
        rows: IntArray,
        params: Sequence[SamplingParams],
        drafts: Sequence[tuple[SpecConfig | None, int]],
        rounds_ahead: int,
    ) -> RoundShape:
        """drafts: of each request, how it speculates (None: not at all), and how many tokens it may still get."""
        num_steps, topk, num_nodes = self._draft_shape(drafts)
        max_nodes = 1 if self.round.worker is None else self.spec.num_nodes
        longest = int(self.round.cache.table.committed_len.host[rows].max(initial=0))
        return RoundShape(
            batch=len(rows),
            longest=longest + rounds_ahead * max_nodes,  # the host learns those lengths later
            num_steps=num_steps,
            topk=topk,
            num_nodes=num_nodes,
            uses=self.round.sampling.uses(params),
            logprobs=_max_logprobs(params),
        )

    def _draft_shape(self, drafts: Sequence[tuple[SpecConfig | None, int]]) -> tuple[int, int, int]:
        """(steps, topk, nodes) of a draft that is enough for each request: the maximum over them.

        Captured rounds have two, the engine's own and none, so that few are captured.
        """
        speculating = [(draft, to_go) for draft, to_go in drafts if draft is not None]
        if speculating and self.graphs is not None:
            speculating = [(self.spec, FULL_DEPTH)]
        # no request can use more drafts than the tokens that it may still get, less the bonus token
        sizes = [(*spec.shortened(to_go - 1), spec.topk) for spec, to_go in speculating]
        num_steps, num_nodes, topk = (max(size) for size in zip((0, 1, 1), *sizes, strict=True))
        return num_steps, topk, num_nodes


class GrammarSteps:
    """What the host does within a round in which some of the first rows have a place in a grammar.

    device    | draft | verify          | draw
    host              trees, their masks ^
    """

    def __init__(self, round: Round, shape: RoundShape, places: Sequence[Place | None]) -> None:
        self._allowed = round.allowed(shape)
        self._places = places
        roots = _root_masks(places)
        if roots is not None:
            write_masks(self._allowed[:, :1], roots)  # a drafter may use what is allowed after the roots

    def between(self, number: int, out: torch.Tensor) -> None:
        """Program 0, the draft, was launched and returned the trees; or program 1, verify, was."""
        if number == 0:
            self._trees, self._done = _copy_to_host(out), _event(out.device)
            return
        if self._done is not None:
            self._done.synchronize()
        tokens, parents = self._trees.tolist()
        held = [(i, place) for i, place in enumerate(self._places) if place is not None]
        found = tree_masks([(place, tokens[i], parents[i]) for i, place in held])
        write_masks(self._allowed, RowMasks(np.array([i for i, _ in held], dtype=np.int64), found))


def _root_masks(places: Sequence[Place | None]) -> RowMasks | None:
    """Tokens that may come next, [M, 1, words], of the M requests that have a place in a grammar; None: none has."""
    held = [(i, place) for i, place in enumerate(places) if place is not None]
    if not held:
        return None
    make_masks([place for _, place in held])
    rows = np.array([i for i, _ in held], dtype=np.int64)
    return RowMasks(rows, np.stack([place.mask for _, place in held])[:, None])


def _copy_to_host(numbers: torch.Tensor) -> torch.Tensor:
    """A copy on the host, before anything overwrites them: complete once an `_event` recorded later is reached."""
    if numbers.device.type != "cuda":
        return numbers.clone()
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    return host.copy_(numbers, non_blocking=True)


def _event(device: torch.device) -> torch.cuda.Event | None:
    """Reached when everything launched so far has run; None: it has."""
    if device.type != "cuda":
        return None
    done = torch.cuda.Event()
    done.record()
    return done


def _max_logprobs(params: Sequence[SamplingParams]) -> int | None:
    return max((p.logprobs for p in params if p.logprobs is not None), default=None)
