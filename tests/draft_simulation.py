"""Simulates a load with given acceptance probabilities on a machine with given round times, without engine or model.

    Machine     seconds of a round by draft and batch, seconds of a drafter that catches up, and noise
    Load        requests that begin and end together, and how often each source's drafts are right
    play        seconds until all have their tokens, with the draft of each round by `choose`

Every policy meets the same random draws: a draft's acceptance at a position does not depend on earlier drafts.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from specdec.runtime.draft_policy import DraftPolicy, FloatArray, RoundTimes
from specdec.runtime.rounds.result import NO_DRAFT, DraftShape
from specdec.runtime.rounds.unread import MAX_UNREAD

E4B = {
    1: (4.125, 4.315, 4.429, 4.542, 4.667),
    8: (4.397, 4.601, 4.949, 5.152, 5.316),
    32: (4.810, 5.166, 5.843, 6.036, 6.998),
    128: (6.242, 8.037, 10.142, 12.328, 14.946),
}
"""Milliseconds of a round on an H100 by batch size, with no draft and chains of 1 to 4
(docs/results/2026-11-26-adaptive.md)."""

DRAFTING = {1: 0.11, 8: 0.13, 32: 0.2, 128: 0.44}
"""Milliseconds of these for each level that a model drafts; a lookup takes none."""


@cache
def e4b(shape: DraftShape, batch: int) -> float:
    """Seconds: between measured batch sizes and numbers of nodes in proportion, and beyond them."""
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
    """Seconds of rounds that read experts: each once, whichever rows choose it. alike: part of a draft's rows that
    choose those of the root."""

    def seconds(shape: DraftShape, batch: int) -> float:
        rows = batch * (1 + (1 - alike) * (shape.num_nodes - 1))
        read = experts * (1 - (1 - chosen / experts) ** rows)
        return (1 + read / 4 + shape.num_steps / 50) / 1e3

    return seconds


@dataclass(frozen=True, kw_only=True)
class Machine:
    """seconds: of a round with a draft, by batch. captured: rounds are timed before the first, as on a GPU. catch_up:
    seconds in which the model reads what others committed, by batch; None: it reads every round. noise: factor on the
    time of the round that begins at a time."""

    seconds: Callable[[DraftShape, int], float] = e4b
    captured: bool = True
    catch_up: Callable[[int], float] | None = None
    noise: Callable[[float], float] = lambda now: 1.0

    def size(self, count: int) -> int:
        return next(size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256) if size >= count)


@dataclass(frozen=True)
class Load:
    """Crowds, one after the other, of `batch` requests that begin together. chance: of a request by its number, how
    often a draft of the model and of the lookup is right. tree_gain: a tree's best path is wrong as often as this many
    chains are all wrong; 1: trees bring no more than chains."""

    chance: Callable[[int], tuple[float, float]]
    batch: int = 1
    tokens: int = 255
    crowds: int = 1
    seed: int = 0
    tree_gain: float = 1.5

    def coins(self) -> FloatArray:
        """[source, crowd, request, position]: a draft is right where its coin is below its chance."""
        shape = 2, self.crowds, self.batch, self.tokens + 300
        return np.random.default_rng(self.seed).random(shape)


class Outcome(NamedTuple):
    """plain_seconds: of plain rounds for the same tokens. reading: seconds in which the model caught up. quiet_seconds:
    as it would have been without noise."""

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
    at, seconds, unread = np.zeros(crowds.size, dtype=np.int64), 0.0, 0
    lagging = machine.catch_up is not None and (shape.by_lookup or not shape.depth)
    while (going := (at < load.tokens)).any():
        sizes = [machine.size(count) for count in going.reshape(crowds.shape).sum(axis=1).tolist() if count]
        seconds += sum(machine.seconds(shape, size) for size in sizes)
        if lagging and unread + shape.depth + 1 > MAX_UNREAD:
            seconds, unread = seconds + sum(map(machine.catch_up, sizes)), 0
        unread += shape.depth + 1
        at[going] += moved[going, at[going]]
    return seconds


def _accepted_share(load: Load, shape: DraftShape, chance: FloatArray) -> FloatArray:
    """How often a draft of this shape is right, where a chain's is by this chance."""
    return chance if shape.topk == 1 else 1 - (1 - chance) ** load.tree_gain


def adaptive(machine: Machine, load: Load, shapes: Sequence[DraftShape], *, burst: Sequence[float] = (1.0,)) -> Outcome:
    """The policy of a new engine with these drafts. burst: factors on what was timed of each when it was made."""
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
        at, launched, unread = np.zeros(load.batch, dtype=np.int64), [], 0
        choice.acceptance.begin_rows(rows)
        while (going := np.flatnonzero(at < load.tokens)).size:
            size, lagging = machine.size(len(going)), machine.catch_up is not None
            unsettled = [each[0] for each in launched] if machine.captured else []
            shape = choice.choose(going, load.tokens - at[going] - 1, size, NO_DRAFT, unsettled)
            by_model, reading = shape.num_steps > 0 and not shape.by_lookup, 0.0
            if lagging and unread and (by_model or unread + shape.depth + 1 > MAX_UNREAD):
                reading = machine.catch_up(size) * machine.noise(now)
                now, read, unread = now + reading, read + reading, 0
                quiet += machine.catch_up(size)
            unread += 0 if by_model or not lagging else shape.depth + 1
            p = _accepted_share(load, shape, chance[int(shape.by_lookup), going])
            drawn = coins[int(shape.by_lookup), crowd][going[:, None], at[going, None] + 1 + np.arange(shape.depth)]
            accepted = np.cumprod(drawn < p[:, None], axis=1).sum(axis=1) if shape.depth else np.zeros_like(going)
            spent = machine.seconds(shape, size) * machine.noise(now)
            quiet += machine.seconds(shape, size)
            brought = float(np.minimum(accepted + 1, load.tokens - at[going]).mean())
            plain += machine.seconds(NO_DRAFT, size) * brought
            depth = np.full(len(going), shape.depth)
            now, rounds[shape] = now + spent, rounds[shape] + 1
            launched.append((shape, size, reading + spent, (going, accepted, depth), brought))
            at[going] += accepted + 1
            while len(launched) > machine.captured:
                choice.learn(*launched.pop(0))
    return Outcome(now, rounds, plain, read, quiet)
