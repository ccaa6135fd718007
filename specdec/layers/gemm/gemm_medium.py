r"""The product of 33 to 256 rows of x in any order. Its bound is between memory and arithmetic.

    y[m, n] = sum_k x[m, k] W[n, k] + bias[n]             gated: y[m, n] = act(g) u, as in `linear.py`

Its time depends on how evenly weight tiles are spread over the multiprocessors, and on how often x is reread: each
weight tile reads all of x. So all rows of x form one tile if possible, and both operands are loaded by tensor
descriptors. A weight tile may have 160 rows (128 and a tail of 32): [20480, K] then gives one program to each of 128 of
132 multiprocessors. A gated weight is described as [2, N / 2, K], so that gate and up are one operand. If a weight has
few tiles, K is cut into ranges with one program each; the reader of the product adds their sums, float32 [S, M, N].

The cut depends on the device and on the number of rows, so `deterministic=True` does not use this kernel.
"""

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch

from specdec.gpu.triton_shim import (
    INTERPRETED,
    KEEP,
    device_limits,
    has_pdl,
    pdl_options,
    tl,
    trigger_next,
    triton,
    wait_for_previous,
)
from specdec.layers.gemm.product import (
    LOW_HEIGHT,
    LOW_RANGE,
    MAX_MEDIUM_ROWS,
    MAX_SMALL_ROWS,
    Product,
    Tiles,
    activate,
    require_operands,
)
from specdec.layers.packed.packed_weight import Weight

ONE_TILE_ROWS = 128
"""Up to this many rows, x is one tile."""

WIDE_TILE_ROWS = 192
"""Above this many rows of x, a tile of 256 rows is chosen if it is faster."""

MAX_RANGES = 3
"""Maximum ranges of K: adding more parts costs the reader more than they gain."""

MIN_RANGE = 512
"""Minimum columns of a range of K."""

HEAD_WAVES = 4
"""An ungated weight uses this kernel for up to one wave of programs, and from this number of waves on; in between the
library is as fast."""


@triton.jit
def store_columns(
    b_sum: tl.tensor,  # [BM, BN]
    p_bias: tl.tensor,  # [N] or None
    p_out: tl.tensor,  # [M, N] or, gated, [M, N / 2]
    o_m: tl.tensor,
    first_n: tl.tensor,
    num_rows: tl.tensor,
    N: tl.tensor,
    ACTIVATION: tl.constexpr,
) -> None:
    BLOCK_M: tl.constexpr = b_sum.shape[0]
    COLUMNS: tl.constexpr = b_sum.shape[1] if ACTIVATION is None else b_sum.shape[1] // 2
    width = N if ACTIVATION is None else N // 2
    if ACTIVATION is None:
        b_out = b_sum
    else:
        b_gate, b_up = tl.split(tl.permute(tl.reshape(b_sum, (BLOCK_M, 2, COLUMNS)), (0, 2, 1)))
        b_out = activate(b_gate, ACTIVATION) * b_up
    o_n = first_n + tl.arange(0, COLUMNS)
    if p_bias is not None:
        b_out += tl.load(p_bias + o_n, mask=o_n < width, other=0.0).to(tl.float32)[None, :]
    m_out = (o_m < num_rows)[:, None] & (o_n < width)[None, :]
    p_out += o_m.to(tl.int64)[:, None] * width + o_n[None, :]
    tl.store(p_out, b_out.to(p_out.dtype.element_ty), mask=m_out, eviction_policy=KEEP)


