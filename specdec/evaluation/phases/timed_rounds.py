"""Drives an engine's rounds through its own streams, and times each.

`WatchedSteps` replaces the engine's own steps. It launches the same rounds, and records when each ended, how long the
host waited for it, and the stage times that the device stamped.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import pairwise
from time import perf_counter
from typing import Any, NamedTuple

from specdec.config import SamplingParams
from specdec.engine import Engine
from specdec.runtime.launched_step import LaunchedStep
from specdec.runtime.request import Request, StreamDelta
from specdec.runtime.rounds.result import RoundResult
from specdec.runtime.steps import Steps

WARM_UP = 6
"""Rounds before the first that counts: kernels are compiled, and a round is captured."""
UNSETTLED = 4
"""More rounds than are ever in flight."""


class RoundTime(NamedTuple):
    """Seconds of one round. wall: from the end of the previous round to its own end. host: the part of `wall` in which
    the host did not wait for the device; on a CPU, the part outside the stages. emitted: tokens of all requests.
    """

    wall: float
    draft: float
    verify: float
    other: float
    host: float
    emitted: int


class Driven(NamedTuple):
    """Times and tokens of some rounds. outputs: tokens of each request, including those of the warm-up.

    uncaptured: rounds whose kernels were launched one by one.
    """

    rounds: list[RoundTime]
    outputs: list[list[int]]
    uncaptured: int


class _Passed(NamedTuple):
    """A round whose result has arrived. at: when. waiting: seconds that the host waited for it."""

    at: float
    waiting: float
    result: RoundResult


@dataclass(frozen=True, slots=True, kw_only=True)
class _WatchedRound(LaunchedStep):
    passed: list[_Passed]

    def result(self) -> RoundResult:
        start = perf_counter()
        result = LaunchedStep.result(self)
        end = perf_counter()
        self.passed.append(_Passed(end, end - start, result))
        return result


class WatchedSteps(Steps):
    """An engine's steps that append every round to `passed` when its result arrives."""

    def __init__(self, steps: Steps) -> None:
        self.__dict__.update(vars(steps))
        self.passed: list[_Passed] = []

    def launch_round(self, requests: Sequence[Request], remaining: Sequence[int]) -> None:
        super().launch_round(requests, remaining)
        step = self.launches.unsettled.pop()
        inherited = {each.name: getattr(step, each.name) for each in fields(step)}
        self.launches.unsettled.append(_WatchedRound(**inherited, passed=self.passed))


def most_new_tokens(rounds: int, depth: int) -> int:
    """Output tokens of a request in `drive` if every draft of `depth` levels is accepted."""
    return 1 + (WARM_UP + rounds + UNSETTLED) * (depth + 1)


def drive(engine: Engine, prompts: Sequence[Sequence[int]], rounds: int, depth: int) -> Driven:
    """Prefill the prompts, then time `rounds` rounds of all of them together. Greedy; end tokens are ignored."""
    watched = engine.steps = WatchedSteps(engine.steps)
    params = SamplingParams(max_new_tokens=most_new_tokens(rounds, depth), ignore_eos=True)
    streams = [engine.stream(list(prompt), params) for prompt in prompts]
    outputs: list[list[int]] = [[] for _ in prompts]
    try:
        with engine.prompts_only():  # every timed round has all requests
            for stream, output in zip(streams, outputs, strict=True):
                output += next(stream).token_ids
        leader = streams[0]  # the other requests are in the same rounds; their tokens are read at the end
        while len(watched.passed) < WARM_UP:
            outputs[0] += _next(leader).token_ids
        uncaptured = -engine.stats().captures.uncaptured_rounds
        while len(watched.passed) < WARM_UP + 1 + rounds:
            outputs[0] += _next(leader).token_ids
        uncaptured += engine.stats().captures.uncaptured_rounds
        for stream, output in zip(streams[1:], outputs[1:], strict=True):
            output += next(stream).token_ids
    finally:
        for stream in streams:
            with suppress(RuntimeError):  # the generator is running: the interruption came within it
                stream.close()  # type: ignore[attr-defined]
    timed = pairwise(watched.passed[WARM_UP : WARM_UP + 1 + rounds])
    times = [round_time(before.at, one, engine.target.device.type == "cpu") for before, one in timed]
    return Driven(times, outputs, uncaptured)


def round_time(before: float, one: _Passed, on_cpu: bool) -> RoundTime:
    """Times of a round. before: when the previous round ended."""
    seconds, wall = one.result.seconds, one.at - before
    busy = sum(seconds.values()) if on_cpu else one.waiting
    return RoundTime(wall=wall, host=max(0.0, wall - busy), emitted=int(one.result.length.sum()), **seconds)


def _next(stream: Any) -> StreamDelta:
    delta: StreamDelta = next(stream)
    assert delta.output is None, "a request ended while it was timed"
    return delta
