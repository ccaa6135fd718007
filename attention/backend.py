"""What an engine computes with: plain torch, or the Triton kernels. One choice an engine, made at construction.

    attention   keys and values           attention            page tables         tree selection, accept walk
    torch       index_copy_ by slot       SDPA over a gather   slots, by indexing  sorts and gathers
    triton      store_kv, move_kv         paged_attention      one launch          one launch each

The choice is a flag of the engine's pools (`runs_kernels`) and of nothing else. A plan over such pools has page tables,
and whoever attends under it does so by the kernels; other plans have slot tables.
"""

from collections.abc import Callable, Iterable
from functools import partial

import torch

from specdec.attention.paged_attention import ancestor_bits, device_limits, paged_attention
from specdec.attention.paged_attention_kernels import attend_kernel
from specdec.attention.plan import KVPlan
from specdec.attention.reference import VisibleKeys
from specdec.errors import ConfigError
from specdec.kvcache.triton_shim import triton

MAX_HEAD_DIM = 512
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

Attend = Callable[..., torch.Tensor]
"""Attention of one forward on layers of one window: (query [B, Hq, N, D], the forward's own new keys and values
[B, Hkv, N, D] or None, pool_k, pool_v [slots, Hkv, D] that hold those already, *, scaling, softcap, sinks) ->
[B, N, Hq, D]."""


def attention_by_window(plan: KVPlan, windows: Iterable[int | None], dtype: torch.dtype) -> dict[int | None, Attend]:
    """For each sliding window (None: full attention) what layers with it do under `plan`; dtype: the model's."""
    tables = plan.page_tables
    if tables is None:
        return {window: VisibleKeys.of(plan, window, dtype).attend for window in set(windows)}
    # a chunk is causal, and may be wider than the bits of a tree
    bits = None if plan.ancestors is None or plan.block_len is not None else ancestor_bits(plan.ancestors)
    full = partial(
        paged_attention,
        pages=tables.full_pages,
        start=torch.zeros_like(plan.committed_len),
        committed_len=plan.committed_len,
        positions=plan.positions,
        page_size=plan.page_size,
        ancestors=bits,
        block_len=plan.block_len,
    )
    sliding = partial(full, pages=tables.swa_pages, start=tables.swa_start)
    return {w: full if w is None else partial(sliding, window=w + plan.window_shift) for w in set(windows)}


def use_kernels(attention: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether `EngineConfig.attention` means the kernels; "auto" does on a GPU that can run them.

    Raises ConfigError when it is "triton", and Triton cannot run on `device`, or not with the dtype or largest head.
    """
    if attention == "torch" or (attention == "auto" and device.type != "cuda"):
        return False
    obstacle = _obstacle(device, dtype, head_dim)
    if obstacle and attention == "triton":
        raise ConfigError(f"attention='triton'{obstacle}")
    return obstacle is None


def _obstacle(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the kernels cannot run, and what to do, as the rest of a sentence."""
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
    return None
