"""Lets a drafter that keeps K/V skip rounds without its drafts, and read their tokens later, many at once.

    a round without its drafts   keeps the target's state at each committed token: states[row, position % MAX_UNREAD]
    catching up                  the drafter observes the unread tokens of all rows in one forward, like a prompt chunk

All rows of a round catch up together, before a round

    * in which the drafter drafts,
    * after which a row could have more than MAX_UNREAD unread tokens, or
    * in which a row reaches the drafter's last position, once.
"""

import numpy as np
import torch

from specdec.draft_models.base import Drafter
from specdec.gpu.mirrored_array import IntArray
from specdec.kvcache.page_pool import BoolArray
from specdec.runtime.rounds.result import RoundShape

MAX_UNREAD = 16
"""Number of states kept per row. The drafter catches up before a round that could leave more tokens unread."""


def reads_late(drafter: Drafter | None, adaptive: bool) -> bool:
    """May the drafter read tokens some rounds after their commit? adaptive: rounds may have no drafts."""
    if drafter is None or not drafter.may_lag:
        return False
    return adaptive or drafter.max_positions is not None  # it reads nothing after that position


def unread_tokens(shape: RoundShape) -> int:
    """Most tokens of a row that a round of this shape leaves unread; 0: the drafter reads them within the round."""
    drafts_by_model = shape.width > 1 and not shape.draft.by_lookup  # then it has read all committed tokens
    return 0 if drafts_by_model or shape.depth > MAX_UNREAD else shape.depth


class UnreadTokens:
    """Unread tokens by row. width: size of a state. count: upper bound on the unread tokens of each row, on the host.
    ended: rows longer than the drafter's last position; it has read them up to that position."""

    def __init__(self, num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.states = torch.zeros((num_rows, MAX_UNREAD, width), dtype=dtype, device=device)
        self.read = torch.zeros(num_rows, dtype=torch.int64, device=device)  # number of first tokens that were read
        self.count: IntArray = np.zeros(num_rows, dtype=np.int64)
        self.ended: BoolArray = np.zeros(num_rows, dtype=np.bool_)

    def clear_rows(self, rows: IntArray | slice) -> None:
        """Reset these rows, which have new requests."""
        self.count[rows] = 0
        self.ended[rows] = False

    def before_round(self, shape: RoundShape, rows: IntArray, ending: IntArray) -> int:
        """Count a round of this shape over these rows before its launch. Returns the most tokens per row that the
        drafter must read first; 0: none. ending: rows whose drafts end with this round (`end_drafts`)."""
        more, most = unread_tokens(shape), int(self.count[rows].max(initial=0))
        must_read = most > 0 and (more == 0 or most + more > MAX_UNREAD or self.count[ending].any())
        if must_read:
            self.count[rows] = 0
        self.ended[ending] = True
        self.count[rows[~self.ended[rows]]] += more
        return most if must_read else 0
