"""The backend of an engine: its operations in plain torch or by Triton kernels, chosen when the engine is made.

    backend   tables of a plan     K/V written, moved    attention           of a draft's level      selection of trees
    torch     pages, by indexing   index_copy_ by slot   SDPA, by a gather   SDPA, one copy a draft  sorts, gathers
    triton    pages, one launch    store_kv, move_kv     tree_attention;     paged_attention         one launch each
                                                         ragged, of prompts

Every plan refers to the backend that made it, and every worker gets that object, so no code asks which one it is.
"""

from typing import Protocol

import torch

from specdec.attention.kernels.draft_block import DraftBlock, DraftPlan
from specdec.attention.plan import PlanBackend
from specdec.attention.torch_backend import TorchBackend
from specdec.attention.trees.tree_builder import TreeBackend
from specdec.attention.triton_backend import TritonBackend
from specdec.errors import ConfigError
from specdec.gpu.triton_device import triton_obstacle
from specdec.kvcache.store import KVStore

MAX_HEAD_DIM = 512


class Backend(PlanBackend, TreeBackend, Protocol):
    """Locate, store, move, attend (`PlanBackend`) and select trees (`TreeBackend`)."""

    name: str

    def draft_block(self, store: KVStore, draft: DraftPlan) -> DraftBlock:
        """K/V and attention of a draft in progress, for a drafter that keeps its own K/V in `store`."""


def choose_backend(
    attention: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    *,
    deterministic: bool = False,
    in_tiles: bool = False,
    captured: bool = False,
) -> Backend:
    """Make the backend for `EngineConfig.attention`; "auto" is Triton on a GPU that can run the kernels.

    head_dim: the largest head of all models that keep K/V. in_tiles: forwards run in tiles of rows (deterministic
    layers that are not fused do); the kernels cannot. captured: forwards may be captured, so the host must read nothing
    back during them. Raises ConfigError if "triton" was requested and cannot run with this device, dtype, head or
    tiles.
    """
    obstacle = ""
    if attention == "triton" or (attention == "auto" and device.type == "cuda"):
        obstacle = triton_obstacle(device, dtype)
        if not obstacle and head_dim > MAX_HEAD_DIM:
            obstacle = f" takes heads of at most {MAX_HEAD_DIM}, this model has {head_dim}; use attention='torch'"
        if not obstacle and in_tiles:
            obstacle = (
                " attends to whole forwards, and with deterministic=True layers that are not fused run in tiles of "
                "rows; use fused=True or attention='torch'"
            )
        if not obstacle:
            return TritonBackend(deterministic)
        if attention == "triton":
            raise ConfigError(f"attention='triton'{obstacle}")
    if deterministic and device.type != "cpu":
        raise ConfigError(f"deterministic=True on {device} needs attention='triton'{obstacle}")
    return TorchBackend(deterministic, captured)
