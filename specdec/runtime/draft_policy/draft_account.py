"""Bounds the loss by wrong drafts: a share of the decoding time, over the newest rounds together.

    balance   of a source: its equal part of one plain round and of SHARE of the seconds of all rounds
              + seconds of plain rounds for the tokens that its drafts brought, less the seconds of their rounds

The newest MEMORY rounds count, by the times that are believed *now*: a burst of noise is not charged for long, and a
draft that was timed too fast is charged in full once that is known. A draft is allowed only if the balance of its
source covers its full cost, with those in flight.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from specdec.runtime.draft_policy.draft_acceptance import MEMORY, FloatArray
from specdec.runtime.draft_policy.round_times import RoundTimes

SHARE = 0.008
"""Share of the decoding time that drafts may lose. With the one plain round in MEMORY rounds it makes 1 %."""

MAX_SAVED = 16.0
"""Upper bound on a balance, in plain rounds: the most that a good drafter can lose after it turns bad."""


class DraftAccount:
    """Rounds of one engine. source: number of the source of each draft [K]; the first draft is none."""

    def __init__(self, source: Sequence[int]) -> None:
        self._is_of = np.eye(1 + max(source))[source]  # [K, S]
        self._counts = defaultdict[RoundTimes, FloatArray](lambda: np.zeros((2, len(source))))  # rounds, tokens

    def balance(self, now: RoundTimes) -> FloatArray:
        """[S], in seconds. now: times of the present batch size."""
        balance, longest = np.zeros(len(self._is_of.T)), float(now.seconds[0, 0])
        for times, (rounds, tokens) in self._counts.items():
            spent, plain = rounds * times.seconds[0], float(times.seconds[0, 0])
            balance += (tokens * plain - spent) @ self._is_of + SHARE * spent.sum() / len(balance)
            longest = max(longest, plain)
        return balance + longest / len(balance)

    def settle(self, times: RoundTimes, number: int, tokens: float) -> None:
        """Enter a round with draft `number` that brought each row `tokens` on average."""
        self._counts[times][:, number] += 1, tokens
        most = MAX_SAVED * float(times.seconds[0, 0]) or np.inf
        kept = np.minimum(1 - 1 / MEMORY, most / np.maximum(self.balance(times), 1e-9))
        for counts in self._counts.values():
            counts *= self._is_of @ kept
