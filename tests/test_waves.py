"""Readers of many streams are woken in waves, so that Python's lock is left to the engine's thread between them."""

import asyncio
from collections.abc import Callable
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

import pytest

from specdec import SamplingParams
from specdec.serving import engine_thread
from specdec.serving.async_engine import AsyncEngine
from specdec.serving.engine_thread import LONGEST_REST, Waves


class Loop:
    """An event loop whose calls wait for the test."""

    def __init__(self) -> None:
        self.soon: list[Callable[[], None]] = []
        self.later: list[tuple[float, Callable[[], None]]] = []

    def call_soon(self, call: Callable[..., None], *args: Any) -> None:
        self.soon.append(lambda: call(*args))

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        self.later.append((seconds, call))


class Reader:
    """In the place of a `Streams`."""

    def __init__(self) -> None:
        self._posted, self.woken = True, 0
        self._news = SimpleNamespace(set=self.wake)

    def wake(self) -> None:
        self.woken += 1


@pytest.mark.parametrize(("worked", "rests"), [(0.0004, []), (0.03, [0.06]), (5.0, [LONGEST_REST])])
def test_after_a_wave_the_loop_rests_for_twice_the_time_that_it_worked(worked, rests, monkeypatch):
    loop, clock, readers, waves = Loop(), chain((7.0, 7.0 + worked), repeat(9.0)), [Reader(), Reader()], Waves()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    monkeypatch.setattr(engine_thread.time, "thread_time", lambda: next(clock))
    waves.add(readers[:1])
    assert [reader.woken for reader in readers] == [1, 0]
    waves.add(readers)  # a step's news while the first reader sends
    assert [reader.woken for reader in readers] == [1, 0]
    loop.soon.pop()()
    assert [seconds for seconds, _ in loop.later] == pytest.approx(rests)
    for _, begin in loop.later:
        assert [reader.woken for reader in readers] == [1, 0]
        begin()
    assert [reader.woken for reader in readers] == [2, 1] and not any(reader._posted for reader in readers)
    loop.soon.pop()()  # nothing is due
    waves.add(readers[:1])
    assert readers[0].woken == 3


def test_a_whole_answer_wakes_its_reader_when_a_sample_ends(make_target, make_engine, monkeypatch):
    """It was woken at each token: as often as a stream."""
    waves, params = list[int](), SamplingParams(max_new_tokens=12, ignore_eos=True)
    engine, add = make_engine(make_target("llama")), Waves.add

    def count(self: Waves, readers: Any) -> None:
        waves.append(len(readers))
        add(self, readers)

    monkeypatch.setattr(Waves, "add", count)

    async def run() -> None:
        async with AsyncEngine(engine) as served:
            [out] = await served.generate([1, 2, 3], params)
            assert len(out.token_ids) == 12 and waves == [1]
            streamed = [token async for delta in served.stream([1, 2, 3], params) for token in delta.token_ids]
            assert streamed == out.token_ids and len(waves) > 1

    asyncio.run(run())
