"""Unsettled launches (rounds and prompt chunks), oldest first, and how the host settles them.

    device    | round 1 | round 2 | chunks | round 3 |
    host      launch 2, settle 1, launch chunks, settle 2, launch 3, settle chunks, ...

The device runs launches in order, so slots that are freed while a round runs are overwritten only after it. A request
that finished or was preempted may still have a row in the round already launched; its part of that result is discarded.

To settle a step is to repeat the device's commit, append tokens, and check stop conditions. The host's table repeats
the commit with the same numbers, then each request takes its tokens in one assignment. The commit of prompt chunks is
known at their launch, so the host makes it then (`Scheduler.commit_chunks`). After a fault every request is either
settled or unchanged. The table may be half updated; the engine rebuilds it from the requests (`Scheduler.restart`).
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from time import perf_counter
from typing import Any

import numpy as np
import torch

from specdec.errors import name_row
from specdec.gpu.mirrored_array import IntArray
from specdec.gpu.ranks import Ranks
from specdec.runtime.drafts.draft_policy import DraftPolicy
from specdec.runtime.engine_stats import DraftWatch, EngineStats
from specdec.runtime.prompts.prefixes import salt_of
from specdec.runtime.prompts.prompt_scores import ChunkScoring, ScoredSpan
from specdec.runtime.request import Request, table_rows
from specdec.runtime.request_output import RowTotals
from specdec.runtime.rounds.decode_round import DECODE_STAGES
from specdec.runtime.rounds.device_state import DeviceState
from specdec.runtime.rounds.prompt_chunks import PREFILL_STAGES
from specdec.runtime.rounds.result import RoundResult, RoundShape, unpack_round_result
from specdec.runtime.rounds.round_shapes import is_rare
from specdec.runtime.scheduler import RequestBatch, Scheduler
from specdec.sampling.log_probs import TokenScores


class HostCopy:
    """A copy of a launch's result to the host, made after the launch. Later launches cannot overwrite it.

    ranks: if they shared the work, waiting raises DeviceLostError if one of them does not answer.
    """

    def __init__(self, numbers: torch.Tensor, ranks: Ranks | None = None) -> None:
        self._numbers, self._done, self._ranks = copy_to_host(numbers), None, ranks
        if numbers.device.type == "cuda":
            self._done = torch.cuda.Event()
            self._done.record()

    def wait(self) -> IntArray:
        """The numbers, once everything launched before the copy has run."""
        if self._done is not None and self._ranks is not None:
            self._ranks.wait_for(self._done)
        elif self._done is not None:
            self._done.synchronize()
        return self._numbers.numpy()


def copy_to_host(numbers: torch.Tensor) -> torch.Tensor:
    """Start a copy of `numbers` to the host. It is complete when a later `HostCopy` is."""
    if numbers.device.type != "cuda":
        return numbers.clone()
    host = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
    return host.copy_(numbers, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Launch:
    """A round or a group of prompt chunks on the device, and the requests that had a row in it.

    batch: the requests; if one has lost its row since the launch, its result is ignored.
    drawing: batch indices of the requests whose prompt ends here and that draw their first token; None for a round.
    packed: the result; `shape` says how to read it.
    draft_depth [B]: deepest draft that each request could accept.
    forced [B]: number of tokens that each request's grammar forced.
    scores: requested log-probabilities of prompt tokens, copied to the host before `packed`.
    lag_seconds: host time in which the drafter read its lag before the round; 0 if rounds are captured.
    """

    batch: RequestBatch
    drawing: list[int] | None
    shape: RoundShape
    packed: HostCopy
    draft_depth: IntArray
    forced: IntArray
    scores: tuple[ChunkScoring, torch.Tensor] | None = None
    lag_seconds: float = 0.0

    @property
    def is_round(self) -> bool:
        return self.drawing is None

    @property
    def brings_a_token(self) -> bool:
        """Is a present request certain to get a token?"""
        return any(self.drawing is None or i in self.drawing for i in self.batch.present())

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


class Launches:
    """The launches of one engine. `unsettled`: oldest first.

    captured: rounds are captured, so one launch may be unsettled when the next one is made. draft_policy: learns from
    each settled round. totals: sums over settled rounds; the engine adds the figures of ended requests.
    waited_seconds: host time spent waiting for the results of rounds.
    """

    def __init__(
        self, scheduler: Scheduler, state: DeviceState, draft_policy: DraftPolicy | None, *, captured: bool
    ) -> None:
        self.unsettled: deque[Launch] = deque()
        self.row_totals = RowTotals(scheduler.table.max_requests)
        self.totals = EngineStats()
        self.waited_seconds = 0.0
        self._scheduler = scheduler
        self._state = state
        self._draft_policy = draft_policy
        self._captured = captured
        self._watch = DraftWatch()
        self._ended: int | None = None  # device clock at the end of the newest settled round; None: chunks followed

    @property
    def num_rounds(self) -> int:
        return sum(launched.is_round for launched in self.unsettled)

    def clear(self) -> None:
        """Drop all launches without settling them."""
        self.unsettled.clear()
        self._ended = None

    def rounds_due(self) -> IntArray:
        """Number of unsettled rounds that each row takes part in, [rows]."""
        due = np.zeros(self._scheduler.table.max_requests, dtype=np.int64)
        for launched in self.unsettled:
            if launched.is_round:
                due[_select_present(launched.batch.rows, launched.batch.present())] += 1
        return due

    def settle(self, *, busy: bool) -> list[Request]:
        """Settle launches; if rounds are captured, all but the newest. Returns the requests that ended.

        busy: the device has other work, a round or the prompt chunks of this step or the next. If not, the device
        would idle until the next step, so a launch that brings a token is settled now.
        """
        advances = not busy and any(launched.brings_a_token for launched in self.unsettled)
        return self.settle_all(left=int(self._captured and not advances))

    def settle_all(self, left: int = 0) -> list[Request]:
        """Settle launches, oldest first, except the last `left`. Of these, the oldest are dropped while all their rows
        are lost. Returns the requests that ended."""
        finished: list[Request] = []
        while self.unsettled and (len(self.unsettled) > left or not self.unsettled[0].batch.present()):
            launched = self.unsettled.popleft()
            present = launched.batch.present()
            if present and launched.is_round:
                self._settle_round(launched, present)
            else:
                self._ended = None
                self._settle_chunks(launched, present)
            finished += self.release_finished(_select_present(launched.batch.requests, present))
        return finished

    def settle_before_parts(self) -> list[Request]:
        """While the device runs the parts of a prompt forward that were just launched, settle the round before them, so
        that every step brings a token."""
        finished = self.settle_all()
        self._ended = None
        return finished

    def release_finished(self, requests: Sequence[Request]) -> list[Request]:
        """Free the rows and slots of the requests that have ended. Returns these requests."""
        finished = [request for request in requests if request.settled.finish_reason]
        if finished:
            for request in finished:
                if self._state.finished is not None and request.finish_reason in ("stop", "length"):
                    self._state.finished.add(request.tokens, len(request.prompt), salt_of(request))
            self._scheduler.release_requests(*finished)
        return finished

    def _settle_chunks(self, launched: Launch, present: Sequence[int]) -> None:
        """For the requests at indices `present`, which still have their rows: add the scores of their prompt chunks,
        and the first output token if the chunk ended the prompt."""
        if not present:
            return
        result, requests = launched.result(), launched.batch.requests
        for index in present:
            requests[index].stats.prefill_seconds += result.seconds["prefill"] / len(requests)
        for span, scores in launched.prompt_scores():
            if span.chunk_index in present and (known := requests[span.chunk_index].scores) is not None:
                known.fill(span.first, scores)
        assert launched.drawing is not None, "a round is no prompt chunk"
        for place, index in enumerate(launched.drawing):
            if index in present:
                request, first = requests[index], int(result.tokens[place, 0])
                self._state.tokens.adopt((request.row, len(request.prompt)), first)
                _settle(request, [first], result.logprobs[place])

    def _settle_round(self, launched: Launch, present: Sequence[int]) -> None:
        batch, shape, began = launched.batch, launched.shape, perf_counter()
        launched.packed.wait()
        self.waited_seconds += perf_counter() - began
        result = launched.result()
        requests, rows = _select_present(batch.requests, present), _select_present(batch.rows, present)
        if len(present) < len(batch.requests):
            result = result.select_requests(present)
        before = sum(request.num_output for request in requests) if shape.draft.num_steps else 0
        self.row_totals = self.row_totals.after_round(rows, result)
        settle_round(self._state, requests, rows, result, self.row_totals)
        gained = sum(request.num_output for request in requests) - before if shape.draft.num_steps else 0
        last, self._ended = self._ended, result.ended
        seconds = sum(result.seconds.values())
        if self._captured and last is not None:
            seconds = (result.ended - last) / 1e9
        self._learn(shape, requests, result, gained, seconds + launched.lag_seconds)
        self._count(requests, result, by_lookup=shape.draft.by_lookup)

    def _learn(
        self, shape: RoundShape, requests: Sequence[Request], result: RoundResult, gained: int, seconds: float
    ) -> None:
        """Update the draft policy from a settled round.

        gained: output tokens of all its requests together; 0 in a round without drafts, whose tokens are not counted.
        seconds: since the end of the previous round if the device ran without a pause between them, else since the
        start of this round.
        """
        if self._draft_policy is None or shape.forced or (self._captured and is_rare(shape)):
            return
        rows, drafting = table_rows(requests), result.draft_depth > 0
        drafted = rows[drafting], result.length[drafting] - 1, result.draft_depth[drafting]
        chosen = not any(request.has_fixed_draft for request in requests)
        mean_tokens = gained / len(requests) if chosen else 0.0
        self._draft_policy.learn(shape.draft, shape.batch, seconds, drafted, mean_tokens)

    def _count(self, requests: Sequence[Request], result: RoundResult, *, by_lookup: bool) -> None:
        """Count a settled round, and its accepted drafts unless the lookup next to a model drafted them."""
        self.totals.batches += 1
        self.totals.batch_seconds += sum(result.seconds.values())
        if self._captured:  # the host works while the device does, so its time does not count
            self._scheduler.prompt_gap.learn_round(sum(result.seconds.values()))
        if not by_lookup:
            drafted = (result.draft_depth > 0) & (result.forced == 0)
            rounds = 0 if self._state.worker is None else sum(request.spec is not None for request in requests)
            self._watch.count(rounds, int(drafted.sum()), int((drafted & (result.length > 1)).sum()))


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
        _settle(request, emitted, logprobs, row_totals, *drafts)
    table.evict_unseen(rows, lazily=True)


def _settle(request: Request, *gained: Any) -> None:
    """`Request.settle`. An error names the request's row."""
    try:
        request.settle(*gained)
    except Exception as error:
        raise name_row(error, request.row)  # noqa: B904 - the same error


def _select_present(values: Any, present: Sequence[int]) -> Any:
    """Select the entries at indices `present` of a list or array by request; returns `values` itself if all are
    present."""
    if len(present) == len(values):
        return values
    return values[present] if isinstance(values, np.ndarray) else [values[i] for i in present]
