"""The thread that steps an engine while there is work and sleeps otherwise, and the streams that event loops read.

    callers         watch(streams), abort(handles)         any thread
    this thread     a step, then its news                  in a loop
    observers       requests that gained tokens or ended   on this thread, so they must not wait
    event loops     all streams of a loop that have news are woken together, in waves

Nothing is queued per token: a delta has all tokens since the last read, and a slow reader delays no other. Streams of
many requests take longer to read and send than a GPU takes for a step. So a loop rests between two waves (`Waves`), and
a delta then has the tokens of several steps.

A failed step (out of memory included) is tried again; if it fails again, the engine ends one of its requests, and one
that the error names at once (`specdec.runtime.step_faults`). It continues with the others. A step costs this thread
time only for requests that gained tokens. A signal in the middle of a call must leave no lock held
(`specdec.runtime.calls.turns`), so `threading.Condition` is not used.
"""

import asyncio
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

import torch

from specdec.engine import Engine
from specdec.errors import ENGINE_CLOSED, ConfigError, RoundFailedError, SpecDecError, StoppingError, error_summary
from specdec.runtime.calls.handle import Handle
from specdec.runtime.request_output import GenerationOutput, StreamDelta

logger = logging.getLogger(__name__)

LOOP_SHARE = 1 / 3
"""Share of the time in which a loop may read and send news. Each hand-over of Python's lock delays the engine's thread,
which needs it all through a step."""
SHORTEST_REST = 0.001
"""Seconds. A shorter rest between two waves is left out, so few streams are told of every step."""
LONGEST_REST = 0.2
"""Seconds between two waves at most."""
MAX_FAILED_ROUNDS = 3
"""After this many requests failed with their rounds, with no token in between, the engine itself counts as broken."""


@dataclass(eq=False, slots=True)
class OpenSample:
    """A request that the thread watches. owner: its reader, which is told of news.

    num_reported: number of tokens reported to the owner. last_news: when they were, by time.perf_counter.
    """

    handle: Handle
    owner: "Streams"
    num_reported: int = 0
    last_news: float = 0.0

    @property
    def failure(self) -> SpecDecError | None:
        return self.owner.failure(self.handle)


class Observer(Protocol):
    """Receives new tokens and ends of requests, for example for metrics. Called on the engine's thread, so it must not
    wait."""

    def gained(self, sample: OpenSample, now: float) -> None:
        """The sample gained tokens; `num_reported` and `last_news` are not updated yet."""

    def ended(self, sample: OpenSample, now: float) -> None:
        """The sample finished, was aborted or failed."""