@triton.jit(do_not_specialize=["num_rows"])
def gemm_medium_kernel(
    d_x: tl.tensor,  # descriptor of [M, K], tiles [BM, BK]
    d_w: tl.tensor,  # descriptor of [N, K], tiles [BN, BK], or of [2, N / 2, K], tiles [2, BN / 2, BK]
    d_tail: tl.tensor,  # for a gated weight, the same with TAIL_N instead of BN; or None
    p_bias: tl.tensor,  # [N] or None
    p_out: tl.tensor,  # [S, M, N] float32, [1, M, N] or, gated, [M, N / 2]
    num_rows: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    split_len: tl.tensor,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TAIL_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """grid (row tiles, weight tiles, ranges of K)"""
    trigger_next(PDL)
    PARTS: tl.constexpr = 1 if ACTIVATION is None else 2  # of a tile: gate rows, then up rows
    first_m = tl.program_id(0) * BLOCK_M
    first_n = tl.program_id(1) * ((BLOCK_N + TAIL_N) // PARTS)
    begin = tl.program_id(2) * split_len
    wait_for_previous(PDL)

    b_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if TAIL_N:
        b_tail = tl.zeros([BLOCK_M, TAIL_N], tl.float32)
    for i_k in range(begin, tl.minimum(begin + split_len, K), BLOCK_K):
        b_x = d_x.load([first_m, i_k])
        if ACTIVATION is None:
            b_w = d_w.load([first_n, i_k])
        else:
            b_w = d_w.load([0, first_n, i_k]).reshape(BLOCK_N, BLOCK_K)
        b_sum = tl.dot(b_x, b_w.T, b_sum)
        if TAIL_N:
            b_w = d_tail.load([0, first_n + BLOCK_N // 2, i_k]).reshape(TAIL_N, BLOCK_K)
            b_tail = tl.dot(b_x, b_w.T, b_tail)

    p_out += tl.program_id(2).to(tl.int64) * num_rows * N
    o_m = first_m + tl.arange(0, BLOCK_M)
    store_columns(b_sum, p_bias, p_out, o_m, first_n, num_rows, N, ACTIVATION)
    if TAIL_N:
        store_columns(b_tail, p_bias, p_out, o_m, first_n + BLOCK_N // 2, num_rows, N, ACTIVATION)


def can_describe(weight: Weight, x: torch.Tensor) -> TypeGuard[torch.Tensor]:
    """Can descriptors describe both matrices (2-byte numbers) on this device?"""
    return isinstance(weight, torch.Tensor) and is_described(x) and is_described(weight)


def is_described(matrix: torch.Tensor) -> bool:
    """Can a descriptor describe this matrix (2-byte numbers) on its device?"""
    supported = INTERPRETED if matrix.device.type == "cpu" else has_pdl(matrix.device)  # both came with Hopper
    return supported and matrix.element_size() == 2 and matrix.data_ptr() % 16 == 0 and matrix.stride(0) % 8 == 0


def descriptor(tensor: torch.Tensor, *tile: int) -> Any:
    """The descriptor with which a kernel loads tiles of a tensor."""
    from triton.tools.tensor_descriptor import TensorDescriptor  # Triton may not be installed

    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(tile))


def choose_medium_tiles(num_rows: int, shape: Sequence[int], device: torch.device, *, gated: bool) -> Tiles | None:
    """For a weight [N, K] of 2-byte numbers, the fastest tiles that were timed on an H100 at 40 to 256 rows. None if
    `gemm_small` or the vendor's library is as fast."""
    if not MAX_SMALL_ROWS < num_rows <= MAX_MEDIUM_ROWS:
        return None
    (n, k), (multiprocessors, shared) = shape, device_limits(device)
    if gated:
        tiles = _gated_tiles(num_rows, n, multiprocessors)
    elif n <= LOW_HEIGHT:
        tiles = Tiles(64, 64, 128, 4, 4, 64, ranges=triton.cdiv(k, LOW_RANGE)) if num_rows > WIDE_TILE_ROWS else None
    else:
        tiles = _plain_tiles(num_rows, n, k, multiprocessors)
    return None if tiles is None else tiles.fit(shared)


def _gated_tiles(num_rows: int, n: int, multiprocessors: int) -> Tiles | None:
    wide = triton.cdiv(n, 160)
    one_wave = multiprocessors * 9 <= wide * 10 <= multiprocessors * 10
    if num_rows > ONE_TILE_ROWS:
        return Tiles(128, 256, 64, 8, 4, 160, tail_n=32) if one_wave and num_rows > WIDE_TILE_ROWS else None
    if one_wave:
        block_m, num_warps, num_stages = (64, 4, 4) if num_rows <= 64 else (128, 8, 3)
        return Tiles(128, block_m, 128, num_warps, num_stages, 160, tail_n=32)
    programs = triton.cdiv(n, 128)
    each = triton.cdiv(programs, multiprocessors)
    if each > 2 or programs * 10 < each * multiprocessors * 7:
        return None
    if num_rows <= 64:
        return Tiles(128, 64, 128, 4, 4, 128)
    # one program per multiprocessor has as many bytes in flight as two
    return Tiles(128, 128, 128, 8, 3, 128) if each == 1 else Tiles(128, 128, 64, 8, 3, 128)


def _plain_tiles(num_rows: int, n: int, k: int, multiprocessors: int) -> Tiles | None:
    few, narrow = num_rows <= 64, triton.cdiv(n, 64)
    if num_rows > ONE_TILE_ROWS:
        return None
    if narrow > multiprocessors:
        if few:
            return Tiles(128, 64, 128, 4, 4, 128)
        return Tiles(128, 128, 64, 8, 3, 128) if narrow >= 2 * HEAD_WAVES * multiprocessors else None
    ranges = max(1, min(MAX_RANGES, multiprocessors // narrow, k // MIN_RANGE))
    if narrow * ranges * 10 < multiprocessors * (6 if few else 7):  # too many multiprocessors would idle
        return None
    return Tiles(64, 64, 64, 4, 8, 64, ranges=ranges) if few else Tiles(64, 128, 128, 8, 4, 64, ranges=ranges)


def gemm_medium(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None, tiles: Tiles
) -> Product:
    """Multiply: x [M, K], weight [N, K], both as descriptors need them; bias [N] or None -> product, or gated [1, M, N
    / 2]."""
    require_operands(x, weight, bias)
    (num_rows, k), n, gated = x.shape, len(weight), activation is not None
    split_len = triton.cdiv(triton.cdiv(k, tiles.ranges), tiles.block_k) * tiles.block_k
    ranges = triton.cdiv(k, split_len)
    assert (ranges == 1) if gated else (tiles.tail_n == 0), f"{tiles=}"
    split = ranges > 1
    shape = (ranges, num_rows, n // 2 if gated else n)
    out = torch.empty(shape, dtype=torch.float32 if split else x.dtype, device=x.device)

    def described(rows: int) -> Any:
        if gated:
            return descriptor(weight.unflatten(0, (2, -1)), 2, rows // 2, tiles.block_k)
        return descriptor(weight, rows, tiles.block_k)

    grid = (triton.cdiv(num_rows, tiles.block_m), triton.cdiv(n, tiles.rows), ranges)
    gemm_medium_kernel[grid](
        *(descriptor(x, tiles.block_m, tiles.block_k), described(tiles.block_n)),
        described(tiles.tail_n) if tiles.tail_n else None,
        *(None if split else bias, out, num_rows, n, k, split_len),
        ACTIVATION=activation,
        TAIL_N=tiles.tail_n,
        **tiles.options,
        **pdl_options(x.device),
    )
    return Product(out, bias if split else None, x.dtype)
