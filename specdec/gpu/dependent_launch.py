"""Programmatic dependent launch: how one kernel's start overlaps the end of the kernel before.

On Hopper and later a kernel may start while its predecessor still runs. Every kernel here then goes through

    trigger          the next kernel may start, as soon as all programs of this one have
    weights, gains   read: no kernel of this forward writes them
    wait             until the kernel before has ended and its writes are visible
    the rest         activations are read, and all results written, after the wait

Every program waits, so by induction all earlier kernels have ended, not only the last one. The wait comes before any
loop over K: inside a loop, Triton would hoist loads above it (#11905). It is off before Hopper and in the interpreter.

Two kernels may agree to overlap across the kernels between them:

    holds    triggers after its wait, so when the next launch starts, all kernels before this one have ended
    early    in a later launch, programs that read nothing newer; they wait last, and no kernel between the two
             uses the memory that they write
"""

from functools import cache
from typing import Any

import torch

from specdec.gpu.triton_shim import tl, triton

TL_DTYPES: dict[torch.dtype, Any] = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def trigger_next(PDL: tl.constexpr) -> None:
    """Let the next kernel start."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr) -> None:
    """Wait; before this, nothing that an earlier kernel wrote may be read, and nothing may be written."""
    if PDL:
        tl.extra.cuda.gdc_wait()


def pdl_options(device: torch.device, *, behind_library: bool = False) -> dict[str, Any]:
    """The launch options of every kernel.

    behind_library: the kernel before never triggers early; a plain launch is then faster.
    """
    return {"PDL": True, "launch_pdl": not behind_library} if has_pdl(device) else {"PDL": False}


@cache
def has_pdl(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (9,)
