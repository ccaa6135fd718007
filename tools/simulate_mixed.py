"""What a mixed load could gain from drafts that are chosen: `python tools/simulate_mixed.py`. Needs no GPU.

Rounds take what they took on an H200 at E4B shapes (docs/results/2026-11-24-adaptive.md), between the batch sizes that
were measured in proportion; drafting takes its part of it (`DRAFTING`). Half of the requests accept each draft with
0.9, half with `--hard`. Prompts take no time, but with `--prompts` those of 128 tokens. Policies:

    chain of D            every round has this draft
    engine                one draft a round, chosen by the engine's own policy, which learns
    chances known         one draft a round, by the geometric mean over rows, or by the sum of tokens
    own depths            a depth for each row, nodes packed into one forward of as many as a bucket has, chances known;
                          drafting counted for every row down to the deepest, for the rows that draft, or by mean depth,
                          as if drafting less took less
    own depths, learned   the first of these, by the engine's chances, where that is expected to be better
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from bench.report import table_head, table_row
from specdec import SpecConfig
from specdec.runtime.draft_policy.draft_choice import DraftChoice
from specdec.runtime.draft_policy.draft_ladder import draft_ladder
from specdec.runtime.prompt_gap import GAP_SHARE
from specdec.runtime.rounds.captured_rounds import batch_sizes
from specdec.runtime.rounds.round_shapes import NO_DRAFT

MEASURED = {
    1: (3.288, 3.458, 3.575, 3.686, 3.812),
    8: (3.511, 3.729, 4.080, 4.245, 4.597),
    32: (3.963, 4.660, 5.093, 5.502, 6.058),
    128: (5.644, 7.385, 9.705, 11.859, 14.567),
}
"""Milliseconds of a round by batch size, without a draft and with chains of 1 to 4."""

DRAFTING = {1: 0.44, 8: 0.54, 32: 0.78, 128: 1.74}
"""Milliseconds of those in which a chain of 4 is drafted (docs/results/2026-11-22-rounds.md, prompts of 1,024 tokens);
of 128 requests from those of 8 and 32, in proportion."""

PHASES = ((1, 6), (4, 16), (32, 64), (128, 256), (64, 96), (16, 40), (2, 8), (96, 144), (8, 24))
"""Requests at once, and in all, as in `python -m bench adaptive`."""

DEPTH, ROWS, TOKENS, EASY = 4, 128, 96, 0.9
LEVELS = np.arange(DEPTH + 1)
SIZES = batch_sizes(ROWS)

PACKING = 0.06
"""Milliseconds of the thirty small launches that pack nodes and spread the results."""

PROMPT, FORWARD, A_TOKEN, ENDING = 128, 3.8, 0.0083, 1.5
"""Tokens of a prompt; and milliseconds of a forward over prompts, of each token in it, and more where a prompt ends: a
line through prompts of 512 and 2,048 tokens (docs/results/2026-11-24-prompts.md), and decision 0062 for the last."""

Mean = Callable[[np.ndarray], np.ndarray]


def geometric(tokens: np.ndarray) -> np.ndarray:
    return np.exp(np.log(tokens).mean(axis=-1))


class Costs(NamedTuple):
    """Milliseconds. scale: of drafting, 0 for drafters that take no time, such as suffixes."""

    scale: float

    def step(self, count: float) -> float:
        """One level of a draft of so many rows."""
        return self.scale * float(np.interp(count, list(DRAFTING), list(DRAFTING.values()))) / DEPTH

    def of_chains(self, size: int) -> np.ndarray:
        """[DEPTH + 1] of rounds of so many seats."""
        whole = np.array([np.interp(size, list(MEASURED), each) for each in zip(*MEASURED.values(), strict=True)])
        return whole - (1 - self.scale) * Costs(1.0).step(size) * LEVELS

    def of_nodes(self, size: int, nodes: float) -> float:
        """Everything but drafting, of so many nodes of all rows together."""
        return float(np.interp(nodes, size * (LEVELS + 1), self.of_chains(size) - self.step(size) * LEVELS))


class Round(NamedTuple):
    """What is decided of a round: the depth of each row, what it takes, and the number of the one draft, if there is
    one."""

    depths: np.ndarray
    milliseconds: float
    number: int | None


class Requests(NamedTuple):
    """Those running: tokens of each depth [DEPTH + 1, B], and the drafts that each can accept."""

    tokens: np.ndarray
    most: np.ndarray
    size: int


def one_draft(costs: Costs, running: Requests, number: int) -> Round:
    return Round(np.full(len(running.most), number), float(costs.of_chains(running.size)[number]), number)


def best_draft(costs: Costs, running: Requests, mean: Mean) -> Round:
    return one_draft(costs, running, int((mean(running.tokens) / costs.of_chains(running.size)).argmax()))


def own_depths(costs: Costs, running: Requests, drafting: str) -> Round:
    """A depth for each row, or one draft if that is better. drafting: "every row", "those that draft" or "by depth"."""
    best = best_draft(costs, running, geometric)
    count, size = len(running.most), running.size
    best_rate = float(geometric(running.tokens)[best.number]) / best.milliseconds
    gain = np.diff(np.log(running.tokens), axis=0)  # a row's falls with its depth, so the largest are its first
    order = np.argsort(-gain, axis=None, kind="stable")
    more = max(8, size // 4)
    for added in range(more, int((gain > 0).sum()) + more, more):
        chosen = np.zeros(gain.size, bool)
        chosen[order[:added]] = True
        depths = (chosen.reshape(gain.shape) & (gain > 0)).sum(axis=0)
        milliseconds = costs.of_nodes(size, size + added) + PACKING
        if drafting == "by depth":
            milliseconds += costs.step(size) * float(depths.mean())
        else:
            milliseconds += costs.step(size if drafting == "every row" else (depths > 0).sum()) * int(depths.max())
        rate = float(geometric(running.tokens[depths, np.arange(count)])) / milliseconds
        if rate > best_rate:
            best, best_rate = Round(depths, milliseconds, None), rate
    return best


Policy = Callable[[Costs, Requests], Round]

KNOWING: dict[str, Policy] = {
    **{f"chain of {depth}": partial(one_draft, number=depth) for depth in range(DEPTH + 1)},
    "chances known, geometric": partial(best_draft, mean=geometric),
    "chances known, sum": partial(best_draft, mean=lambda tokens: tokens.mean(-1)),
    "own depths, every row drafts": partial(own_depths, drafting="every row"),
    "own depths, only those draft": partial(own_depths, drafting="those that draft"),
    "own depths, by mean depth": partial(own_depths, drafting="by depth"),
}
LEARNING = ("engine", "own depths, learned")


def read_prompts(unread: np.ndarray, round_milliseconds: float) -> float:
    """What a step reads of them, as `prompt_gap` allows after a round, all of it after none -> milliseconds."""
    waiting = np.flatnonzero(unread)
    if not len(waiting):
        return 0.0
    room = int(unread.sum())
    if round_milliseconds:
        room = max(64, int((GAP_SHARE * len(waiting) * round_milliseconds - FORWARD) / A_TOKEN))
    before = int(unread.sum())
    for row in waiting:
        taken = min(int(unread[row]), room)
        unread[row] -= taken
        room -= taken
    ends = bool((unread[waiting] == 0).any())
    return FORWARD + A_TOKEN * (before - int(unread.sum())) + ENDING * ends


def seconds_of(name: str, costs: Costs, hard: float, seed: int, prompt: int = 0) -> float:
    """Seconds of the whole load, with prompts of so many tokens."""
    lengths, coin = np.random.default_rng(seed), np.random.default_rng(seed + 1000)
    shapes = draft_ladder(SpecConfig(DEPTH), captured=True)
    choice = DraftChoice(shapes, ROWS + 1)
    choice.times.timed.update({size: costs.of_chains(size) / 1e3 for size in SIZES})
    left, unread, chance = np.zeros(ROWS, np.int64), np.zeros(ROWS, np.int64), np.zeros(ROWS)
    total, number = 0.0, 0
    for at_once, to_come in PHASES:
        while to_come or (left > 0).any():
            for row in np.flatnonzero(left == 0)[: min(to_come, at_once - int((left > 0).sum()))]:
                left[row], chance[row] = lengths.integers(TOKENS // 3, TOKENS), (EASY, hard)[number % 2]
                unread[row] = prompt
                choice.begin(np.array([row]))
                number, to_come = number + 1, to_come - 1
            rows = np.flatnonzero((left > 0) & (unread == 0))
            if not len(rows):
                total += read_prompts(unread, 0.0) / 1e3
                continue
            most = np.minimum(DEPTH, left[rows] - 1)
            size = min(each for each in SIZES if each >= len(rows))
            learns = name in LEARNING
            if learns:
                of_rows = [choice.acceptance.tokens(rows[i : i + 1], most[i : i + 1])[0] for i in range(len(rows))]
                running = Requests(np.stack(of_rows, axis=1), most, size)
                drawn = one_draft(costs, running, shapes.index(choice.choose(rows, most, size, NO_DRAFT)))
                is_trial = drawn.number != best_draft(costs, running, geometric).number
                if name == "own depths, learned" and not is_trial:
                    drawn = own_depths(costs, running, "every row")
            else:
                brought = np.where(LEVELS[:, None] <= most, chance[rows] ** LEVELS[:, None], 0).cumsum(axis=0)
                drawn = KNOWING[name](costs, Requests(brought, most, size))
            right = coin.random((len(rows), DEPTH)) < chance[rows, None]
            accepted = np.minimum(right.cumprod(axis=1).sum(axis=1), np.minimum(drawn.depths, most))
            if learns and drawn.number is not None:
                full, brought = np.full(len(rows), DEPTH), 1 + float(accepted.mean())
                choice.learn(shapes[drawn.number], size, drawn.milliseconds / 1e3, rows, accepted, full, brought)
            elif learns:
                choice.acceptance.learn(DEPTH, rows, accepted, drawn.depths)
            left[rows] -= accepted + 1
            total += (drawn.milliseconds + read_prompts(unread, drawn.milliseconds)) / 1e3
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hard", type=float, default=0.2)
    parser.add_argument("--loads", type=int, default=6)
    parser.add_argument("--drafting", type=float, default=1.0, help="0: drafting takes no time, as of suffixes")
    parser.add_argument("--prompts", action="store_true")
    given = parser.parse_args()
    costs = Costs(given.drafting)
    names = [*KNOWING, *LEARNING]
    prompt = PROMPT if given.prompts else 0
    times = {each: [seconds_of(each, costs, given.hard, seed, prompt) for seed in range(given.loads)] for each in names}
    best = min(np.mean(seconds) for name, seconds in times.items() if name.startswith("chain"))
    print(table_head(("policy", "seconds", "spread", "to the best fixed draft")))
    for name, seconds in times.items():
        mean = np.mean(seconds)
        print(table_row([name, f"{mean:.2f}", f"{np.std(seconds):.2f}", f"{best / mean:.3f}"]))


if __name__ == "__main__":
    main()
