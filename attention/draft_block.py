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

from specdec.attention.dense import bias_of, dense_attention, prefix_keys, visible
from specdec.attention.kernels.page_table import PageTable, PageTables, build_page_tables, reference_build_page_tables
from specdec.attention.kernels.paged_attention import WORD, BlockKeys, paged_attention
from specdec.kvcache.fp8_pool import FieldPool, all_rows, numbers_and_scales
from specdec.kvcache.layer_context import Destination, ScoreOptions
from specdec.kvcache.layout import NULL_SLOT, PRIMARY, GroupId, GroupLoc
from specdec.kvcache.store import KVStore, LayerKV
from specdec.kvcache.table import RequestTable, Rows


class NodeOrder(Enum):
    """Layout of a draft's nodes and which of them see each other. CAUSAL and MUTUAL drafts have one level, its nodes in
    a row."""

    LEVELS = "levels"  # K nodes per position; a node sees its ancestors
    CAUSAL = "causal"  # a node sees the nodes up to itself
    MUTUAL = "mutual"  # a node sees all nodes


KeyLimits = tuple[int | None, int]
"""A layer's window and first key."""


class DraftPlan(NamedTuple):
    """Shape of a draft: K = `topk` nodes per level and request, on `num_levels` levels at `positions` [levels, B].

    windows: one per layer of the drafter, None: full attention.
    order: if the nodes are in a row, `positions` [1, B] is that of the first node.
    anchored: the windows of all nodes count from that first position.
    first_keys: one per layer, the first position with a key; None: every layer has all keys.
    """

    table: RequestTable
    rows: Rows
    positions: torch.Tensor
    topk: int
    windows: Sequence[int | None]
    order: NodeOrder = NodeOrder.LEVELS
    anchored: bool = False
    first_keys: Sequence[int] | None = None

    def key_limits(self, layer: int) -> KeyLimits:
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
        if self.order is not NodeOrder.LEVELS:
            return self.level_positions(0)
        return self.positions.t()[:, :, None].expand(-1, -1, self.topk).reshape(-1, self.num_nodes)

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
    """One draft in progress. Each layer has scratch pools [B * W, Hkv, D]: W rows per request, the last M of them for
    K/V of the draft's M nodes."""

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
        # a node sees the keys of all nodes, of the nodes up to itself, or its own (`enter_level` adds its ancestors')
        if draft.order is NodeOrder.MUTUAL:
            self.bits_of = bits.sum(0, keepdim=True).expand_as(bits)
        else:
            self.bits_of = bits.cumsum(0) if draft.topk == 1 or draft.order is NodeOrder.CAUSAL else bits
        self.bits = bits[None, : draft.topk].expand(batch, -1, -1)  # [B, K, words] of the newest level
        self.scratch = {layer: LayerKV(self.new_pools(layer), PRIMARY) for layer in store.layers}
        by_level = nodes.view(-1, 1, draft.topk)
        self.slots: dict[int, torch.Tensor] = {}  # [levels, B * K] of a pool with B * W rows
        for num_rows in {kept.k.shape[0] for kept in self.scratch.values()}:
            ends = torch.arange(1, batch + 1, device=device)[:, None] * (num_rows // batch)
            self.slots[num_rows] = (by_level + ends - num_nodes).flatten(1)

    @abstractmethod
    def new_pools(self, layer: int) -> tuple[FieldPool, ...]:
        """Scratch pools of a layer's K and V."""

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
        k, v = self.scratch[layer].fields
        return Destination(k, v, GroupLoc(self.slots[k.shape[0]][self.level]))

    @abstractmethod
    def attend(self, layer: int, query: torch.Tensor, **options: Unpack[ScoreOptions]) -> torch.Tensor:
        """Attend with the newest level's queries [B, Hq, K, D] -> [B, K, Hq, D]. Its keys must be written before."""

    def prefix_table(self, layer: int) -> PageTable:
        """The committed keys that a layer may read."""
        return self.tables.table(self.store.layers[layer].group)

    def written(self, pool: torch.Tensor) -> torch.Tensor:
        """View a scratch pool without the nodes of later levels, [B, Hkv, rows, D]."""
        rows: torch.Tensor = pool.unflatten(0, (len(self.key_pos), -1))
        return rows[:, : rows.shape[1] - self.draft.num_nodes + self.num_keys].transpose(1, 2)


class TorchDraftBlock(DraftBlock):
    """A draft in plain torch. A request's scratch rows begin with a copy of the committed keys that the layer sees:
    gathering them at each level would take a CPU ten times as long as attention itself."""

    locate = staticmethod(reference_build_page_tables)

    def new_pools(self, layer: int) -> tuple[FieldPool, ...]:
        slots, _, _ = prefix_keys(self.prefix_table(layer))
        rows = F.pad(slots, (0, self.draft.num_nodes), value=NULL_SLOT).flatten()
        return tuple(pool.index_select(0, rows) for pool in self.store.layers[layer].fields)

    def enter_level(self, origin: torch.Tensor | None) -> None:
        super().enter_level(origin)
        self._bias: dict[tuple[GroupId, KeyLimits], torch.Tensor] = {}

    def attend(self, layer: int, query: torch.Tensor, **options: Unpack[ScoreOptions]) -> torch.Tensor:
        key = self.store.layers[layer].group, self.draft.key_limits(layer)
        if key not in self._bias:
            self._bias[key] = bias_of(self.seen(layer))
        k, v = (self.written(all_rows(pool)) for pool in self.scratch[layer].fields)
        return dense_attention(query, k, v, self._bias[key], **options)

    def seen(self, layer: int) -> torch.Tensor:
        """Mask [B, K, L + nodes] of the keys that the newest level sees: of the prefix and of the draft so far."""
        window, first_key = self.draft.key_limits(layer)
        _, key_pos, committed = prefix_keys(self.prefix_table(layer))
        nodes = torch.arange(self.num_keys, device=key_pos.device)
        ancestors = (self.bits[:, :, nodes // WORD] >> nodes % WORD & 1).bool()
        known = torch.cat([committed[:, None].expand(-1, self.draft.topk, -1), ancestors], dim=2)
        key_pos = torch.cat([key_pos, self.key_pos[:, : self.num_keys]], dim=1)
        return visible(self.draft.window_positions(self.level), key_pos, known, window, first_key)


class PagedDraftBlock(DraftBlock):
    """A draft on the paged kernels, which read the prefix from the store without a copy. Scratch pools are the "block"
    argument of `paged_attention`."""

    locate = staticmethod(build_page_tables)

    def new_pools(self, layer: int) -> tuple[FieldPool, ...]:
        num_rows = self.key_pos.numel()
        return tuple(pool.new_empty((num_rows, *pool.shape[1:])) for pool in self.store.layers[layer].fields)

    def attend(self, layer: int, query: torch.Tensor, **options: Unpack[ScoreOptions]) -> torch.Tensor:
        committed, scratch = self.store.layers[layer], self.scratch[layer]
        window, first_key = self.draft.key_limits(layer)
        (own_k, scales_k), (own_v, scales_v) = map(numbers_and_scales, (scratch.k, scratch.v))
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
