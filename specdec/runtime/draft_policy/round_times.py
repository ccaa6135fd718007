"""Seconds of a round by batch size and draft.

    captured      timed[batch][draft], when the engine is made, or the least since then if that is less, + extra[batch]
                  extra: the least of the newest rounds beyond what was timed, whatever their draft, so that it holds
                  what context and host add, and no burst makes one draft look worse than another
                  where the newest rounds show that drafts cost more or less beyond plain ones than was timed: what
                  they show. Rows of a mixture may route more alike, or less, than those that were timed
    not captured  the least of the newest rounds with this draft. FIRST_GUESS plain rounds before there are any, and
                  again after MEMORY rounds without one

The least, since whatever else runs on a machine only adds.
"""

from collections import defaultdict, deque

import numpy as np

from specdec.gpu.buckets import next_power_of_two
from specdec.runtime.draft_policy.draft_acceptance import MEMORY, FloatArray

NEWEST = 8
"""Rounds that are kept of a batch size, or of a batch size and a draft."""

FIRST_GUESS = 1.5
"""Seconds of a draft that was never timed, in plain rounds."""

PLAIN_AGE = 64
"""Rounds after which a plain round is timed again where nothing is captured; fewer while few were timed."""


COMPARED = 4 * PLAIN_AGE
"""Newest rounds in which drafts are compared with plain rounds, where all were timed when the engine was made."""

MIN_PLAIN, MIN_DRAFTED = 2, NEWEST // 2
"""Rounds without a draft, and with a draft, that such a comparison takes."""

TRUSTED = 1.5
"""Factor within which a draft's cost beyond a plain round is what was timed."""

STRAYED = 0.05
"""Difference of a draft's seconds from what was timed, in plain rounds, from which a plain round is compared again."""


class Samples:
    """Newest seconds of one draft in one batch size: how many there ever were, and the number of the newest round."""

    __slots__ = ("count", "newest", "seconds")

    def __init__(self) -> None:
        self.seconds: deque[float] = deque(maxlen=NEWEST)
        self.count = self.newest = 0


class RoundTimes:
    """Times of one engine with `num_drafts` drafts, the first is none.

    timed: seconds [K] by batch size, filled when the engine is made; empty where nothing is captured. catching_up:
    seconds by batch size in which the drafter reads unread tokens.
    """

    def __init__(self, num_drafts: int) -> None:
        self.timed: dict[int, FloatArray] = {}
        self.catching_up: dict[int, float] = {}
        self._extra: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=NEWEST))
        self._seen: defaultdict[int, list[Samples]] = defaultdict(lambda: [Samples() for _ in range(num_drafts)])
        self._rounds = 0
        self._made: dict[int, FloatArray] = {}
        self._newest: defaultdict[int, list[deque[tuple[float, int]]]] = defaultdict(
            lambda: [deque(maxlen=NEWEST) for _ in range(num_drafts)]
        )

    def plain_is_due(self, batch: int) -> bool:
        """Must the next round of this batch have no draft, so that drafts are compared with what none takes now?"""
        if batch in self.timed:
            without, *drafted = self._newest[batch]
            if without and self._rounds - without[-1][1] <= PLAIN_AGE:
                return False
            made = self._made.get(batch, self.timed[batch])
            beyond = [abs(min(kept)[0] - made[number]) for number, kept in enumerate(drafted, 1) if len(kept) == NEWEST]
            return bool(max(beyond, default=0.0) > STRAYED * made[0])
        plain = self._seen[next_power_of_two(batch)][0]
        return not plain.count or self._rounds - plain.newest > min(PLAIN_AGE, NEWEST * plain.count)

    def learn(self, number: int, batch: int, seconds: float) -> None:
        """A round with the draft of this number took so long."""
        self._rounds += 1
        if batch in self.timed:
            timed = self.timed[batch]
            self._made.setdefault(batch, timed.copy())
            self._newest[batch][number].append((seconds, self._rounds))
            timed[number] = min(timed[number], seconds)
            self._extra[batch].append(seconds - float(timed[number]))
            return
        draft = self._seen[next_power_of_two(batch)][number]
        draft.seconds.append(seconds)
        draft.count += 1
        draft.newest = self._rounds

    def seconds(self, batch: int) -> FloatArray:
        """[2, K]: of a round with each draft, believed and as little as it may still be. A draft never takes less than
        none. 0 before any round was timed."""
        if batch in self.timed:
            extra = self._extra[batch]
            taken = self.timed[batch] + (min(extra) if len(extra) == NEWEST else 0.0)
            taken[0] = taken.min()
            return np.array([self._compared(batch, taken)] * 2)
        seen = self._seen[next_power_of_two(batch)]
        for draft in seen[1:]:
            if self._rounds - draft.newest > MEMORY:
                draft.seconds.clear()
                draft.count = 0
        plain = min((second for draft in seen for second in draft.seconds), default=0.0)
        guess = FIRST_GUESS * plain
        taken = np.array([min(draft.seconds, default=guess) for draft in seen])
        taken[0] = plain
        once = np.array([draft.count == 1 for draft in seen])  # may be a burst, so it counts for twice the guess
        taken[once] = taken[once].clip(max=2 * guess)
        sure = 1 - 1 / np.sqrt([1 + draft.count for draft in seen])
        return np.array([taken, plain + sure * (taken - plain)])

    def _compared(self, batch: int, taken: FloatArray) -> FloatArray:
        """[K]: seconds by what drafts cost beyond plain rounds lately; `taken` where that is what was timed."""
        lately = [[spent for spent, at in kept if self._rounds - at < COMPARED] for kept in self._newest[batch]]
        drafted = [number for number, kept in enumerate(lately) if number and len(kept) >= MIN_DRAFTED]
        if len(lately[0]) < MIN_PLAIN or not drafted:
            return taken
        plain, cost = min(lately[0]), self._made[batch] - self._made[batch][0]
        own = {number: min(lately[number]) - plain for number in drafted}
        share = sum(own.values()) / max(float(cost[drafted].sum()), 1e-9)
        if 1 / TRUSTED <= share <= TRUSTED:
            return taken
        found: FloatArray = plain + max(share, 0.0) * cost.clip(min=0.0)
        for number, beyond in own.items():
            found[number] = plain + max(beyond, 0.0)
        return found
