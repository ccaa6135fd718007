"""Launched steps, and how the host settles them. It also writes what admitted requests ask for to their rows.

To settle a step is to repeat the device's commit, append tokens, and check stop conditions. The device has already
committed the round. The host's table repeats the commit with the same numbers, then each request takes its tokens in
one assignment. The commit of prompt chunks is known at their launch, so the host makes it then. After a fault every
request is either settled or unchanged. The table may be half updated; the engine rebuilds it from the requests
(`Scheduler.restart`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

import numpy as np
import torch

from specdec.errors import name_row
from specdec.gpu.mirrored_array import IntArray
from specdec.gpu.ranks import Ranks
from specdec.kvcache.table import RequestTable, row_cells
from specdec.runtime.prompts.prefixes import PrefixPolicy, salt_of
from specdec.runtime.prompts.prompt_scores import ChunkScoring, ScoredSpan
from specdec.runtime.request import Request, RequestState, table_rows
from specdec.runtime.request_output import RowTotals
from specdec.runtime.rounds.decode_round import DECODE_STAGES
from specdec.runtime.rounds.device_state import DeviceState
from specdec.runtime.rounds.prompt_chunks import PREFILL_STAGES
from specdec.runtime.rounds.result import RoundResult, RoundShape, unpack_round_result
from specdec.runtime.scheduler import RequestBatch
from specdec.sampling.log_probs import TokenScores


class HostCopy:
    """A copy of a launch's result to the host, made after the launch. Later launches cannot overwrite it.

    ranks: if they shared the work, waiting raises DeviceLostError if one of them does not answer.
    """

    def __init__(self, numbers: torch.Tensor, ranks: Ranks | None = None) -> None:
        self._numbers, self._done = copy_to_host(numbers), None
        if numbers.device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
            self._done = done if ranks is None else ranks.guarded(done)

    def wait(self) -> IntArray:
        """The numbers, once everything launched before the copy has run."""
        if self._done is not None:
            self._done.synchronize()
        array: IntArray = self._numbers.numpy()
        return array


def copy_to_host(numbers: torch.Tensor) -> torch.Tensor:
    """Start a copy of `numbers` to the host. It is complete when a later `HostCopy` is."""
    if numbers.device.type != "cuda":
        return numbers.clone()
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    return host.copy_(numbers, non_blocking=True)


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A round or a group of prompt chunks on the device, and the requests that had a row in it.

    batch: the requests; if one has lost its row since the launch, its result is ignored. drawing: batch indices of the
    requests whose prompt ends here and that draw their first token; None for a round. packed: the result; `shape` says
    how to read it. draft_depth [B]: deepest draft that each request could accept. forced [B]: number of tokens that
    each request's grammar forced. scores: requested log-probabilities of prompt tokens, copied to the host before
    `packed`. catch_up_seconds: host time of the drafter's catch-up before the round; 0 if rounds are captured.
    """

    batch: RequestBatch
    drawing: list[int] | None
    shape: RoundShape
    packed: HostCopy
    draft_depth: IntArray
    forced: IntArray
    scores: tuple[ChunkScoring, torch.Tensor] | None = None
    catch_up_seconds: float = 0.0

    @property
    def is_round(self) -> bool:
        return self.drawing is None

    def gaining(self) -> list[Request]:
        """Present requests that are certain to get a token."""
        batch = self.batch
        return [batch.requests[i] for i in batch.present() if self.drawing is None or i in self.drawing]

    def result(self) -> RoundResult:
        """The result for all requests of a round, or for those that draw after prompt chunks. Waits for the device."""
        asked = self.batch.logprobs
        if self.drawing is not None:
            asked = [asked[i] for i in self.drawing]
        stages = DECODE_STAGES if self.is_round else PREFILL_STAGES
        return unpack_round_result(self.packed.wait(), self.shape, stages, asked, self.draft_depth, self.forced)

    def prompt_scores(self) -> list[tuple[ScoredSpan, TokenScores]]:
        """Scores of prompt tokens. Waits for the device."""
        self.packed.wait()
        return [] if self.scores is None else self.scores[0].split(self.scores[1].numpy())


