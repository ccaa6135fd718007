"""What a round takes, by batch size and draft: timed when the engine is made where rounds are captured, otherwise as
rounds go by.

    max(seconds[batch][draft] + context * slope[draft], host[batch])   context: committed tokens of all rows together

The device's own time, and no less than the host takes from one round to the next, where the device waits for it again
and again: many rows of a small model are launched and settled for longer than they run, and drafts cost nothing until
they fill that time. A single wait says nothing: many requests ended or began at once.

A draft that has not been timed for a batch yet is put together from what has been, by stages: a verify of so many
nodes, a level of so many branches, and the rest.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

import numpy as np

from specdec.gpu.buckets import next_power_of_two
from specdec.runtime.adaptive.draft_chances import FloatArray
from specdec.runtime.rounds.result import DraftShape

LEVEL, LINEAR = 0.15, 0.5
"""Before anything was timed: a level of a draft in verify steps of one node a row, and how much of a verify grows with
its nodes."""

SLOWER, FASTER = 0.05, 0.5
"""Weight of the newest round in a level if it took longer, and if it took less: what others on the processor add comes
in bursts, and is no cost of the draft."""

OUTLIER = 3.0
"""A round that takes so many times its level counts as one that takes that."""

FORGET = 0.995

WAITS = 0.05
"""A device that was idle for more than this share of the time between the ends of two rounds waits for the host; a
shorter gap is the launch itself."""

NEWEST, ENOUGH = 8, 4
"""Periods of a host that are kept, and how many say what it takes."""

DOUBT = 0.3
"""Share by which a round without a draft that has been timed once may be faster than it seems, and of what a draft adds
to it."""


class Level:
    """What a part of a round takes: near the least that was seen lately."""

    __slots__ = ("count", "value")

    def __init__(self) -> None:
        self.count, self.value = 0, 0.0

    def add(self, value: float) -> None:
        self.count += 1
        if self.count > 2:
            value = min(value, OUTLIER * self.value)
        weight = 1.0 if self.count == 1 else FASTER if value < self.value else SLOWER
        self.value += (value - self.value) * weight


def batch_in_table(batch: int, *, captured: bool) -> int:
    """The batch size under which a table knows a round: captured ones have few."""
    return batch if captured else next_power_of_two(batch)


class HostPeriods:
    """What the host takes from the end of one round to the end of the next, as the device has seen it lately."""

    __slots__ = ("_waited",)

    def __init__(self) -> None:
        self._waited: deque[float] = deque(maxlen=NEWEST)

    @property
    def value(self) -> float:
        """0: the device does not wait for it."""
        return min(self._waited) if len(self._waited) >= ENOUGH else 0.0

    def waited_for(self, period: float) -> None:
        self._waited.append(period)

    def at_most(self, period: float) -> None:
        """It has done its part in that time: longer ones were no more than bursts."""
        self._waited = deque((each for each in self._waited if each <= period), maxlen=NEWEST)


class CostTable:
    """Seconds of rounds of one engine. shapes: all drafts that it has, the first is none."""

    def __init__(self, shapes: Sequence[DraftShape]) -> None:
        self.shapes = shapes
        self.timed: dict[int, FloatArray] = {}
        """Seconds of a round with each draft [K], by batch size: timed when the engine was made, with nothing
        committed."""
        self.catching_up: dict[int, float] = {}
        """Seconds, by batch size, that a drafter takes to catch up before the first draft after rounds without, for
        some drafters: timed when the engine was made."""
        self._seen: defaultdict[int, list[Level]] = defaultdict(lambda: [Level() for _ in shapes])
        self._verify: defaultdict[int, Level] = defaultdict(Level)  # by nodes of all rows
        # of a draft, a model's and a lookup's, by its branches of all rows
        self._level: tuple[defaultdict[int, Level], ...] = (defaultdict(Level), defaultdict(Level))
        self._by_size = np.argsort([shape.num_nodes for shape in shapes], kind="stable")
        self._rest = Level()
        # where nothing is timed ahead, by batch size and how many tokens of a row were read
        self._caught_up: defaultdict[int, defaultdict[int, Level]] = defaultdict(lambda: defaultdict(Level))
        # by batch size, without a draft and with one
        self._host: defaultdict[int, tuple[HostPeriods, HostPeriods]]
        self._host = defaultdict(lambda: (HostPeriods(), HostPeriods()))
        self._fit = np.zeros((2, len(shapes)))  # of the slope: sums of context * seconds beyond the table, context^2

    def knows_plain(self, batch: int) -> bool:
        """Was a round without a draft timed? Before, what it says of rounds of this batch is guessed."""
        return batch in self.timed or self._seen[batch][0].count > 0

    def note(self, number: int, batch: int, context: int, seconds: Mapping[str, float]) -> float:
        """A round with the draft of that number took so long, by stage -> seconds that it counts as: what comes in
        bursts is no cost of a draft, what the host takes is."""
        total = sum(seconds.values())
        if batch in self.timed:
            timed = float(self.timed[batch][number])
            counted = min(total, OUTLIER * timed)
            self._fit *= FORGET
            self._fit[:, number] += context * (counted - timed), context**2
            return max(counted, self._host_takes(batch)[number > 0])
        shape = self.shapes[number]
        self._seen[batch][number].add(total)
        self._verify[batch * shape.num_nodes].add(seconds["verify"])
        self._rest.add(seconds["other"])
        if shape.num_steps:
            self._level[shape.by_lookup][batch * shape.topk].add(seconds["draft"] / shape.num_steps)
        return self._seen[batch][number].value

    def note_catching_up(self, batch: int, tokens: int, seconds: float) -> None:
        """A drafter has read up to so many tokens of each row, where nothing is timed when the engine is made."""
        self._caught_up[batch][tokens].add(seconds)

    def catch_up(self, batch: int, tokens: int) -> float:
        """Seconds in which a drafter reads up to so many tokens of each row; 0 where nobody knows."""
        if not tokens:
            return 0.0
        return self.catching_up.get(batch, 0.0) or _between(self._caught_up[batch], tokens, 0.0)

    def note_host(self, number: int, batch: int, waited: float, period: float) -> None:
        """A round with the draft of that number ended `period` seconds after the one before it, and the device stood
        still for `waited` of them."""
        if batch not in self.timed:
            return
        plain, drafting = self._host[batch]
        own = drafting if number else plain
        if waited > WAITS * period:
            own.waited_for(period)
            return
        own.at_most(period)
        if number:  # it does no less for a draft than for none
            plain.at_most(period)

    def seconds(self, batch: int, context: int) -> FloatArray:
        """[K]: of a round with each draft."""
        if batch in self.timed:
            plain, drafting = self._host_takes(batch)
            least = np.array([drafting if shape.num_steps else plain for shape in self.shapes])
            slower: FloatArray = np.maximum(self.timed[batch] + context * self._slope(), least)
            return slower
        seen = self._seen[batch]
        seconds = np.array([seen[i].value if seen[i].count else self._guess(batch, i) for i in range(len(seen))])
        # what is smaller takes no longer, and a draft takes longer than none by the time of its levels at least: else
        # noise makes them equal, and drafts that are never right would be chosen as often as none
        drafts = np.array([self._draft(batch, shape) for shape in self.shapes])
        smallest_last = self._by_size[::-1]
        growing = drafts.copy()
        growing[smallest_last] += np.minimum.accumulate((seconds - drafts)[smallest_last])
        return growing

    def _host_takes(self, batch: int) -> tuple[float, float]:
        """Without a draft and with one."""
        plain, drafting = (periods.value for periods in self._host[batch])
        drafting = drafting or plain
        return min(plain, drafting), drafting

    def hopeful(self, batch: int, seconds: FloatArray) -> FloatArray:
        """[K]: as little as rounds may still take, if they are believed to take `seconds` [K]."""
        if batch in self.timed:
            return seconds
        sure = 1 - DOUBT / np.sqrt([1 + level.count for level in self._seen[batch]])
        hopeful: FloatArray = sure[0] * seconds[0] + sure * (seconds - seconds[0])
        return hopeful

    def _slope(self) -> FloatArray:
        """[K]: of each draft, and where it has hardly been seen, of all together."""
        product, square = self._fit
        every = product.sum() / max(square.sum(), 1.0)
        weight = square / max(square.max(), 1.0)  # 1: seen most
        own = product / np.maximum(square, 1.0)
        return np.maximum(np.where(weight > 0.01, own, every), 0.0)

    def _guess(self, batch: int, number: int) -> float:
        shape = self.shapes[number]
        verify = _between(self._verify, batch * shape.num_nodes, 1.0)
        return verify + self._draft(batch, shape) + self._rest.value

    def _draft(self, batch: int, shape: DraftShape) -> float:
        """Seconds of drafting by itself."""
        if not shape.num_steps:
            return 0.0
        unknown = LEVEL * _between(self._verify, batch, 1.0)
        return shape.num_steps * _between(self._level[shape.by_lookup], batch * shape.topk, unknown)


def _between(timed: Mapping[int, Level], size: int, unknown: float) -> float:
    """Seconds of this size, from those of others; in front of and behind all of them half of it is in proportion."""
    if size in timed:
        return timed[size].value
    if not timed:
        return unknown
    sizes = sorted(timed)
    values = [timed[each].value for each in sizes]
    if sizes[0] <= size <= sizes[-1]:
        return float(np.interp(size, sizes, values))
    nearest = 0 if size < sizes[0] else -1
    return values[nearest] * (1 - LINEAR + LINEAR * size / sizes[nearest])
