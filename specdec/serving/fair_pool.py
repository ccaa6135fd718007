"""A thread pool for slow work that clients share in turn.

queue       one per client; the next job is from the client whose last job began longest ago
running     at most `threads` jobs, and one client has at most one fewer, so that a thread is left for others
given up    jobs whose client has left or whose time is over: their future is cancelled. If they have not begun, they
            are dropped with all data. A thread cannot be killed, so a job that has begun runs on and counts as its
            client's: leaving and asking again does not get a client more threads
shut down   every job that has not ended fails with StoppingError, at once
"""

import _thread
import asyncio
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, TypeVar

from specdec.errors import ENGINE_CLOSED, ConfigError, QueueFullError, StoppingError

T = TypeVar("T")
Begun = tuple[Future[Any], Callable[[], Any]]
"""A job that has begun: its result and its function."""
CLIENT: ContextVar[str] = ContextVar("specdec_client", default="")
"""The client whose request this task serves: the name of an API key, or an address."""


async def wait_for(job: Future[T], seconds: float | None = None) -> T:
    """Wait for a job's result. The job is given up if that takes longer, or if the task is cancelled.

    After `seconds`, raises QueueFullError if the job has not begun, ConfigError if it has begun and not ended.
    """
    try:
        async with asyncio.timeout(seconds) as limit:
            return await asyncio.wrap_future(job)  # cancelled with this task
    except TimeoutError:
        if not limit.expired():
            raise
        if job.cancel():
            error = QueueFullError(f"other prompts and grammars have been read for {seconds:g} s; try again later")
            raise error from None
        raise ConfigError(
            f"reading this prompt, or compiling its grammar, takes longer than the {seconds:g} s that are allowed; "
            "make it smaller"
        ) from None


class FairPool:
    """Daemon threads, which never keep a process from ending. A thread is started for a job if fewer than `threads`
    run; it takes further jobs and ends if none may begin."""

    def __init__(self, threads: int, name: str) -> None:
        assert threads > 0
        self._threads = threads
        self._name = name
        self._queues: OrderedDict[str, dict[Future[Any], Callable[[], Any]]] = OrderedDict()  # the next client's first
        self._running: dict[Future[Any], str] = {}  # with the client of each
        self._closed = False
        self._lock = threading.RLock()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Queue a job. It fails with StoppingError if the pool is closed."""
        client, job = CLIENT.get(), Future[T]()
        with self._lock:
            if self._closed:
                job.set_exception(StoppingError(ENGINE_CLOSED))
                return job
            self._queues.setdefault(client, {})[job] = function
            begun = self._begin_next()
        job.add_done_callback(lambda _: self._unqueue(client, job))  # if it is cancelled
        if begun:
            try:
                _thread.start_new_thread(self._work, (begun,))  # `Thread.start` waits until the thread runs
            except RuntimeError as error:  # the system has no more threads
                [(unstarted, _)] = begun
                del self._running[unstarted]
                message = f"no thread could be started for this request ({error}); try again later"
                _fail(unstarted, QueueFullError(message))
        return job

    def shutdown(self) -> None:
        """Accept no more jobs, and let those that have not ended fail. Waits for none."""
        with self._lock:
            self._closed = True
            left = [*self._running, *(job for jobs in self._queues.values() for job in jobs)]
            self._queues.clear()
        for job in left:
            _fail(job, StoppingError(ENGINE_CLOSED))

    def _begin_next(self) -> list[Begun]:
        """Begin the next job that may begin now. Requires the lock."""
        most = max(1, self._threads - 1)
        while len(self._running) < self._threads:
            running = Counter(self._running.values())
            client = next((name for name in self._queues if running[name] < most), None)
            if client is None:
                break
            job, function = next(iter(self._queues[client].items()))
            self._queues.move_to_end(client)
            self._unqueue(client, job)
            if job.set_running_or_notify_cancel():
                self._running[job] = client
                return [(job, function)]
        return []

    def _unqueue(self, client: str, job: Future[Any]) -> None:
        """Remove the job if it is queued, with all that its function holds."""
        with self._lock:
            jobs = self._queues.get(client, {})
            jobs.pop(job, None)
            if not jobs:
                self._queues.pop(client, None)

    def _work(self, begun: list[Begun]) -> None:
        """Run jobs while any may begin. They leave the list, which the thread keeps: it must not keep their data."""
        threading.current_thread().name = self._name
        while begun:
            job, function = begun.pop()
            try:
                job.set_result(function())
            except BaseException as error:
                _fail(job, error)
            del function  # an error keeps this frame
            with self._lock:
                del self._running[job]
                begun += self._begin_next()


def _fail(job: Future[Any], error: BaseException) -> None:
    """Let a job fail, unless it has ended or was given up."""
    with suppress(InvalidStateError):
        job.set_exception(error)
