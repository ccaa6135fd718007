"""The backend that runs anywhere, and the oracle of the Triton backend: plain torch over tables of slots."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from specdec.attention.dense import VisibleKeys
from specdec.attention.deterministic_attention import deterministic_attention
from specdec.attention.kernels.draft_block import CopiedDraft, Draft, DraftBlock
from specdec.attention.kernels.own_keys import reference_own_keys
from specdec.attention.pack import PackTables
from specdec.attention.path_attention import PathAttention
from specdec.attention.plan import Attend, KVPlan
from specdec.attention.runs import EveryRun, RunsAttention, dense_run, exact_run
from specdec.attention.trees.beam import reference_expand
from specdec.attention.trees.growth import reference_select_tree
from specdec.kvcache.index_spaces import FullLoc, SlotTable, Space, SwaLoc
from specdec.kvcache.store import KVStore, LayerKV, reference_move_kv, reference_store_kv
from specdec.kvcache.table import RequestTable, Rows


class SlotTables(NamedTuple):
    """`PrefixTables` as slots, position by position; SWA is O(window) wide."""

    full: SlotTable[FullLoc]
    swa: SlotTable[SwaLoc] | None
    write_full: FullLoc
    write_swa: SwaLoc | None

    def pages(self, space: Space) -> tuple[torch.Tensor, torch.Tensor]:
        table = self.full if space is Space.FULL else self.swa
        assert table is not None, "no SWA space"
        return table.pages, table.start


@dataclass(frozen=True, slots=True)
class TorchBackend:
    """Every step as torch operators. deterministic: keys are cut by absolute position, which reads lengths back.
    captured: nothing else does."""

    name = "torch"
    deterministic: bool = False
    captured: bool = False

    def locate(self, table: RequestTable, rows: Rows, committed_len: torch.Tensor, num_queries: int) -> SlotTables:
        page_size, retain = table.allocator.page_size, table.retain
        slots, row = table.slots.tensor, rows.index[:, None]
        last = slots.shape[1] - 1
        full = FullLoc(slots[row, torch.arange(rows.longest, device=slots.device)])
        prefix_full = SlotTable(full, torch.zeros_like(committed_len), page_size)
        # the node at index n of a block lives at position S + n of the row, whatever its depth
        own = committed_len[:, None] + torch.arange(num_queries, device=slots.device)  # [B, N]
        write_full = FullLoc(slots[row, own.clamp(max=last)])
        if retain is None:
            return SlotTables(prefix_full, None, write_full, None)
        # only pages that a query of this step can see, so O(window) columns
        start = (committed_len - retain).clamp(min=0) // page_size * page_size
        columns = start[:, None] + torch.arange(min(rows.longest, retain + page_size - 1), device=slots.device)
        swa = table.allocator.translate(FullLoc(slots[row, columns.clamp(max=last)]))
        prefix_swa = SlotTable(swa, start, page_size)
        return SlotTables(prefix_full, prefix_swa, write_full, table.allocator.translate(write_full))

    def attention(self, plan: KVPlan, space: Space, window: int | None) -> Attend:
        if plan.pack is not None:
            assert isinstance(plan.prefix, PackTables), f"a pack with {type(plan.prefix).__name__}"
            if self.captured and not self.deterministic:
                return EveryRun(plan.pack, plan.prefix.of(space), window)
            make = exact_run if self.deterministic else dense_run
            return RunsAttention.of(make, plan.pack, plan.prefix.of(space), window)
        assert isinstance(plan.prefix, SlotTables), f"a plan of another backend: {type(plan.prefix).__name__}"
        table = plan.prefix.full if space is Space.FULL else plan.prefix.swa
        assert table is not None, "a sliding layer, but the plan has no SWA table"
        if self.deterministic:
            find, located = reference_own_keys, (table.pages, table.start)
            return PathAttention.of(deterministic_attention, find, plan, located, space, window)
        return VisibleKeys.of(plan, table, space, window).attend

    def draft_block(self, store: KVStore, draft: Draft) -> DraftBlock:
        return CopiedDraft(store, draft)

    def store(self, layer: LayerKV, slots: FullLoc | SwaLoc, k: torch.Tensor, v: torch.Tensor) -> None:
        reference_store_kv(k, v, slots, layer.k, layer.v)

    def move(self, store: KVStore, space: Space, source: FullLoc | SwaLoc, destination: FullLoc | SwaLoc) -> None:
        reference_move_kv(store.tensors(space), source, destination)

    expand = staticmethod(reference_expand)
    select_tree = staticmethod(reference_select_tree)
