"""The thread that steps an engine while there is work, and sleeps while there is none.

    callers          watch(samples), call(function)               any thread
    this thread      functions first, then a step, then news      over and over
    observer, tell   requests that gained tokens or ended         on this thread, so neither may wait

A step that raises, out of memory included, is tried again; if it raises again, the engine ends one of its requests
(`specdec.runtime.step_faults`) and goes on with the others. A step costs this thread time for the requests that gained
tokens, not for all. A signal in the middle of a call must leave no lock taken (`specdec.runtime.turns`), so there is no
`threading.Condition`.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar

import torch

from specdec.engine import Engine
from specdec.errors import ConfigError, RoundFailedError, SpecDecError, StoppingError, error_summary
from specdec.runtime.handle import Handle
from specdec.serving.fair_pool import settle

logger = logging.getLogger(__name__)
T = TypeVar("T")

BROKEN = 3
"""Requests that failed with their rounds, with no token in between, after which the engine itself counts as broken."""


@dataclass(eq=False, slots=True)
class StreamedSample:
    """One request that this thread looks after. owner: its reader, told when there is news.

    client: its API key's name or address. seen: tokens that its owner was told of.
    """

    handle: Handle
    owner: Any
    client: str = ""
    submitted: float = field(default_factory=time.perf_counter)
    seen: int = 0
    last_news: float = 0.0
    error: SpecDecError | None = None

    def failure(self) -> SpecDecError | None:
        """Its error, from the moment that its handle has finished: a reader may look before the step is reported."""
        if self.error is None and (grammar := self.handle.dead_grammar) is not None:
            self.error = ConfigError(
                f"{grammar} cannot be followed any further: after {self.handle.num_output} tokens none may come "
                "next; change it, or leave it out"
            )
        self.error = self.error or self.handle.error
        return self.error


class Observer(Protocol):
    """Is told of tokens and ends of requests, such as the metrics. Called on the engine's thread, so it never waits."""

    def gained(self, sample: StreamedSample, tokens: int, now: float) -> None:
        """The sample gained `tokens` tokens; `seen` and `last_news` are as they were before."""

    def ended(self, sample: StreamedSample, now: float) -> None:
        """The sample ended by itself, or was aborted, or failed."""


class EngineThread:
    """Steps one engine while it has work. tell: called after each step with the samples of which there is news."""

    def __init__(
        self, engine: Engine, tell: Callable[[Sequence[StreamedSample]], None], observers: Sequence[Observer]
    ) -> None:
        self.engine = engine
        self.failed_rounds = 0  # in a row, that a request failed with
        self.step_began: float | None = None  # by time.monotonic; None while there is nothing to do
        self._tell = tell
        self.observers = list(observers)
        self._open: dict[int, StreamedSample] = {}  # by id
        self._news: deque[int] = deque()  # ids of requests that gained tokens or ended, some more than once
        self._calls: deque[Callable[[], object]] = deque()
        self._guard = threading.RLock()  # a finalizer may come back here
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._drained: list[SimpleQueue[None]] = []  # of callers that wait until no request is open
        self._more = False  # the engine may have something to do
        self._stopping = False
        self.stopped: str | None = None  # why it takes no more; None while it does
        self._thread = threading.Thread(target=self._run, name="specdec-engine", daemon=True)
        self._thread.start()

    @property
    def open(self) -> list[StreamedSample]:
        """The samples that have not ended."""
        with self._guard:
            return list(self._open.values())

    def watch(self, samples: Sequence[StreamedSample]) -> None:
        """Look after submitted requests. Raises SpecDecError, and aborts them, when the thread has stopped."""
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
        """Have it called between two steps; at once, by the caller, when the thread has stopped."""
        future: Future[T] = Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                settle(future, function)

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

    def drain(self, timeout: float | None) -> None:
        """Wait until all have ended, at most for `timeout` seconds."""
        ended: SimpleQueue[None] = SimpleQueue()
        with self._guard:
            if not self._open:
                return
            self._drained.append(ended)
        with suppress(Empty):
            ended.get(timeout=timeout)

    def stop(self) -> None:
        """Abort open requests, end the thread, and wait for its end: at most a step."""
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
                sample.error = RoundFailedError(reason)  # before it is seen to have ended
                self._news.append(sample.handle.id)
                _abort(sample)
        finally:
            self._end(reason)

    def _await_work(self) -> bool:
        while not (self._more or self._calls or self._stopping):
            self._wake.get()
        while not self._wake.empty():
            self._wake.get()  # the work of every wake-up so far is done below
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
        if lacked_memory:  # the error's frames have released their tensors
            torch.cuda.empty_cache()
        self._report_news()
        with self._guard:
            self._more = self._more or more

    def _report_news(self) -> None:
        """Tell observers and owners of the samples that gained tokens or ended."""
        now = time.perf_counter()
        news, ended = [], []
        for sample in self._samples_with_news():
            finished = sample.handle.finished or sample.failure() is not None  # before the tokens, which end with it
            tokens = sample.handle.num_output - sample.seen
            if tokens:
                if sample.seen:  # a round brought them, not a prompt
                    self.failed_rounds = 0
                for observer in self.observers:
                    observer.gained(sample, tokens, now)
                sample.seen, sample.last_news = sample.seen + tokens, now
            if finished:
                ended.append(sample)
                if sample.failure() is None and sample.handle.finish_reason != "abort":
                    self.failed_rounds = 0
                elif isinstance(sample.error, RoundFailedError):
                    self.failed_rounds += 1
            if tokens or finished:
                news.append(sample)
        self._release_ended(ended, now)
        if news:
            self._tell(news)

    def _samples_with_news(self) -> list[StreamedSample]:
        """The samples that reported news since the last call, each once, in the order of their first news."""
        told: dict[int, None] = {}
        while self._news:
            told[self._news.popleft()] = None
        with self._guard:
            return [self._open[id] for id in told if id in self._open]

    def _release_ended(self, ended: Sequence[StreamedSample], now: float) -> None:
        for sample in ended:
            for observer in self.observers:
                observer.ended(sample, now)
        with self._guard:
            for sample in ended:
                self._open.pop(sample.handle.id, None)
            if not self._open:
                for waiting in self._drained:
                    waiting.put(None)
                self._drained.clear()

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
    except Exception:  # the engine failed to begin again; the request is released when that succeeds
        logger.warning("request %d is not released yet", sample.handle.id, exc_info=True)
