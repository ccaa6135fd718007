"""The state that a recurrent layer keeps for each request, and how many tokens are folded into it.

    position     0 ........ 32 ........ 48 ..... S
    state        everything before 32 (`folded_len`)
    records                 |-- 32 .. S - 1 --|         in a group of their own, at the slots of their tokens

A fold takes FOLD committed tokens at once and begins at a multiple of FOLD, whatever the rounds were. So a rejected
draft leaves nothing to undo, and a token's bits do not depend on the draft it came in. The state also holds the newest
inputs of the convolution. It therefore needs no record of folded tokens, and a copy of it is all that a cached prefix
keeps (`StateCache`).

States are indexed by row of the request table; copies follow after them. A forward that reads position 0 resets the
row's state.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from specdec.gpu.mirrored_array import IntArray

FOLD = 16
"""Tokens per fold."""


class StateShape(NamedTuple):
    """Shape of a recurrent layer's state for one request: a float32 matrix [k_dim, v_dim] per head (0 heads: none), the
    newest `taps` inputs of a convolution over `channels` in the model's dtype, and the folded length."""

    heads: int
    k_dim: int
    v_dim: int
    taps: int
    channels: int

    def share(self, count: int) -> "StateShape":
        """The state on one of `count` ranks, which divide its heads and its channels."""
        return self._replace(heads=self.heads // count, channels=self.channels // count)

    def bytes(self, dtype: torch.dtype) -> int:
        return 4 * self.heads * self.k_dim * self.v_dim + self.taps * self.channels * dtype.itemsize + 8


class RecurrentState(NamedTuple):
    """The states of one layer: matrices [slots, heads, DK, DV] float32, inputs [slots, taps, C] with the newest last,
    and folded_len [slots] int64."""

    matrices: torch.Tensor
    inputs: torch.Tensor
    folded_len: torch.Tensor

    @classmethod
    def zeros(cls, num_states: int, shape: StateShape, dtype: torch.dtype, device: torch.device) -> "RecurrentState":
        matrix = (num_states, shape.heads, shape.k_dim, shape.v_dim)
        return cls(
            torch.zeros(matrix, dtype=torch.float32, device=device),
            torch.zeros((num_states, shape.taps, shape.channels), dtype=dtype, device=device),
            torch.zeros(num_states, dtype=torch.int64, device=device),
        )

    def clear(self, rows: torch.Tensor) -> None:
        """Reset the states of rows [B]."""
        for tensor in self:
            tensor.index_fill_(0, rows, 0)

    def fold(self, rows: torch.Tensor, matrices: torch.Tensor, inputs: torch.Tensor, length: torch.Tensor) -> None:
        """Replace the states of rows [B]: matrices [B, heads, DK, DV] and inputs [B, taps, C] after `length` [B]
        tokens."""
        for tensor, new in zip(self, (matrices, inputs, length), strict=True):
            tensor.index_copy_(0, rows, new)

    def copy(self, source: int, destination: int) -> None:
        for tensor in self:
            tensor[destination] = tensor[source]


class StateCache:
    """Copies of states for the prefix cache, keyed by the primary page at which their tokens end.

    layers: the states of every recurrent layer; copies are at slots `first` and later. A new copy replaces the least
    recently used one. A copy is dropped together with its page. fold(row, length): folds the states of a row up to its
    first `length` tokens. A round folds only tokens that earlier rounds have committed. So a copy made while a round is
    in flight holds no token that the host does not know.
    """

    def __init__(self, layers: Sequence[RecurrentState], first: int, fold: Callable[[int, int], None]) -> None:
        self._layers = layers
        self._fold = fold
        self._slots = range(first, len(layers[0].folded_len))
        self.reset()

    def reset(self) -> None:
        self._free = list(reversed(self._slots))
        self._slot_of: dict[int, int] = {}  # keyed by page, least recently used first

    def has(self, pages: IntArray) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Mask of the `pages` that have a copy of the state at their end."""
        return np.array([page in self._slot_of for page in pages.tolist()], dtype=np.bool_)

    def save(self, row: int, length: int, page: int) -> None:
        """Copy the state of a row after its first `length` tokens. They must end with a page that the cache has."""
        if page in self._slot_of or not self._slots:
            return
        if not self._free:
            self.drop(np.array([next(iter(self._slot_of))]))
        self._fold(row, length)
        self._slot_of[page] = self._free.pop()
        for layer in self._layers:
            layer.copy(row, self._slot_of[page])

    def restore(self, row: int, page: int) -> None:
        """Set the states of a row to the copy at the end of a page."""
        self._slot_of[page] = slot = self._slot_of.pop(page)
        for layer in self._layers:
            layer.copy(slot, row)

    def drop(self, pages: IntArray) -> None:
        """Drop the copies at the ends of these pages, if there are any."""
        for page in pages.tolist():
            if (slot := self._slot_of.pop(page, None)) is not None:
                self._free.append(slot)

    @property
    def pages(self) -> dict[int, int]:
        """The slot of each copy by its page."""
        return dict(self._slot_of)

    def check(self) -> None:
        """Assert that each copy has a slot of its own."""
        used = [*self._free, *self._slot_of.values()]
        assert sorted(used) == list(self._slots), f"{used=} of {self._slots}"
