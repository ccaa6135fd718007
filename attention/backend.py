"""What an engine computes with: plain torch, or the Triton kernels. One object, chosen at construction.

    backend   tables of a plan     K/V written, moved    attention           of a draft's level      trees and walks
    torch     slots, by indexing   index_copy_ by slot   SDPA, by a gather   SDPA, one copy a draft  sorts and gathers
    triton    pages, one launch    store_kv, move_kv     paged_attention     the same                one launch each

Every plan refers to the backend that made it, every worker is handed it; nothing further down asks which one it is.
"""

from typing import Protocol

import torch

from specdec.attention.kernels.draft_block import Draft, DraftBlock
from specdec.attention.kernels.paged_attention import device_limits
from specdec.attention.kernels.paged_attention_kernels import attend_kernel
from specdec.attention.plan import PlanBackend
from specdec.attention.torch_backend import TorchBackend
from specdec.attention.trees.growth import TreeBackend
from specdec.attention.trees.tree import DraftTree
from specdec.attention.trees.walk import Accepted
from specdec.attention.triton_backend import TritonBackend
from specdec.errors import ConfigError
from specdec.gpu.triton_shim import triton
from specdec.kvcache.store import KVStore

MAX_HEAD_DIM = 512
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Backend(PlanBackend, TreeBackend, Protocol):
    """Locate, store, move, attend (`PlanBackend`), select trees (`TreeBackend`) and walk them."""

    name: str

    def draft_block(self, store: KVStore, draft: Draft) -> DraftBlock:
        """The K/V and attention of a draft in progress, by a drafter that keeps its own K/V in `store`."""

    def accept(self, tree: DraftTree, target_tokens: torch.Tensor) -> Accepted:
        """The path on which every draft is what the target drew: see `tree_walk`."""


def choose_backend(
    attention: str, device: torch.device, dtype: torch.dtype, head_dim: int, *, deterministic: bool = False
) -> Backend:
    """The backend that `EngineConfig.attention` means; "auto" is Triton on a GPU that can run the kernels.

    head_dim: the largest of all models that keep K/V. Raises ConfigError when it is "triton", and Triton cannot run on
    `device`, or not with the dtype or that head.
    """
    obstacle = ""
    if attention == "triton" or (attention == "auto" and device.type == "cuda"):
        obstacle = _obstacle(device, dtype, head_dim)
        if not obstacle:
            return TritonBackend(deterministic)
        if attention == "triton":
            raise ConfigError(f"attention='triton'{obstacle}")
    if deterministic and device.type != "cpu":
        raise ConfigError(f"deterministic=True on {device} needs attention='triton'{obstacle}")
    return TorchBackend(deterministic)


def _obstacle(device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """Why the kernels cannot run, and what to do, as the rest of a sentence; empty: they can."""
    if not triton:
        return ": Triton is not installed; install it, or use attention='torch'"
    interpreted = not isinstance(attend_kernel, triton.JITFunction)  # decided when the kernels were imported
    if interpreted != triton.knobs.runtime.interpret or not (interpreted or device.type == "cuda"):
        return (
            f" needs a CUDA device, and this model is on {device}; use attention='torch', or set "
            "TRITON_INTERPRET=1 before Python starts to run the kernels, slowly, in Triton's interpreter"
        )
    if not interpreted:
        try:
            device_limits(device)
        except Exception as error:  # of many kinds: Triton builds its launcher when it starts
            return f": Triton does not start ({error}); it needs a C compiler and Python.h, or use attention='torch'"
    if device.type == "cuda" and (torch.version.cuda is None or torch.cuda.get_device_capability(device) < (8, 0)):
        return " needs an NVIDIA GPU of compute capability 8.0 (Ampere) or later; use attention='torch'"
    dtypes = KERNEL_DTYPES[:2] if interpreted else KERNEL_DTYPES  # the interpreter multiplies bfloat16 as integers
    if dtype not in dtypes:
        return f" works in {', '.join(map(str, dtypes))}, not {dtype}; use attention='torch'"
    if head_dim > MAX_HEAD_DIM:
        return f" takes heads of at most {MAX_HEAD_DIM}, this model has {head_dim}; use attention='torch'"
    return ""
