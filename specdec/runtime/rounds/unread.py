"""What a drafter has not read yet: the target's states at a row's newest tokens, kept by position."""

import numpy as np
import torch

from specdec.gpu.mirrored_array import IntArray
from specdec.kvcache.page_pool import BoolArray
from specdec.runtime.rounds.result import RoundShape

KEPT = 16
"""Most tokens of a row whose states are kept. Of a row with more the drafter reads nothing again: the row is lost to it
until it is given another request."""


def unread_tokens(shape: RoundShape) -> int:
    """Most tokens of a row that a round of this shape commits and a drafter that lags does not read in it; 0: it reads
    them, since it has drafted, or because there may be too many."""
    return 0 if shape.drafts_by_model or shape.depth > KEPT else shape.depth


class Unread:
    """Unread tokens of each row of the request table. width: numbers of a state. count: on the host, how many tokens
    are unread at most: so many may the rounds that it launched since have committed, one each without drafts. ended:
    rows that are longer than the drafter can read, which has read all else of them."""

    def __init__(self, num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.states = torch.zeros((num_rows, KEPT, width), dtype=dtype, device=device)
        self.read = torch.zeros(num_rows, dtype=torch.int64, device=device)  # tokens, from the first on
        self.count: IntArray = np.zeros(num_rows, dtype=np.int64)
        self.ended: BoolArray = np.zeros(num_rows, dtype=np.bool_)

    def lost(self, rows: IntArray) -> BoolArray:
        """[B]: is the drafter done with these rows?"""
        return self.ended[rows] | (self.count[rows] > KEPT)

    def due(self, rows: IntArray, more: int) -> int:
        """How many tokens of a row the drafter has to read before a round of these rows that leaves `more` unread; 0:
        none, or it can be later."""
        most = int(self.count[rows[~self.lost(rows)]].max(initial=0))
        return most if more == 0 or most + more > KEPT else 0

    def grow(self, rows: IntArray, shape: RoundShape) -> None:
        """A round of this shape is launched over these rows. Of rows that are lost it has one token each, or what a
        grammar forces, whatever the draft of others is; rows that have ended stay read."""
        rows = rows[~self.ended[rows]]
        self.count[rows] += np.where(self.lost(rows), shape.forced or 1, unread_tokens(shape))

    def was_read(self, rows: IntArray) -> None:
        """All that is kept of these rows."""
        self.count[rows[~self.lost(rows)]] = 0

    def reset(self) -> None:
        self.read.zero_()
        self.begin(slice(None))

    def begin(self, rows: IntArray | slice) -> None:
        """These rows have new requests."""
        self.count[rows] = 0
        self.ended[rows] = False
