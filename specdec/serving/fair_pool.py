"""Threads for work that takes long, shared by clients who take turns.

queue       one for each client; the next job is that of the client whose last one began longest ago
running     at most `threads` jobs, at most one fewer of one client, so that a thread is left for others
given up    jobs whose client has left, or whose time is over; if they have not begun, they are dropped with all they
            hold
abandoned   jobs given up after they had begun. No thread can be ended, so they run on, while a spare thread takes the
            next job. A client has at most `threads` jobs, abandoned ones included: leaving and asking again brings no
            more threads
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
"""Client whose request this task serves: the name of an API key, or an address."""


@dataclass(eq=False, slots=True)
class Job(Generic[T]):
    """One call of a function, which is let go of once it has begun or was given up. begun: a thread runs it, or has."""

    function: Callable[[], T] | None
    client: str
    future: Future[T] = field(default_factory=Future)
    begun: bool = False
    given_up: bool = False


def settle(future: Future[T], function: Callable[[], T]) -> None:
    """Settle the future with the result or the error of this function."""
    try:
        future.set_result(function())
    except BaseException as error:
        del function  # this frame, and all that the function holds, would live as long as the error
        future.set_exception(error)


class FairPool:
    """Daemon threads, which never keep a process from ending. A thread is started for a job if none is idle; it takes
    further jobs, and is idle when there are none.

    spares: threads that may replace those with abandoned jobs; None: `threads` more.
    """

    def __init__(self, threads: int, name: str, spares: int | None = None) -> None:
        assert threads > 0
        self._threads = threads
        self._most = threads + (threads if spares is None else spares)  # threads, those of abandoned jobs included
        self._name = name
        self._queues: OrderedDict[str, deque[Job[Any]]] = OrderedDict()  # none is empty; the next client's is first
        self._running: Counter[str] = Counter()  # jobs of each client that are under way and not given up
        self._abandoned: Counter[str] = Counter()  # jobs of each client that are under way, and given up
        self._alive = 0  # threads, those of abandoned jobs included
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
            self._start_next_job()
        return job

    def give_up(self, job: "Job[Any]") -> bool:
        """Its caller no longer waits for it. -> was it dropped before it began?"""
        with self._lock:
            if job.future.done() or job.given_up:
                return False
            job.given_up = True
            if job.begun:
                self._running -= Counter((job.client,))
                self._abandoned[job.client] += 1
                self._start_next_job()
                return False
            self._queues[job.client].remove(job)
            if not self._queues[job.client]:
                del self._queues[job.client]
            job.function = None
            return job.future.cancel()

    @property
    def queued(self) -> int:
        """Jobs that have not begun."""
        with self._lock:
            return sum(map(len, self._queues.values()))

    @property
    def under_way(self) -> int:
        """Jobs that run, abandoned ones included."""
        with self._lock:
            return self._running.total() + self._abandoned.total()

    async def wait_for(self, job: "Job[T]", seconds: float | None = None) -> T:
        """Waits like `result`; the job is given up when that raises, or its task is cancelled."""
        try:
            return await self.result(job, seconds)
        except BaseException:
            self.give_up(job)
            raise

    async def result(self, job: "Job[T]", seconds: float | None = None) -> T:
        """Wait for the result of the job's function. Does not give the job up when cancelled; the caller does.

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
        """Accept no more jobs, drop those that have not begun, and wait for none."""
        with self._lock:
            self._closed = True
            left = [job for queue in self._queues.values() for job in queue]
            self._queues.clear()
            for inbox in self._resting:
                inbox.put(None)
        for job in left:
            job.future.cancel()

    def _start_next_job(self) -> None:
        """A thread for a job that may begin."""
        if not self._resting and self._alive >= self._most:
            return
        job = self._next_job()
        if job is not None and self._resting:
            self._resting.pop().put(job)
        elif job is not None:
            self._alive += 1
            threading.Thread(target=self._work, args=(job,), name=self._name, daemon=True).start()

    def _next_job(self) -> "Job[Any] | None":
        """The next job that may begin now."""
        if self._running.total() >= self._threads:
            return None
        client = next(filter(self._has_share, self._queues), None)
        if client is None:
            return None
        job = self._queues[client].popleft()
        self._queues.move_to_end(client)
        if not self._queues[client]:
            del self._queues[client]
        job.begun = job.future.set_running_or_notify_cancel()
        self._running[client] += 1
        return job

    def _has_share(self, client: str) -> bool:
        """May another job of this client begin?"""
        running, abandoned = self._running[client], self._abandoned[client]
        return running < max(1, self._threads - 1) and running + abandoned < self._threads

    def _work(self, job: "Job[Any] | None") -> None:
        inbox: SimpleQueue[Job[Any] | None] = SimpleQueue()
        while job is not None:
            function, job.function = job.function, None
            if job.begun and function is not None:
                settle(job.future, function)
            del function
            with self._lock:
                if job.given_up:
                    self._abandoned -= Counter((job.client,))
                else:
                    self._running -= Counter((job.client,))
                job = self._next_job()
                rests = job is None and not self._closed and len(self._resting) < self._threads
                if rests:
                    self._resting.append(inbox)
            if rests:
                job = inbox.get()
        with self._lock:
            self._alive -= 1
