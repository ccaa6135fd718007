"""K/V of a draft in progress, and the attention of its newest level to the committed prefix and to its ancestors.

    level 0     level 1     level 2          K nodes a level, all of level l at position S + l, children of level l - 1
    |0 .. K-1|  |K .. 2K-1| |2K .. 3K-1|     node numbers of a request; each has a scratch key until the draft is done

A drafter that keeps K/V enters a level, writes the keys of the level's nodes at `destination`, then attends. The prefix
is the drafter's store over [0, S); each layer reads it at the slots of its group, and no draft writes there. Invariant:
a level sees the prefix and its ancestors among the keys written so far, each layer through its own window.

A draft of a single forward (`NodeOrder.CAUSAL`, `NodeOrder.MUTUAL`) is one level of K nodes in a row, at positions S
to S + K - 1. Each node sees the nodes up to itself (causal) or all nodes (mutual).
"""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol, Unpack

import torch

from specdec.attention.dense import bias_of, dense_attention, newest, visible
from specdec.attention.kernels.page_table import PageTable, build_page_tables
from specdec.attention.kernels.paged_attention import WORD, BlockKeys, paged_attention
from specdec.kvcache.fp8_pool import all_rows, numbers_and_scales
from specdec.kvcache.layer_context import Destination, ScoreOptions
from specdec.kvcache.layout import PRIMARY, GroupLoc, PrimaryLoc
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


class DraftBlock(Protocol):
    """One draft in progress."""

    def enter_level(self, origin: torch.Tensor | None) -> None:
        """Go to the next K nodes, children of nodes `origin` [B, K] of the previous level; None: level 0, or K is 1."""

    def destination(self, layer: int) -> Destination:
        """Destination of the K/V of the newest level's nodes [B * K]."""

    def attend(self, layer: int, query: torch.Tensor, **options: Unpack[ScoreOptions]) -> torch.Tensor:
        """Attend with the newest level's queries [B, Hq, K, D] -> [B, K, Hq, D]. Its keys must be written before."""

    def prefix_table(self, layer: int) -> PageTable:
        """The committed keys that a layer may read. Used for checks."""


class CopiedDraftBlock:
    """A draft in plain torch. For each layer it holds a copy of the visible committed keys, then room for the draft's
    keys."""

    def __init__(self, store: KVStore, draft: DraftPlan) -> None:
        self.draft, self.level = draft, -1
        length, topk, num_nodes = draft.committed_len, draft.topk, draft.num_nodes
        batch, device = len(length), length.device
        self.key_pos = draft.key_positions()
        self.ancestors = torch.zeros((batch, topk, num_nodes), dtype=torch.bool, device=device)
        all_slots = draft.table.slots.tensor[draft.rows.index, : max(draft.rows.max_committed_len, 1)]
        # read a key of the same request instead: a NaN of another request cannot leak through a zero weight
        unseen = all_slots.gather(1, (length - 1).clamp(min=0)[:, None])
        translate = draft.table.allocator.translate
        self._tables: dict[int, PageTable] = {}
        self.prefix: dict[KeyLimits, tuple[torch.Tensor, torch.Tensor]] = {}  # positions and committed mask: [B, L]
        self.copies: dict[int, LayerKV] = {}  # K and V [B * (L + M), Hkv, D] of each layer with K/V
        self._cells: dict[KeyLimits, torch.Tensor] = {}  # slots of the draft's nodes in `kept`, [B, M]
        for layer, layer_kv in store.layers.items():
            limits = window, _ = draft.key_limits(layer)
            slots, start = all_slots, torch.zeros_like(length)
            if window is not None:
                slots, start = newest(all_slots, length, window)
            key_pos = start[:, None] + torch.arange(slots.shape[1], device=device)
            committed = key_pos < length[:, None]
            self.prefix[limits] = (key_pos, committed)
            own = torch.cat([torch.where(committed, slots, unseen), unseen.expand(-1, num_nodes)], dim=1)  # [B, L + M]
            own = translate(layer_kv.group, PrimaryLoc(own))
            self._tables[layer] = PageTable(own[:, :-num_nodes], start, length, 1)
            cells = torch.arange(own.numel(), device=device).view(batch, -1)
            self._cells[limits] = cells[:, own.shape[1] - num_nodes :]
            own = own.flatten()
            self.copies[layer] = LayerKV(tuple(pool.index_select(0, own) for pool in layer_kv.fields), PRIMARY)
        self._bias: dict[KeyLimits, torch.Tensor] = {}

    def enter_level(self, origin: torch.Tensor | None) -> None:
        self.level += 1
        if origin is not None:
            self.ancestors = self.ancestors.gather(1, origin[:, :, None].expand_as(self.ancestors))
        columns = torch.arange(self.draft.num_nodes, device=self.key_pos.device)
        own = columns[self._newest(), None]
        if self.draft.order is NodeOrder.LEVELS:
            self.ancestors = self.ancestors | (own == columns)
        else:
            self.ancestors = self.ancestors | (columns <= (own if self.draft.order is NodeOrder.CAUSAL else own.amax()))
        self._bias = {limits: bias_of(self._seen(*limits)) for limits in self.prefix}

    def destination(self, layer: int) -> Destination:
        cells = self._cells[self.draft.key_limits(layer)][:, self._newest()]
        return Destination(self.copies[layer].k, self.copies[layer].v, GroupLoc(cells.flatten()))

    def attend(self, layer: int, query: torch.Tensor, **options: Unpack[ScoreOptions]) -> torch.Tensor:
        bias = self._bias[self.draft.key_limits(layer)]
        layer_kv = self.copies[layer]
        both = all_rows(layer_kv.k), all_rows(layer_kv.v)
        k, v = (x.unflatten(0, (len(query), -1))[:, : bias.shape[3]].transpose(1, 2) for x in both)
        return dense_attention(query, k, v, bias, **options)

    def prefix_table(self, layer: int) -> PageTable:
        return self._tables[layer]

    def _newest(self) -> slice:
        return slice(self.level * self.draft.topk, (self.level + 1) * self.draft.topk)

    def _seen(self, window: int | None, first_key: int = 0) -> torch.Tensor:
        """Mask [B, K, L + nodes] of the keys that the newest level sees: of the prefix and of the nodes drafted so
        far."""
        key_pos, committed = self.prefix[window, first_key]
        filled = (self.level + 1) * self.draft.topk
        known = [committed[:, None].expand(-1, self.draft.topk, -1), self.ancestors[:, :, :filled]]
        key_pos = torch.cat([key_pos, self.key_pos[:, :filled]], dim=1)
        return visible(self.draft.window_positions(self.level), key_pos, torch.cat(known, dim=2), window, first_key)


