"""Bounds what drafts may lose: a share of the decoding time, and one plain round.

    balance   a plain round of the largest batch so far
              + SHARE of the seconds of every round
              + for a round with a draft: the seconds of plain rounds for its tokens, less its own
              - the seconds in which a drafter reads unread tokens: before its draft all, else half of the share

A draft is allowed only if the balance covers its full cost, together with that of the drafts in flight. So however
wrong the expectations are, decoding takes longer than plain decoding by no more than this share, this round, the first
trial of each source, and reading as far as it takes more than half of the share: the other half is left for trials, so
that a drafter whose reading takes long can still prove useful. Tokens are a mean over the rows of a round.
"""

SHARE = 0.01
"""Share of the decoding time that drafts may lose."""

UNCAPTURED = 1.5
"""Factor on the share and on that first round where nothing is captured: the smallest draft is the whole one there."""

MAX_SAVED = 16.0
"""Upper bound on what gains leave in the balance, in plain rounds: so much may a drafter lose that turns bad."""


class DraftAccount:
    """Account of one engine, in seconds. It is empty until a plain round was timed."""

    __slots__ = ("_factor", "_largest", "_shared", "balance")

    def __init__(self, *, captured: bool = True) -> None:
        self._factor = 1.0 if captured else UNCAPTURED
        self.balance = self._largest = 0.0
        self._shared = 0.0  # of the share, since unread tokens were read

    def credit_plain(self, plain: float) -> None:
        """The next round would take `plain` seconds without a draft."""
        self.balance += self._factor * max(0.0, plain - self._largest)
        self._largest = max(self._largest, plain)

    def settle(self, spent: float, plain: float, tokens: float) -> None:
        """A round took `spent` seconds and brought each row `tokens` on average; a plain round, which brings one, would
        have taken `plain`."""
        share = SHARE * self._factor * spent
        self._shared += share
        earned = self.balance + share + plain * tokens - spent
        self.balance = min(earned, max(MAX_SAVED * plain, self._largest))

    def charge(self, seconds: float, *, due: bool) -> None:
        """A drafter has read unread tokens for this time. due: not before its own draft, but since no more are kept."""
        self.balance -= min(seconds, self._shared / 2) if due else seconds
        self._shared = 0.0
