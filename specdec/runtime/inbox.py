"""Requests of one engine from submission to end, and ids to abort, until a turn processes them.

    submit    arrived  -- the next turn -->  live, in the scheduler  -- settled to its end -->  counted
    abort     aborted  -- the next turn -->  ended as it is, its row and slots freed, counted

Any thread may submit and abort, the garbage collector within a turn too, and none waits for a turn. `process`,
`remove_ended`, `restart` and `close` run in a turn. Each may be interrupted anywhere; the next turn does it again.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence

from specdec.errors import SpecDecError
from specdec.modules.weights_lock import weights_lock_held
from specdec.runtime.request import Request
from specdec.runtime.steps import Steps

CLOSED = "this engine is closed; make a new one"
CUT = "this engine was closed before the request had ended; make a new one and ask again"


class Inbox:
    """Requests that arrived, live and are to be aborted; see above.

    live: those that the scheduler has, by number, oldest first; a restart needs no other list.
    attempt_turn: processes the inbox in a turn of this thread, unless a thread has one or waits for one -> was it done?
    """

    def __init__(self, steps: Steps, attempt_turn: Callable[[], bool]) -> None:
        self.live: dict[int, Request] = {}
        self.closed = False
        self._arrived: deque[Request] = deque()
        self._aborted: deque[int] = deque()
        self._numbers = itertools.count()
        self._steps = steps
        self._attempt_turn = attempt_turn

    @property
    def is_idle(self) -> bool:
        """No request is live, and none is to be processed."""
        return not (self.live or self._arrived or self._aborted)

    def require_open(self) -> None:
        if self.closed:
            raise SpecDecError(CLOSED)

    def submit(self, requests: Sequence[Request], priority: int = 0) -> None:
        self.require_open()
        for request in requests:
            request.number, request.priority, request.handed_in = next(self._numbers), priority, time.perf_counter()
        self._arrived.extend(requests)
        self.drain()

    def abort(self, number: int) -> None:
        self.abort_later(number)
        self.drain()

    def abort_later(self, number: int) -> None:
        """Leave the abort to the next turn, which may have to restart the others first."""
        self._aborted.append(number)

    def abort_unended(self, requests: Sequence[Request]) -> None:
        """Abort those that have not ended, or whose release a fault prevented."""
        self._aborted.extend(r.number for r in requests if not r.finished or r.number in self.live)
        self.drain()

    def drain(self) -> None:
        """Process the inbox now, unless another thread has a turn or waits for one: then that turn processes it.

        Never waits for a turn, so it may be called from anywhere, by the garbage collector within any turn too. While
        the lock over weights is held, the inbox is left to the next turn, since a release looks at the weights.
        """
        while (self._arrived or self._aborted) and not weights_lock_held():
            if not self._attempt_turn():
                break

    def process(self) -> None:
        """Hand submitted requests to the scheduler, then end aborted ones and free their row and slots."""
        while self._arrived:
            request = self._arrived[0]
            if self.closed:
                request.end("abort", SpecDecError(CLOSED))
            elif request.number not in self.live:  # or a turn was interrupted right here
                self.live[request.number] = request
                self._steps.scheduler.submit(request)
            self._arrived.popleft()
        while self._aborted:
            aborted = self.live.get(self._aborted[0])
            if aborted is not None:
                aborted.end("abort")
                self._steps.scheduler.release_requests(aborted)
                self._steps.drop_lost()
                self.remove_ended(aborted.number)
            self._aborted.popleft()

    def remove_ended(self, number: int) -> None:
        """Count a request that has ended, and hold it no longer."""
        request = self.live.pop(number)
        self._steps.launches.totals.count(request)

    def restart(self) -> None:
        """After a fault, restart every live request from its settled tokens; nothing else of the turn is kept."""
        for number, request in list(self.live.items()):
            if request.finished:
                self.remove_ended(number)
        self._steps.restart(list(self.live.values()))

    def close(self) -> None:
        """End every live request, and refuse further ones."""
        self.closed = True
        for request in self.live.values():
            request.end("abort", SpecDecError(CUT))
        self.live.clear()
        self._steps.restart([])
