"""Everything one forward needs to know about KV, in one immutable object made for that forward.

The write locations of all groups are looked up once, here; no layer translates anything, and nothing outlives the
step. A plan is made on the device from the request table by one of five builders:

    plan_packed   runs of prompt tokens of many requests, in one row of T places, each after its committed tokens
    plan_last     the last token of each of those runs alone, once the K/V of the whole run are stored
    plan_chunk    B runs of tokens that a drafter reads, causal, padded to the longest; padding writes to the null slot
    plan_verify   B trees of N nodes after their committed prefixes
    plan_frozen   queries on the committed prefix only, of a frozen-KV drafter

A plan refers to the backend that made it and holds its tables: that backend computes under it, and no other.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from specdec.attention.pack import Pack, locate_pack
from specdec.attention.trees.tree import DraftTree
from specdec.kvcache.cache import KVOperations
from specdec.kvcache.frozen import KVView
from specdec.kvcache.index_spaces import NULL_SLOT, ByGroup, GroupId, GroupLoc
from specdec.kvcache.layer_context import RecurrentContext
from specdec.kvcache.table import RequestTable, Rows

Attend = Callable[..., torch.Tensor]
"""Attention of one forward on layers of one group and window: (query [B, Hq, N, D], pools k, v [slots, Hkv, D]
that hold the forward's own keys already, *, scaling, softcap, sinks) -> [B, N, Hq, D]."""


class PrefixTables(Protocol):
    """Tables of the committed prefixes that a forward reads, in a form that only their own backend knows; and by group
    the slots [B, N] of the N positions after each prefix, which the forward writes."""

    @property
    def write(self) -> ByGroup[GroupLoc]: ...
    def pages(self, group: GroupId) -> tuple[torch.Tensor, torch.Tensor]:
        """Page ids [B, P] of the prefixes in one group, and the position [B] of each first page. For checks."""


class RecurrentRows(RecurrentContext, Protocol):
    """Recurrent layers of one forward."""

    def part(self, requests: slice, columns: slice) -> "RecurrentRows":
        """These columns of these requests."""


class PlanBackend(KVOperations, Protocol):
    """A backend, as far as plans need it: it makes their tables and computes under them."""

    def locate(self, table: RequestTable, rows: Rows, committed_len: torch.Tensor, num_queries: int) -> PrefixTables:
        """Tables of the prefixes [0, committed_len [B]) and slots of the `num_queries` positions after each."""

    def attention(self, plan: "KVPlan", group: GroupId, window: int | None, shares: int = 1) -> Attend:
        """Attention under `plan` on layers whose K/V live in `group`, through `window` (None: full attention).

        shares: see `LayerCache`. Keys are cut into blocks by the heads of all ranks, so bits do not depend on them."""

    def recurrence(self, plan: "KVPlan", view: KVView) -> RecurrentRows:
        """The recurrent layers of a forward under `plan`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPlan:
    """B requests with N queries each, packed as one sequence of B * N rows; or a pack, one row of T places.

    rows [B]: rows of the request table.    committed_len [B]: keys of each prefix.    positions [B, N]: the queries'.
    tree: which queries see each other, if they are nodes of a tree; None: causal, or (write None) without keys.
    write [B * N]: slots of the queries' own K/V, by group; None: they have no K/V.
    prefix: the backend's tables of the prefixes.
    block_len [B]: real queries of each causal run, the rest are padding; None: all are real.
    pack: the runs that the row consists of; rows and committed_len are then by run, [R].
    window_shift: added to the window of every sliding layer; not 0 only for a frozen drafter's convention.
    first_key: keys before this position do not exist, except a query's own (modules that begin later than the text).
    """

    backend: PlanBackend
    rows: torch.Tensor
    committed_len: torch.Tensor
    positions: torch.Tensor
    prefix: PrefixTables
    page_size: int
    tree: DraftTree | None = None
    write: ByGroup[GroupLoc] | None = None
    block_len: torch.Tensor | None = None
    pack: Pack | None = None
    window_shift: int = 0
    first_key: int = 0

    def write_slots(self, group: GroupId) -> GroupLoc:
        """Slots of the forward's own tokens in one group, [B * N]."""
        assert self.write is not None, "a plan that writes nothing"
        return self.write[group]


def plan_chunk(
    backend: PlanBackend, table: RequestTable, rows: Rows, start: torch.Tensor, block_len: torch.Tensor, width: int
) -> KVPlan:
    """Runs of `block_len` [B] tokens, at most `width`, from position `start` [B] on."""
    steps = torch.arange(width, device=start.device)
    prefix = backend.locate(table, rows, start, width)
    padding = steps >= block_len[:, None]  # [B, N]
    return KVPlan(
        backend=backend,
        rows=rows.index,
        committed_len=start,
        positions=start[:, None] + steps,
        prefix=prefix,
        page_size=table.allocator.page_size,
        write=prefix.write.map(lambda slots: GroupLoc(slots.masked_fill(padding, NULL_SLOT).reshape(-1))),
        block_len=block_len,
    )


def plan_packed(backend: PlanBackend, table: RequestTable, pack: Pack, longest: int | None = None) -> KVPlan:
    """Runs of prompt tokens in one row. longest: upper bound on a run's tokens; None: the places of the row."""
    num_places = len(pack.row_of)
    tables = locate_pack(table, pack, num_places if longest is None else longest)
    return KVPlan(
        backend=backend,
        rows=pack.rows,
        committed_len=pack.start,
        positions=pack.positions[None],
        prefix=tables,
        page_size=table.allocator.page_size,
        write=tables.write,
        pack=pack,
    )


def plan_last(backend: PlanBackend, table: RequestTable, pack: Pack) -> KVPlan:
    """The last token of each run, as in plain decoding: for layers that store nothing and run after those that do."""
    return replace(plan_packed(backend, table, pack.last_tokens(), 1), write=None)


def plan_verify(
    backend: PlanBackend,
    table: RequestTable,
    rows: Rows,
    tree: DraftTree,
    *,
    committed_len: torch.Tensor | None = None,
    prefix: PrefixTables | None = None,
    positions: torch.Tensor | None = None,
) -> KVPlan:
    """One tree a request. Node n writes to the slot of position S + n and sits at position S + depth[n].

    Computed here unless given: committed_len, S [B]; prefix, for these prefixes and N nodes; positions [B, N].
    """
    if committed_len is None:
        committed_len = table.committed_len.tensor[rows.index]
    if prefix is None:
        prefix = backend.locate(table, rows, committed_len, tree.num_nodes)
    assert all(slots.shape == tree.tokens.shape for slots in prefix.write), f"{prefix.write=} {tree.tokens.shape=}"
    return KVPlan(
        backend=backend,
        rows=rows.index,
        committed_len=committed_len,
        positions=committed_len[:, None] + tree.depth if positions is None else positions,
        prefix=prefix,
        page_size=table.allocator.page_size,
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
    committed_len: torch.Tensor | None = None,
    prefix: PrefixTables | None = None,
) -> KVPlan:
    """Queries that all sit at S + `position_offset`, on the committed prefix [0, S) and nothing else.

    Computed here unless given: committed_len, S [B], and prefix, the backend's tables of it.
    """
    assert window_shift - position_offset <= table.extra_keys, f"eviction keeps too little for {window_shift=}"
    if committed_len is None:
        committed_len = table.committed_len.tensor[rows.index]
    position = committed_len + position_offset if position_offset else committed_len
    return KVPlan(
        backend=backend,
        rows=rows.index,
        committed_len=committed_len,
        positions=position[:, None].expand(-1, num_queries),
        prefix=backend.locate(table, rows, committed_len, 0) if prefix is None else prefix,
        page_size=table.allocator.page_size,
        window_shift=window_shift,
    )
