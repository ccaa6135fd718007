"""Bounds what drafts may lose: a share of the decoding time, and one plain round.

    balance   of a source: a plain round of the largest batch so far
              + SHARE of the seconds of every round
              + for a round with its draft: the seconds of plain rounds for the tokens, less its own
              - the seconds in which a drafter reads unread tokens: before its draft all, else half of the share

Sources have equal parts of the first two. The newest rounds with drafts count by what is believed now of the times of
their batch size: so a burst is not charged for long, and a draft that was timed too fast is charged in full once that
is known. A draft is allowed only if the balance of its source covers its full cost, together with that of the drafts in
flight. So however wrong expectations are, decoding takes longer than plain decoding by no more than that and the first
trial of each source, and no source takes the trials of the other. The half of the share that reading leaves lets a
drafter whose reading takes long prove useful.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from specdec.runtime.draft_policy.draft_acceptance import MEMORY, FloatArray
from specdec.runtime.draft_policy.round_times import SizeTimes
from specdec.runtime.rounds.unread import KEPT

SHARE = 0.01
"""Share of the decoding time that drafts may lose."""

MAX_SAVED = 16.0
"""Upper bound on what gains leave in a balance, in plain rounds: so much may a drafter lose that turns bad."""


class DraftAccount:
    """Balances [S] of an engine's sources, in seconds, without the first plain round.

    source: of each draft [K]; that of none, the first, does not count.
    """

    def __init__(self, source: Sequence[int]) -> None:
        self._is_of = np.array(source)[:, None] == np.unique(source[1:])  # [K, S]
        self._is_of[0] = False
        self._counts = defaultdict[SizeTimes, FloatArray](lambda: np.zeros((2, len(source))))  # rounds, tokens
        self._gains: dict[SizeTimes, FloatArray] = {}  # [S] by these, as they were settled last
        self._settled = np.zeros(self._is_of.shape[1])

    @property
    def balance(self) -> FloatArray:
        """[S]"""
        balance: FloatArray = self._settled + sum(self._gains.values())
        return balance

    def settle(self, times: SizeTimes, number: int, tokens: float) -> None:
        """A round with the draft of this number brought each row `tokens` on average; 0: its draft was fixed."""
        seconds, plain = times.seconds[0], float(times.seconds[0, 0])
        rounds, brought = counts = self._counts[times]
        if tokens:
            counts[:, number] += 1, tokens
        gains = (brought * plain - rounds * seconds) @ self._is_of
        self._settled += SHARE * seconds[number] / len(gains) + np.minimum(gains, 0) / MEMORY
        kept = np.minimum(1 - 1 / MEMORY, MAX_SAVED * plain / np.maximum(gains, 1e-9))
        counts *= self._is_of @ kept
        self._gains[times] = kept * gains
        self._settled -= (self.balance - MAX_SAVED * plain).clip(min=0)

    def charge(self, times: SizeTimes, seconds: float, *, due: bool) -> None:
        """The model has read unread tokens. due: not before its own draft, but since no more than KEPT are kept."""
        share = SHARE * KEPT * float(times.seconds[0, 0]) / len(self._settled)
        self._settled[0] -= min(seconds, share / 2) if due else seconds
