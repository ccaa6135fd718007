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
from queue import SimpleQueue
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
    """Daemon threads, which never keep a process from ending. One is started for a job that may begin where none rests;
    it takes others after it, and rests where there is none."""

    def __init__(self, threads: int, name: str) -> None:
        assert threads > 1
        self._threads = threads
        self._name = name
        self._queues: OrderedDict[str, deque[Job[Any]]] = OrderedDict()  # none is empty; the next client's is first
        self._running: Counter[str] = Counter()  # jobs of each client that are under way and not given up
        self._alive = 0  # threads, those of jobs that were given up included
        self._resting: list[SimpleQueue[Job[Any] | None]] = []  # where threads that rest wait for a job
        self._closed = False
        self._lock = threading.Lock()

    def submit(self, function: Callable[[], T]) -> "Job[T]":
        """Raises StoppingError when it is closed."""
        job = Job(function, CLIENT.get())
        with self._lock:
            if self._closed:
                raise StoppingError("this engine is closed; make a new one")
            self._queues.setdefault(job.client, deque()).append(job)
            self._staff()
        return job

    def give_up(self, job: "Job[Any]") -> bool:
        """Its caller no longer waits for it. -> was it dropped before it began?"""
        with self._lock:
            if job.future.done() or job.given_up:
                return False
            job.given_up = True
            if job.begun:
                self._running -= Counter((job.client,))
                self._staff()
                return False
            self._queues[job.client].remove(job)
            if not self._queues[job.client]:
                del self._queues[job.client]
            return job.future.cancel()

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
        with self._lock:
            self._closed = True
            left = [job for queue in self._queues.values() for job in queue]
            self._queues.clear()
            for inbox in self._resting:
                inbox.put(None)
        for job in left:
            job.future.cancel()

    def _staff(self) -> None:
        """A thread for a job that may begin."""
        if not self._resting and self._alive >= MAX_EXTRA * self._threads:
            return
        job = self._take()
        if job is not None and self._resting:
            self._resting.pop().put(job)
        elif job is not None:
            self._alive += 1
            threading.Thread(target=self._work, args=(job,), name=self._name, daemon=True).start()

    def _take(self) -> "Job[Any] | None":
        """The next job that may begin now."""
        full = self._running.total() >= self._threads
        client = next((name for name in self._queues if not full and self._running[name] < self._threads - 1), None)
        if client is None:
            return None
        job = self._queues[client].popleft()
        self._queues.move_to_end(client)
        if not self._queues[client]:
            del self._queues[client]
        job.begun = job.future.set_running_or_notify_cancel()
        self._running[client] += 1
        return job

    def _work(self, job: "Job[Any] | None") -> None:
        inbox: SimpleQueue[Job[Any] | None] = SimpleQueue()
        while job is not None:
            if job.begun:
                settle(job.future, job.function)
            with self._lock:
                if not job.given_up:
                    self._running -= Counter((job.client,))
                job = self._take()  # and let go of what the last one's function holds
                rests = job is None and not self._closed and len(self._resting) < self._threads
                if rests:
                    self._resting.append(inbox)
            if rests:
                job = inbox.get()
        with self._lock:
            self._alive -= 1
