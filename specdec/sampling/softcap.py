r"""The softcap after a model's head: y = c tanh(x / c), each of the three results rounded to x's dtype.

Torch needs three operators, and each would read and write V numbers per row. This kernel gives the same bits: like
torch on a GPU, it divides by multiplying with the reciprocal. The tanh of a bfloat16 is at least 8e-6 (relative) away
from a rounding boundary, so a cheap tanh with an error of 2e-6 rounds to the same. float16 and float32 use CUDA's own
tanh, like torch. No row depends on others.
"""

import numpy as np
import torch

from specdec.gpu.operations import op
from specdec.gpu.triton_shim import INTERPRETED, pdl_options, tl, trigger_next, triton, wait_for_previous

BLOCK = 2048

LIBRARY = tl.constexpr(torch.version.cuda is not None and not INTERPRETED)


def inverse_cap(cap: float) -> float:
    return float(np.float32(1) / np.float32(cap))


def reference_softcap(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """See `softcap`; a new tensor."""
    return torch.tanh(logits / cap) * cap


@triton.jit
def _tanh(b_x: tl.tensor) -> tl.tensor:
    """Hyperbolic tangent within a few float32 units: a series near 0, where the quotient would cancel."""
    b_a = tl.abs(b_x)
    b_e = tl.exp(-2.0 * b_a)
    b_sq = b_a * b_a
    b_series = b_a * (1.0 + b_sq * (-0.33333334 + b_sq * (0.13333334 - b_sq * 0.053968254)))
    b_tanh = tl.where(b_a < 0.2, b_series, tl.div_rn(1.0 - b_e, 1.0 + b_e))
    return tl.where(b_x < 0, -b_tanh, b_tanh)


@triton.jit
def _cheap_tanh(b_x: tl.tensor) -> tl.tensor:
    """Hyperbolic tangent within 2e-6, without branches; NaN stays NaN."""
    b_x = tl.clamp(b_x, -40.0, 40.0, propagate_nan=tl.PropagateNan.ALL)  # e^80 is a float32
    b_sq = b_x * b_x
    b_series = b_x * (1.0 + b_sq * (b_sq * 0.13333334 - 0.33333334))
    return tl.where(tl.abs(b_x) < 0.09375, b_series, 2.0 * tl.sigmoid(2.0 * b_x) - 1.0)


@triton.jit
def capped(b_x: tl.tensor, cap: tl.tensor, inverse: tl.tensor) -> tl.tensor:
    """Softcap of b_x in its dtype; inverse: 1 / cap."""
    DTYPE: tl.constexpr = b_x.dtype
    b_y = (b_x.to(tl.float32) * inverse).to(DTYPE).to(tl.float32)
    if b_x.dtype == tl.bfloat16:
        b_tanh = _cheap_tanh(b_y)
    elif LIBRARY:  # it flushes subnormal arguments, whose tanh is the argument
        b_tanh = tl.where(tl.abs(b_y) < 0.0001, b_y, tl.extra.cuda.libdevice.tanh(b_y))
    else:
        b_tanh = _tanh(b_y)
    return (b_tanh.to(DTYPE).to(tl.float32) * cap).to(DTYPE)


@triton.jit(do_not_specialize=["cap", "inverse"])
def _softcap_kernel(
    p_x: tl.tensor,
    numel: tl.tensor,
    cap: tl.tensor,
    inverse: tl.tensor,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    o_x = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    b_x = tl.load(p_x + o_x, mask=o_x < numel, other=0.0)
    tl.store(p_x + o_x, capped(b_x, cap, inverse), mask=o_x < numel)


@op(reference=reference_softcap)
def softcap(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """Cap contiguous logits of any shape in place, and return them."""
    assert logits.is_contiguous(), f"{logits.stride()=}"
    if logits.numel():
        _softcap_kernel[(triton.cdiv(logits.numel(), BLOCK),)](
            *(logits, logits.numel(), cap, inverse_cap(cap)),
            BLOCK=BLOCK,
            num_warps=4,
            **pdl_options(logits.device),
        )
    return logits
