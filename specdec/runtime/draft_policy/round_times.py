"""Seconds of a round, by batch size and draft.

    plain      of a round without a draft
    beyond     of a draft: what its rounds take more

Both are known from the newest rounds, and at first from what was timed when the engine was made, or by a guess. The
lower third of the newest counts: whatever else runs on a machine only adds. A draft's rounds tell what it takes beyond
a plain one until that is known, and again after each plain round; else they tell what a plain round takes by now, as
context and host add the same to every draft. A draft that takes less than a plain round shows that this is not known
any more. An untried draft may take half of what was timed.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np

from specdec.gpu.buckets import next_power_of_two
from specdec.runtime.draft_policy.draft_acceptance import MEMORY, FloatArray

NEWEST = 8
"""Rounds of a draft that are kept, and after which it is known."""

FIRST_GUESS = 0.5
"""Plain rounds that a draft takes beyond one where nothing was timed."""

FRESH = 32
"""Rounds for which a plain round is compared with, and a draft's times are remembered."""

DOUBT = 0.95
"""Plain rounds that a draft takes at least, or what these take is not known."""


class SizeTimes:
    """Times of one batch size. timed: seconds [K] of a round with each draft, the first is none; or nothing."""

    def __init__(self, num_drafts: int, timed: Sequence[float]) -> None:
        self._plain = deque(timed[:1], maxlen=NEWEST)
        self._timed = [each - timed[0] for each in timed]
        self._beyond: list[deque[float]] = [deque(maxlen=NEWEST) for _ in range(num_drafts)]
        self._newest = [0] * num_drafts  # the round that had it last
        self._rounds = 0
        self._is_doubtful = not timed  # what a plain round takes

    @property
    def plain_is_due(self) -> bool:
        """Must the next round have no draft? Soon at first, so that wrong times do not last."""
        return self._is_doubtful or self._rounds - self._newest[0] > min(FRESH + self._newest[0], MEMORY)

    def seconds(self) -> FloatArray:
        """[2, K]: of a round with each draft, believed and as little as it may be. 0 before any round."""
        plain = low(self._plain) if self._plain else 0.0
        first = self._timed or [0.0, *[FIRST_GUESS * plain] * (len(self._beyond) - 1)]
        beyond = [max(0.0, low([known, *own])) for known, own in zip(first, self._beyond, strict=True)]
        believed = plain + np.array(beyond)
        untried = [not newest or self._rounds - newest > MEMORY for newest in self._newest]
        return np.array([believed, np.where(untried, np.maximum(plain, believed / 2), believed)])

    def learn(self, number: int, seconds: float) -> None:
        """A round with the draft of this number took so long."""
        own, believed = self._beyond[number], self.seconds()[0]
        is_fresh = self._rounds - self._newest[0] <= FRESH
        self._rounds += 1
        self._newest[number] = self._rounds
        if number == 0:
            if self._is_doubtful or not is_fresh:
                self._plain.clear()
            self._plain.append(seconds)
            self._is_doubtful = False
        elif seconds < DOUBT * believed[0]:
            self._is_doubtful = True
        elif is_fresh or len(own) < NEWEST:
            own.append(seconds - believed[0])
        else:
            self._plain.append(seconds - (believed[number] - believed[0]))
        for own, newest in zip(self._beyond, self._newest, strict=True):
            if self._rounds - newest > FRESH:
                own.clear()


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

    def of_batch(self, batch: int) -> SizeTimes:
        """Times of rounds with this many seats."""
        size = batch if batch in self.timed else next_power_of_two(batch)
        if size not in self.by_size:
            self.by_size[size] = SizeTimes(self._num_drafts, list(self.timed.get(size, ())))
        return self.by_size[size]


def low(seconds: Sequence[float] | deque[float]) -> float:
    """The lower third of these."""
    return sorted(seconds)[len(seconds) // 4]
