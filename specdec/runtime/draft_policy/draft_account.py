"""Bounds what drafts may lose: a share of the decoding time, and one plain round.

    balance   of a source: a plain round of the largest batch so far
              + SHARE of the seconds of every round
              + for a round with its draft: the seconds of plain rounds for the tokens, less its own
              - the seconds in which a drafter reads unread tokens: before its draft all, else half of the share

Sources have equal parts of the first two. Rounds with drafts count by what is believed now of the times of their batch
size: so no burst is charged for long, and a draft that was timed wrong is charged in full once that is known. A draft
is allowed only if the balance of its source covers its full cost, together with that of the drafts in flight. So
however wrong expectations are, decoding takes longer than plain decoding by no more than that, and no source takes the
trials of the other. The half of the share that reading leaves lets a drafter whose reading takes long prove useful.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from specdec.runtime.draft_policy.draft_acceptance import MEMORY, FloatArray
from specdec.runtime.rounds.unread import KEPT

SHARE = 0.01
"""Share of the decoding time that drafts may lose."""

MAX_SAVED = 16.0
"""Upper bound on what gains leave in a balance, in plain rounds: so much may a drafter lose that turns bad."""


class DraftAccount:
    """Balances [S] of an engine's sources, in seconds. sources: of each draft, none first, whose does not count."""

    def __init__(self, sources: Sequence[int]) -> None:
        is_own = np.array(sources)[:, None] == np.unique(sources[1:])
        is_own[0] = False
        self._is_own = is_own  # [K, S]
        self._counts: defaultdict[int, FloatArray] = defaultdict(lambda: np.zeros((2, len(sources))))  # rounds, tokens
        self._gains: dict[int, FloatArray] = {}
        self._settled = np.zeros(is_own.shape[1])

    @property
    def balance(self) -> FloatArray:
        """[S]: without the first plain round."""
        total: FloatArray = self._settled + sum(self._gains.values())
        return total

    def settle(self, size: int, number: int, tokens: float, seconds: FloatArray) -> None:
        """A round with the draft of this number brought each row `tokens` on average; 0: it does not count. seconds:
        [K] that each takes."""
        plain, counts = float(seconds[0]), self._counts[size]
        if tokens:
            counts[:, number] += 1, tokens
        gains = (counts[1] * plain - counts[0] * seconds) @ self._is_own
        kept = np.minimum(1 - 1 / MEMORY, MAX_SAVED * plain / np.maximum(gains, 1e-9))
        self._settled += SHARE * seconds[number] / len(gains) + np.minimum(gains, 0) / MEMORY
        counts *= self._is_own @ kept
        self._gains[size] = gains * kept
        self._settled -= (self.balance - MAX_SAVED * plain).clip(min=0)

    def charge(self, seconds: float, plain: float, *, due: bool) -> None:
        """The model has read unread tokens. due: not before its own draft, but since no more than KEPT are kept."""
        share = SHARE * KEPT * plain / len(self._settled)
        self._settled[0] -= min(seconds, share / 2) if due else seconds
