"""Results that the draft policy must reach on simulated loads (`draft_simulation.py`) with measured times of rounds.

python -m draft_rows [part of a name ...]     prints each row: mean and worst of the seeds, to the best fixed draft
                                              and to plain decoding (in tests/, with PYTHONPATH=..:.)
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np
from draft_simulation import E4B, Load, Machine, Outcome, adaptive, chances, e4b, fixed

from specdec import Engine, SpecConfig
from specdec.runtime.draft_policy import draft_ladder
from specdec.runtime.rounds.result import NO_DRAFT

CHAIN, TREE, SMALL_TREE = (SpecConfig(*size, adaptive=True) for size in ((4,), (4, 4, 16), (4, 4, 8)))
SEEDS = range(8)
RIGHT = (0.0, 0.3, 0.45, 0.8)


def prompts(engine: Engine) -> list[list[int]]:
    """Three questions for the bundled target."""
    texts = ["Tom has 3 boxes of 12 pencils.", "A cinema has 4 rows with 8 seats each.", "17 boys go to a match."]
    return [engine.chat_prompt(text) for text in texts]


@dataclass(frozen=True)
class Timing:
    """How wrong the times were that were taken when the engine was made, and how its rounds vary.

    factors: on what was timed of each draft, none first; the last one is of all further drafts. spread: of a round's
    time, in both directions. burst: begin, end and factor of one.
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
    """One row. tree_gain: see `Load`. timing: wrong times; right ones by default."""

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
            yield DraftRow(f"lagging, {named}", CHAIN, batch, right, machine=Machine(catch_up=_dear_reading))
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
    """How many times as fast as the best fixed draft, and as none; time that a burst adds is of no draft."""
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
