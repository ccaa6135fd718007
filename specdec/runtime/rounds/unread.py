"""Tokens that a drafter has not read yet: the target's states at a row's newest tokens, kept by position."""

import numpy as np
import torch

from specdec.draft_models.base import Drafter
from specdec.gpu.mirrored_array import IntArray
from specdec.kvcache.page_pool import BoolArray
from specdec.runtime.rounds.result import RoundShape

KEPT = 16
"""Tokens of a row whose states are kept: before a round that could make more of them unread, the drafter reads."""


def reads_late(drafter: Drafter | None, adaptive: bool) -> bool:
    """Does the drafter read tokens rounds after they were committed? adaptive: rounds may have no drafts. It reads
    nothing beyond its last position."""
    # a drafter that inherits no defaults may be older than these attributes
    has_end = getattr(drafter, "max_positions", None) is not None
    return (adaptive or has_end) and getattr(drafter, "may_lag", False)


def unread_tokens(shape: RoundShape) -> int:
    """Most tokens of a row that a round of this shape leaves unread; 0: the drafter reads them in it, since it drafts
    itself or more might be accepted than are kept."""
    return 0 if shape.drafts_by_model or shape.depth > KEPT else shape.depth


class Unread:
    """Unread tokens of each row of the request table. width: numbers of a state. count: upper bound on the unread
    tokens, on the host. ended: rows that are longer than the drafter can read, which has read all else of them."""

    def __init__(self, num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.states = torch.zeros((num_rows, KEPT, width), dtype=dtype, device=device)
        self.read = torch.zeros(num_rows, dtype=torch.int64, device=device)  # tokens, from the first on
        self.count: IntArray = np.zeros(num_rows, dtype=np.int64)
        self.ended: BoolArray = np.zeros(num_rows, dtype=np.bool_)

    def most(self, rows: IntArray) -> int:
        """Unread tokens of the row that has most of them."""
        return int(self.count[rows].max(initial=0))

    def grow(self, rows: IntArray, shape: RoundShape) -> None:
        """A round of this shape is launched over these rows."""
        self.count[rows[~self.ended[rows]]] += unread_tokens(shape)

    def reset(self) -> None:
        self.read.zero_()
        self.begin(slice(None))

    def begin(self, rows: IntArray | slice) -> None:
        """These rows have new requests."""
        self.count[rows] = 0
        self.ended[rows] = False
