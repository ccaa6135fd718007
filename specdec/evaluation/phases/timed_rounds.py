"""Rounds of an engine, one after the other through its own streams, with the times of each.

`WatchedSteps` takes the place of the engine's own and writes down when each round ended, how long the host waited for
it, and the stages that the device stamped. What is launched, and how, it does not change.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from specdec.config import SamplingParams
from specdec.engine import Engine
from specdec.gpu.stage_clock import STAMP
from specdec.runtime.launched_step import LaunchedStep
from specdec.runtime.request import Request, StreamDelta
from specdec.runtime.rounds.decode_round import DECODE_STAGES
from specdec.runtime.rounds.result import RoundResult
from specdec.runtime.steps import Steps

WARM_UP = 6
"""Rounds before the first that counts: kernels compile, a round is captured."""
PROFILED = 8
UNSETTLED = 4
"""More rounds than are ever under way."""


class RoundTime(NamedTuple):
    """Seconds of one round. wall: from the end of the round before to its own end.

    host: of the wall, what the host did not spend waiting for the device; on a CPU, what was not spent in a stage.
    """

    wall: float
    draft: float
    verify: float
    other: float
    host: float
    emitted: int


class Driven(NamedTuple):
    """Times and tokens of some rounds. outputs: tokens of each request, those of warm-up included.

    uncaptured: of these rounds, those whose kernels were launched one by one. idle: seconds a round in which no kernel
    of its own runs; None where that was not measured.
    """

    rounds: list[RoundTime]
    outputs: list[list[int]]
    uncaptured: int
    idle: float | None


class _Passed(NamedTuple):
    """A round whose result has arrived: when, and after how many seconds of waiting for it."""

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
    """The steps it is made from, and a note of every round that it launches: in `passed`, once it is over."""

    def __init__(self, steps: Steps) -> None:
        self.__dict__.update(vars(steps))
        self.passed: list[_Passed] = []

    def launch_round(self, requests: Sequence[Request], remaining: Sequence[int]) -> None:
        super().launch_round(requests, remaining)
        step = self.launches.unsettled.pop()
        inherited = {each.name: getattr(step, each.name) for each in fields(step)}
        self.launches.unsettled.append(_WatchedRound(**inherited, passed=self.passed))


def most_new_tokens(rounds: int, depth: int) -> int:
    """Output tokens of a request that is driven through `drive`, if every draft of `depth` levels is accepted."""
    return 1 + (WARM_UP + rounds + PROFILED + UNSETTLED) * (depth + 1)


def drive(engine: Engine, prompts: Sequence[Sequence[int]], rounds: int, depth: int, *, profiled: bool) -> Driven:
    """Prefill the prompts, then time `rounds` rounds of all of them together, greedy, end tokens ignored."""
    watched = engine.steps = WatchedSteps(engine.steps)
    params = SamplingParams(max_new_tokens=most_new_tokens(rounds, depth), ignore_eos=True)
    streams = [engine.stream(list(prompt), params) for prompt in prompts]
    outputs: list[list[int]] = [[] for _ in prompts]
    idle = None
    try:
        with engine.prompts_only():  # so that every timed round is one of all requests
            for stream, output in zip(streams, outputs, strict=True):
                output += next(stream).token_ids
        leader = streams[0]  # the others' requests are in the same rounds; what they gained is taken at the end
        while len(watched.passed) < WARM_UP:
            outputs[0] += _next(leader).token_ids
        uncaptured = -engine.stats().captures.uncaptured_rounds
        while len(watched.passed) < WARM_UP + 1 + rounds:
            outputs[0] += _next(leader).token_ids
        uncaptured += engine.stats().captures.uncaptured_rounds
        if profiled and engine.target.device.type == "cuda":
            idle = _gaps_within_rounds(watched.passed, leader, outputs[0])
        for stream, output in zip(streams[1:], outputs[1:], strict=True):
            output += next(stream).token_ids
    finally:
        for stream in streams:
            with suppress(RuntimeError):  # of a generator that is running: an interruption within it
                stream.close()  # type: ignore[attr-defined]
    timed = pairwise(watched.passed[WARM_UP : WARM_UP + 1 + rounds])
    times = [round_time(before.at, one, engine.target.device.type == "cpu") for before, one in timed]
    if idle is not None:
        idle += median(time.wall - time.draft - time.verify - time.other for time in times)
    return Driven(times, outputs, uncaptured, idle)


def round_time(before: float, one: _Passed, on_cpu: bool) -> RoundTime:
    """Times of a round, when the one before it ended at `before`."""
    seconds, wall = one.result.seconds, one.at - before
    busy = sum(seconds.values()) if on_cpu else one.waiting
    return RoundTime(wall=wall, host=max(0.0, wall - busy), emitted=int(one.result.length.sum()), **seconds)


def _next(stream: Any) -> StreamDelta:
    delta: StreamDelta = next(stream)
    assert delta.output is None, "a request ended while it was timed"
    return delta


def _gaps_within_rounds(passed: Sequence[_Passed], leader: Any, output: list[int]) -> float:
    """Seconds a round without a kernel, between its first and its last stamp, over some rounds under the profiler.

    Not between rounds, where the profiler itself keeps the host from launching: what lies there is the wall time of
    rounds without it, less their stages.
    """
    torch.cuda.synchronize()
    last = len(passed) + PROFILED
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        while len(passed) < last:
            output += _next(leader).token_ids
        torch.cuda.synchronize()
    events = [event for event in profiler.events() or [] if event.device_type.name == "CUDA"]
    spans = [(event.name, event.time_range.start / 1e6, event.time_range.end / 1e6) for event in events]
    return gaps_between_stamps(spans, len(DECODE_STAGES) + 1)


def gaps_between_stamps(spans: Sequence[tuple[str, float, float]], stamps: int) -> float:
    """Mean time that no span covers from the first to the last of each `stamps` spans that are the clock's."""
    taken = sorted((begin, end) for name, begin, end in spans if STAMP in name)
    rounds = [(taken[i][0], taken[i + stamps - 1][1]) for i in range(0, len(taken) - stamps + 1, stamps)]
    idle = (idle_within([(b, e) for _, b, e in spans if first <= b and e <= last]) for first, last in rounds)
    return sum(idle) / max(1, len(rounds))


def idle_within(spans: Sequence[tuple[float, float]]) -> float:
    """From the first beginning to the last end, the time that no span covers."""
    idle = 0.0
    reached = min((begin for begin, _ in spans), default=0.0)
    for begin, end in sorted(spans):
        idle += max(0.0, begin - reached)
        reached = max(reached, end)
    return idle
