"""What a mixed load could gain from drafts that are chosen: `python tools/simulate_mixed.py`. Needs no GPU.

Rounds take what they took on an H200 at E4B shapes (docs/results/2026-11-24-adaptive.md), between the batch sizes that
were measured in proportion. Half of the requests accept each draft with 0.9, half with `--hard`. Policies: every fixed
draft; the engine's own choice; choices that know all chances, by the geometric mean over rows or by the sum of tokens;
and one that gives each row a depth of its own, where a round costs what its mean depth does.
"""

import argparse
from collections.abc import Callable
from itertools import combinations_with_replacement

import numpy as np
from result_table import table_head, table_row

from specdec import SpecConfig
from specdec.runtime.adaptive.draft_choice import DraftChoice
from specdec.runtime.adaptive.draft_ladder import draft_ladder
from specdec.runtime.rounds.captured_rounds import batch_sizes
from specdec.runtime.rounds.round_shapes import NO_DRAFT

MEASURED = {
    1: (3.288, 3.458, 3.575, 3.686, 3.812),
    8: (3.511, 3.729, 4.080, 4.245, 4.597),
    32: (3.963, 4.660, 5.093, 5.502, 6.058),
    128: (5.644, 7.385, 9.705, 11.859, 14.567),
}
"""Milliseconds of a round by batch size, without a draft and with chains of 1 to 4."""

PHASES = ((1, 6), (4, 16), (32, 64), (128, 256), (64, 96), (16, 40), (2, 8), (96, 144), (8, 24))
"""Requests at once, and in all, as in bench_adaptive.py."""

DEPTH, ROWS, TOKENS, EASY = 4, 128, 96, 0.9
SIZES = batch_sizes(ROWS)


def cost(batch: int) -> np.ndarray:
    """[DEPTH + 1] ms."""
    size = min(each for each in SIZES if each >= batch)
    return np.array([np.interp(size, list(MEASURED), column) for column in zip(*MEASURED.values(), strict=True)])


def expected(chance: np.ndarray) -> np.ndarray:
    """[B] -> tokens of each depth [DEPTH + 1, B]."""
    return np.cumsum([chance**depth for depth in range(DEPTH + 1)], axis=0)


def geometric(tokens: np.ndarray) -> np.ndarray:
    return np.exp(np.log(tokens).mean(axis=-1))


def own_depths(chance: np.ndarray, milliseconds: np.ndarray) -> np.ndarray:
    """The best depth of easy rows and of hard ones."""
    easy, tokens, best = chance == EASY, expected(chance), (0.0, chance)
    for hard_depth, easy_depth in combinations_with_replacement(range(DEPTH + 1), 2):
        depths = np.where(easy, easy_depth, hard_depth)
        rate = geometric(tokens[depths, np.arange(len(depths))]) / np.interp(
            depths.mean(), range(DEPTH + 1), milliseconds
        )
        best = max(best, (float(rate), depths), key=lambda each: each[0])
    return best[1]


def seconds_of(policy: int | str, hard: float, seed: int) -> float:
    """Of the whole load."""
    lengths, coin = np.random.default_rng(seed), np.random.default_rng(seed + 1000)
    shapes = draft_ladder(SpecConfig(DEPTH))
    choice = DraftChoice(shapes, ROWS + 1)
    choice.cost.timed.update({size: cost(size) / 1e3 for size in SIZES})
    left, chance, total, number = np.zeros(ROWS, np.int64), np.zeros(ROWS), 0.0, 0
    known: dict[str, Callable[[np.ndarray], np.ndarray]] = {"geometric": geometric, "sum": lambda each: each.mean(-1)}
    for at_once, to_come in PHASES:
        while to_come or (left > 0).any():
            for row in np.flatnonzero(left == 0)[: min(to_come, at_once - int((left > 0).sum()))]:
                left[row], chance[row] = lengths.integers(TOKENS // 3, TOKENS), (EASY, hard)[number % 2]
                choice.begin(np.array([row]))
                number, to_come = number + 1, to_come - 1
            rows = np.flatnonzero(left)
            most, milliseconds = np.minimum(DEPTH, left[rows] - 1), cost(len(rows))
            size = min(each for each in SIZES if each >= len(rows))
            if policy == "own depths":
                depths = own_depths(chance[rows], milliseconds)
            elif policy == "engine":
                depths = np.full(len(rows), shapes.index(choice.choose(rows, most, size, 0, NO_DRAFT)))
            elif isinstance(policy, str):
                depths = np.full(len(rows), (known[policy](expected(chance[rows])) / milliseconds).argmax())
            else:
                depths = np.full(len(rows), policy)
            spent = float(np.interp(depths.mean(), range(DEPTH + 1), milliseconds)) / 1e3
            right = coin.random((len(rows), DEPTH)) < chance[rows, None]
            accepted = np.minimum(right.cumprod(axis=1).sum(axis=1), np.minimum(depths, most))
            if policy == "engine":
                stages = {"draft": 0.0, "verify": spent, "other": 0.0}
                choice.learn(shapes[depths[0]], size, 0, stages, rows, accepted, np.full(len(rows), DEPTH))
            left[rows] -= accepted + 1
            total += spent
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hard", type=float, default=0.2)
    parser.add_argument("--loads", type=int, default=6)
    given = parser.parse_args()
    policies: list[int | str] = [*range(DEPTH + 1), "engine", "geometric", "sum", "own depths"]
    times = {each: [seconds_of(each, given.hard, seed) for seed in range(given.loads)] for each in policies}
    best = min(np.mean(times[each]) for each in range(DEPTH + 1))
    print(table_head("policy", "seconds", "spread", "to the best fixed draft"))
    for policy, seconds in times.items():
        name = f"chain of {policy}" if isinstance(policy, int) else policy
        mean = np.mean(seconds)
        print(table_row([name, f"{mean:.2f}", f"{np.std(seconds):.2f}", f"{best / mean:.3f}"]))


if __name__ == "__main__":
    main()
