"""A drafter with K/V of its own need not read along while no draft is its own: it catches up before its next one.

    a round without drafts,   keeps the target's states behind each token that it commits, at position p:
    or with a lookup's        states[row, p % KEPT]
    catching up               the drafter observes positions [read, S) of each row at once, as it does a prompt chunk

So rounds without drafts take what they take without a drafter. At most `KEPT` tokens of a row are unread: before a
round that could make them more, rows catch up in any case, unless that does not pay any more (`read_along` of
`adaptive`): then they are lost to the drafter, which has the padding row in their place.
"""

from specdec.runtime.rounds.captured_rounds import Captures
from specdec.runtime.rounds.result import RoundShape
from specdec.runtime.rounds.unread import KEPT


class CatchUps(Captures):
    """Catching up, captured as rounds are, by their batch size and longest prefix."""

    what, warning = "rounds", "catching up runs without CUDA graphs: %s"

    def run(self, shape: RoundShape) -> None:
        self.run_captured((shape.batch, shape.longest), [lambda: self.round.catch_up(shape, KEPT)])
