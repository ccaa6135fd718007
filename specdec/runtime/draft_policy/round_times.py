"""Seconds of a round, by batch size and draft.

The lower quarter of the newest rounds counts, since whatever else runs on a machine only adds. What was timed when the
engine was made, or a guess, is one more of them. So a round that takes less is believed at once, and one that takes
more when it has happened three times. What the draft seen most takes beyond what was timed counts for the others too,
and one that was never tried may take half. No draft takes less than a plain round: one that does shows that something
else ran when the times were taken. Those that are kept are dropped, and the next round is plain.
"""

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from specdec.gpu.buckets import next_power_of_two
from specdec.runtime.draft_policy.draft_acceptance import MEMORY, FloatArray

NEWEST = 8
"""Rounds of a draft that are kept."""

FIRST_GUESS = 1.5
"""Plain rounds that a draft takes where nothing was timed."""

FRESH = 32
"""Rounds after which a plain round is timed again; after more of them, ever more."""

DOUBT = 0.95
"""Plain rounds that a draft takes at least, or what these take is not known."""


class SizeTimes:
    """Times of one batch size. timed: seconds [K] of a round with each draft, the first is none; or nothing.

    seconds: [2, K] of a round with each draft, believed and as little as it may be. 0 before any round.
    """

    def __init__(self, num_drafts: int, timed: Sequence[float]) -> None:
        self._timed = timed
        self._own: list[deque[float]] = [deque(maxlen=NEWEST) for _ in range(num_drafts)]
        self._last = [0] * num_drafts  # the round that had it last
        self._rounds = 0
        self._is_doubtful = not timed or min(timed) < DOUBT * timed[0]  # what a plain round takes
        self.seconds = self._believed()

    @property
    def plain_is_due(self) -> bool:
        """Must the next round have no draft? Soon at first, so that wrong times do not last."""
        return self._is_doubtful or self._rounds - self._last[0] > min(FRESH + self._last[0], MEMORY)

    def learn(self, number: int, seconds: float) -> None:
        """A round with the draft of this number took so long."""
        self._rounds += 1
        self._last[number] = self._rounds
        if number == 0:
            self._is_doubtful = False
        elif seconds < DOUBT * self.seconds[0, 0]:
            self._is_doubtful = True
            for own in self._own:
                own.clear()
        self._own[number].append(seconds)
        for own, last in zip(self._own, self._last, strict=True):
            if self._rounds - last > MEMORY:
                own.clear()
        self.seconds = self._believed()

    def _believed(self) -> FloatArray:
        plain = low([*self._timed[:1], *self._own[0]])
        first = np.array(self._timed or [plain, *[FIRST_GUESS * plain] * (len(self._own) - 1)])
        counts = [len(own) for own in self._own[1:]]
        seen = 1 + counts.index(max(counts))  # whose times are known best
        first[1:] *= max(1.0, low([first[seen], *self._own[seen]]) / max(first[seen], 1e-9))
        untried = np.array([number > 0 and not own for number, own in enumerate(self._own)])
        believed = np.array([low([each, *own]) for each, own in zip(first, self._own, strict=True)])
        return np.maximum(plain, [believed, np.where(untried, believed / 2, believed)])


class RoundTimes:
    """Times of one engine with `num_drafts` drafts, the first is none.

    timed: seconds [K] by batch size, filled when the engine is made; empty where nothing is captured. catching_up:
    seconds by batch size in which the drafter reads unread tokens.
    """

    def __init__(self, num_drafts: int) -> None:
        self.timed: dict[int, FloatArray] = {}
        self.catching_up: dict[int, float] = {}
        self.by_size: dict[int, SizeTimes] = {}
        self._num_drafts = num_drafts

    @property
    def longest_plain(self) -> float:
        """Seconds of a plain round of the largest batch so far."""
        return max((float(times.seconds[0, 0]) for times in self.by_size.values()), default=0.0)

    def of_batch(self, batch: int) -> SizeTimes:
        """Times of rounds with this many seats."""
        size = batch if batch in self.timed else next_power_of_two(batch)
        if size not in self.by_size:
            self.by_size[size] = SizeTimes(self._num_drafts, list(self.timed.get(size, ())))
        return self.by_size[size]


def low(seconds: Iterable[float]) -> float:
    """The lower quarter of these, 0 of none."""
    ordered = sorted(seconds)
    return ordered[len(ordered) // 4] if ordered else 0.0
