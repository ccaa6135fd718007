"""Starts rounds and prompt chunks on the device and brings back what came out, in one copy.

It chooses the shape of a round, seats the rows, sends what the host has changed in one upload, and runs the round as it
is or, on a GPU, as a captured one. A round under way is waited for only when its result is asked for, and captured
rounds may be launched before the one in front has been settled: `lag` of them, for which slots are reserved.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from specdec.config import MAX_FORCED_TOKENS, SamplingParams, SpecConfig
from specdec.gpu.captures import CaptureUse
from specdec.gpu.mirrored_array import IntArray, upload
from specdec.kvcache.table import row_cells
from specdec.runtime.request import Request
from specdec.runtime.rounds.captured_prompts import ChunkGraphs
from specdec.runtime.rounds.captured_rounds import RoundGraphs, batch_sizes, run_programs
from specdec.runtime.rounds.grouping import group_chunks, padded_size
from specdec.runtime.rounds.prompt_scoring import Scoring, Span, score_chunk
from specdec.runtime.rounds.result import RoundResult, RoundShape, unpack
from specdec.runtime.rounds.round import DECODE_STAGES, PREFILL_STAGES, Chunk, Round
from specdec.sampling.grammars.grammar import Place, make_masks, tree_masks
from specdec.sampling.log_probs import TokenScores
from specdec.sampling.sampling_table import Uses
from specdec.sampling.token_bitmaps import RowMasks, write_masks

FULL_DEPTH = 1 << 30


class Wanted(NamedTuple):
    """How a request speculates (None: not at all), how many tokens it has to go, where in its grammar it is (None: it
    has none) and which tokens that forces."""

    draft: SpecConfig | None
    to_go: int
    place: Place | None = None
    forced: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class OnItsWay:
    """Numbers of the device that are on their way to the host, and there once `done` is reached."""

    host: torch.Tensor
    done: torch.cuda.Event | None

    @classmethod
    def of(cls, numbers: torch.Tensor) -> "OnItsWay":
        """Sent before anything overwrites them."""
        if numbers.device.type != "cuda":
            return cls(numbers.clone(), None)
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return cls(host, done)

    def array(self) -> IntArray:
        """Waits for the device."""
        if self.done is not None:
            self.done.synchronize()
        array: IntArray = self.host.numpy()
        return array


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A launched step, and what is asked of its result."""

    packed: OnItsWay
    shape: RoundShape
    stages: tuple[str, ...]
    asked: list[int | None]  # of each request: alternatives to every token that it wants
    forced: IntArray  # and how many of its tokens its grammar gives
    scores: "tuple[Scoring, OnItsWay] | None" = None  # of prompt tokens

    def prompt_scores(self) -> list[tuple[Span, TokenScores]]:
        """What was scored of prompts. Waits for the device."""
        return [] if self.scores is None else self.scores[0].split(self.scores[1].array())

    def result(self) -> RoundResult:
        """Waits for the device."""
        return unpack(self.packed.array(), self.shape, self.stages, self.asked, self.forced)


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
        """Rounds that may be under way when one more is launched."""
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
        """Capture greedy rounds of full drafts at the shortest tables, the largest batch first; nobody is seated.

        Yields the sizes, each when it is done. Other shapes are captured when they come.
        """
        if self.graphs is None:
            return
        nobody = np.zeros(0, dtype=np.int64)
        draft = None if self.round.worker is None else self.spec
        for size in reversed(batch_sizes(self.round.cache.table.max_requests)):
            shape = self.graphs.bucket(self._shape(nobody, [], [Wanted(draft, FULL_DEPTH)], 0)._replace(batch=size))
            for _ in range(2):  # as it is, then captured
                self.round.seat(nobody)
                self.round.flush()
                self.graphs.run(shape)
            yield size
        self.graphs.store.uncaptured["rounds"] = 0  # so far nobody has asked for any

    def load(self, requests: Sequence[Request]) -> None:
        """These requests have been given their rows: their tokens and parameters go there with the next upload."""
        round = self.round
        rows = np.array([request.row for request in requests], dtype=np.int64)
        length = np.array([request.settled.num_tokens for request in requests], dtype=np.int64)
        tokens = chain.from_iterable(request.tokens for request in requests)
        round.tokens[row_cells(rows, np.zeros_like(rows), length)] = np.fromiter(tokens, dtype=np.int64)
        round.sampling.load(rows, [(request.params, request.seed) for request in requests])
        round.max_drafts[rows] = np.array([request.max_drafts for request in requests], dtype=np.int64)
        round.prompt_len[rows] = np.array([len(request.prompt) for request in requests], dtype=np.int64)
        if round.seen_bits is not None:
            held = [request for request in requests if request.params.repetition_penalty != 1]
            round.seen_bits.load(np.array([r.row for r in held], dtype=np.int64), [r.tokens for r in held])

    def prefill(
        self,
        rows: IntArray,
        params: Sequence[SamplingParams],
        chunk_len: IntArray,
        through: Sequence[int],
        places: Sequence[Place | None],
        scoring: Scoring | None = None,
    ) -> UnderWay:
        """Prompt chunks of `chunk_len` [B] tokens; the result is that of the rows numbered `through`.

        places: of these, in their grammars. scoring: tokens of the chunks whose log-probabilities are asked for.
        """
        drawing = [params[i] for i in through]
        uses, logprobs = Uses.of(drawing), _most_logprobs(drawing)
        shape = RoundShape(len(drawing), 0, 0, 1, 1, uses, logprobs)
        chosen = np.array(through, dtype=np.int64)
        self.round.sampling.load_biases(rows[chosen], drawing, uses)
        self.round.flush()
        self.round.clock.start(*PREFILL_STAGES)
        chunk = self._read(rows, chunk_len)
        scores = None
        if scoring is not None:
            cells = upload(scoring.cells(), self.round.device)
            scores = scoring, OnItsWay.of(score_chunk(self.round, chunk, cells, scoring.alternatives))
        packed = self.round.prefill(chunk, chosen, uses, logprobs, _root_masks(places))
        launched = _fetch(packed, shape, PREFILL_STAGES, drawing, np.zeros(len(drawing), dtype=np.int64))
        return replace(launched, scores=scores)

    def group(self, chunk_len: IntArray) -> list[IntArray]:
        """Numbers of the prompt chunks [B] that share a forward."""
        return group_chunks(chunk_len, padded_size if self.chunks is None else self.chunks.size)

    def _read(self, rows: IntArray, chunk_len: IntArray) -> Chunk:
        """The target's part of prompt chunks, captured where they are few."""
        chunk = None if self.chunks is None else self.chunks.read(rows, chunk_len)
        if chunk is None:
            length = upload(chunk_len, self.round.device)
            chunk = self.round.read(self.round.cache.table.rows(rows), length, int(chunk_len.max()))
        return chunk

    def decode(
        self, rows: IntArray, params: Sequence[SamplingParams], drafts: Sequence[Wanted], under_way: int
    ) -> UnderWay:
        """One round of these rows, behind `under_way` others."""
        shape = self._shape(rows, params, drafts, under_way)
        masked = any(each.place is not None for each in drafts)  # a request's rules may have ended before it does
        shape = shape._replace(uses=shape.uses._replace(masked=masked))
        forced = np.array([len(each.forced) for each in drafts], dtype=np.int64)
        if forced.any():
            shape = self._widened(shape, rows, int(forced.max()))
            forced = forced.clip(max=shape.width - 1)
        if self.graphs is not None:
            shape = self.graphs.bucket(shape)
        self.round.seat(rows)
        self.round.sampling.load_biases(rows, params, shape.uses)
        if shape.forced:
            for row, wanted, count in zip(rows.tolist(), drafts, forced.tolist(), strict=True):
                self.round.forced[row, : 1 + count] = np.array([count, *wanted.forced[:count]], dtype=np.int64)
        self.round.flush()
        masks = _Masks(self.round, shape, [each.place for each in drafts])
        masks.send_roots()
        if self.graphs is None:
            packed = run_programs(self.round.programs(shape), masks.between)
        else:
            packed = self.graphs.run(shape, masks.between)
        return _fetch(packed, shape, DECODE_STAGES, params, forced)

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
        self, rows: IntArray, params: Sequence[SamplingParams], drafts: Sequence[Wanted], under_way: int
    ) -> RoundShape:
        num_steps, topk, num_nodes = self._draft_shape(drafts)
        most_nodes = 1 if self.round.worker is None else self.spec.num_nodes
        longest = int(self.round.cache.table.committed_len.host[rows].max(initial=0))
        return RoundShape(
            batch=len(rows),
            longest=longest + under_way * most_nodes,  # the host learns of those later
            num_steps=num_steps,
            topk=topk,
            num_nodes=num_nodes,
            uses=self.round.sampling.uses(params),
            logprobs=_most_logprobs(params),
        )

    def _draft_shape(self, drafts: Sequence[Wanted]) -> tuple[int, int, int]:
        """(steps, topk, nodes) of a draft that is enough for each: the largest of what they want.

        Captured rounds have two, the engine's and none, so that few are captured.
        """
        wanted = [(each.draft, each.to_go) for each in drafts if each.draft is not None]
        if wanted and self.graphs is not None:
            wanted = [(self.spec, FULL_DEPTH)]
        # no request can use more drafts than it has tokens to go, less the bonus
        sizes = [(*spec.shortened(to_go - 1), spec.topk) for spec, to_go in wanted]
        num_steps, num_nodes, topk = (max(size) for size in zip((0, 1, 1), *sizes, strict=True))
        return num_steps, topk, num_nodes


