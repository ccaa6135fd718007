r"""The product of more than 32 rows of x and a packed weight. A weight tile is decoded once for many rows.

    y[m, n] = sum_k x[m, k] W[n, k] + bias[n]             gated: y[m, n] = act(g) u, as in `linear.py`

The weight is the M operand of the tensor core and stays in the registers where it was decoded, as in `gemm_small`. Rows
of x are the N operand, loaded by tensor descriptors, which leave more registers for a larger tile. The tensor core
waits while a program decodes, so two or three programs run per multiprocessor if they fit.

The last row tile ends with the last row, and so recomputes some rows: a descriptor that reads past the end of x is
slower (in tiles of 128 rows, 192 rows took 1.5 times as long as 256).

A sum over a range of K has the bits of `gemm_small` for any tile (`packed_launch.py`). In order, the ranges are those
of `gemm_small`; each has a program, or one program adds all ranges.
"""

import torch

from specdec.gpu.dependent_launch import pdl_options, trigger_next, wait_for_previous
from specdec.gpu.triton_shim import tl, triton
from specdec.layers.gemm_medium import store_columns
from specdec.layers.gemm_small import sum_range
from specdec.layers.packed.packed_launch import PackedLaunch
from specdec.layers.packed.packed_tile import weight_constants, weight_pointers, weight_rows
from specdec.layers.packed.packed_weight import PackedWeight
from specdec.layers.product import Product


@triton.jit(do_not_specialize=["num_rows"])
def packed_gemm_kernel(
    d_x: tl.tensor,  # descriptor of [M, K], tiles [BM, BK]
    d_tail: tl.tensor,  # descriptor of the same, tiles [TAIL_M, BK], or None
    p_w: tl.tensor,  # words of [N, K], and scales and zeros: a weight by `weight_pointers`
    p_scales: tl.tensor,
    p_zeros: tl.tensor,
    p_bias: tl.tensor,  # [N] or None
    p_out: tl.tensor,  # [S, M, N] float32, [1, M, N] or, gated, [M, N / 2]
    num_rows: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    split_len: tl.tensor,
    s_w: tl.tensor,
    s_scales: tl.tensor,
    CODE: tl.constexpr,  # and GROUP and FAST: `weight_constants`
    GROUP: tl.constexpr,
    FAST: tl.constexpr,
    SUMMED: tl.constexpr,  # a program adds up all ranges
    ACTIVATION: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TAIL_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """grid (row tiles, weight tiles, ranges of K)"""
    trigger_next(PDL)
    PARTS: tl.constexpr = 1 if ACTIVATION is None else 2  # of a tile: gates, then what they gate
    DTYPE: tl.constexpr = d_x.dtype
    first_m = tl.program_id(0) * (BLOCK_M + TAIL_M)
    tail_m = tl.maximum(tl.minimum(first_m + BLOCK_M, num_rows - TAIL_M), 0)
    first_m = tl.maximum(tl.minimum(first_m, num_rows - BLOCK_M), 0)
    first_n = tl.program_id(1) * (BLOCK_N // PARTS)
    first_k = tl.program_id(2) * split_len
    p_w, p_scale, p_zero, m_w, m_n = weight_rows(
        *(p_w, p_scales, p_zeros, tl.program_id(1), 0, N, s_w, CODE, BLOCK_N, PARTS)
    )
    wait_for_previous(PDL)

    if SUMMED:
        b_sum = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for i_range in range(0, K, split_len):
            b_part, _ = sum_range(
                *(p_w, p_scale, p_zero, s_scales, m_w, m_n, d_x, first_m, d_tail, tail_m),
                *(i_range, tl.minimum(i_range + split_len, K)),
                *(EVEN_K, CODE, GROUP, FAST, True, DTYPE, BLOCK_N, BLOCK_M, 0, BLOCK_K),
            )
            b_sum += b_part
        b_tail = b_sum
    else:
        b_sum, b_tail = sum_range(
            *(p_w, p_scale, p_zero, s_scales, m_w, m_n, d_x, first_m, d_tail, tail_m),
            *(first_k, tl.minimum(first_k + split_len, K)),
            *(EVEN_K, CODE, GROUP, FAST, True, DTYPE, BLOCK_N, BLOCK_M, TAIL_M, BLOCK_K),
        )

    p_out += tl.program_id(2).to(tl.int64) * num_rows * N
    o_m = first_m + tl.arange(0, BLOCK_M)
    store_columns(b_sum.T, p_bias, p_out, o_m, first_n, num_rows, N, ACTIVATION)
    if TAIL_M:
        o_m = tail_m + tl.arange(0, TAIL_M)
        store_columns(b_tail.T, p_bias, p_out, o_m, first_n, num_rows, N, ACTIVATION)


def packed_gemm(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, activation: str | None, launch: PackedLaunch
) -> Product:
    """x [M, K] as descriptors need it, weight [N, K], bias [N] or None -> product, or gated [1, M, N / 2]."""
    from triton.tools.tensor_descriptor import TensorDescriptor  # Triton may not be there

    (num_rows, k), n, gated = x.shape, len(weight), activation is not None
    tiles, cut, summed = launch
    assert weight.shape[1] == k and x.stride(1) == 1, f"{x.shape=} {weight.shape=} {x.stride()=}"
    assert bias is None or (bias.shape == (n,) and bias.is_contiguous()), f"{bias.shape=} {n=}"
    assert cut.splits == 1 or (not gated and cut.split_len % tiles.block_k == 0), f"{cut=} {tiles=}"
    assert not summed or tiles.tail_m == 0, f"{launch=}"
    split = launch.parts > 1
    shape = (launch.parts, num_rows, n // 2 if gated else n)
    out = torch.empty(shape, dtype=torch.float32 if split else x.dtype, device=x.device)
    words, scales, zeros, s_w, s_scales = weight_pointers(weight)

    def described(rows: int) -> TensorDescriptor:
        return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, tiles.block_k])

    row_tiles = triton.cdiv(num_rows, tiles.block_m + tiles.tail_m)
    packed_gemm_kernel[(row_tiles, triton.cdiv(n, tiles.block_n), launch.parts)](
        *(described(tiles.block_m), described(tiles.tail_m) if tiles.tail_m else None),
        *(words, scales, zeros, None if split else bias, out),
        *(num_rows, n, k, cut.split_len if cut.splits > 1 else k, s_w, s_scales),
        **weight_constants(weight, x.dtype),
        SUMMED=summed,
        ACTIVATION=activation,
        EVEN_K=k % tiles.block_k == 0,
        BLOCK_M=tiles.block_m,
        TAIL_M=tiles.tail_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        maxnreg=tiles.registers,
        **pdl_options(x.device),
    )
    return Product(out, bias if split else None, x.dtype)
