"""The inbox of an engine: submitted requests and ids to abort, until a turn processes them; and its live requests.

    submit    arrived  -- the next turn -->  live, in the scheduler  -- settled to its end -->  counted
    abort     aborted  -- a turn -------->  ended with the tokens it has, row and slots freed, counted

An engine calls `process` at the beginning of each turn and at its end, so an abort during a step takes effect after it.
Any thread may submit and abort, even the garbage collector within a turn, and none of them waits for a turn. `process`,
`remove_ended`, `restart` and `close` run in a turn. Each may be interrupted anywhere; the next turn repeats it.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence

from specdec.errors import ENGINE_CLOSED, SpecDecError
from specdec.modules.weight_watch import weights_lock_held
from specdec.runtime.request import Request
from specdec.runtime.steps import Steps

CUT = "this engine was closed before the request had ended; make a new one and ask again"


class Inbox:
    """Arrived requests, live requests, and requests to abort; see above.

    live: requests in the scheduler, by number, oldest first; a restart needs no other list. attempt_turn: processes the
    inbox in a turn, unless a thread has a turn or waits for one. Returns whether it did.
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
        """No request is live and the inbox is empty."""
        return not (self.live or self._arrived or self._aborted)

    def require_open(self) -> None:
        if self.closed:
            raise SpecDecError(ENGINE_CLOSED)

    def submit(self, requests: Sequence[Request], priority: int = 0) -> None:
        self.require_open()
        for request in requests:
            request.id, request.priority, request.submit_time = next(self._numbers), priority, time.perf_counter()
        self._arrived.extend(requests)
        self.drain()

    def abort(self, number: int) -> None:
        self.abort_later(number)
        self.drain()

    def abort_later(self, number: int) -> None:
        """Leave the abort to the next turn, which may have to restart the other requests first."""
        self._aborted.append(number)

    def abort_unended(self, requests: Sequence[Request]) -> None:
        """Abort the requests that have not ended, or that a fault kept from being released."""
        self._aborted.extend(r.id for r in requests if not r.finished or r.id in self.live)
        self.drain()

    def drain(self) -> None:
        """Process the inbox now. If another thread has a turn or waits for one, leave it to that turn.

        Never waits for a turn, so it may be called from anywhere, even by the garbage collector within a turn. While
        the lock over weights is held, the inbox is left to the next turn, since releasing a request reads the weights.
        """
        while (self._arrived or self._aborted) and not weights_lock_held():
            if not self._attempt_turn():
                break

    def process(self) -> None:
        """Hand submitted requests to the scheduler, then end aborted ones and free their row and slots."""
        numbers = [*self._aborted]  # of requests that have arrived; later numbers are left to the next call
        while self._arrived:
            request = self._arrived[0]
            if self.closed:
                request.end("abort", SpecDecError(ENGINE_CLOSED))
            elif request.id not in self.live:  # false if a turn was interrupted right here
                self.live[request.id] = request
                self._steps.scheduler.submit(request)
            self._arrived.popleft()
        aborted = [self.live[number] for number in dict.fromkeys(numbers) if number in self.live]
        for request in aborted:
            request.end("abort")
        if aborted:
            self._steps.scheduler.release_requests(*aborted)  # in one call, which looks at all that wait
            self._steps.drop_lost()
        for request in aborted:
            self.remove_ended(request.id)
        for _ in numbers:
            self._aborted.popleft()

    def remove_ended(self, number: int) -> None:
        """Count a request that has ended, and drop it."""
        request = self.live.pop(number)
        self._steps.launches.totals.count(request)

    def restart(self) -> None:
        """After a fault, restart every live request from its settled tokens. All other results of the turn are
        dropped."""
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
