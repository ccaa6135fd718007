"""Drives an engine's rounds through its own streams, and times each.

`WatchedSteps` replaces the engine's own steps. It launches the same rounds, and records when each ended, how long the
host waited for it, and the stage times that the device stamped.
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
from specdec.runtime.launches import Launch
from specdec.runtime.request_output import StreamDelta
from specdec.runtime.rounds.decode_round import DECODE_STAGES
from specdec.runtime.rounds.result import RoundResult
from specdec.runtime.scheduler import RequestBatch
from specdec.runtime.steps import Steps

WARM_UP = 6
"""Rounds before the first that counts: kernels are compiled, and a round is captured."""
PROFILED = 8
"""Rounds under the profiler."""
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


class TimedRun(NamedTuple):
    """Times and tokens of some rounds. outputs: tokens of each request, including those of the warm-up.

    uncaptured: rounds whose kernels were launched one by one. idle: seconds per round in which none of its kernels
    runs; None if not measured.
    """

    rounds: list[RoundTime]
    outputs: list[list[int]]
    uncaptured: int
    idle: float | None


class _ArrivedRound(NamedTuple):
    """A round whose result has arrived. at: when. waiting: seconds that the host waited for it."""

    at: float
    waiting: float
    result: RoundResult


@dataclass(frozen=True, slots=True, kw_only=True)
class _WatchedRound(Launch):
    passed: list[_ArrivedRound]

    def result(self) -> RoundResult:
        start = perf_counter()
        result = Launch.result(self)
        end = perf_counter()
        self.passed.append(_ArrivedRound(end, end - start, result))
        return result


class WatchedSteps(Steps):
    """An engine's steps that append every round to `passed` when its result arrives."""

    def __init__(self, steps: Steps) -> None:
        self.__dict__.update(vars(steps))
        self.passed: list[_ArrivedRound] = []

    def launch_round(self, batch: RequestBatch, remaining: Sequence[int]) -> None:
        super().launch_round(batch, remaining)
        step = self.launches.unsettled.pop()
        inherited = {each.name: getattr(step, each.name) for each in fields(step)}
        self.launches.unsettled.append(_WatchedRound(**inherited, passed=self.passed))


def tokens_of_rounds(rounds: int, depth: int) -> int:
    """Output tokens of a request in `drive` if every draft of `depth` levels is accepted."""
    return 1 + (WARM_UP + rounds + PROFILED + UNSETTLED) * (depth + 1)


def drive(engine: Engine, prompts: Sequence[Sequence[int]], rounds: int, depth: int, *, profiled: bool) -> TimedRun:
    """Prefill the prompts, then time `rounds` rounds of all of them together. Greedy; end tokens are ignored."""
    watched = engine.steps = WatchedSteps(engine.steps)
    params = SamplingParams(max_new_tokens=tokens_of_rounds(rounds, depth), ignore_eos=True)
    streams = [engine.stream(list(prompt), params) for prompt in prompts]
    outputs: list[list[int]] = [[] for _ in prompts]
    idle = None
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
        if profiled and engine.target.device.type == "cuda":
            idle = _gaps_within_rounds(watched.passed, leader, outputs[0])
        for stream, output in zip(streams[1:], outputs[1:], strict=True):
            output += next(stream).token_ids
    finally:
        for stream in streams:
            with suppress(RuntimeError):  # the generator is running: the interruption came within it
                stream.close()  # type: ignore[attr-defined]
    timed = pairwise(watched.passed[WARM_UP : WARM_UP + 1 + rounds])
    times = [round_time(before.at, one, engine.target.device.type == "cpu") for before, one in timed]
    if idle is not None:
        idle += median(time.wall - time.draft - time.verify - time.other for time in times)
    return TimedRun(times, outputs, uncaptured, idle)


def round_time(before: float, one: _ArrivedRound, on_cpu: bool) -> RoundTime:
    """Times of a round. before: when the previous round ended."""
    seconds, wall = one.result.seconds, one.at - before
    busy = sum(seconds.values()) if on_cpu else one.waiting
    return RoundTime(wall=wall, host=max(0.0, wall - busy), emitted=int(one.result.length.sum()), **seconds)


def _next(stream: Any) -> StreamDelta:
    delta: StreamDelta = next(stream)
    assert delta.output is None, "a request ended while it was timed"
    return delta


def _gaps_within_rounds(passed: Sequence[_ArrivedRound], leader: Any, output: list[int]) -> float:
    """Seconds per round without a kernel between its first and last stamp, over some rounds under the profiler.

    Gaps between rounds are not taken from here, since the profiler itself delays launches: `drive` adds the wall time
    of rounds without the profiler, minus their stages.
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
    """Mean uncovered time of a round, which reaches from the first to the last of `stamps` spans of the clock."""
    taken = sorted((begin, end) for name, begin, end in spans if STAMP in name)
    rounds = [(taken[i][0], taken[i + stamps - 1][1]) for i in range(0, len(taken) - stamps + 1, stamps)]
    idle = (idle_within([(b, e) for _, b, e in spans if first <= b and e <= last]) for first, last in rounds)
    return sum(idle) / max(1, len(rounds))


def idle_within(spans: Sequence[tuple[float, float]]) -> float:
    """Time that no span covers between the first beginning and the last end."""
    idle = 0.0
    reached = min((begin for begin, _ in spans), default=0.0)
    for begin, end in sorted(spans):
        idle += max(0.0, begin - reached)
        reached = max(reached, end)
    return idle
