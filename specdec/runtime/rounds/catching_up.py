"""A drafter with K/V of its own need not read along while no draft is its own: it catches up before its next one.

    a round without drafts,   keeps the target's states behind each token that it commits, at position p:
    or with a lookup's        states[row, p % KEPT]
    catching up               the drafter observes positions [read, S) of each row at once, as it does a prompt chunk

So rounds without drafts take what they take without a drafter. At most `KEPT` tokens of a row are unread: before a
round that could make them more, rows catch up in any case. `count` is the host's: so many tokens may the rounds that it
launched since have committed, one each without drafts.
"""

import numpy as np

from specdec.gpu.mirrored_array import IntArray
from specdec.runtime.rounds.captured_rounds import Captures
from specdec.runtime.rounds.result import RoundShape
from specdec.runtime.rounds.round import Round
from specdec.runtime.rounds.unread import KEPT, unread_tokens


class CatchUps(Captures):
    """Catching up, captured as rounds are, by their batch size and longest prefix."""

    what, warning = "rounds", "catching up runs without CUDA graphs: %s"

    def run(self, shape: RoundShape) -> None:
        self.run_captured((shape.batch, shape.longest), [lambda: self.round.catch_up(shape)])


def catch_up_if_due(round: Round, graphs: CatchUps | None, shape: RoundShape, rows: IntArray) -> bool:
    """Before a round of this shape is launched over these rows, which are seated -> was it due?"""
    unread = round.unread
    if unread is None:
        return False
    count, more = unread.count[rows], unread_tokens(shape)
    due = bool(count.any()) and (more == 0 or int(count.max()) + more > KEPT)
    if due:
        if graphs is None:
            round.catch_up(shape)
        else:
            graphs.run(shape)
        unread.count[rows] = 0
    unread.count[rows] += np.int64(more)
    return due
