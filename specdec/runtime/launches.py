"""Unsettled launches (rounds and prompt chunks), oldest first, and how they settle.

    device    | round 1 | round 2 | chunks | round 3 |
    host      launch 2, settle 1, launch chunks, settle 2, launch 3, settle chunks, ...

The device runs launches in order, so slots that are freed while a round runs are overwritten only after it. A request
that finished or was preempted may still have a row in the round already launched; its part of that result is discarded.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from specdec.gpu.mirrored_array import IntArray
from specdec.runtime.draft_policy import DraftPolicy
from specdec.runtime.engine_stats import DraftWatch, EngineStats
from specdec.runtime.request import Request, table_rows
from specdec.runtime.request_output import RowTotals
from specdec.runtime.rounds.device_state import DeviceState
from specdec.runtime.rounds.result import RoundResult, RoundShape
from specdec.runtime.rounds.round_shapes import is_rare
from specdec.runtime.scheduler import Scheduler
from specdec.runtime.settling import LaunchedStep, keep_outputs, settle_chunks, settle_round


class Launches:
    """The launches of one engine. `unsettled`: oldest first.

    captured: rounds are captured, so one launch may be unsettled when the next one is made. draft_policy: learns from
    each settled round. totals: sums over settled rounds; the engine adds the figures of ended requests.
    """

    def __init__(
        self, scheduler: Scheduler, state: DeviceState, draft_policy: DraftPolicy | None, *, captured: bool
    ) -> None:
        self.unsettled: deque[LaunchedStep] = deque()
        self.row_totals = RowTotals(scheduler.table.max_requests)
        self.totals = EngineStats()
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

        busy: the device has other work, a round or the prompt chunks of this step or the next. If it has none and a
        launch brings a token, everything is settled now: waiting for the next step would leave the device idle.
        """
        gaining = not busy and any(launched.gaining() for launched in self.unsettled)
        return self.settle_all(left=int(self._captured and not gaining))

    def settle_all(self, left: int = 0) -> list[Request]:
        """Settle launches, oldest first, except the last `left`. Returns the requests that ended."""
        finished: list[Request] = []
        while self.unsettled and (len(self.unsettled) > left or not self.unsettled[0].batch.present()):
            launched = self.unsettled.popleft()
            present = launched.batch.present()
            if present and launched.is_round:
                self._settle_round(launched, present)
            else:
                self._ended = None
                if present:
                    settle_chunks(self._state, launched, present)
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
            keep_outputs(self._state, finished)
            self._scheduler.release_requests(*finished)
        return finished

    def _settle_round(self, launched: LaunchedStep, present: Sequence[int]) -> None:
        batch, shape, result = launched.batch, launched.shape, launched.result()
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
        self._learn(shape, requests, result, gained, seconds + launched.catch_up_seconds)
        self._count(requests, result, by_lookup=shape.draft.by_lookup)

    def _learn(
        self, shape: RoundShape, requests: Sequence[Request], result: RoundResult, gained: int, seconds: float
    ) -> None:
        """Update the draft policy from a settled round.

        gained: output tokens of all its requests together; 0 in a round without drafts, where they are not counted.
        seconds: since the end of the previous round if the device ran without a pause between them, else since the
        start of this round.
        """
        if self._draft_policy is None or shape.forced or (self._captured and is_rare(shape)):
            return
        rows, drafting = table_rows(requests), result.draft_depth > 0
        drafted = rows[drafting], result.length[drafting] - 1, result.draft_depth[drafting]
        chosen = not any(request.has_fixed_draft for request in requests)
        brought = gained / len(requests) if chosen else 0.0
        self._draft_policy.learn(shape.draft, shape.batch, seconds, drafted, brought)

    def _count(self, requests: Sequence[Request], result: RoundResult, *, by_lookup: bool) -> None:
        """Count a settled round, and its accepted drafts unless the lookup next to a model drafted them."""
        self.totals.batches += 1
        self.totals.batch_seconds += sum(result.seconds.values())
        if self._captured:  # then the host's time is hidden
            self._scheduler.prompt_gap.learn_round(sum(result.seconds.values()))
        if not by_lookup:
            drafted = (result.draft_depth > 0) & (result.forced == 0)
            rounds = 0 if self._state.worker is None else sum(request.spec is not None for request in requests)
            self._watch.count(rounds, int(drafted.sum()), int((drafted & (result.length > 1)).sum()))


def _select_present(values: Any, present: Sequence[int]) -> Any:
    """Those of the requests numbered `present`, of a list or an array by request; the same object if all are."""
    if len(present) == len(values):
        return values
    return values[present] if isinstance(values, np.ndarray) else [values[i] for i in present]