class PagedDraftBlock:
    """A draft on the paged kernels. They read the prefix from the store without a copy, so a level costs only its
    reads.

    The scratch keys, [B * M, Hkv, D] per layer, are the "block" argument of `paged_attention`.
    """

    def __init__(self, store: KVStore, draft: DraftPlan) -> None:
        self.draft, self.level, self.store = draft, -1, store
        table, num_nodes = draft.table, draft.num_nodes
        batch, device = len(draft.committed_len), draft.positions.device
        self.tables = build_page_tables(table, draft.rows, draft.committed_len, 0)
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
        by_level = nodes.view(-1, 1, draft.topk) + num_nodes * torch.arange(batch, device=device)[:, None]
        self.slots = by_level.flatten(1)  # [levels, B * K]
        self.scratch: dict[int, LayerKV] = {}
        for layer, layer_kv in store.layers.items():
            k, v = (pool.new_empty((batch * num_nodes, *pool.shape[1:])) for pool in (layer_kv.k, layer_kv.v))
            self.scratch[layer] = LayerKV((k, v), PRIMARY)

    def enter_level(self, origin: torch.Tensor | None) -> None:
        self.level += 1
        own = self.bits_of[self.level * self.draft.topk : (self.level + 1) * self.draft.topk]
        if origin is None:
            self.bits = own.expand_as(self.bits)
        else:
            self.bits = self.bits.gather(1, origin[:, :, None].expand_as(self.bits)) | own

    def destination(self, layer: int) -> Destination:
        return Destination(self.scratch[layer].k, self.scratch[layer].v, GroupLoc(self.slots[self.level]))

    def attend(self, layer: int, query: torch.Tensor, **options: Unpack[ScoreOptions]) -> torch.Tensor:
        committed, scratch, draft = self.store.layers[layer], self.scratch[layer], self.draft
        filled = (self.level + 1) * draft.topk
        window, first_key = draft.key_limits(layer)
        (own_k, scales_k), (own_v, scales_v) = map(numbers_and_scales, (scratch.k, scratch.v))
        block_k, block_v = (x.unflatten(0, (len(query), -1))[:, :filled].transpose(1, 2) for x in (own_k, own_v))
        ancestors = self.bits[:, :, : -(-filled // WORD)]
        return paged_attention(
            *(query, committed.k, committed.v, self.prefix_table(layer)),
            BlockKeys(block_k, block_v, self.key_pos[:, :filled], ancestors, (scales_k, scales_v)),
            draft.window_positions(self.level),
            window=window,
            first_key=first_key,
            **options,
        )

    def prefix_table(self, layer: int) -> PageTable:
        return self.tables.table(self.store.layers[layer].group)
