r"""The product of more than 32 rows of x and a packed weight. A weight tile is decoded once for many rows.

    y[m, n] = sum_k x[m, k] W[n, k] + bias[n]             gated: y[m, n] = act(g) u, as in `linear.py`

The weight is the M operand of the tensor core and stays in the registers where it was decoded, as in `gemm_small`. Rows
of x are the N operand, loaded by tensor descriptors, which leave more registers for a larger tile. The tensor core
waits while a program decodes, so two or three programs run per multiprocessor if they fit.

The last row tile ends with the last row, and so recomputes some rows: a descriptor that reads past the end of x is
slower (in tiles of 128 rows, 192 rows took 1.5 times as long as 256).

If one tile size would load the multiprocessors unevenly, a launch mixes two: tall tiles of x for some tiles of the
weight, and short ones (`SHORT_M` rows) for the others. Example: gate and up of Gemma 4 E4B at 256 rows. Tall tiles
alone are 320 programs, so some of the 132 multiprocessors run three and others two. Mixed, there are 264 tall
programs, two for each, and 224 short ones with a quarter of the rows.

A sum over a range of K has the bits of `gemm_small` for any tile (`packed_launch.py`). In order, the ranges are those
of `gemm_small`; each has a program, or one program adds all ranges.

For still more rows `dequantise` writes the weight to memory, and the vendor's library multiplies by it.
"""

import torch

from specdec.gpu.triton_shim import pdl_options, tl, trigger_next, triton, wait_for_previous
from specdec.layers.gemm.gemm_medium import descriptor, store_columns
from specdec.layers.gemm.gemm_small import sum_range
from specdec.layers.gemm.product import Product, require_operands
from specdec.layers.packed.packed_launch import PackedLaunch
from specdec.layers.packed.packed_tile import (
    load_tile,
    row_pointers,
    scale_pointers,
    scale_sum,
    tile_columns,
    weight_constants,
    weight_pointers,
    weight_rows,
    zero_pointers,
)
from specdec.layers.packed.packed_weight import PackedWeight


