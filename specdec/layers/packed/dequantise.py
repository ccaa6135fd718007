"""Dequantises a packed weight into memory on a GPU, so that the vendor's library can multiply many rows by it."""

import torch

from specdec.gpu.triton_shim import tl, triton
from specdec.layers.packed.packed_tile import (
    load_tile,
    row_pointers,
    scale_pointers,
    scale_sum,
    tile_columns,
    weight_constants,
    weight_pointers,
    zero_pointers,
)
from specdec.layers.packed.packed_weight import PackedWeight


@triton.jit
def _dequantise_kernel(
    p_w: tl.tensor,
    p_scales: tl.tensor,
    p_zeros: tl.tensor,
    p_out: tl.tensor,  # [N, K]
    N: tl.tensor,
    K: tl.tensor,
    s_w: tl.tensor,
    s_scales: tl.tensor,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    i_k = tl.program_id(1) * BLOCK_K
    o_k = i_k + tl.arange(0, BLOCK_K)
    m_n = (o_n < N)[:, None]
    DTYPE: tl.constexpr = p_out.dtype.element_ty
    p_scale_tile = scale_pointers(p_scales, o_n, CODE)
    b_w = load_tile(
        *(row_pointers(p_w, o_n, s_w, CODE), p_scale_tile, zero_pointers(p_zeros, o_n, CODE), s_scales, i_k, K),
        *(m_n, m_n, False, CODE, GROUP, FAST, BLOCK_K, DTYPE),
    ).to(tl.float32)
    if CODE == "e4m3" and GROUP > 0:
        b_w *= tl.load(p_scale_tile + i_k // GROUP * s_scales, mask=m_n, other=0.0).to(tl.float32)
    else:
        b_w = scale_sum(b_w, p_scale_tile, m_n, CODE, GROUP, FAST, DTYPE)
    tl.store(p_out + o_n.to(tl.int64)[:, None] * K + o_k[None, :], b_w.to(DTYPE), mask=m_n & (o_k < K)[None, :])


def dequantise(weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """The weight [N, K] in `dtype`, on a GPU, in temporary memory."""
    n, k = weight.shape
    out = torch.empty((n, k), dtype=dtype, device=weight.device)
    block_k = min(128, tile_columns(weight) or 128)
    words, scales, zeros, s_w, s_scales = weight_pointers(weight)
    _dequantise_kernel[(triton.cdiv(n, 64), triton.cdiv(k, block_k))](
        *(words, scales, zeros, out, n, k, s_w, s_scales),
        **weight_constants(weight, dtype),
        BLOCK_N=64,
        BLOCK_K=block_k,
        num_warps=4,
    )
    return out
