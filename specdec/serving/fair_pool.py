"""A thread pool for slow work that clients share in turn.

queue       one per client; the next job is from the client whose last job began longest ago
running     at most `threads` jobs, and one client has at most one fewer, so that a thread is left for others
given up    jobs whose client has left or whose time is over. If they have not begun, they are dropped with all data. A
            thread cannot be killed, so a job that has begun runs on and counts as its client's: leaving and asking
            again does not get a client more threads
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
"""The client whose request this task serves: the name of an API key, or an address."""


@dataclass(eq=False, slots=True)
class Job(Generic[T]):
    """A call of a function. The function is released when the job begins or is given up. begun: a thread has taken
    it."""

    function: Callable[[], T] | None
    client: str
    future: Future[T] = field(default_factory=Future)
    begun: bool = False


def complete_future(future: Future[T], function: Callable[[], T]) -> None:
    """Set the future to the result or the error of this function."""
    try:
        future.set_result(function())
    except BaseException as error:
        del function  # otherwise an error would keep this frame and the function's data alive
        future.set_exception(error)


class FairPool:
    """Daemon threads, which never keep a process from ending. A thread is started for a job if fewer than `threads`
    run; it takes further jobs and ends if none may begin."""

    def __init__(self, threads: int, name: str) -> None:
        assert threads > 0
        self._threads = threads
        self._name = name
        self._queues: OrderedDict[str, deque[Job[Any]]] = OrderedDict()  # no queue is empty; the next client's is first
        self._running: Counter[str] = Counter()  # running jobs of each client
        self._closed = False
        self._lock = threading.Lock()

    def submit(self, function: Callable[[], T]) -> "Job[T]":
        """Queue a job. It fails with StoppingError if the pool is closed."""
        job = Job(function, CLIENT.get())
        with self._lock:
            if self._closed:
                job.future.set_exception(StoppingError("this engine is closed; make a new one"))
                return job
            self._queues.setdefault(job.client, deque()).append(job)
            next_job = self._next_job()
        if next_job is not None:
            threading.Thread(target=self._work, args=(next_job,), name=self._name, daemon=True).start()
        return job

    def give_up(self, job: "Job[Any]") -> bool:
        """Give up a job whose caller no longer waits. Returns whether it was dropped before it began."""
        with self._lock:
            if job.begun or job.future.done():
                return False
            self._queues[job.client].remove(job)
            if not self._queues[job.client]:
                del self._queues[job.client]
            job.function = None
            return job.future.cancel()

    async def wait_for(self, job: "Job[T]", seconds: float | None = None) -> T:
        """Wait for the job's result. The job is given up if that raises or the task is cancelled.

        After `seconds`, raises QueueFullError if the job has not begun, ConfigError if it has begun and not ended.
        """
        done = asyncio.wrap_future(job.future)
        done.add_done_callback(lambda late: late.cancelled() or late.exception())  # its caller may have left
        try:
            await asyncio.wait({done}, timeout=seconds)
        finally:
            self.give_up(job)  # if it has not begun
        if done.done():
            return done.result()
        if job.begun:
            raise ConfigError(
                f"reading this prompt, or compiling its grammar, takes longer than the {seconds:g} s that are allowed; "
                "make it smaller"
            )
        raise QueueFullError(f"other prompts and grammars have been read for {seconds:g} s; try again later")

    def shutdown(self) -> None:
        """Accept no more jobs and drop those that have not begun. Waits for none."""
        with self._lock:
            self._closed = True
            left = [job for queue in self._queues.values() for job in queue]
            self._queues.clear()
        for job in left:
            job.future.cancel()

    def _next_job(self) -> "Job[Any] | None":
        """The next job that may begin now. Requires the lock."""
        if self._running.total() >= self._threads:
            return None
        most = max(1, self._threads - 1)
        client = next((name for name in self._queues if self._running[name] < most), None)
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
        while job is not None:
            function, job.function = job.function, None
            if job.begun and function is not None:
                complete_future(job.future, function)
            del function
            with self._lock:
                self._running -= Counter((job.client,))
                job = self._next_job()
