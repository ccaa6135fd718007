"""Steps an engine through rounds of the same requests, and times each round.

The engine itself notes when a round was settled, its stage times as the device stamped them, and how long the host
waited for results; here they are read after each step. This file does not know what is compared with these times.
"""

from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from specdec.config import SamplingParams
from specdec.engine import Engine
from specdec.gpu.stage_clock import STAMP
from specdec.runtime.request_output import RowTotals
from specdec.runtime.rounds.decode_round import DECODE_STAGES

WARM_UP = 6
"""Rounds before the first that counts: kernels are compiled, and a round is captured."""
PROFILED = 8
"""Rounds under the profiler."""
UNSETTLED = 4
"""More rounds than are ever in flight."""
Span = tuple[str, float, float]
"""Name of a kernel, and seconds of its begin and end."""


class RoundTime(NamedTuple):
    """Seconds of one round. wall: from the end of the previous round to its own end. host: the part of `wall` in which
    the host did not wait for the device; on a CPU, the part outside the stages."""

    wall: float
    draft: float
    verify: float
    other: float
    host: float


class TimedRun(NamedTuple):
    """Times and tokens of some rounds. outputs: tokens of each request, including those of the warm-up.

    acceptance_length: tokens per request and timed round. uncaptured: rounds whose kernels were launched one by one.
    idle: seconds per round in which none of its kernels runs; None if not measured.
    """

    rounds: list[RoundTime]
    outputs: list[list[int]]
    acceptance_length: float
    uncaptured: int
    idle: float | None


def tokens_of_rounds(rounds: int, depth: int) -> int:
    """Output tokens of a request in `drive` if every draft of `depth` levels is accepted."""
    return 1 + (WARM_UP + rounds + PROFILED + UNSETTLED) * (depth + 1)


def drive(engine: Engine, prompts: Sequence[Sequence[int]], rounds: int, depth: int, *, profiled: bool) -> TimedRun:
    """Prefill the prompts, then time `rounds` rounds of all of them together. Greedy; end tokens are ignored."""
    params = SamplingParams(max_new_tokens=tokens_of_rounds(rounds, depth), ignore_eos=True)
    handles = engine.submit_many([list(prompt) for prompt in prompts], params)
    device, idle = engine.target.device, None
    try:
        with engine.prompts_only():  # every timed round has all requests
            while not all(handle.num_output for handle in handles):
                engine.step()
        step_rounds(engine, WARM_UP)
        tokens = -sum(handle.num_output for handle in handles)
        uncaptured = -engine.stats().captures.uncaptured_rounds
        times = step_rounds(engine, rounds)
        uncaptured += engine.stats().captures.uncaptured_rounds
        tokens += sum(handle.num_output for handle in handles)
        if profiled and device.type == "cuda":
            # the profiler delays launches, so gaps between rounds are taken from the rounds without it, below
            spans = profiled_spans(lambda: step_rounds(engine, PROFILED), device)
            idle = gaps_between_stamps(spans, len(DECODE_STAGES) + 1)
        assert not any(handle.finished for handle in handles), "a request ended while it was timed"
        outputs = [delta.token_ids for handle in handles if (delta := handle.read()) is not None]
    finally:
        for handle in handles:
            handle.abort()
    if idle is not None:
        idle += median(time.wall - time.draft - time.verify - time.other for time in times)
    return TimedRun(times, outputs, tokens / (rounds * len(handles)), uncaptured, idle)


def step_rounds(engine: Engine, count: int) -> list[RoundTime]:
    """Step the engine until `count` more rounds of all its requests are settled. Their times."""
    times: list[RoundTime] = []
    launches, batch, on_cpu = engine.steps.launches, len(engine.running_ids()), engine.target.device.type == "cpu"
    totals, waited = launches.row_totals, launches.waited_seconds
    while len(times) < count:
        engine.step()
        if launches.row_totals is not totals:
            took = None if on_cpu else launches.waited_seconds - waited
            times.append(round_time(totals, launches.row_totals, batch, took))
            totals, waited = launches.row_totals, launches.waited_seconds
    return times


def round_time(before: RowTotals, settled: RowTotals, batch: int, waited: float | None) -> RoundTime:
    """Times of a round of `batch` requests. before: the previous round. waited: seconds for the device; None: on a
    CPU."""
    wall = settled.settled_at - before.settled_at
    draft, verify, other = (batch * share for share in settled.shares)
    busy = draft + verify + other if waited is None else waited
    return RoundTime(wall, draft, verify, other, max(0.0, wall - busy))


def profiled_spans(work: Callable[[], object], device: torch.device) -> list[Span]:
    """Spans of the kernels that `work` runs on the device; on a CPU, of its operators."""
    on_gpu = device.type == "cuda"
    wait = torch.cuda.synchronize if on_gpu else lambda _: None
    wait(device)
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        work()
        wait(device)
    events = [event for event in profiler.events() or [] if (event.device_type.name == "CUDA") == on_gpu]
    return [(event.name, event.time_range.start / 1e6, event.time_range.end / 1e6) for event in events]


def gaps_between_stamps(spans: Sequence[Span], stamps: int) -> float:
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
