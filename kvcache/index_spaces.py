"""The two index spaces of a hybrid sliding-window KV cache, as static types.

A token owns one slot in the full pool (`FullLoc`) and, while some query can still see it through a sliding window,
one in the SWA pool (`SwaLoc`). The numbers are unrelated: reading a pool with the other space's number is the bug
class this project exists to exclude. Both types are `NewType`s over int64 tensors, so mixing them is a type error
under `mypy --strict` and costs nothing at run time. Only `HybridAllocator.translate` makes a `SwaLoc` from a `FullLoc`.

Suffixes used everywhere: `row` (row of the request table), `pos` (position in a sequence), `node` (tree node),
`page`, `slot` (= page * page_size + offset), `layer` / `draft_layer`; `x_to_y` maps x to y; lengths end in `_len`.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Generic, NewType, TypeVar

import torch

FullLoc = NewType("FullLoc", torch.Tensor)
SwaLoc = NewType("SwaLoc", torch.Tensor)

NULL_SLOT = 0
"""Slot 0 (and the rest of page 0) of each pool takes the writes of padded rows. It is never allocated."""


class Space(Enum):
    """Which pool a layer's keys and values live in."""

    FULL = "full"
    SWA = "swa"


Loc = TypeVar("Loc", FullLoc, SwaLoc)


@dataclass(frozen=True, slots=True)
class SlotTable(Generic[Loc]):
    """Pages of each request's committed prefix, in one space.

    `slots`: [B, L] int64, the slot of every key the table covers, in position order, 0 where there is none.
    `start`: [B] int64, the position of column 0 (0 in the full space; page-aligned and before the window in SWA,
    so that the table is O(window) wide and never O(context)).
    """

    slots: Loc
    start: torch.Tensor
    page_size: int

    @property
    def pages(self) -> torch.Tensor:
        """[B, ceil(L / page_size)] int64: one page id per `page_size` columns."""
        return self.slots[:, :: self.page_size] // self.page_size

    def positions(self) -> torch.Tensor:
        """[B, L] int64: the position in its sequence of the key in each column."""
        columns = torch.arange(self.slots.shape[1], device=self.slots.device)
        return self.start[:, None] + columns[None, :]
