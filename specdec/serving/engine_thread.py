"""The thread that steps an engine while there is work and sleeps otherwise.

    callers          watch(samples), call(function)               any thread
    this thread      functions first, then a step, then news      in a loop
    observer, tell   requests that gained tokens or ended         on this thread, so they must not wait

A failed step (out of memory included) is tried again; if it fails again, the engine ends one of its requests
(`specdec.runtime.step_faults`) and continues with the others. A step costs this thread time only for requests that
gained tokens. A signal in the middle of a call must leave no lock held (`specdec.runtime.calls.turns`), so
`threading.Condition` is not used.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import torch

from specdec.engine import Engine
from specdec.errors import ConfigError, RoundFailedError, SpecDecError, StoppingError, error_summary
from specdec.runtime.calls.handle import Handle
from specdec.serving.fair_pool import complete_future

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_FAILED_ROUNDS = 3
"""After this many requests failed with their rounds, with no token in between, the engine itself counts as broken."""


@dataclass(eq=False, slots=True)
class StreamedSample:
    """A request that this thread watches. owner: its reader, which is told of news.

    client: name of its API key, or its address. num_reported: number of tokens reported to the owner.
    """

    handle: Handle
    owner: Any
    client: str = ""
    submitted: float = field(default_factory=time.perf_counter)
    num_reported: int = 0
    last_news: float = 0.0
    error: SpecDecError | None = None

    def failure(self) -> SpecDecError | None:
        """Its error, available as soon as its handle has finished: a reader may look before the step is reported."""
        if self.error is None and (grammar := self.handle.dead_grammar) is not None:
            self.error = ConfigError(
                f"{grammar} cannot be followed any further: after {self.handle.num_output} tokens none may come "
                "next; change it, or leave it out"
            )
        self.error = self.error or self.handle.error
        return self.error


class Observer(Protocol):
    """Receives new tokens and ends of requests, for example for metrics. Called on the engine's thread, so it must not
    wait."""

    def gained(self, sample: StreamedSample, now: float) -> None:
        """The sample gained tokens; `num_reported` and `last_news` are not updated yet."""

    def ended(self, sample: StreamedSample, now: float) -> None:
        """The sample finished, was aborted or failed."""


class EngineThread:
    """Steps one engine while it has work. tell: called after each step with the samples that have news."""

    def __init__(
        self, engine: Engine, tell: Callable[[Sequence[StreamedSample]], None], observers: Sequence[Observer]
    ) -> None:
        self.engine = engine
        self.failed_rounds = 0  # consecutive rounds that failed a request
        self.step_began: float | None = None  # by time.monotonic; None while there is nothing to do
        self._tell = tell
        self.observers = list(observers)
        self._open: dict[int, StreamedSample] = {}  # by id
        self._news: deque[int] = deque()  # ids of requests that gained tokens or ended, some more than once
        self._calls: deque[Callable[[], object]] = deque()
        self._guard = threading.RLock()  # reentrant: a finalizer may call in here
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._more = False  # the engine may have something to do
        self._stopping = False
        self.stopped: str | None = None  # why it accepts no more; None: it does
        self._thread = threading.Thread(target=self._run, name="specdec-engine", daemon=True)
        self._thread.start()

    @property
    def open(self) -> list[StreamedSample]:
        """The samples that have not ended."""
        with self._guard:
            return list(self._open.values())

    def watch(self, samples: Sequence[StreamedSample]) -> None:
        """Watch submitted requests. If the thread has stopped, aborts them and raises SpecDecError."""
        with self._guard:
            taken = not (self._stopping or self.stopped)
            if taken:
                self._open.update((sample.handle.id, sample) for sample in samples)
                self._more = True
        if not taken:
            for sample in samples:
                sample.handle.abort()
            raise StoppingError(self.stopped or "this engine is closing; make a new one")
        for sample in samples:
            sample.handle.report_to(self._news)
        self._wake.put(None)

    def call(self, function: Callable[[], T]) -> "Future[T]":
        """Call a function between two steps; if the thread has stopped, call it now on this thread."""
        future: Future[T] = Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                complete_future(future, function)

        with self._guard:
            if queued := not self.stopped:
                self._calls.append(work)
        if queued:
            self._wake.put(None)
        else:
            work()
        return future

    def abort(self, samples: Sequence[StreamedSample]) -> None:
        """End the samples that have not ended, before the next step; does not wait for it."""
        for sample in samples:
            if not sample.handle.finished:
                self.call(sample.handle.abort)

    def stop(self) -> None:
        """Abort open requests, then end the thread and wait for it, at most one step."""
        self._stopping = True
        self._wake.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        reason = "this engine is closed; make a new one"
        try:
            while self._await_work():
                self.step_began = time.monotonic()
                self._run_step()
                self.step_began = None
        except BaseException as error:
            logger.exception("the engine's thread ended")
            reason = f"the engine's thread ended: {error_summary(error)}"
            for sample in self.open:
                sample.error = RoundFailedError(reason)  # set before the sample shows as ended
                self._news.append(sample.handle.id)
                _abort(sample)
        finally:
            self._end(reason)

    def _await_work(self) -> bool:
        while not (self._more or self._calls or self._stopping):
            self._wake.get()
        while not self._wake.empty():
            self._wake.get()  # the work of all earlier wake-ups is done below
        return not self._stopping

    def _run_step(self) -> None:
        """Run the callers' functions, a step, and report its news."""
        while self._calls:
            self._calls.popleft()()
        with self._guard:
            self._more = False  # a later submission sets it again
        lacked_memory = False
        try:
            more = self.engine.step()
        except Exception as error:
            logger.warning("a round failed: %s", error_summary(error), exc_info=error)
            more, lacked_memory = bool(self._open), isinstance(error, torch.OutOfMemoryError)
        if lacked_memory:  # by now the error's frames have released their tensors
            torch.cuda.empty_cache()
        self._report_news()
        with self._guard:
            self._more = self._more or more

    def _report_news(self) -> None:
        """Report the samples that gained tokens or ended to observers and owners."""
        now = time.perf_counter()
        news, ended = [], []
        told: dict[int, None] = {}  # each once, in the order of their first news
        while self._news:
            told[self._news.popleft()] = None
        with self._guard:
            samples = [self._open[id] for id in told if id in self._open]
        for sample in samples:
            finished = sample.handle.finished or sample.failure() is not None  # read this before the tokens
            tokens = sample.handle.num_output - sample.num_reported
            if tokens:
                if sample.num_reported:  # gained in a round, not after the prompt
                    self.failed_rounds = 0
                for observer in self.observers:
                    observer.gained(sample, now)
                sample.num_reported, sample.last_news = sample.num_reported + tokens, now
            if finished:
                ended.append(sample)
                if sample.failure() is None and sample.handle.finish_reason != "abort":
                    self.failed_rounds = 0
                elif isinstance(sample.error, RoundFailedError):
                    self.failed_rounds += 1
                for observer in self.observers:
                    observer.ended(sample, now)
            if tokens or finished:
                news.append(sample)
        with self._guard:
            for sample in ended:
                del self._open[sample.handle.id]
        if news:
            self._tell(news)

    def _end(self, reason: str) -> None:
        with self._guard:
            self.stopped = reason
            calls = list(self._calls)
            self._calls.clear()
        for work in calls:
            work()
        for sample in self.open:
            _abort(sample)
            sample.error = sample.error if sample.handle.finished else StoppingError(reason)
            self._news.append(sample.handle.id)
        self._report_news()


def _abort(sample: StreamedSample) -> None:
    try:
        sample.handle.abort()
    except Exception:  # the engine's restart failed; the request is released when a restart succeeds
        logger.warning("request %d is not released yet", sample.handle.id, exc_info=True)
