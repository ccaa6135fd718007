"""Cosines and sines of the rotary embedding, in one launch a forward and kind of layer.

    cos[t, j] = dtype(cos(pos_t f_j) c),   sin[t, j] = dtype(sin(pos_t f_j) c)          j < R / 2

f are the frequencies that a transformers rotary module holds, c its attention factor; both halves of a head share them.
For modules whose frequencies do not depend on the sequence.
"""

from typing import NamedTuple

import torch

from specdec.gpu.dependent_launch import TL_DTYPES, pdl_options, trigger_next, wait_for_previous
from specdec.gpu.operations import op
from specdec.gpu.triton_shim import KEEP, tl, triton


class Rotary(NamedTuple):
    """cos, sin [T, R / 2] in the model's dtype, as transformers rounds them."""

    cos: torch.Tensor
    sin: torch.Tensor


def reference_rotary(positions: torch.Tensor, frequencies: torch.Tensor, factor: float, dtype: torch.dtype) -> Rotary:
    """positions [T], frequencies [R / 2]."""
    angles = positions.float()[:, None] * frequencies.float()
    return Rotary((angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype))


@triton.jit(do_not_specialize=["factor"])
def _rotary_kernel(
    p_positions: tl.tensor,  # [T]
    p_frequencies: tl.tensor,  # [R / 2]
    p_cos: tl.tensor,  # [T, R / 2]
    p_sin: tl.tensor,
    half: tl.tensor,
    s_positions: tl.tensor,
    factor: tl.tensor,
    DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    i_t = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b_frequency = tl.load(p_frequencies + o, mask=o < half, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    b_angle = tl.load(p_positions + i_t * s_positions).to(tl.float32) * b_frequency
    tl.store(p_cos + i_t * half + o, (tl.cos(b_angle) * factor).to(DTYPE), mask=o < half, eviction_policy=KEEP)
    tl.store(p_sin + i_t * half + o, (tl.sin(b_angle) * factor).to(DTYPE), mask=o < half, eviction_policy=KEEP)


@op(reference=reference_rotary)
def rotary(positions: torch.Tensor, frequencies: torch.Tensor, factor: float, dtype: torch.dtype) -> Rotary:
    """positions [T], frequencies [R / 2]."""
    num_rows, half = len(positions), len(frequencies)
    cos, sin = torch.empty((2, num_rows, half), dtype=dtype, device=positions.device)
    if cos.numel():  # no frequencies: nothing rotates
        _rotary_kernel[(num_rows, triton.cdiv(half, 64))](
            *(positions, frequencies.contiguous(), cos, sin, half, positions.stride(0), factor),
            DTYPE=TL_DTYPES[dtype],
            BLOCK=64,
            num_warps=1,
            **pdl_options(positions.device),
        )
    return Rotary(cos, sin)