class EngineThread:
    """Steps one engine while it has work, and after each step tells observers and readers the news."""

    def __init__(self, engine: Engine, observers: Sequence[Observer]) -> None:
        self.engine = engine
        self.failed_rounds = 0  # consecutive rounds that failed a request
        self.step_began: float | None = None  # by time.monotonic; None while there is nothing to do
        self.observers = list(observers)
        self._open: dict[int, OpenSample] = {}  # by id
        self._news: deque[int] = deque()  # ids of requests that gained tokens or ended, some more than once
        self._guard = threading.RLock()  # reentrant: a finalizer may call in here
        self._wake: SimpleQueue[None] = SimpleQueue()  # an entry: the engine may have something to do
        self._waves: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Waves] = weakref.WeakKeyDictionary()
        self._stopping = False
        self.stopped: str | None = None  # why it accepts no more; None: it does
        self._thread = threading.Thread(target=self._run, name="specdec-engine", daemon=True)
        self._thread.start()

    @property
    def open(self) -> list[OpenSample]:
        """The samples that have not ended."""
        with self._guard:
            return list(self._open.values())

    def watch(self, streams: "Streams") -> None:
        """Watch submitted requests. If the thread has stopped, aborts them and raises SpecDecError."""
        with self._guard:
            taken = not (self._stopping or self.stopped)
            if taken:
                self._open.update((handle.id, OpenSample(handle, streams)) for handle in streams.handles)
        if not taken:
            for handle in streams.handles:
                handle.abort()
            raise StoppingError(self.stopped or ENGINE_CLOSED)
        for handle in streams.handles:
            handle.report_to(self._news)
        self._wake.put(None)

    def abort(self, handles: Sequence[Handle]) -> None:
        """End the requests that have not ended, in the turn of the next step. From any thread; does not wait for it."""
        unended = [handle.id for handle in handles if not handle.finished]
        for number in unended:
            self.engine.inbox.abort_later(number)
        if unended:
            self._wake.put(None)

    def stop(self) -> None:
        """Abort open requests, then end the thread and wait for it, at most one step."""
        self._stopping = True
        self._wake.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        reason: SpecDecError = StoppingError(ENGINE_CLOSED)
        try:
            while self._await_work():
                self.step_began = time.monotonic()
                self._run_step()
                self.step_began = None
        except BaseException as error:
            logger.exception("the engine's thread ended")
            reason = RoundFailedError(f"the engine's thread ended: {error_summary(error)}")
        finally:
            self._end_samples(reason)

    def _await_work(self) -> bool:
        self._wake.get()
        while not self._wake.empty():
            self._wake.get()  # the work of all earlier wake-ups is done in one step
        return not self._stopping

    def _run_step(self) -> None:
        lacked_memory = False
        try:
            more = self.engine.step()
        except Exception as error:
            logger.warning("a round failed: %s", error_summary(error), exc_info=error)
            more, lacked_memory = bool(self._open), isinstance(error, torch.OutOfMemoryError)
        if lacked_memory:  # by now the error's frames have released their tensors
            torch.cuda.empty_cache()
        self._report_news()
        if more:
            self._wake.put(None)

    def _report_news(self) -> None:
        """Report the samples that gained tokens or ended to observers and owners."""
        now = time.perf_counter()
        ended: list[OpenSample] = []
        news: dict[Streams, bool] = {}  # has one of the samples ended?
        told: dict[int, None] = {}  # each once, in the order of their first news
        while self._news:
            told[self._news.popleft()] = None
        with self._guard:
            samples = [self._open[id] for id in told if id in self._open]
        for sample in samples:
            finished = sample.handle.finished or sample.failure is not None  # read this before the tokens
            tokens = sample.handle.num_output - sample.num_reported
            if tokens:
                if sample.num_reported:  # gained in a round, not after the prompt
                    self.failed_rounds = 0
                for observer in self.observers:
                    observer.gained(sample, now)
                sample.num_reported, sample.last_news = sample.num_reported + tokens, now
            if finished:
                ended.append(sample)
                if sample.failure is None and sample.handle.finish_reason != "abort":
                    self.failed_rounds = 0
                elif isinstance(sample.failure, RoundFailedError):
                    self.failed_rounds += 1
                for observer in self.observers:
                    observer.ended(sample, now)
            if tokens or finished:
                news[sample.owner] = finished or news.get(sample.owner, False)
        with self._guard:
            for sample in ended:
                del self._open[sample.handle.id]
        self._wake_readers(news)

    def _end_samples(self, reason: SpecDecError) -> None:
        """Abort every sample. One that cannot be released fails with the reason, and all do if the thread ended by a
        failure."""
        with self._guard:
            self.stopped = str(reason)
        for sample in self.open:
            if isinstance(reason, RoundFailedError):
                sample.owner.error = reason  # set before the sample shows as ended
            try:
                sample.handle.abort()
            except Exception:  # the engine's restart failed; the request is released when a restart succeeds
                logger.warning("request %d is not released yet", sample.handle.id, exc_info=True)
            if not sample.handle.finished:
                sample.owner.error = reason
            self._news.append(sample.handle.id)
        self._report_news()

    def _wake_readers(self, news: Mapping["Streams", bool]) -> None:
        """Wake the readers of streams with news, with one call per loop; for a whole answer only when a sample has
        ended. Streams of closed loops are aborted."""
        by_loop: dict[asyncio.AbstractEventLoop, list[Streams]] = {}
        for streams, ended in news.items():
            if streams.loop.is_closed():  # perhaps before it ran the call that was posted last
                streams.abort()
            elif not streams._posted and (streams.reads_deltas or ended):
                streams._posted = True
                by_loop.setdefault(streams.loop, []).append(streams)
        for loop, due in by_loop.items():
            waves = self._waves.setdefault(loop, Waves())
            try:
                loop.call_soon_threadsafe(waves.add, due)
            except RuntimeError:
                for streams in due:
                    streams.abort()


