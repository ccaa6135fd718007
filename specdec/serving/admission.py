"""Admission of requests to a served engine: a bounded queue, which refuses callers or lets them wait.

    open requests   | running, at most the engine's rows | waiting, at most `max_waiting` |  refused, or let wait
    per client      | at most `per_client` (0: no limit)                                  |  refused

It only counts and knows no engine. Callers wait in order of arrival, each on its own event loop; any thread may return
places. Invariant: at most `max_places` places are taken, and at most `per_client` by one client.
"""

import asyncio
import threading
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from specdec.errors import ConfigError, QueueFullError


@dataclass(eq=False)
class Waiter:
    """A caller that waits on its own event loop for `count` places. admitted: it has got them."""

    count: int
    client: str
    future: "asyncio.Future[None]"
    admitted: bool = False


class Admission:
    """Places for `rows` requests that run and `max_waiting` that wait. per_client: 0, no limit."""

    def __init__(self, rows: int, max_waiting: int, per_client: int = 0) -> None:
        self.max_places = rows + max_waiting
        self._rows = rows
        self._max_waiting = max_waiting
        self._per_client = per_client
        self.out = 0  # places taken by open requests
        self._places_of: Counter[str] = Counter()  # places that each client has or waits for, if limited
        self._lock = threading.Lock()
        self._waiters: deque[Waiter] = deque()

    async def take_places(self, count: int, client: str = "", *, wait: bool = False) -> None:
        """Take `count` places. If fewer are free, raises QueueFullError, or waits for them. A client over its limit
        always gets the error."""
        with self._lock:
            free = self._has_room(count, client)
            if not (free or wait):
                raise self._full()
            self._count_places(client, count)
            if free:
                self.out += count
                return
            waiter = Waiter(count, client, asyncio.get_running_loop().create_future())
            self._waiters.append(waiter)
        try:
            await waiter.future
        except BaseException:
            with self._lock:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
                    self._count_places(client, -count)
                    self._admit_waiters()  # it may have been first in line, and others waited for it
            if waiter.admitted:
                self.give_back(count, client)
            raise

    def require(self, count: int, client: str = "") -> None:
        """Raise the error that `take_places` would raise now; takes no places."""
        with self._lock:
            if not self._has_room(count, client):
                raise self._full()

    def give_back(self, count: int, client: str = "") -> None:
        """Return the places of ended requests. The caller that has waited longest gets them. Any thread may call
        this."""
        with self._lock:
            self.out -= count
            self._count_places(client, -count)
            self._admit_waiters()

    def gained(self, sample: Any, now: float) -> None:
        """Observer method: a request that gained tokens keeps its place."""

    def ended(self, sample: Any, now: float) -> None:
        """Observer method: an ended request returns its place."""
        self.give_back(1, sample.client)

    def _admit_waiters(self) -> None:
        """Give free places to the callers that have waited longest. Requires the lock."""
        while self._waiters and self.out + self._waiters[0].count <= self.max_places:
            waiter = self._waiters.popleft()
            self.out += waiter.count
            waiter.admitted = True
            try:
                waiter.future.get_loop().call_soon_threadsafe(_admit, waiter.future)
            except RuntimeError:  # its loop is closed, so its places would never be returned
                self.out -= waiter.count
                self._count_places(waiter.client, -waiter.count)
                waiter.admitted = False

    def _count_places(self, client: str, count: int) -> None:
        if self._per_client:
            self._places_of[client] += count
            if not self._places_of[client]:
                del self._places_of[client]

    def _has_room(self, count: int, client: str) -> bool:
        """Are `count` places free? Raises if there can never be as many, or if the client has too many."""
        many = f"{count} samples at once are more than the"
        if self._per_client and count > self._per_client:
            raise ConfigError(f"{many} {self._per_client} that one client may have; ask for fewer")
        if count > self.max_places:
            raise ConfigError(
                f"{many} {self.max_places} that this engine takes in: {self._rows} run at a time and "
                f"{self._max_waiting} wait; ask for fewer, or raise max_batch_size or max_waiting"
            )
        if self._per_client and self._places_of[client] + count > self._per_client:
            more = f"{count} more would make more than the {self._per_client} that one client may have"
            raise QueueFullError(
                f"{self._places_of[client]} of your samples are open, and {more}; try again when some have ended"
            )
        return not self._waiters and self.out + count <= self.max_places

    def _full(self) -> QueueFullError:
        if self._waiters:
            first = sum(waiter.count for waiter in self._waiters)
            return QueueFullError(
                f"{self.out} of {self.max_places} places are taken, and callers that came earlier wait for {first}; "
                "try again later"
            )
        return QueueFullError(
            f"{max(0, self.out - self._rows)} requests wait behind {min(self.out, self._rows)} that run, and "
            f"at most {self._max_waiting} may; try again later, or raise max_waiting"
        )


def _admit(future: "asyncio.Future[None]") -> None:
    if not future.done():  # else it was cancelled, and returns its places itself
        future.set_result(None)
