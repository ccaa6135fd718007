"""Chooses the request that ends when a step raises an error, so that one bad request does not stop the others.

    the error names a row      the request of that row ends, at once; the step does not raise
    another error, first time  no request ends: all restart from their tokens
    again without progress     the newest request that was in both failed steps ends

A request has made progress if it has reached more tokens than at the last error. Captured rounds are launched before
the previous one is settled, so a launched round counts as a token:

    raised at the launch of     committed    unsettled rounds    reached
    round 1                     17           0                   17
    round 1 again               17           0                   17         no progress, even if its first token settled
    round 2                     17           1                   18         progress

From then on requests get rows one at a time: the next is admitted once every running request has settled tokens beyond
the point of the error. If the newest request was not the cause, the step raises again when the cause is admitted, and
then that request ends. Nothing is computed twice for the others.

This file chooses and ends requests; the engine removes them when it restarts. A `KeyboardInterrupt` is no error.
"""

import copy
import logging
from collections.abc import Iterable

from specdec.errors import RequestFailedError, RoundFailedError, SpecDecError, error_summary, row_named_by
from specdec.runtime.launches import Launches
from specdec.runtime.request import Request
from specdec.runtime.scheduler import Scheduler

logger = logging.getLogger(__name__)


class StepFaults:
    """Ends requests of one engine after errors in its steps."""

    def __init__(self, scheduler: Scheduler, launches: Launches) -> None:
        self._scheduler = scheduler
        self._launches = launches

    def end_named(self, error: Exception) -> Request | None:
        """End the request whose row the error names, and return it; None: the error names no row."""
        row = row_named_by(error)
        for request in self._scheduler.running if row is not None else ():
            if request.row == row and not request.finished:
                logger.warning("request %d ends here: a step raised an error in its row", request.id, exc_info=error)
                message = f"a step raised an error in this request alone: {error_summary(error)}"
                own = copy.copy(error) if isinstance(error, SpecDecError) else RequestFailedError(message)
                request.end("error", own)  # a new error, without the frames of the step
                return request
        return None

    def end_newest(self, error: Exception, live: Iterable[Request]) -> Request | None:
        """Note an error that names no row. At the second one without progress, end the newest request and return it."""
        in_step = [request for request in self._scheduler.running or live if not request.finished]
        due = self._launches.rounds_due()
        reached = [self._committed(request) + int(due[request.row]) * (request.row >= 0) for request in in_step]
        again = [request for request, length in zip(in_step, reached, strict=True) if length <= request.failed_at]
        for request, length in zip(in_step, reached, strict=True):
            request.failed_at = length
        if not again:
            return None
        newest = max(again, key=lambda request: request.id)
        logger.warning("request %d ends here: its round failed, and failed again", newest.id, exc_info=error)
        newest.end("error", RoundFailedError(f"the round failed, and failed again: {error_summary(error)}"))
        self._scheduler.max_running = 1
        return newest

    def step_ended(self) -> None:
        """After a step without an error, allow one more row if all running requests have settled more than they had
        reached at their last error."""
        scheduler = self._scheduler
        is_lowered = scheduler.max_running < scheduler.table.max_requests
        if is_lowered and all(self._committed(each) > each.failed_at for each in scheduler.running):
            scheduler.max_running += 1

    def _committed(self, request: Request) -> int:
        """Committed tokens of the request, prompt included."""
        return 0 if request.row < 0 else int(self._scheduler.table.committed_len.host[request.row])
