"""Programmatic dependent launch: how the kernels of this folder overlap the end of one with the start of the next.

On Hopper and later a kernel may start while its predecessor still runs. Every kernel here then goes through

    trigger          the next kernel may start, as soon as all programs of this one have
    weights, gains   read: nothing of this forward writes them
    wait             until the kernel before has ended and what it wrote can be seen
    the rest         activations are read, and everything is written, after the wait

Every program waits, so by induction all earlier kernels have ended, not the last one only. The wait stands before any
loop over K: inside one, Triton hoists the loads above it (#11905). Off before Hopper and in the interpreter.

Two kernels may agree to work past those between them:

    holds    triggers after its wait: a launch that starts then finds that all before it have ended
    early    in some later launch, programs that read nothing newer than that; they wait as their last act, and the
             memory that they write belongs to no kernel between the two
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
    """Nothing that an earlier kernel wrote is read, and nothing is written, before this."""
    if PDL:
        tl.extra.cuda.gdc_wait()


def pdl_options(device: torch.device, *, behind_library: bool = False) -> dict[str, Any]:
    """The launch options of every kernel of this folder.

    behind_library: the kernel in front lets nothing start before it ends, and then a plain launch comes sooner.
    """
    return {"PDL": True, "launch_pdl": not behind_library} if has_pdl(device) else {"PDL": False}


@cache
def has_pdl(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (9,)
