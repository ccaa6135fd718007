"""The plan of a forward: everything that it needs to know about KV, in one immutable object.

A plan looks up the write slots of all groups once, so no layer translates slots, and it lives for one forward. One of
five builders makes it on the device from the request table:

    plan_packed   runs of prompt tokens of many requests, in one row of T places, each after its committed tokens
    plan_last     only the last token of each of these runs, once the K/V of the whole runs are stored
    plan_chunk    B causal runs that a drafter reads, padded to the longest; padding writes to the null slot
    plan_verify   B trees of N nodes after their committed prefixes (over a window: header of `kvcache/table.py`)
    plan_frozen   queries of a frozen-KV drafter, which see only the committed prefix

A plan holds tables of the backend that made it, so only that backend can compute with it. The runs of a prompt lie in a
pack, without padding between them:

    run        0         1     2             R = 3, T = 10
    row        a a a a a b b b c .           run_of  0 0 0 0 0 1 1 1 2 2
    cu_len     0         5     8 9           the place after the last run is padding
    positions  3 4 5 6 7 0 1 2 9 0           each run begins at a position of its own, 3 0 9

The host knows R and T, which decide shapes. Lengths are data on the device, so a captured forward can be replayed with
other lengths. A run may be empty. Padding writes to the null slot and sees nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch

from specdec.attention.kernels.page_table import PageTables
from specdec.attention.trees.tree import DraftTree
from specdec.kvcache.cache import KVOperations
from specdec.kvcache.frozen import KVView
from specdec.kvcache.layer_context import RecurrentContext
from specdec.kvcache.layout import NULL_SLOT, ByGroup, GroupId, GroupLoc, PrimaryLoc
from specdec.kvcache.table import RequestTable, Rows


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
        return (self.cu_len[1:] - 1).clamp(min=0)  # a kernel must not read before the first place

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
    """A pack, and the slots that a forward over it reads and writes. Lines of the primary group are those of the
    request table. Lines of a windowed group are made for the forward: they hold the keys that some token of the run
    sees, so they are O(window + longest run) wide."""

    pack: Pack
    lines: ByGroup[RunSlots]
    write: ByGroup[GroupLoc]


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

    return PackTables(pack, ByGroup((every, *map(windowed, allocator.windowed))), allocator.located(own))


Attend = Callable[..., torch.Tensor]
"""Attention of one forward for layers of one group and window: (query [B, Hq, N, D], pools k, v [slots, Hkv, D], *,
scaling, softcap, sinks) -> [B, N, Hq, D]. The forward's own keys are in the pools already."""


class PlanBackend(KVOperations, Protocol):
    """The part of a backend that plans need: it makes their tables and computes with them."""

    def locate(self, table: RequestTable, rows: Rows, committed_len: torch.Tensor, num_nodes: int) -> PageTables:
        """Make tables of the prefixes [0, committed_len [B]), with slots of the `num_nodes` positions after each."""

    def attention(self, plan: "KVPlan", group: GroupId, window: int | None, shares: int = 1) -> Attend:
        """Attention under `plan` for layers of `group` with `window` (None: full attention).

        shares: see `LayerSpec`. The cut of keys depends on the heads of all ranks together, so bits do not depend on
        the number of ranks."""

    def recurrence(self, plan: "KVPlan", view: KVView) -> RecurrentContext:
        """The recurrent layers of a forward under `plan`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPlan:
    """Plan of one sequence of tokens: N queries of each of B requests (B * N), or the T places of a pack. Below, [B, N]
    is then [1, T].

    rows [B]: rows of the request table.    positions [B, N] of the queries.
    tree: the tree whose nodes the queries are; None: the queries are causal, or those of a frozen drafter.
    write [B * N]: slots at which the queries' K/V are stored, by group; None: the forward stores none.
    prefix: tables of the prefixes; of a pack if the sequence is one.
    block_len [B]: number of real queries of each causal run, before padding; None: all are real.
    window_shift: added to the window of every sliding layer. Not 0 only if a frozen drafter's convention requires it.
    first_key: keys before this position do not exist, except a query's own. MTP modules begin later than the text.
    """

    backend: PlanBackend
    rows: torch.Tensor
    positions: torch.Tensor
    prefix: PageTables | PackTables
    tree: DraftTree | None = None
    write: ByGroup[GroupLoc] | None = None
    block_len: torch.Tensor | None = None
    window_shift: int = 0
    first_key: int = 0

    @property
    def pack(self) -> Pack | None:
        """The runs of the sequence, if it is a pack; rows and committed_len then have one entry per run, [R]."""
        return self.prefix.pack if isinstance(self.prefix, PackTables) else None

    @property
    def committed_len(self) -> torch.Tensor:
        """Number of keys of each prefix, [B]."""
        return self.prefix.pack.start if isinstance(self.prefix, PackTables) else self.prefix.committed_len

    def write_slots(self, group: GroupId) -> GroupLoc:
        """Slots of the forward's own tokens in one group, [B * N]."""
        assert self.write is not None, "a plan that writes nothing"
        return self.write[group]


