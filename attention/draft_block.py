"""K/V of a draft in progress, and the attention of its newest level to the committed prefix and to its ancestors.

    level 0     level 1     level 2          K nodes a level, all of level l at position S + l, children of level l - 1
    |0 .. K-1|  |K .. 2K-1| |2K .. 3K-1|     node numbers of a request; each has a scratch key until the draft is done

A drafter that keeps K/V enters a level, writes the keys of the level's nodes at `destination`, then attends. The prefix
is the drafter's store over [0, S); each layer reads it at the slots of its group, and no draft writes there. Invariant:
a level sees the prefix and its ancestors among the keys written so far, each layer through its own window.

A draft of a single forward (`NodeOrder.CAUSAL`, `NodeOrder.MUTUAL`) is one level of K nodes in a row, at positions S
to S + K - 1. Each node sees the nodes up to itself (causal) or all nodes (mutual).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple, Unpack

import torch
import torch.nn.functional as F

from specdec.attention.dense import VisibleKeys, bias_of, dense_attention, prefix_keys, visible
from specdec.attention.kernels.page_table import (
    PageTable,
    PageTables,
    build_page_tables,
    reference_build_page_tables,
)
from specdec.attention.kernels.paged_attention import WORD, BlockKeys, paged_attention
from specdec.kvcache.fp8_pool import all_rows, numbers_and_scales, read_rows
from specdec.kvcache.layer_context import Destination, ScoreOptions
from specdec.kvcache.layout import NULL_SLOT, GroupLoc
from specdec.kvcache.store import KVStore
from specdec.kvcache.table import RequestTable, Rows


class NodeOrder(Enum):
    """Layout of a draft's nodes and which of them see each other. CAUSAL and MUTUAL drafts have one level, its nodes in
    a row."""

    LEVELS = "levels"  # K nodes per position; a node sees its ancestors
    CAUSAL = "causal"  # a node sees the nodes up to itself
    MUTUAL = "mutual"  # a node sees all nodes


class DraftPlan(NamedTuple):
    """Shape of a draft: K = `topk` nodes per level and request, on `num_levels` levels at `positions` [levels, B].

    windows: one per layer of the drafter, None: full attention. order: if the nodes are in a row, `positions` [1, B] is
    that of the first node. anchored: the windows of all nodes count from that first position. first_keys: one per
    layer, the first position with a key; None: every layer has all keys.
    """

    table: RequestTable
    rows: Rows
    positions: torch.Tensor
    topk: int
    windows: Sequence[int | None]
    order: NodeOrder = NodeOrder.LEVELS
    anchored: bool = False
    first_keys: Sequence[int] | None = None

    def key_limits(self, layer: int) -> tuple[int | None, int]:
        """A layer's window, and its first position with a key."""
        return self.windows[layer], 0 if self.first_keys is None else self.first_keys[layer]

    @property
    def num_levels(self) -> int:
        return len(self.positions)

    @property
    def num_nodes(self) -> int:
        return self.num_levels * self.topk

    @property
    def committed_len(self) -> torch.Tensor:
        """Length of each prefix, [B] int64. It equals the position of the first node."""
        return self.positions[0]

    def key_positions(self) -> torch.Tensor:
        """Position of each node, [B, M]."""
        return torch.cat([self.level_positions(level) for level in range(self.num_levels)], dim=1)

    def level_positions(self, level: int) -> torch.Tensor:
        """Position of each node of a level, [B, K]."""
        first = self.positions[level][:, None]
        if self.order is NodeOrder.LEVELS:
            return first.expand(-1, self.topk)
        return first + torch.arange(self.topk, device=first.device)

    def window_positions(self, level: int) -> torch.Tensor:
        """Position from which the windows of a level's nodes count, [B, K]."""
        if self.anchored:
            return self.committed_len[:, None].expand(-1, self.topk)
        return self.level_positions(level)


