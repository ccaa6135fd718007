"""What recurrent layers keep once a request: a state, and up to which position it has taken tokens in.

    position     0 ........ 32 ........ 48 ..... S
    state        everything before 32 (`folded_len`)
    records                 |-- 32 .. S - 1 --|         in a windowed group, at the slots of their tokens

A state takes in FOLD tokens at once, at positions that are multiples of FOLD and of committed tokens only, whatever
the rounds were: so nothing is to be undone when a draft is rejected, and a token's bits do not depend on its draft.
States lie by row of the request table. A forward begins a row anew when it reads position 0.
"""

from typing import NamedTuple

import torch

FOLD = 16
"""Tokens that a state takes in at once."""


class RecurrentState(NamedTuple):
    """The states of one layer: [rows, heads, DK, DV] float32, and folded_len [rows] int64."""

    tensor: torch.Tensor
    folded_len: torch.Tensor

    @classmethod
    def zeros(cls, num_states: int, shape: tuple[int, int, int], device: torch.device) -> "RecurrentState":
        states = torch.zeros((num_states, *shape), dtype=torch.float32, device=device)
        return cls(states, torch.zeros(num_states, dtype=torch.int64, device=device))

    def clear(self, rows: torch.Tensor) -> None:
        """Begin rows [B] anew."""
        self.tensor.index_fill_(0, rows, 0.0)
        self.folded_len.index_fill_(0, rows, 0)

    def fold(self, rows: torch.Tensor, states: torch.Tensor, folded_len: torch.Tensor) -> None:
        """Put states [B, heads, DK, DV] in the place of those of rows [B]."""
        self.tensor.index_copy_(0, rows, states)
        self.folded_len.index_copy_(0, rows, folded_len)
