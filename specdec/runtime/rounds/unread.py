"""What a drafter has not read yet: the target's states at a row's newest tokens, kept by position."""

import numpy as np
import torch

from specdec.gpu.mirrored_array import IntArray
from specdec.runtime.rounds.result import RoundShape

KEPT = 16
"""Most tokens of a row that are unread."""


def unread_tokens(shape: RoundShape) -> int:
    """Most tokens of a row that a round of this shape commits and a drafter that lags does not read in it; 0: it reads
    them, since it has drafted, or because there may be too many."""
    return 0 if shape.drafts_by_model or shape.depth > KEPT else shape.depth


class Unread:
    """By row of the request table. width: numbers of a state. count: on the host, how many tokens
    are unread at most (`catching_up.py`)."""

    def __init__(self, num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.states = torch.zeros((num_rows, KEPT, width), dtype=dtype, device=device)
        self.read = torch.zeros(num_rows, dtype=torch.int64, device=device)  # tokens, from the first on
        self.count: IntArray = np.zeros(num_rows, dtype=np.int64)

    def reset(self) -> None:
        self.read.zero_()
        self.count[:] = 0
