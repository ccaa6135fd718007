"""The backend of an engine: its operations in plain torch or by Triton kernels, chosen when the engine is made.

    backend   tables of a plan     K/V written, moved    attention           of a draft's level      selection of trees
    torch     pages, by indexing   index_copy_ by slot   SDPA, by a gather   SDPA, one copy a draft  sorts, gathers
    triton    pages, one launch    store_kv, move_kv     tree_attention;     paged_attention         one launch each
                                                         ragged, of prompts

The torch backend runs anywhere, and is the reference for the Triton backend, which needs an NVIDIA GPU (tests run it on
a CPU in Triton's interpreter). Every plan refers to the backend that made it, and every worker gets that object, so no
code asks which backend it has.
"""

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from specdec.attention.dense import VisibleKeys, attend_alone, attend_together, masked_runs, runs_attention
from specdec.attention.draft_block import DraftBlock, DraftPlan, PagedDraftBlock, TorchDraftBlock
from specdec.attention.kernels.own_keys import PathKeys, own_keys
from specdec.attention.kernels.page_table import build_page_tables, reference_build_page_tables
from specdec.attention.kernels.ragged_attention import ragged_attention
from specdec.attention.kernels.tree_attention import tree_attention
from specdec.attention.plan import Attend, KVPlan, PackTables, PlanBackend
from specdec.attention.recurrence.gpu_recurrence import RecurrentKernels, fold_row
from specdec.attention.recurrence.torch_recurrence import RecurrentForward, fold_committed
from specdec.attention.trees.tree_builder import (
    TreeBackend,
    expand,
    reference_expand,
    reference_select_tree,
    select_tree,
)
from specdec.errors import ConfigError
from specdec.gpu.triton_shim import triton_obstacle
from specdec.kvcache.frozen import KVView
from specdec.kvcache.layout import GroupId, GroupLoc
from specdec.kvcache.store import KVStore, move_kv, reference_move_kv, reference_store_kv, store_kv

MAX_HEAD_DIM = 512


class Backend(PlanBackend, TreeBackend, Protocol):
    """The operations of one engine: tables, K/V and attention (`PlanBackend`), and trees (`TreeBackend`)."""

    name: str

    def draft_block(self, store: KVStore, draft: DraftPlan) -> DraftBlock:
        """K/V and attention of a draft in progress, for a drafter that keeps its own K/V in `store`."""


@dataclass(frozen=True, slots=True)
class TorchBackend:
    """Every operation as torch operators. deterministic: rows attend one by one, for which the host reads lengths.
    captured: forwards may be captured, so no other operation reads a value on the host."""

    name = "torch"
    deterministic: bool = False
    captured: bool = False

    def attention(self, plan: KVPlan, group: GroupId, window: int | None, shares: int = 1) -> Attend:
        if isinstance(plan.prefix, PackTables):
            runs = plan.prefix.pack, plan.prefix.lines[group], window, plan.first_key
            if self.captured and not self.deterministic:
                return masked_runs(*runs)
            return runs_attention(attend_alone if self.deterministic else attend_together, *runs)
        keys = VisibleKeys.from_plan(plan, group, window)
        return attend_alone(keys, plan.block_len) if self.deterministic else attend_together(keys)

    def move(self, store: KVStore, group: GroupId, source: GroupLoc, destination: GroupLoc) -> None:
        reference_move_kv(store.tensors(group), source, destination)

    locate = staticmethod(reference_build_page_tables)
    store = staticmethod(reference_store_kv)
    draft_block = TorchDraftBlock
    recurrence = RecurrentForward
    fold = staticmethod(fold_committed)
    expand = staticmethod(reference_expand)
    select_tree = staticmethod(reference_select_tree)


@dataclass(frozen=True, slots=True)
class TritonBackend:
    """Every operation as Triton launches: one for tables and write slots, one to store K/V, one to select a tree; two
    to attend or to move K/V.

    deterministic: keys are cut by absolute position in prompts too, as they always are in chains and trees; recurrent
    layers read prompts in the order of decoding.
    """

    name = "triton"
    deterministic: bool = False

    def attention(self, plan: KVPlan, group: GroupId, window: int | None, shares: int = 1) -> Attend:
        if isinstance(plan.prefix, PackTables):
            attend = partial(ragged_attention, pack=plan.prefix.pack, lines=plan.prefix.lines[group])
            return partial(attend, window=window, first_key=plan.first_key, exact=self.deterministic, shares=shares)
        table, tree = plan.prefix.table(group), plan.tree
        write = None if plan.write is None else plan.write_slots(group).view(plan.positions.shape)
        parents = None if tree is None or tree.is_chain else tree.parents
        own = own_keys(table, write, parents, None if tree is None else tree.max_depth)
        if window is not None:
            window += plan.window_shift
        path = PathKeys(table, own, plan.positions, plan.block_len, window, plan.first_key)
        return partial(tree_attention, path=path, shares=shares)

    def move(self, store: KVStore, group: GroupId, source: GroupLoc, destination: GroupLoc) -> None:
        addresses = store.addresses.get(group)
        if addresses is not None:
            move_kv(addresses, source, destination)

    def recurrence(self, plan: KVPlan, view: KVView) -> RecurrentKernels:
        return RecurrentKernels(plan, view, deterministic=self.deterministic)

    locate = staticmethod(build_page_tables)
    store = staticmethod(store_kv)
    draft_block = PagedDraftBlock
    fold = staticmethod(fold_row)
    expand = staticmethod(expand)
    select_tree = staticmethod(select_tree)


def choose_backend(
    attention: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    *,
    deterministic: bool = False,
    captured: bool = False,
) -> Backend:
    """Make the backend for `EngineConfig.attention`; "auto" is Triton on a GPU that can run the kernels.

    head_dim: the largest head of all models that keep K/V. captured: forwards may be captured, so the host must read
    nothing back during them. Raises ConfigError if "triton" was requested and cannot run with this device, dtype or
    head.
    """
    obstacle = ""
    if attention == "triton" or (attention == "auto" and device.type == "cuda"):
        obstacle = triton_obstacle(device, dtype)
        if not obstacle and head_dim > MAX_HEAD_DIM:
            obstacle = f" takes heads of at most {MAX_HEAD_DIM}, this model has {head_dim}; use attention='torch'"
        if not obstacle:
            return TritonBackend(deterministic)
        if attention == "triton":
            raise ConfigError(f"attention='triton'{obstacle}")
    if deterministic and device.type != "cpu":
        raise ConfigError(f"deterministic=True on {device} needs attention='triton'{obstacle}")
    return TorchBackend(deterministic, captured)
