"""Bounds what drafts may lose: a share of the decoding time, and one plain round.

    balance   of a source: a plain round of the largest batch so far
              + SHARE of the seconds of every round
              + for a round with its draft: the seconds of plain rounds for the tokens, less its own
              - the seconds in which a drafter reads unread tokens: before its draft all, else half of the share

Sources have equal parts of the first two. A draft is allowed only if the balance of its source covers its full cost,
together with that of the drafts in flight. So however wrong expectations are, decoding takes longer than plain decoding
by no more than that, and no source takes the trials of the other. The half of the share that reading leaves lets a
drafter whose reading takes long still prove useful.
"""

import numpy as np

from specdec.runtime.rounds.unread import KEPT

SHARE = 0.01
"""Share of the decoding time that drafts may lose."""

MAX_SAVED = 16.0
"""Upper bound on what gains leave in a balance, in plain rounds: so much may a drafter lose that turns bad."""


class DraftAccount:
    """Balances [S] of an engine's sources, in seconds. They are empty until a plain round was timed."""

    __slots__ = ("_largest", "balance")

    def __init__(self, num_sources: int) -> None:
        self.balance = np.zeros(num_sources)
        self._largest = 0.0

    def credit_plain(self, plain: float) -> None:
        """The next round would take `plain` seconds without a draft."""
        self.balance += max(0.0, plain - self._largest) / len(self.balance)
        self._largest = max(self._largest, plain)

    def settle(self, source: int | None, spent: float, plain: float, tokens: float) -> None:
        """A round took `spent` seconds and brought each row `tokens` on average; a plain round, which brings one, would
        have taken `plain`. source: of its draft, if it had one."""
        self.balance += SHARE * spent / len(self.balance)
        if source is not None:
            self.balance[source] += plain * tokens - spent
        self.balance = self.balance.clip(max=max(MAX_SAVED * plain, self._largest))

    def charge(self, seconds: float, plain: float, *, due: bool) -> None:
        """The model has read unread tokens. due: not before its own draft, but since no more than KEPT are kept."""
        share = SHARE * KEPT * plain / len(self.balance)
        self.balance[0] -= min(seconds, share / 2) if due else seconds
