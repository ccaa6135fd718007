"""Deltas of one submission's samples, read on an event loop, and how the engine's thread notifies the loop.

Nothing is queued per token: a delta has all tokens since the last read, and a slow reader delays no other.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence

from specdec.runtime.request_output import GenerationOutput, StreamDelta
from specdec.serving.engine_thread import EngineThread, StreamedSample


class Streams:
    """The deltas of one submission's samples, in order of arrival: `async for index, delta in streams`.

    It belongs to the event loop that made it. Leaving `async with` aborts the samples that have not ended. If a sample
    fails, all end, and the reader gets its error.
    """

    def __init__(self, thread: EngineThread) -> None:
        self.loop = asyncio.get_running_loop()
        self.samples: list[StreamedSample] = []  # set once submitted
        self._thread = thread
        self._news = asyncio.Event()
        self._posted = False  # the loop will be notified

    async def __aiter__(self) -> AsyncIterator[tuple[int, StreamDelta]]:
        left = dict(enumerate(self.samples))  # samples whose last delta is unread
        while left:
            self._news.clear()
            deltas = []
            for index, sample in list(left.items()):
                delta = sample.handle.read()
                if sample.failure() is not None:
                    self._raise_failure()
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
        while True:
            self._news.clear()
            finished = all(sample.handle.finished for sample in self.samples)
            self._raise_failure()  # after checking which have finished: see `StreamedSample.failure`
            if finished:
                return [sample.handle.output() for sample in self.samples]
            await self._news.wait()

    def abort(self) -> None:
        """End the samples that have not ended, before the next step. From any thread; does not wait."""
        self._thread.abort(self.samples)

    async def __aenter__(self) -> "Streams":
        return self

    async def __aexit__(self, *raised: object) -> None:
        self.abort()

    def _raise_failure(self) -> None:
        for sample in self.samples:
            if (failure := sample.failure()) is not None:
                self.abort()
                raise failure


def tell_readers(samples: Sequence[StreamedSample]) -> None:
    """Wake the readers of these samples, with one call per loop. Streams of closed loops are aborted."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Streams]] = {}
    for streams in {sample.owner for sample in samples}:
        if streams.loop.is_closed():  # perhaps before it ran the call that was posted last
            streams.abort()
        elif not streams._posted:
            streams._posted = True
            by_loop.setdefault(streams.loop, []).append(streams)
    for loop, readers in by_loop.items():
        try:
            loop.call_soon_threadsafe(_wake_readers, readers)
        except RuntimeError:
            for streams in readers:
                streams.abort()


def _wake_readers(readers: Sequence[Streams]) -> None:
    """Wake these readers, on their loop."""
    for streams in readers:
        streams._posted = False
        streams._news.set()
