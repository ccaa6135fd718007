"""Simulates the draft policy without engine or model, from acceptance probabilities and round times.

    Machine     seconds of a round by draft and batch, seconds that a drafter takes to read its lag, and noise
    Load        requests that begin and end together, and the acceptance probability of each source
    adaptive    seconds until all requests have their tokens, with the policy's choice in each round
    fixed       the same with one draft in all rounds
    ROWS        the cases: loads on measured machines, with right and wrong timings at the start

Every policy meets the same random draws: a draft's acceptance at a position does not depend on earlier drafts.

`python -m draft_simulation [part of a name ...]`, in tests/ with PYTHONPATH=..:. , prints for each row the mean and the
worst seed, relative to the best fixed draft and to plain decoding.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np

from specdec import Engine, SpecConfig
from specdec.runtime.drafts.draft_policy import DraftPolicy, FloatArray, RoundTimes, draft_ladder
from specdec.runtime.rounds.drafter_lag import MAX_LAG
from specdec.runtime.rounds.result import NO_DRAFT, DraftShape

E4B = {
    1: (4.125, 4.315, 4.429, 4.542, 4.667),
    8: (4.397, 4.601, 4.949, 5.152, 5.316),
    32: (4.810, 5.166, 5.843, 6.036, 6.998),
    128: (6.242, 8.037, 10.142, 12.328, 14.946),
}
"""Milliseconds of a round on an H100 by batch size, with no draft and chains of 1 to 4
(docs/results/2026-11-26-adaptive.md)."""

DRAFTING = {1: 0.11, 8: 0.13, 32: 0.2, 128: 0.44}
"""The drafter's part of those milliseconds, for each level that a model drafts. A lookup takes none."""


@cache
def e4b(shape: DraftShape, batch: int) -> float:
    """Seconds of a round, interpolated and extrapolated from `E4B` by batch size and number of nodes."""
    nodes = batch * (shape.num_nodes - 1)
    by_size = []
    for size, times in E4B.items():
        by_nodes = [(0, times[0]), *((size * k, times[k] - DRAFTING[size] * k) for k in range(1, 5)), (size * 64, 0.0)]
        slope = (by_nodes[4][1] - by_nodes[0][1]) / (4 * size)
        by_nodes[-1] = size * 64, by_nodes[4][1] + 60 * size * slope
        verify = np.interp(nodes * size / batch, *zip(*by_nodes, strict=True))
        by_size.append(verify + (0.0 if shape.by_lookup else DRAFTING[size] * shape.num_steps))
    return float(np.interp(batch, list(E4B), by_size)) / 1e3


