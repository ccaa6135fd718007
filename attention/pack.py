"""A pack: runs of tokens of many requests in one sequence, without padding between them. Forwards over prompts read
packs.

    run        0         1     2             R = 3, T = 10
    row        a a a a a b b b c .           run_of  0 0 0 0 0 1 1 1 2 2
    cu_len     0         5     8 9           the place after the last run is padding
    positions  3 4 5 6 7 0 1 2 9 0           each run begins at a position of its own, 3 0 9

The host knows R and T, which decide shapes. Lengths are data on the device, so a captured forward can be replayed with
other lengths. A run may be empty. Padding writes to the null slot and sees nothing.
"""

from typing import NamedTuple

import torch

from specdec.kvcache.index_spaces import NULL_SLOT, PRIMARY, ByGroup, GroupId, GroupLoc, PrimaryLoc
from specdec.kvcache.table import RequestTable


class Pack(NamedTuple):
    """R runs in one sequence of T tokens. All tensors but `exists` are int64.

    rows [R]: rows of the request table. start, length [R]: first position and number of tokens of each run. cu_len [R +
    1]: tokens before each run. For each place: run_of [T], its run (padding: the last one); positions [T], 0 on
    padding; exists [T], False on padding.
    """

    rows: torch.Tensor
    start: torch.Tensor
    length: torch.Tensor
    cu_len: torch.Tensor
    run_of: torch.Tensor
    positions: torch.Tensor
    exists: torch.Tensor

    @classmethod
    def from_lengths(cls, rows: torch.Tensor, start: torch.Tensor, length: torch.Tensor, num_tokens: int) -> "Pack":
        """Pack runs of `length` [R] tokens that begin at positions `start` [R] into `num_tokens` places."""
        cu_len = torch.cat([length.new_zeros(1), length.cumsum(0)])
        places = torch.arange(num_tokens, device=length.device)
        run_of = torch.searchsorted(cu_len[1:], places, right=True).clamp(max=len(rows) - 1)
        exists = places < cu_len[-1]
        positions = torch.where(exists, start[run_of] + places - cu_len[run_of], 0)
        return cls(rows, start, length, cu_len, run_of, positions, exists)

    @property
    def last(self) -> torch.Tensor:
        """Place of each run's last token, [R]; any place for an empty run."""
        return (self.cu_len[1:] - 1).clamp(min=0)

    def last_tokens(self) -> "Pack":
        """A pack of only the last token of each run, so T is R. An empty run becomes padding."""
        ahead = (self.length - 1).clamp(min=0)
        places = torch.arange(len(self.rows), device=self.rows.device)
        cu_len = torch.arange(len(self.rows) + 1, device=self.rows.device)
        positions, exists = self.start + ahead, self.length > 0
        return Pack(self.rows, positions, torch.ones_like(ahead), cu_len, places, positions, exists)


class RunSlots(NamedTuple):
    """Slots of the keys of R runs in one group: key p of run r is at slots[line[r], p - begin[r]]. begin None: all
    0."""

    slots: torch.Tensor
    line: torch.Tensor
    begin: torch.Tensor | None

    def slots_at(self, run: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Slots of `positions` of runs `run` (tensors of one shape). A position outside its line is clamped to it."""
        column = positions if self.begin is None else positions - self.begin[run]
        return self.slots[self.line[run], column.clamp(0, self.slots.shape[1] - 1)]


class PackTables(NamedTuple):
    """Slots that a forward over a pack reads and writes (`PrefixTables`). Lines of the primary group are those of the
    request table. Lines of a windowed group are made for the forward: they hold the keys that some token of the run
    sees, so they are O(window + longest run) wide."""

    lines: ByGroup[RunSlots]
    write: ByGroup[GroupLoc]
    page_size: int

    def group_table(self, group: GroupId) -> RunSlots:
        return self.lines[group]

    def pages(self, group: GroupId) -> tuple[torch.Tensor, torch.Tensor]:
        lines = self.lines[group]
        begin = torch.zeros_like(lines.line) if lines.begin is None else lines.begin
        return lines.slots[lines.line, :: self.page_size] // self.page_size, begin


def locate_pack(table: RequestTable, pack: Pack, longest: int) -> PackTables:
    """Make the tables of a forward over this pack. longest: upper bound on the tokens of a run.

    All slots of the table's padding row are null slots.
    """
    slots, allocator = table.slots.tensor, table.allocator
    page_size = allocator.page_size
    numbers = torch.arange(len(pack.rows), device=slots.device)
    every = RunSlots(slots, pack.rows, None)
    stored = pack.exists & (pack.positions >= table.shared_len.tensor[pack.rows[pack.run_of]])
    own = PrimaryLoc(every.slots_at(pack.run_of, pack.positions).masked_fill(~stored, NULL_SLOT))

    def windowed(group: GroupId) -> RunSlots:
        retain = int(table.retain[group])
        begin = (pack.start - retain).clamp(min=0) // page_size * page_size
        width = min(slots.shape[1], retain + page_size - 1 + longest)
        columns = begin[:, None] + torch.arange(width, device=slots.device)
        inside = PrimaryLoc(slots[pack.rows[:, None], columns.clamp(max=slots.shape[1] - 1)])
        return RunSlots(allocator.translate(group, inside), numbers, begin)

    groups = [group for group, _ in allocator.pools.items()]
    lines = tuple(every if group == PRIMARY else windowed(group) for group in groups)
    return PackTables(ByGroup(lines), ByGroup(tuple(allocator.translate(group, own) for group in groups)), page_size)