class Waves:
    """Wakes the readers of one event loop, which runs all its methods. After a wave the loop rests for a multiple of
    the time in which it read and sent."""

    def __init__(self) -> None:
        self._due: list[Streams] = []
        self._going_on = False  # readers of the last wave are at work, or the loop rests

    def add(self, readers: Sequence["Streams"]) -> None:
        self._due += readers
        if not self._going_on:
            self._begin()

    def _begin(self) -> None:
        began, due, self._due = time.thread_time(), self._due, []
        self._going_on = bool(due)
        for streams in due:
            streams._posted = False
            streams._news.set()
        if due:
            asyncio.get_running_loop().call_soon(self._end, began)  # after the readers, which are ready now

    def _end(self, began: float) -> None:
        rest = (time.thread_time() - began) * (1 / LOOP_SHARE - 1)
        if rest < SHORTEST_REST:
            self._begin()
        else:
            asyncio.get_running_loop().call_later(min(rest, LONGEST_REST), self._begin)


class Streams:
    """The deltas of all samples of one submission, in order of arrival: `async for index, delta in streams`.

    It belongs to the event loop that made it. Leaving `async with` aborts the samples that have not ended. If a sample
    fails, all end, and the reader gets its error. client: name of its API key, or its address.
    """

    def __init__(self, thread: EngineThread, client: str) -> None:
        self.loop = asyncio.get_running_loop()
        self.client = client
        self.handles: list[Handle] = []  # a sample each; set once submitted
        self.submitted = 0.0  # when that was, by time.perf_counter
        self.error: SpecDecError | None = None  # why the engine's thread ended before them
        self._thread = thread
        self._news = asyncio.Event()
        self._posted = False  # a wave will wake the reader
        self.reads_deltas = False  # a reader is woken for every delta, not only for ends

    async def __aiter__(self) -> AsyncIterator[tuple[int, StreamDelta]]:
        self.reads_deltas = True
        left = dict(enumerate(self.handles))  # samples whose last delta is unread
        while left:
            self._news.clear()
            deltas = []
            for index, handle in list(left.items()):
                delta = handle.read()
                self._require_whole([handle])
                if delta is not None:
                    deltas.append((index, delta))
                    if delta.output is not None:
                        del left[index]
            for each in deltas:
                yield each
            if not deltas:
                await self._news.wait()

    async def outputs(self) -> list[GenerationOutput]:
        """Wait until all samples have ended and return their outputs."""
        self.reads_deltas = False
        while True:
            self._news.clear()
            finished = all(handle.finished for handle in self.handles)
            self._require_whole(self.handles)  # after checking which have finished: see `failure`
            if finished:
                return [handle.output() for handle in self.handles]
            await self._news.wait()

    def failure(self, handle: Handle) -> SpecDecError | None:
        """The error of a sample, known as soon as it has finished: a reader may look before the step is reported."""
        if (grammar := handle.dead_grammar) is not None:
            return ConfigError(
                f"{grammar} cannot be followed any further: after {handle.num_output} tokens none may come next; "
                "change it, or leave it out"
            )
        return self.error or handle.error

    def abort(self) -> None:
        """End the samples that have not ended: see `EngineThread.abort`."""
        self._thread.abort(self.handles)

    async def __aenter__(self) -> "Streams":
        return self

    async def __aexit__(self, *raised: object) -> None:
        self.abort()

    def _require_whole(self, handles: Sequence[Handle]) -> None:
        for handle in handles:
            if (failure := self.failure(handle)) is not None:
                self.abort()
                raise failure