def mixture(alike: float, experts: int = 64, chosen: int = 8) -> Callable[[DraftShape, int], float]:
    """Seconds of a round of a mixture, which reads each chosen expert once. alike: share of a draft's rows that choose
    the root's experts."""

    def seconds(shape: DraftShape, batch: int) -> float:
        rows = batch * (1 + (1 - alike) * (shape.num_nodes - 1))
        read = experts * (1 - (1 - chosen / experts) ** rows)
        return (1 + read / 4 + shape.num_steps / 50) / 1e3

    return seconds


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A simulated machine.

    seconds: time of a round, by draft and batch size.   captured: rounds are timed before the first, as on a GPU.
    read_lag: seconds to read the tokens that other sources committed, by batch size; None: the model reads every round.
    noise: factor on the time of a round, by the time at which it begins.
    """

    seconds: Callable[[DraftShape, int], float] = e4b
    captured: bool = True
    read_lag: Callable[[int], float] | None = None
    noise: Callable[[float], float] = lambda now: 1.0

    def size(self, count: int) -> int:
        return next(size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256) if size >= count)


@dataclass(frozen=True)
class Load:
    """Crowds of `batch` requests that begin together, one crowd after the other.

    chance: number of a request -> acceptance probabilities of the model and of the lookup.   tree_gain: a tree fails
    with the probability that this many chains all fail; 1: trees gain nothing.
    """

    chance: Callable[[int], tuple[float, float]]
    batch: int = 1
    tokens: int = 255
    crowds: int = 1
    seed: int = 0
    tree_gain: float = 1.5

    def coins(self) -> FloatArray:
        """Draw coins [source, crowd, request, position]: a draft is right if its coin is below its chance."""
        shape = 2, self.crowds, self.batch, self.tokens + 300
        return np.random.default_rng(self.seed).random(shape)


class Outcome(NamedTuple):
    """plain_seconds: time of plain rounds for the same tokens. reading: part of `seconds` in which the model caught up.
    quiet_seconds: `seconds` without the noise."""

    seconds: float
    rounds: Counter[DraftShape]
    plain_seconds: float
    reading: float
    quiet_seconds: float
    choice: DraftPolicy | None = None


def chances(p: float, lookup: float = 0.0) -> Callable[[int], tuple[float, float]]:
    return lambda number: (p, lookup)


def fixed(machine: Machine, load: Load, shape: DraftShape) -> float:
    """Seconds with the same draft in every round, without noise. All crowds are played at once."""
    crowds = np.arange(load.crowds * load.batch).reshape(load.crowds, load.batch)
    p = _accepted_share(
        load, shape, np.array([[load.chance(int(i))[shape.by_lookup] for i in crowd] for crowd in crowds])
    )
    right = load.coins()[int(shape.by_lookup)] < p[..., None]  # [crowd, B, position]
    ahead = np.lib.stride_tricks.sliding_window_view(right[..., 1:], max(shape.depth, 1), axis=2)
    moved = 1 + (np.cumprod(ahead, axis=3).sum(axis=3) if shape.depth else np.zeros_like(right, dtype=np.int64))
    moved = moved.reshape(crowds.size, -1)
    at, seconds, lag = np.zeros(crowds.size, dtype=np.int64), 0.0, 0
    lagging = machine.read_lag is not None and (shape.by_lookup or not shape.depth)
    while (going := (at < load.tokens)).any():
        sizes = [machine.size(count) for count in going.reshape(crowds.shape).sum(axis=1).tolist() if count]
        seconds += sum(machine.seconds(shape, size) for size in sizes)
        if lagging and lag + shape.depth + 1 > MAX_LAG:
            seconds, lag = seconds + sum(map(machine.read_lag, sizes)), 0
        lag += shape.depth + 1
        at[going] += moved[going, at[going]]
    return seconds


def _accepted_share(load: Load, shape: DraftShape, chance: FloatArray) -> FloatArray:
    """Acceptance probability of a draft of this shape, from that of a chain."""
    return chance if shape.topk == 1 else 1 - (1 - chance) ** load.tree_gain


def adaptive(machine: Machine, load: Load, shapes: Sequence[DraftShape], *, burst: Sequence[float] = (1.0,)) -> Outcome:
    """Play the load with the policy of a new engine. burst: factors on the times measured at the start, by draft."""
    choice = DraftPolicy(shapes, load.batch + 1)
    if machine.captured:
        for size in {machine.size(count + 1) for count in range(load.batch)}:
            timed = np.array(burst) * [machine.seconds(shape, size) for shape in shapes]
            choice.times[size] = RoundTimes(timed.tolist())
    return _play(machine, load, choice)._replace(choice=choice)


def _play(machine: Machine, load: Load, choice: DraftPolicy) -> Outcome:
    coins = load.coins()
    rounds, rows = Counter[DraftShape](), np.arange(load.batch)
    now = plain = read = quiet = 0.0
    for crowd in range(load.crowds):
        chance = np.array([load.chance(crowd * load.batch + i) for i in range(load.batch)]).T  # [source, B]
        at, launched, lag = np.zeros(load.batch, dtype=np.int64), [], 0
        choice.acceptance.begin_rows(rows)
        while (going := np.flatnonzero(at < load.tokens)).size:
            size, lagging = machine.size(len(going)), machine.read_lag is not None
            unsettled = [each[0] for each in launched] if machine.captured else []
            shape = choice.choose(going, load.tokens - at[going] - 1, size, NO_DRAFT, unsettled)
            by_model, reading = shape.num_steps > 0 and not shape.by_lookup, 0.0
            if lagging and lag and (by_model or lag + shape.depth + 1 > MAX_LAG):
                reading = machine.read_lag(size) * machine.noise(now)
                now, read, lag = now + reading, read + reading, 0
                quiet += machine.read_lag(size)
            lag += 0 if by_model or not lagging else shape.depth + 1
            p = _accepted_share(load, shape, chance[int(shape.by_lookup), going])
            drawn = coins[int(shape.by_lookup), crowd][going[:, None], at[going, None] + 1 + np.arange(shape.depth)]
            accepted = np.cumprod(drawn < p[:, None], axis=1).sum(axis=1) if shape.depth else np.zeros_like(going)
            spent = machine.seconds(shape, size) * machine.noise(now)
            quiet += machine.seconds(shape, size)
            mean_tokens = float(np.minimum(accepted + 1, load.tokens - at[going]).mean())
            plain += machine.seconds(NO_DRAFT, size) * mean_tokens
            depth = np.full(len(going), shape.depth)
            now, rounds[shape] = now + spent, rounds[shape] + 1
            launched.append((shape, size, reading + spent, (going, accepted, depth), mean_tokens))
            at[going] += accepted + 1
            while len(launched) > machine.captured:
                choice.learn(*launched.pop(0))
    return Outcome(now, rounds, plain, read, quiet)


# the cases, with measured times of rounds


CHAIN, TREE, SMALL_TREE = (SpecConfig(*size, adaptive=True) for size in ((4,), (4, 4, 16), (4, 4, 8)))
SEEDS = range(8)
RIGHT = (0.0, 0.3, 0.45, 0.8)


def prompts(engine: Engine) -> list[list[int]]:
    """Three questions for the bundled target."""
    texts = ["Tom has 3 boxes of 12 pencils.", "A cinema has 4 rows with 8 seats each.", "17 boys go to a match."]
    return [engine.chat_prompt(text) for text in texts]


@dataclass(frozen=True)
class Timing:
    """Errors of the times that were measured when the engine was made, and noise of its rounds.

    factors: error of each draft's measured time, plain rounds first; further drafts have the last one.
    spread: relative variation of a round's time, in both directions.   burst: begin, end and factor of a slow period.
    """

    factors: tuple[float, ...] = (1.0,)
    spread: float = 0.0
    burst: tuple[float, float, float] | None = None

    def noise(self, seed: int) -> Callable[[float], float]:
        draw = np.random.default_rng(seed)

        def factor(now: float) -> float:
            begin, end, slow = self.burst or (0.0, 0.0, 1.0)
            spread = draw.uniform(1 - self.spread, 1 + self.spread) if self.spread else 1.0
            return spread * (slow if begin <= now < end else 1.0)

        return factor


TIMINGS = {
    "all drafts timed at 2x": Timing((1.0, 2.0)),
    "all drafts timed at 0.5x": Timing((1.0, 0.5)),
    "one timed at 2x": Timing((1.0, 1.0, 2.0, 1.0)),
    "one timed at 0.5x": Timing((1.0, 1.0, 0.5, 1.0)),
    "plain timed at 2x": Timing((2.0, 1.0)),
    "plain timed at 0.5x": Timing((0.5, 1.0)),
    "noise of 20 %": Timing(spread=0.2),
    "a burst": Timing(burst=(0.02, 0.15, 10.0)),
    "a burst at first": Timing(burst=(0.0, 0.1, 10.0)),
}


class DraftRow(NamedTuple):
    """One case. tree_gain: see `Load`. timing: errors of the measured times; none by default."""

    name: str
    spec: SpecConfig = CHAIN
    batch: int = 1
    right: float = 0.0
    looked_up: float | None = None
    tree_gain: float = 1.5
    machine: Machine = Machine()
    timing: Timing = Timing()

    @property
    def never_right(self) -> bool:
        return self.right == 0 and not self.looked_up


def _dear_reading(size: int) -> float:
    return 0.1 * e4b(NO_DRAFT, size)


def _cpu(shape, batch):  # type: ignore[no-untyped-def]
    return 0.07 * (1 + batch / 8) * (1 + 0.05 * (shape.num_nodes - 1) + 0.15 * shape.num_steps)


def _rows() -> Iterator[DraftRow]:
    for batch in E4B:
        for right in RIGHT:
            named = f"{batch} requests, right {right}"
            yield DraftRow(f"chain, {named}", CHAIN, batch, right)
            yield DraftRow(f"tree of 16, {named}", TREE, batch, right)
            yield DraftRow(f"tree of 8, {named}", SMALL_TREE, batch, right)
            yield DraftRow(f"vain tree of 16, {named}", TREE, batch, right, tree_gain=1.0)
            yield DraftRow(f"lagging, {named}", CHAIN, batch, right, machine=Machine(read_lag=_dear_reading))
            yield DraftRow(f"uncaptured, {named}", CHAIN, batch, right, machine=Machine(seconds=_cpu, captured=False))
            for timing in TIMINGS:
                yield DraftRow(f"{timing}, {named}", CHAIN, batch, right, timing=TIMINGS[timing])
            for timing in ("noise of 20 %", "a burst", "a burst at first"):
                given, machine = TIMINGS[timing], Machine(seconds=_cpu, captured=False)
                if given.burst:
                    given = replace(given, burst=(20 * given.burst[0], 20 * given.burst[1], given.burst[2]))
                yield DraftRow(f"uncaptured, {timing}, {named}", CHAIN, batch, right, machine=machine, timing=given)
        for right, looked_up in ((0.0, 0.0), (0.0, 0.8), (0.3, 0.45), (0.45, 0.45), (0.8, 0.3), (0.8, 0.0)):
            named = f"{batch} requests, right {right} and {looked_up}"
            yield DraftRow(f"[model; lookup], {named}", CHAIN, batch, right, looked_up)


ROWS = {row.name: row for row in _rows()}


@cache
def _fixed(row: DraftRow, seed: int) -> list[float]:
    shapes = draft_ladder(row.spec, captured=row.machine.captured, lookup=row.looked_up is not None)
    return [fixed(row.machine, _load(row, seed), shape) for shape in shapes]


def _load(row: DraftRow, seed: int) -> Load:
    chance = chances(row.right, row.looked_up or 0.0)
    return Load(chance, batch=row.batch, crowds=max(1, 8 // row.batch), seed=seed, tree_gain=row.tree_gain)


def measured(row: DraftRow, seed: int) -> tuple[float, float, Outcome]:
    """Speed relative to the best fixed draft and to plain decoding, both without the time that noise adds."""
    shapes = draft_ladder(row.spec, captured=row.machine.captured, lookup=row.looked_up is not None)
    timing = row.timing
    factors = [*timing.factors, *[timing.factors[-1]] * len(shapes)][: len(shapes)]
    machine = replace(row.machine, noise=timing.noise(seed))
    outcome = adaptive(machine, _load(row, seed), shapes, burst=factors)
    times = _fixed(row._replace(name="", timing=Timing()), seed)
    return min(times) / outcome.quiet_seconds, times[0] / outcome.quiet_seconds, outcome


def print_table(parts: list[str]) -> None:
    rows = {name: row for name, row in ROWS.items() if not parts or any(part in name for part in parts)}
    means = []
    for name, row in rows.items():
        best, plain = np.array([measured(row, seed)[:2] for seed in SEEDS]).T
        means.append(best.mean())
        print(f"{name:58} {best.mean():.3f} {best.min():.3f} | {plain.mean():.3f} {plain.min():.3f}", flush=True)
    print(f"{len(means)} rows: mean {np.mean(means):.3f}, least {min(means):.3f}")


if __name__ == "__main__":
    print_table(sys.argv[1:])