class DraftBlock(ABC):
    """One draft in progress. Each layer has scratch pools [B * M, Hkv, D] for the K/V of the draft's M nodes."""

    locate: Callable[[RequestTable, Rows, torch.Tensor, int], PageTables]

    def __init__(self, store: KVStore, draft: DraftPlan) -> None:
        self.draft, self.level, self.store = draft, -1, store
        num_nodes = draft.num_nodes
        batch, device = len(draft.committed_len), draft.positions.device
        self.tables = self.locate(draft.table, draft.rows, draft.committed_len, 0)
        self.key_pos = draft.key_positions()
        nodes = torch.arange(num_nodes, device=device)
        words = torch.arange(-(-num_nodes // WORD), device=device)
        bits = (nodes[:, None] // WORD == words).long() << (nodes % WORD)[:, None]  # [M, words]
        # bits of the node itself; in a row, of the nodes before it too; or of all nodes
        if draft.order is NodeOrder.MUTUAL:
            self.bits_of = bits.sum(0, keepdim=True).expand_as(bits)
        else:
            self.bits_of = bits.cumsum(0) if draft.topk == 1 or draft.order is NodeOrder.CAUSAL else bits
        self.bits = bits[None, : draft.topk].expand(batch, -1, -1)  # [B, K, words] of the newest level
        self.scratch = {
            layer: [pool.new_empty((batch * num_nodes, *pool.shape[1:])) for pool in kept.fields]
            for layer, kept in store.layers.items()
        }
        of_request = torch.arange(batch, device=device)[:, None] * num_nodes
        self.slots = (nodes.view(-1, 1, draft.topk) + of_request).flatten(1)  # [levels, B * K]

    @property
    def num_keys(self) -> int:
        """Number of nodes with keys, those of the newest level included."""
        return (self.level + 1) * self.draft.topk

    def enter_level(self, origin: torch.Tensor | None) -> None:
        """Go to the next K nodes, children of nodes `origin` [B, K] of the previous level; None: level 0, or K is 1."""
        self.level += 1
        own = self.bits_of[self.level * self.draft.topk : self.num_keys]
        if origin is None:
            self.bits = own.expand_as(self.bits)
        else:
            self.bits = self.bits.gather(1, origin[:, :, None].expand_as(self.bits)) | own

    def destination(self, layer: int) -> Destination:
        """Destination of the K/V of the newest level's nodes [B * K]."""
        k, v = self.scratch[layer]
        return Destination(k, v, GroupLoc(self.slots[self.level]))

    @abstractmethod
    def attend(self, layer: int, query: torch.Tensor, **options: Unpack[ScoreOptions]) -> torch.Tensor:
        """Attend with the newest level's queries [B, Hq, K, D] -> [B, K, Hq, D]. Its keys must be written before."""

    def prefix_table(self, layer: int) -> PageTable:
        """The committed keys that a layer may read."""
        return self.tables.table(self.store.layers[layer].group)

    def written(self, pool: torch.Tensor) -> torch.Tensor:
        """View the rows of a scratch pool that have keys, [B, Hkv, nodes, D]."""
        rows: torch.Tensor = pool.unflatten(0, (len(self.key_pos), -1))
        return rows[:, : self.num_keys].transpose(1, 2)


class TorchDraftBlock(DraftBlock):
    """A draft in plain torch, which gathers the committed keys at each level."""

    locate = staticmethod(reference_build_page_tables)

    def attend(self, layer: int, query: torch.Tensor, **options: Unpack[ScoreOptions]) -> torch.Tensor:
        slots, seen = self.visible_keys(layer)
        k, v = (read_rows(pool, slots).transpose(1, 2) for pool in self.store.layers[layer].fields)
        for rows, own in zip((k, v), self.scratch[layer], strict=True):
            rows[:, :, -self.num_keys :] = self.written(all_rows(own))
        return dense_attention(query, k, v, bias_of(seen), **options)

    def visible_keys(self, layer: int) -> VisibleKeys:
        """The keys that the newest level sees: those of the prefix, then those of the draft's nodes so far, which have
        the null slot because they are in the scratch pools."""
        window, first_key = self.draft.key_limits(layer)
        slots, key_pos, committed = prefix_keys(self.prefix_table(layer))
        nodes = torch.arange(self.num_keys, device=key_pos.device)
        ancestors = (self.bits[:, :, nodes // WORD] >> nodes % WORD & 1).bool()
        known = torch.cat([committed[:, None].expand(-1, self.draft.topk, -1), ancestors], dim=2)
        key_pos = torch.cat([key_pos, self.key_pos[:, : self.num_keys]], dim=1)
        seen = visible(self.draft.window_positions(self.level), key_pos, known, window, first_key)
        return VisibleKeys(F.pad(slots, (0, self.num_keys), value=NULL_SLOT), seen)


class PagedDraftBlock(DraftBlock):
    """A draft on the paged kernels, which read the prefix from the store without a copy. Scratch pools are the "block"
    argument of `paged_attention`."""

    locate = staticmethod(build_page_tables)

    def attend(self, layer: int, query: torch.Tensor, **options: Unpack[ScoreOptions]) -> torch.Tensor:
        committed = self.store.layers[layer]
        window, first_key = self.draft.key_limits(layer)
        (own_k, scales_k), (own_v, scales_v) = map(numbers_and_scales, self.scratch[layer])
        ancestors = self.bits[:, :, : -(-self.num_keys // WORD)]
        key_pos = self.key_pos[:, : self.num_keys]
        return paged_attention(
            *(query, committed.k, committed.v, self.prefix_table(layer)),
            BlockKeys(self.written(own_k), self.written(own_v), key_pos, ancestors, (scales_k, scales_v)),
            self.draft.window_positions(self.level),
            window=window,
            first_key=first_key,
            **options,
        )
