r"""The skinny product: few rows of activations against a large weight.

    y[m, n] = sum_k x[m, k] W[n, k] + bias[n]
    gated:  y[m, n] = act(g) u    with g and u the products of rows n and N / 2 + n of a merged gate / up weight

Weight rows are the M operand of the tensor core's instruction and the rows of x its N operand, so a row of x never
meets another. The sum over K is cut once per weight (`choose_cut`), whatever the number of rows:

    y = ((0 + p_0) + p_1) + ... + p_{S-1},      p_s = sum over the s-th range of K, in ascending order

so a row's result has the same bits next to any number of others. At few rows the S ranges are programs of their own,
which leave p_s in float32 [S, M, N] to the reader of the product; at many, one program adds them up. Where a range
is one tile of the weight (`held`: small weights), its program asks for it while the kernel before still runs.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from specdec.gpu.dependent_launch import pdl_options, trigger_next, wait_for_previous
from specdec.gpu.operations import op
from specdec.gpu.triton_shim import KEEP, tl, triton
from specdec.layers.activation import ACTIVATIONS, activate, reference_activate
from specdec.layers.gemm_large import can_describe, multiply_many_rows, suits
from specdec.layers.packed.dequantise import dequantise
from specdec.layers.packed.packed_gemm import multiply_packed_rows
from specdec.layers.packed.packed_launch import choose_packed_rows, takes_packed_rows
from specdec.layers.packed.packed_tile import (
    load_tile,
    multiply_tile,
    row_pointers,
    scale_pointers,
    scale_sum,
    weight_constants,
    weight_pointers,
    zero_pointers,
)
from specdec.layers.packed.packed_weight import PackedWeight, Weight, multiply
from specdec.layers.product import FEW_ROWS, Cut, Product, Tiles, can_hold, cut_of, tiles_of
from specdec.layers.gemm_small import multiply_both, multiply_range
from specdec.layers.gemm_medium import choose_some_tiles, multiply_some_rows

FEW_PROGRAMS = 256
"""With more of them, or more rows, a program adds the ranges up: parts would be more bytes than they are worth."""

FEW_PACKED_ROWS = 32
"""Up to this number of rows the ranges of a packed weight are programs of their own."""

VENDOR_ROWS = 64
"""Up to this number of rows `linear` is faster than the vendor's library; with weights that programs hold, at more."""


class Mlp(NamedTuple):
    """gate_up [2 I, H], the gate's rows first; down [H, I]."""

    gate_up: Weight
    activation: str
    down: Weight


def reference_linear(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None, cut: Cut | None = None
) -> Product:
    return Product.of(multiply(x, weight, bias))


def reference_linear_parts(x: torch.Tensor, weight: torch.Tensor, cut: Cut) -> Product:
    ranges = zip(x.float().split(cut.split_len, 1), weight.float().split(cut.split_len, 1), strict=True)
    return Product(torch.stack([F.linear(some, columns) for some, columns in ranges]), None, x.dtype)


def reference_gated_linear(x: torch.Tensor, weight: Weight, activation: str) -> torch.Tensor:
    gate, up = multiply(x, weight).float().chunk(2, dim=-1)
    return (reference_activate(gate, activation) * up).to(x.dtype)


