"""What drafts may still lose: a share of the decoding time, and the time of a plain round.

    balance   CREDIT plain rounds of the largest batch so far
              + SHARE of the seconds of every round
              + of each round with a draft, what plain rounds would have taken for its tokens, less what it took
              - a drafter's catching up, before its drafts and, up to half of the share, without

A draft is chosen only if the balance pays for it at its worst, that nothing of it is accepted, beside the rounds that
are launched and not settled. So however wrong the chances are, decoding takes no longer than plain decoding would have
taken for the same tokens by more than that share and that credit, as far as the cost table tells what rounds take.
Gains fill the balance up to MAX_SAVED plain rounds: a drafter that turns bad loses no more than these until it is left.

Tokens are those of all rows together: a request that accepts nothing next to others that accept much may end later.

    spare     what trials may lose by expectation, next to the best that is known, plain or not
"""

SHARE, SPARE = 0.01, 0.006
"""Shares of the time: what drafts may lose, and what trials may be expected to lose."""

CREDIT = 1.0
"""Plain rounds that a new engine may lose, so that it can try its drafts."""

MAX_SAVED = 16.0


class DraftAccount:
    """The account of one engine, in seconds. It is empty until a plain round was timed."""

    __slots__ = ("_largest", "_unread", "balance", "spare")

    def __init__(self) -> None:
        self.balance = self.spare = 0.0
        self._largest = self._unread = 0.0  # seconds of a plain round, and of rounds since a drafter last read along

    def affords(self, seconds: float) -> bool:
        """Is reading along paid by what was put aside for it since the drafter last did?"""
        return seconds <= SHARE * self._unread / 2

    def read_along(self, seconds: float) -> None:
        """A drafter has read what rounds without it committed, since it can be no later. A half of the share stays for
        trials, so that one whose reading takes more can still become useful."""
        self.balance -= min(seconds, SHARE * self._unread / 2)
        self._unread = 0.0

    def begin(self, plain: float) -> None:
        """A round is about to be chosen; a plain one would take so long."""
        more = CREDIT * max(0.0, plain - self._largest)
        self._largest = max(self._largest, plain)
        self.balance += more
        self.spare = min(self.spare + more + SPARE * plain, MAX_SAVED * plain)

    def settle(self, spent: float, plain: float, tokens: float = 1.0) -> None:
        """A round took `spent` seconds and brought each row `tokens` on average; a plain round, which brings one, would
        have taken `plain` seconds."""
        self._unread += spent
        earned = self.balance + SHARE * spent + plain * tokens - spent
        self.balance = min(earned, max(MAX_SAVED * plain, CREDIT * self._largest))
