"""The two index spaces of a hybrid sliding-window KV cache, as static types.

A token owns one slot in the full pool (`FullLoc`) and, while some query can still see it through a sliding window,
one in the SWA pool (`SwaLoc`). The numbers are unrelated: reading a pool with the other space's number is the bug
class this project exists to exclude. Both types are `NewType`s over int64 tensors, so mixing them is a type error
under `mypy --strict` and costs nothing at run time. Only `HybridAllocator.translate` makes a `SwaLoc` from a `FullLoc`.

Suffixes used everywhere: `row` (row of the request table), `pos` (position in a sequence), `node` (tree node),
`page`, `slot` (= page * page_size + offset), `layer` / `draft_layer`; `x_to_y` maps x to y; lengths end in `_len`.
"""

from enum import Enum
from typing import NewType

import torch

FullLoc = NewType("FullLoc", torch.Tensor)
SwaLoc = NewType("SwaLoc", torch.Tensor)

NULL_SLOT = 0
"""Slot 0 (and the rest of page 0) of each pool takes the writes of padded rows. It is never allocated."""


class Space(Enum):
    """Pool that a layer's keys and values live in."""

    FULL = "full"
    SWA = "swa"
