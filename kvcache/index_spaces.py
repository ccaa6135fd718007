"""The index spaces of a cache with several groups of layers, as static types.

A token owns one slot in the primary pool (`PrimaryLoc`), and in the pool of each windowed group one more while a query
can still see it through that group's window. Unlike vLLM's block tables, one a group, a request has one row of primary
slots; the slots of a group are looked up from it. The numbers are unrelated: reading one pool with the number of
another is the bug class that this project exists to exclude.

    PrimaryLoc   slots as the request table has them
    GroupLoc     slots of the pool of one group; of the primary group they are the same numbers

Both are `NewType`s over int64 tensors, so mixing them is a type error under `mypy --strict` and costs nothing at run
time. A `PrimaryLoc` becomes a `GroupLoc` in `HybridAllocator.translate`, and in the kernel that makes the page tables
of a forward (`attention/kernels/page_table.py`), which reads the same maps; plans and drafts only reshape theirs. No
type says whether the group is the right one: values by group are a `ByGroup`, indexed with a layer's own `GroupId`, and
the sanitizer compares a plan with the table.

Suffixes used everywhere: `row` (row of the request table), `pos` (position in a sequence), `node` (tree node),
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
"""The group whose layers keep every token. It is always there, without layers where none does."""

NULL_SLOT = 0
"""Slot 0 (and the rest of page 0) of each pool takes the writes of padded rows. It is never allocated."""

T = TypeVar("T", covariant=True)
S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class ByGroup(Generic[T]):
    """One value a group, the primary first."""

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
