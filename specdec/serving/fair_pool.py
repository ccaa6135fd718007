"""Threads for work that takes long, shared by clients who take turns.

queue      one for each client; the next job is that of the client whose last one began longest ago
running    at most `threads` jobs, of one client at most one fewer, so that one thread is left for others
given up   jobs whose client has left, or whose time is over: dropped before they begin; one that has begun runs on,
           as no thread can be ended, and another thread takes its place, up to MAX_EXTRA times as many
"""

import asyncio
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from specdec.errors import ConfigError, QueueFullError, StoppingError

T = TypeVar("T")
CLIENT: ContextVar[str] = ContextVar("specdec_client", default="")
"""Whose request this task is about: the name of an API key, or an address."""
MAX_EXTRA = 4


@dataclass(eq=False, slots=True)
class Job(Generic[T]):
    """One call of a function. begun: a thread runs it, or has."""

    function: Callable[[], T]
    client: str
    future: Future[T] = field(default_factory=Future)
    begun: bool = False
    given_up: bool = False


def settle(future: Future[T], function: Callable[[], T]) -> None:
    """Give the future what this function returns or raises."""
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)


class FairPool:
    """`threads` daemon threads, started when they are needed; they never keep a process from ending."""

    def __init__(self, threads: int, name: str) -> None:
        assert threads > 1
        self._threads = threads
        self._name = name
        self._queues: OrderedDict[str, deque[Job[Any]]] = OrderedDict()  # the next client to be served first
        self._running: Counter[str] = Counter()  # jobs of each client that are under way and not given up
        self._alive = 0  # threads whose job is not given up, idle ones included
        self._idle = 0
        self._all = 0
        self._closed = False
        self._changed = threading.Condition()

    def submit(self, function: Callable[[], T]) -> "Job[T]":
        """Raises StoppingError when it is closed."""
        job = Job(function, CLIENT.get())
        with self._changed:
            if self._closed:
                raise StoppingError("this engine is closed; make a new one")
            self._queues.setdefault(job.client, deque()).append(job)
            self._staff()
            self._changed.notify_all()
        return job

    def give_up(self, job: "Job[Any]") -> bool:
        """Its caller no longer waits for it. -> was it dropped before it began?"""
        with self._changed:
            if job.future.done() or job.given_up:
                return False
            job.given_up = True
            if not job.begun:
                self._queues[job.client].remove(job)
                self._forget_empty(job.client)
                job.future.cancel()
                return True
            self._forget_running(job.client)
            self._alive -= 1
            self._staff()
            self._changed.notify_all()
            return False

    async def wait_for(self, job: "Job[T]", seconds: float | None = None) -> T:
        """As `result`; the job is given up when that raises, or its task is cancelled."""
        try:
            return await self.result(job, seconds)
        except BaseException:
            self.give_up(job)
            raise

    async def result(self, job: "Job[T]", seconds: float | None = None) -> T:
        """What its function returns. Does not give it up: who was cancelled does.

        Raises QueueFullError where it has not begun after `seconds`, ConfigError where it has begun and not ended.
        """
        done = asyncio.wrap_future(job.future)
        done.add_done_callback(lambda late: late.cancelled() or late.exception())  # its caller may have left
        await asyncio.wait({done}, timeout=seconds)
        if done.done():
            return done.result()
        if job.begun:
            raise ConfigError(
                f"reading this prompt, or compiling its grammar, takes longer than the {seconds:g} s that are allowed; "
                "make it smaller"
            )
        raise QueueFullError(f"other prompts and grammars have been read for {seconds:g} s; try again later")

    def shutdown(self) -> None:
        """Take no more, drop what has not begun, wait for nothing."""
        with self._changed:
            self._closed = True
            left = [job for queue in self._queues.values() for job in queue]
            self._queues.clear()
            self._changed.notify_all()
        for job in left:
            job.future.cancel()

    def _staff(self) -> None:
        waiting = sum(map(len, self._queues.values()))
        if waiting > self._idle and self._alive < self._threads and self._all < MAX_EXTRA * self._threads:
            self._alive += 1
            self._all += 1
            threading.Thread(target=self._work, name=self._name, daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                self._changed.wait_for(lambda: self._closed or self._next_client() is not None)
                self._idle -= 1
                client = self._next_client()
                if client is None:  # closed
                    self._alive -= 1
                    self._all -= 1
                    return
                job = self._queues[client].popleft()
                if self._queues[client]:
                    self._queues.move_to_end(client)
                self._forget_empty(client)
                job.begun = job.future.set_running_or_notify_cancel()
                self._running[client] += 1
            if job.begun:
                settle(job.future, job.function)
            if self._end(job):
                return
            del job  # and with it what its function holds

    def _end(self, job: "Job[Any]") -> bool:
        """-> is this thread one too many, as another took its place?"""
        with self._changed:
            if not job.given_up:
                self._forget_running(job.client)
                self._changed.notify_all()
            elif self._alive < self._threads:
                self._alive += 1
            else:
                self._all -= 1
                return True
            return False

    def _next_client(self) -> str | None:
        return next((client for client in self._queues if self._running[client] < self._threads - 1), None)

    def _forget_empty(self, client: str) -> None:
        if not self._queues[client]:
            del self._queues[client]

    def _forget_running(self, client: str) -> None:
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]
