"""A drafter with K/V of its own reads what rounds without its drafts commit later, many tokens at once.

    a round without drafts,   keeps the target's states at each token that it commits, at position p:
    or with a lookup's        states[row, p % KEPT]
    catching up               the drafter observes positions [read, S) of each row at once, as it does a prompt chunk

So rounds without drafts take what they take without a drafter. All rows of a round catch up together: before the
drafter drafts, before any row could have more than KEPT unread tokens, and for the last time when a row ends for it.
"""

from collections.abc import Hashable

from specdec.gpu.mirrored_array import IntArray
from specdec.runtime.rounds.captured_rounds import Captures
from specdec.runtime.rounds.result import RoundShape
from specdec.runtime.rounds.round import Round
from specdec.runtime.rounds.unread import KEPT, unread_tokens


class CatchUps(Captures):
    """Catching up, captured as rounds are, by their batch size and longest prefix."""

    what = "rounds"

    def warning(self, shape: Hashable) -> str:
        return "catching up runs without CUDA graphs: %s"

    def run(self, shape: RoundShape) -> None:
        self.run_captured((shape.batch, shape.longest), [lambda: self.round.catch_up(shape, KEPT)])


def end_drafts(round: Round, rows: IntArray, ahead: int) -> IntArray:
    """End the drafts of rows within `ahead` tokens of the drafter's last position -> those that it ends for now."""
    if round.max_positions is None:
        return rows[:0]
    reached = rows[round.cache.table.committed_len.host[rows] + ahead > round.max_positions]
    round.max_drafts[reached[round.max_drafts.host[reached] > 0]] = 0
    return rows[:0] if round.unread is None else reached[~round.unread.ended[reached]]


def read_unread(round: Round, graphs: CatchUps | None, shape: RoundShape, rows: IntArray, ending: IntArray) -> bool:
    """Before a round of this shape is launched over these rows, which are seated: the drafter reads their unread tokens
    if it must -> whether it did. ending: see `end_drafts`. graphs: None where nothing is captured."""
    unread = round.unread
    if unread is None:
        return False
    more, most = unread_tokens(shape), unread.most(rows)
    is_due = most > 0 and (more == 0 or most + more > KEPT or unread.most(ending) > 0)
    if is_due:
        if graphs is None:
            round.catch_up(shape, most)
        else:
            graphs.run(shape)
        unread.count[rows] = 0
    unread.ended[ending] = True
    unread.grow(rows, shape)
    return is_due
