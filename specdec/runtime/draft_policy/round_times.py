"""Seconds of a round with each draft.

The lower quartile of the newest rounds counts, since other work on a machine only adds time. The time measured when the
engine was made (or a guess) is one sample of it. So a shorter time is believed after one round, a longer one after
three. If the draft with the most samples takes longer than measured at the start, the measured times of all drafts
rise by the same factor. A draft (or no draft) that has not run in the newest DECAY_ROUNDS rounds counts with half its
time, so it is tried again. If a draft takes less than a plain round, plain rounds were timed next to other work, and
all samples are dropped.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

DECAY_ROUNDS = 512
"""Rounds after which counts of the draft policy have decayed to about 1/e."""

NEWEST = 8
"""Number of newest rounds per draft whose times are kept."""

FIRST_GUESS = 1.5
"""Assumed time of a draft that was never timed, in plain rounds."""

DOUBT = 0.95
"""If a round with drafts takes less than this many plain rounds, the time of plain rounds is wrong."""


class RoundTimes:
    """Round times for one batch size. timed: seconds [K] with each draft (the first is no draft), measured at the
    start; 0: unknown. seconds: believed and hopeful times, [2, K]."""

    def __init__(self, timed: Sequence[float]) -> None:
        self.timed = np.array(timed)
        self._own: list[deque[float]] = [deque(maxlen=NEWEST) for _ in timed]
        self._last = [0] * len(timed)  # number of the last round with each draft
        self._rounds = 0
        self.seconds = self._believed()

    def learn(self, draft_index: int, seconds: float) -> None:
        """Add a round with draft `draft_index` that took this many seconds."""
        self._rounds += 1
        is_doubtful = draft_index > 0 and seconds < DOUBT * self.seconds[0, 0]
        if is_doubtful or not self.timed[0]:
            self.timed[0] = seconds  # a plain round takes at most this
        for own, last in zip(self._own, self._last, strict=True):
            if is_doubtful or self._rounds - last > DECAY_ROUNDS:
                own.clear()
        self._own[draft_index].append(seconds)
        self._last[draft_index] = self._rounds
        self.seconds = self._believed()

    def _believed(self) -> FloatArray:
        own, plain = self._own, low(self.timed[0], self._own[0])
        timed = np.where(self.timed > 0, self.timed, FIRST_GUESS * plain)
        seen = max(range(1, len(own)), key=lambda draft_index: len(own[draft_index]))  # the draft with the most samples
        timed[1:] *= max(1.0, low(timed[seen], own[seen]) / max(timed[seen], 1e-9))
        believed = np.array([low(*each) for each in zip(timed.tolist(), own, strict=True)])
        hoped = np.where([len(each) == 0 for each in own], believed / 2, believed)
        return np.array([believed.clip(min=believed[0]), hoped.clip(min=hoped[0])])


def low(timed: float, own: Sequence[float]) -> float:
    """The lower quartile of `timed` and `own` together."""
    ordered = sorted([timed, *own])
    return ordered[len(ordered) // 4]