@triton.jit
def _multiply_rows(
    d_x: tl.tensor,  # descriptors as in `packed_gemm_kernel`, each with its first row
    first_m: tl.tensor,
    d_tail: tl.tensor,
    tail_m: tl.tensor,
    p_w: tl.tensor,  # a tile of the weight, as `weight_rows` returns it
    p_scale: tl.tensor,
    p_zero: tl.tensor,
    m_w: tl.tensor,
    m_n: tl.tensor,
    p_bias: tl.tensor,
    p_out: tl.tensor,
    first_n: tl.tensor,
    first_k: tl.tensor,
    num_rows: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    split_len: tl.tensor,
    s_scales: tl.tensor,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    FAST: tl.constexpr,
    SUMMED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TAIL_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Multiply BLOCK_M + TAIL_M rows by a tile of the weight, and store the product."""
    DTYPE: tl.constexpr = d_x.dtype
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

    o_m = first_m + tl.arange(0, BLOCK_M)
    store_columns(b_sum.T, p_bias, p_out, o_m, first_n, num_rows, N, ACTIVATION)
    if TAIL_M:
        o_m = tail_m + tl.arange(0, TAIL_M)
        store_columns(b_tail.T, p_bias, p_out, o_m, first_n, num_rows, N, ACTIVATION)


@triton.jit
def _short_place(
    i: tl.tensor,
    row_tiles: tl.tensor,
    num_tall: tl.tensor,
    num_rows: tl.tensor,
    BLOCK_M: tl.constexpr,
    SHORT_M: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Weight tile and first row of short tile `i`. The first ones cover the rows after the last tall tile."""
    rest = tl.cdiv(tl.maximum(num_rows - row_tiles * BLOCK_M, 0), SHORT_M)
    after = i - rest * num_tall
    beside, every = tl.maximum(rest, 1), tl.cdiv(num_rows, SHORT_M)
    i_n = tl.where(after < 0, i // beside, num_tall + after // every)
    first_m = tl.where(after < 0, row_tiles * BLOCK_M + i % beside * SHORT_M, after % every * SHORT_M)
    return i_n, first_m


@triton.jit(do_not_specialize=["num_rows", "row_tiles", "num_tall"])
def packed_gemm_kernel(
    d_x: tl.tensor,  # descriptor of [M, K], tiles [BM, BK]
    d_other: tl.tensor,  # of the same, tiles [TAIL_M, BK] or [SHORT_M, SHORT_K], or None
    p_w: tl.tensor,  # words of [N, K], and scales and zeros: a weight by `weight_pointers`
    p_scales: tl.tensor,
    p_zeros: tl.tensor,
    p_bias: tl.tensor,  # [N] or None
    p_out: tl.tensor,  # [S, M, N] float32, [1, M, N] or, gated, [M, N / 2]
    num_rows: tl.tensor,
    row_tiles: tl.tensor,  # of BM + TAIL_M rows
    num_tall: tl.tensor,  # tiles of the weight that have those
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
    SHORT_M: tl.constexpr,  # rows of the other tiles; 0: there are none
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SHORT_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """grid (tiles, ranges of K): row tiles of a weight tile are neighbours, and short ones come last."""
    trigger_next(PDL)
    PARTS: tl.constexpr = 1 if ACTIVATION is None else 2  # of a tile: gate rows, then up rows
    i_n, first_m = tl.program_id(0) // row_tiles, tl.program_id(0) % row_tiles * (BLOCK_M + TAIL_M)
    i_short = tl.program_id(0) - row_tiles * num_tall
    if SHORT_M:
        i_other, short_m = _short_place(i_short, row_tiles, num_tall, num_rows, BLOCK_M, SHORT_M)
        i_n = tl.where(i_short < 0, i_n, i_other)
        short_m = tl.maximum(tl.minimum(short_m, num_rows - SHORT_M), 0)
    tail_m = tl.maximum(tl.minimum(first_m + BLOCK_M, num_rows - TAIL_M), 0)
    first_m = tl.maximum(tl.minimum(first_m, num_rows - BLOCK_M), 0)
    first_n = i_n * (BLOCK_N // PARTS)
    first_k = tl.program_id(1) * split_len
    p_w, p_scale, p_zero, m_w, m_n = weight_rows(*(p_w, p_scales, p_zeros, i_n, 0, N, s_w, CODE, BLOCK_N, PARTS))
    p_out += tl.program_id(1).to(tl.int64) * num_rows * N
    wait_for_previous(PDL)
    if SHORT_M == 0:
        _multiply_rows(
            *(d_x, first_m, d_other, tail_m, p_w, p_scale, p_zero, m_w, m_n, p_bias, p_out, first_n, first_k),
            *(num_rows, N, K, split_len, s_scales, CODE, GROUP, FAST, SUMMED, ACTIVATION, EVEN_K),
            *(BLOCK_M, TAIL_M, BLOCK_N, BLOCK_K),
        )
    elif i_short < 0:
        _multiply_rows(
            *(d_x, first_m, d_x, first_m, p_w, p_scale, p_zero, m_w, m_n, p_bias, p_out, first_n, first_k),
            *(num_rows, N, K, split_len, s_scales, CODE, GROUP, FAST, False, ACTIVATION, EVEN_K),
            *(BLOCK_M, 0, BLOCK_N, BLOCK_K),
        )
    else:
        _multiply_rows(
            *(d_other, short_m, d_other, short_m, p_w, p_scale, p_zero, m_w, m_n, p_bias, p_out, first_n, first_k),
            *(num_rows, N, K, split_len, s_scales, CODE, GROUP, FAST, False, ACTIVATION, EVEN_K),
            *(SHORT_M, 0, BLOCK_N, SHORT_K),
        )


def packed_gemm(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, activation: str | None, launch: PackedLaunch
) -> Product:
    """Multiply: x [M, K] as descriptors need it, weight [N, K], bias [N] or None -> product, or gated [1, M, N / 2]."""
    require_operands(x, weight, bias)
    (num_rows, k), n, gated = x.shape, len(weight), activation is not None
    tiles, split_k, short = launch.tiles, launch.split_k, launch.short_tiles
    assert split_k.splits == 1 or (not gated and split_k.split_len % tiles.block_k == 0), f"{split_k=} {tiles=}"
    assert not (launch.summed or short) or tiles.tail_m == 0, f"{launch=}"
    assert short is None or (short.block_n == tiles.block_n and not launch.summed), f"{launch=}"
    split = launch.parts > 1
    shape = (launch.parts, num_rows, n // 2 if gated else n)
    out = torch.empty(shape, dtype=torch.float32 if split else x.dtype, device=x.device)
    words, scales, zeros, s_w, s_scales = weight_pointers(weight)

    other = (short.block_m, short.block_k) if short else (tiles.tail_m, tiles.block_k)
    row_tiles, num_tall, num_short = launch.count_programs(num_rows, n)
    packed_gemm_kernel[(row_tiles * num_tall + num_short, launch.parts)](
        *(descriptor(x, tiles.block_m, tiles.block_k), descriptor(x, *other) if other[0] else None),
        *(words, scales, zeros, None if split else bias, out),
        *(num_rows, row_tiles, num_tall, n, k, split_k.split_len if split_k.splits > 1 else k, s_w, s_scales),
        **weight_constants(weight, x.dtype),
        SUMMED=launch.summed,
        ACTIVATION=activation,
        EVEN_K=k % max(tiles.block_k, other[1]) == 0,
        TAIL_M=tiles.tail_m,
        SHORT_M=short.block_m if short else 0,
        SHORT_K=other[1],
        **(tiles._replace(registers=None) if launch.summed else tiles).options,  # a second sum needs registers
        **pdl_options(x.device),
    )
    return Product(out, bias if split else None, x.dtype)


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
