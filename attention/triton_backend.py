"""The backend for NVIDIA GPUs: Triton kernels over page tables. Tests run it on a CPU in Triton's interpreter."""

from dataclasses import dataclass
from functools import partial

import torch

from specdec.attention.kernels.draft_block import DraftBlock, DraftPlan, PagedDraftBlock
from specdec.attention.kernels.own_keys import own_keys
from specdec.attention.kernels.page_table import PageTables, build_page_tables, locate_prefixes
from specdec.attention.kernels.ragged_attention import RaggedAttention
from specdec.attention.kernels.tree_attention import tree_attention
from specdec.attention.pack import PackTables
from specdec.attention.path_attention import PathAttention
from specdec.attention.plan import Attend, KVPlan
from specdec.attention.recurrence.kernel_forward import RecurrentKernels, fold_row
from specdec.attention.trees.beam import MAX_KERNEL_TOPK, Candidates, Scored, expand, reference_expand
from specdec.attention.trees.tree import DraftTree
from specdec.attention.trees.tree_builder import MAX_CANDIDATES, reference_select_tree, select_tree
from specdec.kvcache.frozen import KVView
from specdec.kvcache.index_spaces import GroupId, GroupLoc
from specdec.kvcache.store import KVStore, LayerKV, move_kv, store_kv
from specdec.kvcache.table import RequestTable, Rows


@dataclass(frozen=True, slots=True)
class TritonBackend:
    """Tables and write slots take one launch, a store of K/V and a tree one each; attention and moves take two.

    deterministic: prompts' keys too are cut by absolute position (keys of chains and trees always are), and recurrent
    layers read prompts in the order of decoding.
    """

    name = "triton"
    deterministic: bool = False

    def locate(self, table: RequestTable, rows: Rows, committed_len: torch.Tensor, num_queries: int) -> PageTables:
        return locate_prefixes(build_page_tables, table, rows, committed_len, num_queries)

    def attention(self, plan: KVPlan, group: GroupId, window: int | None, shares: int = 1) -> Attend:
        if plan.pack is not None:
            assert isinstance(plan.prefix, PackTables), f"a pack with {type(plan.prefix).__name__}"
            lines = plan.prefix.group_table(group)
            return RaggedAttention(plan.pack, lines, window, self.deterministic, shares, plan.first_key)
        assert isinstance(plan.prefix, PageTables), f"no pack with {type(plan.prefix).__name__}"
        attend = partial(tree_attention, shares=shares)
        return PathAttention.from_plan(attend, own_keys, plan, plan.prefix.group_table(group), group, window)

    def draft_block(self, store: KVStore, draft: DraftPlan) -> DraftBlock:
        return PagedDraftBlock(store, draft)

    def store(self, layer: LayerKV, slots: GroupLoc, k: torch.Tensor, v: torch.Tensor) -> None:
        store_kv(k, v, slots, layer.k, layer.v)

    def move(self, store: KVStore, group: GroupId, source: GroupLoc, destination: GroupLoc) -> None:
        addresses = store.addresses.get(group)
        if addresses is not None:
            move_kv(addresses, source, destination)

    def fold(self, table: RequestTable, store: KVStore, row: int, length: int) -> None:
        fold_row(table, store, row, length)

    def recurrence(self, plan: KVPlan, view: KVView) -> RecurrentKernels:
        return RecurrentKernels(plan, view, deterministic=self.deterministic)

    def expand(
        self, above: Scored | None, tokens: torch.Tensor, log_probs: torch.Tensor, out: Candidates, first_candidate: int
    ) -> Scored:
        grow = expand if tokens.shape[-1] <= MAX_KERNEL_TOPK else reference_expand
        return grow(above, tokens, log_probs, out, first_candidate)

    def select_tree(self, root: torch.Tensor, found: Candidates, *, num_nodes: int, num_levels: int) -> DraftTree:
        choose = select_tree if found.tokens.shape[1] <= MAX_CANDIDATES else reference_select_tree
        return choose(root, found, num_nodes=num_nodes, num_levels=num_levels)
