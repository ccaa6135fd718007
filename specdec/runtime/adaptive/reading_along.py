"""When a drafter with K/V of its own reads what rounds without its drafts have committed."""

import time

from specdec.gpu.mirrored_array import IntArray
from specdec.runtime.adaptive.cost_table import batch_in_table
from specdec.runtime.adaptive.draft_choice import DraftChoice
from specdec.runtime.rounds.catching_up import CatchUps
from specdec.runtime.rounds.result import RoundShape
from specdec.runtime.rounds.round import Round
from specdec.runtime.rounds.unread import unread_tokens


def read_along(
    round: Round, graphs: CatchUps | None, choice: DraftChoice | None, shape: RoundShape, rows: IntArray
) -> None:
    """Before a round of this shape is launched over these rows, which are seated: the drafter catches up if it is to
    draft, or if states would be overwritten that it has not read. Where it is hardly ever right that must be paid for
    (`DraftChoice.reads_along`), or the rows are lost to it."""
    unread = round.unread
    if unread is None:
        return
    more = unread_tokens(shape)
    due = unread.due(rows, more)
    batch = batch_in_table(shape.batch, captured=graphs is not None)
    if due and (more == 0 or choice is None or choice.reads_along(batch, due)):
        begin = time.perf_counter()
        if graphs is None:
            round.catch_up(shape, due)
        else:
            graphs.run(shape)
        if choice is not None:
            choice.caught_up(batch, due, None if graphs else time.perf_counter() - begin, shape.draft)
        unread.was_read(rows)
    unread.grow(rows, shape)
    lost = rows[unread.lost(rows) & (round.max_drafts.host[rows] > 0)]
    round.max_drafts[lost] = 0
