"""Bounds the time lost on rejected drafts to a share of the decoding time of the newest rounds.

    allowance   one plain round, and LOSS_SHARE of the seconds of all rounds; each source has an equal part
    balance     allowance + seconds of plain rounds for the same tokens - seconds that its rounds took

The newest DECAY_ROUNDS rounds count, at the times that are believed *now*. So a burst of noise is not charged for long,
and a draft that was timed too fast is charged in full when its true time is known. A draft is allowed only if the
balance of its source covers its full cost and that of the drafts in flight.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from specdec.runtime.draft_policy.draft_acceptance import DECAY_ROUNDS, FloatArray
from specdec.runtime.draft_policy.round_times import RoundTimes

LOSS_SHARE = 0.008
"""Share of the decoding time that drafts may lose. Together with one plain round per DECAY_ROUNDS rounds it is 1 %."""

MAX_SAVED = 16.0
"""Upper bound on a balance, in plain rounds: the most that a good drafter can lose if it turns bad."""


class DraftAccount:
    """The account of one engine. source [K]: source number of each draft; the first is no draft."""

    def __init__(self, source: Sequence[int]) -> None:
        self._is_of = np.eye(1 + max(source))[source]  # [K, S]
        self._counts = defaultdict[RoundTimes, FloatArray](lambda: np.zeros((2, len(source))))  # rounds, tokens

    def balance(self, now: RoundTimes) -> FloatArray:
        """Balance of each source [S] in seconds. now: times for the present batch size."""
        balance, longest = np.zeros(len(self._is_of.T)), float(now.seconds[0, 0])
        for times, (rounds, tokens) in self._counts.items():
            spent, plain = rounds * times.seconds[0], float(times.seconds[0, 0])
            balance += (tokens * plain - spent) @ self._is_of + LOSS_SHARE * spent.sum() / len(balance)
            longest = max(longest, plain)
        return balance + longest / len(balance)

    def settle(self, times: RoundTimes, draft_index: int, tokens: float) -> None:
        """Enter a round with draft `draft_index` that brought `tokens` per row on average."""
        self._counts[times][:, draft_index] += 1, tokens
        most = MAX_SAVED * float(times.seconds[0, 0]) or np.inf
        kept = np.minimum(1 - 1 / DECAY_ROUNDS, most / np.maximum(self.balance(times), 1e-9))
        for counts in self._counts.values():
            counts *= self._is_of @ kept