@triton.jit
def _store_tile(
    b_sum: tl.tensor,  # [BN, BM]
    p_bias: tl.tensor,  # [N] or None
    p_out: tl.tensor,
    o_row: tl.tensor,  # [1, BM]
    m_x: tl.tensor,
    i_n: tl.tensor,
    i_split: tl.tensor,
    num_rows: tl.tensor,
    tile_rows: tl.tensor,
    N: tl.tensor,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """What a program has summed, as part `i_split` of the product, or activated."""
    if ACTIVATION is None:
        o_n = i_n * tile_rows + tl.arange(0, BLOCK_N)
        m_n = (tl.arange(0, BLOCK_N) < tile_rows) & (o_n < N)
        if p_bias is not None:
            b_sum += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
        p_out += (i_split * num_rows + o_row) * N + o_n[:, None]
        tl.store(p_out, b_sum.to(p_out.dtype.element_ty), mask=m_x & m_n[:, None], eviction_policy=KEEP)
    else:
        BLOCK_M: tl.constexpr = b_sum.shape[1]
        b_gate, b_up = tl.split(tl.permute(tl.reshape(b_sum, (2, BLOCK_N // 2, BLOCK_M)), (1, 2, 0)))
        b_out = activate(b_gate, ACTIVATION) * b_up
        o_half = tl.arange(0, BLOCK_N // 2)
        o_out = i_n * tile_rows + o_half
        m_out = (o_half < tile_rows) & (o_out < N // 2)
        p_out += o_row * (N // 2) + o_out[:, None]
        tl.store(p_out, b_out.to(p_out.dtype.element_ty), mask=m_x & m_out[:, None], eviction_policy=KEEP)


@triton.jit(do_not_specialize=["num_rows", "tile_rows"])
def linear_kernel(
    row_tile: tl.tensor,  # of this program where another kernel calls; None where launched
    weight_tile: tl.tensor,
    split: tl.tensor,
    p_x: tl.tensor,  # [M, K]
    p_w: tl.tensor,  # [N, K], and scales and zeros: a weight by `weight_pointers`
    p_scales: tl.tensor,
    p_zeros: tl.tensor,
    p_bias: tl.tensor,  # [N] or None
    p_out: tl.tensor,  # [S, M, N] float32, [1, M, N] or, gated, [M, N / 2]
    num_rows: tl.tensor,
    tile_rows: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    split_len: tl.tensor,
    s_x: tl.tensor,
    s_w: tl.tensor,
    s_scales: tl.tensor,
    CODE: tl.constexpr,  # and GROUP and FAST: `weight_constants`
    GROUP: tl.constexpr,
    FAST: tl.constexpr,
    SPLIT: tl.constexpr,  # the ranges of K are programs of their own; otherwise a program sums them
    HELD: tl.constexpr,  # and each is one tile
    WHOLE: tl.constexpr,  # there is one range
    ACTIVATION: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TAIL_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    START: tl.constexpr,  # "usual", or "holds" or "early" (`dependent_launch.py`)
    PDL: tl.constexpr,
) -> None:
    """grid (row tiles, weight tiles, ranges of K): a tile of the weight times a tile of rows."""
    if weight_tile is None:  # row tiles of one weight tile are neighbours, so that it is read from memory once
        i_m, i_n, i_split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    else:
        i_m, i_n, i_split = row_tile, weight_tile, split
    if START != "holds":
        trigger_next(PDL)
    PARTS: tl.constexpr = 1 if ACTIVATION is None else 2  # of a tile: gates, then what they gate
    o_n = tl.arange(0, BLOCK_N)
    first = i_n * tile_rows if CODE is None else i_n * (BLOCK_N // PARTS)  # a packed weight has whole tiles
    o_part = first + o_n % (BLOCK_N // PARTS)  # row of its part of the weight
    m_n = (o_part < N // PARTS)[:, None]
    m_w = (o_n % (BLOCK_N // PARTS) < tile_rows)[:, None] & m_n if CODE is None else m_n
    o_w = o_part + o_n // (BLOCK_N // PARTS) * (N // PARTS)
    p_w = row_pointers(p_w, o_w, s_w, CODE)
    p_scale = scale_pointers(p_scales, o_w, CODE)
    p_zero = zero_pointers(p_zeros, o_w, CODE)
    begin = i_split * split_len
    end = tl.minimum(begin + split_len, K) if SPLIT else K
    o_k = begin + tl.arange(0, BLOCK_K)
    m_k = o_k < end
    if HELD:
        DTYPE: tl.constexpr = p_x.dtype.element_ty
        b_w = load_tile(
            *(p_w, p_scale, p_zero, s_scales, begin, end, m_w, m_n, EVEN_K, CODE, GROUP, FAST, BLOCK_K, DTYPE)
        )
    if START != "early":
        wait_for_previous(PDL)
    if START == "holds":
        trigger_next(PDL)

    o_m = i_m * (BLOCK_M + TAIL_M) + tl.arange(0, BLOCK_M)
    o_row = o_m.to(tl.int64)[None, :]
    m_x = (o_m < num_rows)[None, :]
    p_row = p_x + o_row * s_x
    if TAIL_M:
        o_t = i_m * (BLOCK_M + TAIL_M) + BLOCK_M + tl.arange(0, TAIL_M)
        o_tail = o_t.to(tl.int64)[None, :]
        m_tail = (o_t < num_rows)[None, :]
        b_sum, b_tail = multiply_both(
            *(p_w, p_scale, p_zero, s_scales, p_row, p_x + o_tail * s_x, m_w, m_n, m_x, m_tail, begin, end, EVEN_K),
            *(CODE, GROUP, FAST, BLOCK_N, BLOCK_M, TAIL_M, BLOCK_K),
        )
        _store_tile(*(b_tail, p_bias, p_out, o_tail, m_tail, i_n, i_split, num_rows, tile_rows, N, ACTIVATION, BLOCK_N))
    elif HELD:
        b_x = tl.load(p_row + o_k[:, None], mask=m_k[:, None] & m_x, other=0.0)  # [BK, BM]
        b_sum = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        b_sum = multiply_tile(b_w, b_x, b_sum, p_scale, s_scales, begin, m_n, CODE, GROUP)
        b_sum = scale_sum(b_sum, p_scale, m_n, CODE, GROUP, FAST, DTYPE)
    elif SPLIT or WHOLE:
        b_sum = multiply_range(
            *(p_w, p_scale, p_zero, s_scales, p_row, m_w, m_n, m_x, begin, end, EVEN_K, CODE, GROUP, FAST),
            *(BLOCK_N, BLOCK_M, BLOCK_K),
        )
    else:
        b_sum = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for i_k in range(begin, end, split_len):
            i_end = tl.minimum(i_k + split_len, end)
            b_sum += multiply_range(
                *(p_w, p_scale, p_zero, s_scales, p_row, m_w, m_n, m_x, i_k, i_end, EVEN_K, CODE, GROUP, FAST),
                *(BLOCK_N, BLOCK_M, BLOCK_K),
            )
    _store_tile(*(b_sum, p_bias, p_out, o_row, m_x, i_n, i_split, num_rows, tile_rows, N, ACTIVATION, BLOCK_N))
    if START == "early":
        wait_for_previous(PDL)


@triton.jit
def _gate_kernel(
    p_merged: tl.tensor,  # [M, 2 I]
    p_out: tl.tensor,  # [M, I]
    width: tl.tensor,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    i_row = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = o < width
    wait_for_previous(PDL)
    b_gate = tl.load(p_merged + i_row * 2 * width + o, mask=m, other=0.0).to(tl.float32)
    b_up = tl.load(p_merged + i_row * 2 * width + width + o, mask=m, other=0.0).to(tl.float32)
    b_out = activate(b_gate, ACTIVATION) * b_up
    tl.store(p_out + i_row * width + o, b_out.to(p_out.dtype.element_ty), mask=m, eviction_policy=KEEP)


def vendor_linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None, cut: Cut | None = None) -> Product:
    """`linear`, by `some_rows` or the vendor's library where x has more rows: faster there, with bits that depend on
    their number. The library multiplies a packed weight dequantised, into memory that is free again afterwards."""
    if can_describe(weight, x) and (some := choose_some_tiles(len(x), weight.shape, x.device)):
        return multiply_some_rows(x, weight, bias, None, some)
    if takes_packed_rows(weight, x) and (packed := choose_packed_rows(len(x), weight, x.device)):
        return multiply_packed_rows(x, weight, bias, None, packed)
    if len(x) <= VENDOR_ROWS or can_hold(weight, cut or cut_of(weight), len(x), x.dtype):
        return linear(x, weight, bias, cut)
    return Product.of(F.linear(x, _whole(weight, x.dtype), bias))


def vendor_gated_linear(x: torch.Tensor, weight: Weight, activation: str) -> torch.Tensor:
    """`gated_linear`, likewise."""
    if can_describe(weight, x) and (some := choose_some_tiles(len(x), weight.shape, x.device, gated=True)):
        return multiply_some_rows(x, weight, None, activation, some).parts[0]
    if takes_packed_rows(weight, x) and (packed := choose_packed_rows(len(x), weight, x.device, gated=True)):
        return multiply_packed_rows(x, weight, None, activation, packed).parts[0]
    if len(x) <= VENDOR_ROWS:
        return gated_linear(x, weight, activation)
    merged = F.linear(x, _whole(weight, x.dtype))
    out = torch.empty((len(x), len(weight) // 2), dtype=x.dtype, device=x.device)
    _gate_kernel[(len(x), triton.cdiv(out.shape[1], 1024))](
        *(merged, out, out.shape[1]),
        ACTIVATION=activation,
        BLOCK=1024,
        num_warps=4,
        **pdl_options(x.device, behind_library=True),
    )
    return out


def _whole(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    return dequantise(weight, dtype) if isinstance(weight, PackedWeight) else weight


@op(reference=reference_linear, vendor=vendor_linear)
def linear(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    cut: Cut | None = None,
    *,
    tiles: Tiles | None = None,
    apart: bool = False,
    holds: bool = False,
) -> Product:
    """x [M, K], weight [N, K] (rows of both at any stride; packed or not), bias [N] or None -> their product.

    cut: of the larger weight whose rows these are; None: the weight's own. apart: its ranges of K are parts whatever
    the number of rows. holds: no later kernel starts before x is written.
    """
    cut = cut or cut_of(weight)
    if tiles is None and not apart and suits(weight, x):
        return Product.of(multiply_many_rows(x, weight, bias, None, cut))
    if tiles is None and not holds and takes_packed_rows(weight, x):
        packed = choose_packed_rows(len(x), weight, x.device, cut=cut)
        if packed is not None:
            return multiply_packed_rows(x, weight, bias, None, packed)
    tiles = tiles or tiles_of(len(x), weight, cut, x)
    count = triton.cdiv(len(x), tiles.block_m + tiles.tail_m) * triton.cdiv(len(weight), tiles.rows)
    few = count < FEW_PROGRAMS and len(x) <= FEW_ROWS
    if isinstance(weight, PackedWeight):  # its ranges are there for more programs
        few |= len(x) <= FEW_PACKED_ROWS
    split = cut.splits > 1 and (apart or few)
    shape = (cut.splits if split else 1, len(x), len(weight))
    parts = torch.empty(shape, dtype=torch.float32 if split else x.dtype, device=x.device)
    _launch(x, weight, None if split else bias, parts, None, cut, tiles, split, holds)
    return Product(parts, bias if split else None, x.dtype)


@op(reference=reference_linear_parts)
def linear_parts(x: torch.Tensor, weight: torch.Tensor, cut: Cut) -> Product:
    """x [M, K], weight [N, K]: columns of a larger weight, cut as there -> a part for each range of K, in float32."""
    assert cut.splits * cut.split_len >= weight.shape[1] > (cut.splits - 1) * cut.split_len, f"{cut=} {weight.shape=}"
    tiles = tiles_of(len(x), weight, cut, x)
    parts = torch.empty((cut.splits, len(x), len(weight)), dtype=torch.float32, device=x.device)
    _launch(x, weight, None, parts, None, cut, tiles, split=cut.splits > 1)
    return Product(parts, None, x.dtype)


@op(reference=reference_gated_linear, vendor=vendor_gated_linear)
def gated_linear(x: torch.Tensor, weight: Weight, activation: str, *, tiles: Tiles | None = None) -> torch.Tensor:
    """x [M, K], weight [2 I, K] with the gate's rows first -> act(gate) * up [M, I]. One range of K."""
    assert activation in ACTIVATIONS and len(weight) % 2 == 0, f"{activation=} {weight.shape=}"
    cut = Cut(1, weight.shape[1])
    if tiles is None and suits(weight, x):
        return multiply_many_rows(x, weight, None, activation, cut)
    if tiles is None and takes_packed_rows(weight, x):
        packed = choose_packed_rows(len(x), weight, x.device, gated=True, cut=cut)
        if packed is not None:
            return multiply_packed_rows(x, weight, None, activation, packed).parts[0]
    out = torch.empty((len(x), len(weight) // 2), dtype=x.dtype, device=x.device)
    tiles = tiles or tiles_of(len(x), weight, cut, x, gated=True)
    _launch(x, weight, None, out, activation, cut, tiles, split=False)
    return out


def _launch(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    activation: str | None,
    cut: Cut,
    tiles: Tiles,
    split: bool,
    holds: bool = False,
) -> None:
    (num_rows, k), (n, weight_k) = x.shape, weight.shape
    assert k == weight_k and x.stride(1) == 1, f"{x.shape=} {weight.shape=} {x.stride()=}"
    if not isinstance(weight, PackedWeight):
        assert x.dtype == weight.dtype and weight.stride(1) == 1, f"{x.dtype=} {weight.dtype=}"
    assert bias is None or (bias.shape == (n,) and bias.is_contiguous()), f"{bias.shape=} {n=}"
    assert cut.splits == 1 or cut.split_len % tiles.block_k == 0, f"{cut=} {tiles=}"  # a tile lies in one range
    assert tiles.tail_m == 0 or split or cut.splits == 1, f"{cut=} {tiles=}"  # no accumulator of its own for a range
    if num_rows == 0:
        return
    # of a gated weight a program has as many gates as of what they gate
    tile_rows, num_columns = (tiles.rows, n) if activation is None else (tiles.rows // 2, n // 2)
    row_tiles = triton.cdiv(num_rows, tiles.block_m + tiles.tail_m)
    grid = (row_tiles, triton.cdiv(num_columns, tile_rows), cut.splits if split else 1)
    words, scales, zeros, s_w, s_scales = weight_pointers(weight)
    linear_kernel[grid](
        *(None, None, None, x, words, scales, zeros, bias, out),
        *(num_rows, tile_rows, n, k, cut.split_len, x.stride(0), s_w, s_scales),
        **weight_constants(weight, x.dtype),
        SPLIT=split,
        HELD=split and cut.split_len == tiles.block_k,
        WHOLE=cut.splits == 1,
        ACTIVATION=activation,
        EVEN_K=k % tiles.block_k == 0,
        BLOCK_N=tiles.block_n,
        BLOCK_M=tiles.block_m,
        TAIL_M=tiles.tail_m,
        BLOCK_K=tiles.block_k,
        START="holds" if holds else "usual",
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        maxnreg=tiles.registers,
        **pdl_options(x.device),
    )
