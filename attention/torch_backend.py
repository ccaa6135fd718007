"""The backend in plain torch. It runs anywhere, and is the reference for the Triton backend."""

from dataclasses import dataclass

import torch

from specdec.attention.dense import VisibleKeys
from specdec.attention.deterministic_attention import deterministic_attention
from specdec.attention.kernels.draft_block import CopiedDraftBlock, DraftBlock, DraftPlan
from specdec.attention.kernels.own_keys import reference_own_keys
from specdec.attention.kernels.page_table import PageTables, locate_prefixes, reference_build_page_tables
from specdec.attention.pack import PackTables
from specdec.attention.path_attention import PathAttention
from specdec.attention.plan import Attend, KVPlan
from specdec.attention.recurrence.forward import RecurrentForward, fold_committed
from specdec.attention.runs import MaskedRuns, RunsAttention, dense_run, exact_run
from specdec.attention.trees.beam import reference_expand
from specdec.attention.trees.tree_builder import reference_select_tree
from specdec.kvcache.frozen import KVView
from specdec.kvcache.index_spaces import GroupId, GroupLoc
from specdec.kvcache.store import KVStore, LayerKV, reference_move_kv, reference_store_kv
from specdec.kvcache.table import RequestTable, Rows


@dataclass(frozen=True, slots=True)
class TorchBackend:
    """Every operation as torch operators. deterministic: keys are cut by absolute position, for which the host reads
    lengths. captured: the host reads nothing else."""

    name = "torch"
    deterministic: bool = False
    captured: bool = False

    def locate(self, table: RequestTable, rows: Rows, committed_len: torch.Tensor, num_queries: int) -> PageTables:
        return locate_prefixes(reference_build_page_tables, table, rows, committed_len, num_queries)

    def attention(self, plan: KVPlan, group: GroupId, window: int | None, shares: int = 1) -> Attend:
        if plan.pack is not None:
            assert isinstance(plan.prefix, PackTables), f"a pack with {type(plan.prefix).__name__}"
            if self.captured and not self.deterministic:
                return MaskedRuns(plan.pack, plan.prefix.group_table(group), window, plan.first_key)
            make = exact_run if self.deterministic else dense_run
            return RunsAttention.from_pack(make, plan.pack, plan.prefix.group_table(group), window, plan.first_key)
        assert isinstance(plan.prefix, PageTables), f"no pack with {type(plan.prefix).__name__}"
        if self.deterministic:
            table = plan.prefix.group_table(group)
            return PathAttention.from_plan(deterministic_attention, reference_own_keys, plan, table, group, window)
        return VisibleKeys.from_plan(plan, *plan.prefix.slots(group, plan.page_size), group, window).attend

    def draft_block(self, store: KVStore, draft: DraftPlan) -> DraftBlock:
        return CopiedDraftBlock(store, draft)

    def store(self, layer: LayerKV, slots: GroupLoc, k: torch.Tensor, v: torch.Tensor) -> None:
        reference_store_kv(k, v, slots, layer.k, layer.v)

    def move(self, store: KVStore, group: GroupId, source: GroupLoc, destination: GroupLoc) -> None:
        reference_move_kv(store.tensors(group), source, destination)

    def fold(self, table: RequestTable, store: KVStore, row: int, length: int) -> None:
        fold_committed(table, store, row, length)

    def recurrence(self, plan: KVPlan, view: KVView) -> RecurrentForward:
        return RecurrentForward(plan, view)

    expand = staticmethod(reference_expand)
    select_tree = staticmethod(reference_select_tree)
