"""The index spaces of a cache with several groups of layers, as static types.

A token owns one slot in the primary pool (`PrimaryLoc`). It owns one more in the pool of each windowed group while a
query can still see the token through that window. vLLM keeps one block table per group; here a request has one row of
primary slots, and the slots of a group are looked up from that row. The numbers of two pools are unrelated. Reading one
pool with a slot number of another is the class of bugs that these types exclude.

    PrimaryLoc   slots as the request table has them
    GroupLoc     slots of the pool of one group; for the primary group, the same numbers

Both are `NewType`s over int64 tensors, so mixing them is a type error under `mypy --strict` and costs nothing at run
time. A `PrimaryLoc` becomes a `GroupLoc` in `HybridAllocator.translate`, and in the kernel that makes the page tables
of a forward (`attention/kernels/page_table.py`), which reads the same maps; plans and drafts only reshape the slots
that they are given. No type checks that the group is the right one. So values by group are a `ByGroup`, indexed with
the layer's own `GroupId`, and the sanitizer compares each plan with the table.

Suffixes outside kernels: `row` (row of the request table), `pos` (position in a sequence), `node` (tree node),
`page`, `slot` (= page * page_size + offset), `layer` / `draft_layer`; `x_to_y` maps x to y; lengths end in `_len`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, NewType, TypeVar

import torch

PrimaryLoc = NewType("PrimaryLoc", torch.Tensor)
GroupLoc = NewType("GroupLoc", torch.Tensor)

GroupId = NewType("GroupId", int)
PRIMARY = GroupId(0)
"""The group of the layers that keep every token. It always exists, even if the model has no such layer."""

NULL_SLOT = 0
"""Slot 0 (and the rest of page 0) of each pool takes the writes of padded rows. It is never allocated."""

T = TypeVar("T", covariant=True)
S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class ByGroup(Generic[T]):
    """One value per group, the primary group first."""

    values: tuple[T, ...]

    def __getitem__(self, group: GroupId) -> T:
        return self.values[group]

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[T]:
        return iter(self.values)

    def group_of(self, value: object) -> GroupId:
        """The group that has this value."""
        assert value in self.values, f"no group has {value}; there are {self.values}"
        return GroupId(self.values.index(value))

    def items(self) -> Iterator[tuple[GroupId, T]]:
        return ((GroupId(number), value) for number, value in enumerate(self.values))

    def map(self, function: Callable[[T], S]) -> "ByGroup[S]":
        return ByGroup(tuple(map(function, self.values)))
