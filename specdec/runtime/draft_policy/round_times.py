"""Seconds of a round with each draft.

The lower quarter of the newest rounds counts, since other work on a machine only adds. What was timed when the engine
was made, or a guess, is one more of them: less is believed at once, more when it has happened three times. What the
draft seen most takes beyond what was timed counts for the others too. A draft that has not run in the newest MEMORY
rounds, none included, may take half: hope tries it. No draft takes less than a plain round: one that does shows that
something else ran when these were timed, so that they are forgotten.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np

from specdec.runtime.draft_policy.draft_acceptance import MEMORY, FloatArray

NEWEST = 8
"""Rounds of a draft that are kept."""

FIRST_GUESS = 1.5
"""Plain rounds that a draft takes where nothing was timed."""

DOUBT = 0.95
"""Plain rounds that a draft takes at least, or what these take is not known."""


class RoundTimes:
    """Times of one batch size. timed: seconds [K] with each draft, the first is none, before any round; 0: unknown.
    seconds: [2, K] believed, and as little as it may be."""

    def __init__(self, timed: Sequence[float]) -> None:
        self.timed = np.array(timed)
        self._own: list[deque[float]] = [deque(maxlen=NEWEST) for _ in timed]
        self._last = [0] * len(timed)  # the round that had it last
        self._rounds = 0
        self.seconds = self._believed()

    def learn(self, number: int, seconds: float) -> None:
        """A round with the draft of this number took so long."""
        self._rounds += 1
        is_doubtful = number > 0 and seconds < DOUBT * self.seconds[0, 0]
        if is_doubtful or not self.timed[0]:
            self.timed[0] = seconds  # a plain round takes no more
        for own, last in zip(self._own, self._last, strict=True):
            if is_doubtful or self._rounds - last > MEMORY:
                own.clear()
        self._own[number].append(seconds)
        self._last[number] = self._rounds
        self.seconds = self._believed()

    def _believed(self) -> FloatArray:
        own, plain = self._own, low(self.timed[0], self._own[0])
        timed = np.where(self.timed > 0, self.timed, FIRST_GUESS * plain)
        seen = max(range(1, len(own)), key=lambda number: len(own[number]))  # its times are known best
        timed[1:] *= max(1.0, low(timed[seen], own[seen]) / max(timed[seen], 1e-9))
        believed = np.array([low(*each) for each in zip(timed.tolist(), own, strict=True)])
        hoped = np.where([len(each) == 0 for each in own], believed / 2, believed)
        return np.array([believed.clip(min=believed[0]), hoped.clip(min=hoped[0])])


def low(timed: float, own: Sequence[float]) -> float:
    """The lower quarter of these."""
    ordered = sorted([timed, *own])
    return ordered[len(ordered) // 4]