class _Masks:
    """What the host does within a round in which grammars have a say, for the first rows of its batch.

    device    | draft | verify          | draw
    host              trees, their masks ^
    """

    def __init__(self, round: Round, shape: RoundShape, places: Sequence[Place | None]) -> None:
        self._round = round
        self._shape = shape
        self._places = places
        self._trees: OnItsWay | None = None

    def send_roots(self) -> None:
        """What may follow the roots: the drafter may know."""
        roots = _root_masks(self._places)
        if roots is not None:
            write_masks(self._round.allowed(self._shape)[:, :1], roots)

    def between(self, number: int, out: torch.Tensor) -> None:
        """The draft was launched, and returned the trees; or the verify was."""
        if number == 0:
            self._trees = OnItsWay.of(out)
            return
        assert self._trees is not None
        tokens, parents = self._trees.array().tolist()
        held = [(i, place) for i, place in enumerate(self._places) if place is not None]
        found = tree_masks([(place, tokens[i], parents[i]) for i, place in held])
        write_masks(self._round.allowed(self._shape), RowMasks(np.array([i for i, _ in held], dtype=np.int64), found))


def _root_masks(places: Sequence[Place | None]) -> RowMasks | None:
    """What may come next, [M, 1, words], of those that have a grammar; None: nobody has."""
    held = [(i, place) for i, place in enumerate(places) if place is not None]
    if not held:
        return None
    make_masks([place for _, place in held])
    rows = np.array([i for i, _ in held], dtype=np.int64)
    return RowMasks(rows, np.stack([place.mask for _, place in held])[:, None])


def _fetch(
    packed: torch.Tensor,
    shape: RoundShape,
    stages: tuple[str, ...],
    params: Sequence[SamplingParams],
    forced: IntArray,
) -> UnderWay:
    """Send the packed result to the host."""
    return UnderWay(OnItsWay.of(packed), shape, stages, [p.logprobs for p in params], forced)


def _most_logprobs(params: Sequence[SamplingParams]) -> int | None:
    return max((p.logprobs for p in params if p.logprobs is not None), default=None)