def plan_chunk(
    backend: PlanBackend, table: RequestTable, rows: Rows, start: torch.Tensor, block_len: torch.Tensor, width: int
) -> KVPlan:
    """Plan runs of `block_len` [B] tokens, at most `width`, from position `start` [B] on."""
    steps = torch.arange(width, device=start.device)
    prefix = backend.locate(table, rows, start, width)
    padding = steps >= block_len[:, None]  # [B, N]
    return KVPlan(
        backend=backend,
        rows=rows.index,
        positions=start[:, None] + steps,
        prefix=prefix,
        write=prefix.write.map(lambda slots: GroupLoc(slots.masked_fill(padding, NULL_SLOT).reshape(-1))),
        block_len=block_len,
    )


def plan_packed(backend: PlanBackend, table: RequestTable, pack: Pack, longest: int | None = None) -> KVPlan:
    """Plan runs of prompt tokens in one sequence. longest: upper bound on a run's tokens; None: the number of
    places."""
    num_places = len(pack.run_of)
    tables = locate_pack(table, pack, num_places if longest is None else longest)
    return KVPlan(backend=backend, rows=pack.rows, positions=pack.positions[None], prefix=tables, write=tables.write)


def plan_last(backend: PlanBackend, table: RequestTable, pack: Pack) -> KVPlan:
    """Plan the last token of each run, as plain decoding does: for the last layers, if they store no K/V."""
    return replace(plan_packed(backend, table, pack.last_tokens(), 1), write=None)


def plan_verify(
    backend: PlanBackend,
    table: RequestTable,
    rows: Rows,
    tree: DraftTree,
    *,
    prefix: PageTables | None = None,
    positions: torch.Tensor | None = None,
) -> KVPlan:
    """Plan one tree per request. Node n writes to the slot of position S + n; its own position is S + depth[n].

    In a windowed group the table of the prefix begins at page_floor(S - retain), so it names no evicted page; a node's
    ancestors are found by its parents, not by positions (header of `kvcache/table.py`).

    Optional, computed if not given: prefix, the tables for N nodes after S [B] tokens; positions [B, N].
    """
    if prefix is None:
        prefix = backend.locate(table, rows, table.committed_len.tensor[rows.index], tree.num_nodes)
    committed_len = prefix.committed_len
    assert all(slots.shape == tree.tokens.shape for slots in prefix.write), f"{prefix.write=} {tree.tokens.shape=}"
    return KVPlan(
        backend=backend,
        rows=rows.index,
        positions=committed_len[:, None] + tree.depth if positions is None else positions,
        prefix=prefix,
        tree=tree,
        write=prefix.write.map(lambda slots: GroupLoc(slots.reshape(-1))),
    )


def plan_frozen(
    backend: PlanBackend,
    table: RequestTable,
    rows: Rows,
    *,
    position_offset: int,
    window_shift: int,
    num_queries: int = 1,
    prefix: PageTables | None = None,
) -> KVPlan:
    """Plan queries that are all at position S + `position_offset` and see only the committed prefix [0, S). prefix: the
    backend's tables of it; made if not given."""
    assert window_shift - position_offset <= table.extra_keys, f"eviction keeps too little for {window_shift=}"
    if prefix is None:
        prefix = backend.locate(table, rows, table.committed_len.tensor[rows.index], 0)
    committed_len = prefix.committed_len
    position = committed_len + position_offset if position_offset else committed_len
    return KVPlan(
        backend=backend,
        rows=rows.index,
        positions=position[:, None].expand(-1, num_queries),
        prefix=prefix,
        window_shift=window_shift,
    )
