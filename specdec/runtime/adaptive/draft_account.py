"""What drafts may still lose: a share of the decoding time, and the time of a few plain rounds.

    balance   CREDIT plain rounds of the largest batch so far
              + SHARE of the seconds of every round
              + of each round with a draft, what plain rounds would have taken for its tokens, less what it took
              - catching up of a drafter

A draft is chosen only if the balance pays for it at its worst, that none of it is accepted, beside the rounds that are
launched and not settled. So however wrong the chances are, decoding with a drafter takes no longer than plain decoding
by more than that share and that credit, as far as the cost table tells what rounds take. What is gained fills the
balance up to `MAX_SAVED` plain rounds: a drafter that turns bad loses no more than these before it is left.
"""

SHARE = 0.01

CREDIT = 1.0
"""Plain rounds that a new engine may lose, so that it can try its drafts."""

MAX_SAVED = 16.0


class DraftAccount:
    """Of one engine, in seconds; empty until a round was timed."""

    __slots__ = ("_largest", "balance")

    def __init__(self) -> None:
        self.balance = self._largest = 0.0

    def credit(self, plain: float) -> None:
        """A plain round of the next batch takes so long."""
        if plain > self._largest:
            self.balance += CREDIT * (plain - self._largest)
            self._largest = plain

    def settle(self, spent: float, plain: float, tokens: float = 1.0) -> None:
        """A round took so long and brought each row so many tokens on average, which plain rounds would have taken
        `plain` seconds each for. A plain round is its own measure."""
        earned = self.balance + SHARE * spent + plain * tokens - spent
        self.balance = min(earned, max(MAX_SAVED * plain, CREDIT * self._largest))

    def pay(self, seconds: float) -> None:
        """For a drafter that reads what was committed without it."""
        self.balance -= seconds