def load_requests(state: DeviceState, requests: Sequence[Request]) -> None:
    """Write the tokens and parameters of these requests to their new rows, on the host; the next upload sends them."""
    rows = table_rows(requests)
    length = np.array([request.settled.num_tokens for request in requests], dtype=np.int64)
    tokens = chain.from_iterable(request.tokens for request in requests)
    state.tokens[row_cells(rows, np.zeros_like(rows), length)] = np.fromiter(tokens, dtype=np.int64)
    state.sampling.load(rows, [(request.params, request.seed) for request in requests])
    state.max_drafts[rows] = np.array([request.max_drafts for request in requests], dtype=np.int64)
    state.prompt_len[rows] = np.array([len(request.prompt) for request in requests], dtype=np.int64)
    if state.unread is not None:
        state.unread.clear_rows(rows)
    if state.finished is not None:
        for request in requests:
            state.finished.seat(request.row, salt_of(request))
    if state.seen_bits is not None:
        held = [request for request in requests if request.params.repetition_penalty != 1]
        state.seen_bits.load(table_rows(held), [request.tokens for request in held])


def commit_chunks_on_host(
    table: RequestTable, prefixes: PrefixPolicy, requests: Sequence[Request], chunk_len: IntArray
) -> None:
    """Commit the next `chunk_len` [B] prompt tokens on the host after their chunks are launched.

    A request whose prompt is complete may then join a round that is launched after the chunks.
    """
    rows = table_rows(requests)
    table.commit_chunk_on_host(rows, chunk_len)
    prefixes.keep_committed(requests)  # before SWA eviction: another prompt may diverge anywhere
    table.evict_unseen(rows)
    for request in requests:
        if table.committed_len.host[request.row] == request.prefill_target:
            request.state = RequestState.DECODE


def settle_chunks(state: DeviceState, step: LaunchedStep, present: Sequence[int]) -> None:
    """For the requests at indices `present`, which still have their rows: add the scores of their prompt chunks, and
    the first output token if the chunk ended the prompt."""
    result, requests = step.result(), step.batch.requests
    for index in present:
        requests[index].stats.prefill_seconds += result.seconds["prefill"] / len(requests)
    for span, scores in step.prompt_scores():
        if span.chunk_index in present and (known := requests[span.chunk_index].scores) is not None:
            known.fill(span.first, scores)
    assert step.drawing is not None, "a round is no prompt chunk"
    for place, index in enumerate(step.drawing):
        if index in present:
            request, first = requests[index], int(result.tokens[place, 0])
            state.tokens.adopt((request.row, len(request.prompt)), first)
            try:
                request.settle([first], result.logprobs[place])
            except Exception as error:
                raise name_row(error, request.row)  # noqa: B904 - the same error


def settle_round(
    state: DeviceState, requests: Sequence[Request], rows: IntArray, result: RoundResult, row_totals: RowTotals
) -> None:
    """Give every request its accepted tokens and the bonus token, up to the end of its output.

    rows [B]: their rows. row_totals: those of the rows after this round.
    """
    table = state.cache.table
    start = table.committed_len.host[rows]
    table.commit_on_host(rows, result.length, result.path)
    tokens: list[list[int]] = result.tokens.tolist()
    counts: Iterable[Sequence[int]] = repeat((), len(tokens))
    if result.tokens.shape[1] == 1:  # every row has gained one, without drafts
        state.tokens.adopt((rows, start + 1), result.tokens[:, 0])
    else:
        of_row, step = np.nonzero(np.arange(result.tokens.shape[1]) < result.length[:, None])  # [M], row by row
        state.tokens.adopt((rows[of_row], start[of_row] + 1 + step), result.tokens[of_row, step])
        tokens = [emitted[:length] for emitted, length in zip(tokens, result.length.tolist(), strict=True)]
        counts = np.stack([result.draft_depth, result.forced], axis=1).tolist()
    for request, emitted, logprobs, drafts in zip(requests, tokens, result.logprobs, counts, strict=True):
        try:
            request.settle(emitted, logprobs, row_totals, *drafts)
        except Exception as error:
            raise name_row(error, request.row)  # noqa: B904 - the same error
    table.evict_unseen(rows, ahead=True)


def keep_outputs(state: DeviceState, finished: Sequence[Request]) -> None:
    """Keep the outputs of finished requests as a source of drafts for other requests."""
    if state.finished is None:
        return
    for request in finished:
        if request.finish_reason in ("stop", "length"):
            state.finished.add(request.tokens, len(request.prompt), salt_of(request))
