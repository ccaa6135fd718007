r"""The product of 33 to 256 rows, next to any others: between memory and arithmetic as the bound.

    y[m, n] = sum_k x[m, k] W[n, k] + bias[n]             gated: y[m, n] = act(g) u, as in `linear.py`

What bounds it is how evenly a weight lies on the multiprocessors, and how often x is read again: each tile of the
weight reads all of x. So x comes whole or in two tiles, both operands by tensor descriptors, and a tile of the weight
may be 160 rows, 128 and a tail of 32: [20480, K] is then one program for 128 of 132 multiprocessors. A gated weight is
described as [2, N / 2, K], so that gates and what they gate are one operand. A weight of few tiles is cut into ranges
of K, one program each; their sums, float32 [S, M, N], are left to the reader of the product.

The cut depends on the device and the tiles on the number of rows, so `deterministic=True` does not come here.
"""

from typing import NamedTuple, TypeGuard

import torch

from specdec.gpu.dependent_launch import pdl_options, trigger_next, wait_for_previous
from specdec.gpu.triton_device import device_limits
from specdec.gpu.triton_shim import KEEP, tl, triton
from specdec.layers.activation import activate
from specdec.layers.many_rows import can_describe
from specdec.layers.packed.packed_weight import Weight
from specdec.layers.product import SMALL_ROWS, Product

TOO_FEW = 32
"""Up to this number of rows `linear` is as fast."""

MOST, MOST_GATED = 128, 256
"""Above this number of rows the vendor's library is faster; of a gated weight, with its gate in a launch of its own,
only further on."""

MAX_RANGES = 3
"""More parts of a sum cost its reader more than they gain."""

WIDTHS = (128, 160)


class SomeTiles(NamedTuple):
    """block_n + tail_n: rows of the weight of a program, gates and what they gate counted."""

    block_m: int
    block_n: int
    tail_n: int
    block_k: int
    num_warps: int
    num_stages: int
    ranges: int = 1  # of K


@triton.jit
def _store_columns(
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
def some_rows_kernel(
    d_x: tl.tensor,  # descriptor of [M, K], tiles [BM, BK]
    d_w: tl.tensor,  # of [N, K], tiles [BN, BK], or of [2, N / 2, K], tiles [2, BN / 2, BK]
    d_tail: tl.tensor,  # the same with TAIL_N in the place of BN, or None
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
    PARTS: tl.constexpr = 1 if ACTIVATION is None else 2  # of a tile: gates, then what they gate
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
            if ACTIVATION is None:
                b_w = d_tail.load([first_n + BLOCK_N, i_k])
            else:
                b_w = d_tail.load([0, first_n + BLOCK_N // 2, i_k]).reshape(TAIL_N, BLOCK_K)
            b_tail = tl.dot(b_x, b_w.T, b_tail)

    p_out += tl.program_id(2).to(tl.int64) * num_rows * N
    o_m = first_m + tl.arange(0, BLOCK_M)
    _store_columns(b_sum, p_bias, p_out, o_m, first_n, num_rows, N, ACTIVATION)
    if TAIL_N:
        _store_columns(b_tail, p_bias, p_out, o_m, first_n + BLOCK_N // PARTS, num_rows, N, ACTIVATION)


def suits_some(weight: Weight, x: torch.Tensor, *, gated: bool = False) -> TypeGuard[torch.Tensor]:
    """Has x some rows, and are both matrices that descriptors can describe?"""
    some = TOO_FEW < len(x) <= (MOST_GATED if gated else MOST)
    return some and can_describe(weight, x) and len(weight) > SMALL_ROWS


def choose_some_tiles(num_rows: int, n: int, device: torch.device, *, gated: bool) -> SomeTiles:
    """The fastest of those timed on an H100 at 64, 128 and 256 rows, for 2-byte numbers."""
    multiprocessors, shared = device_limits(device)
    few, narrow = num_rows <= 64, triton.cdiv(n, 64)
    if narrow <= multiprocessors and not gated:
        ranges = min(MAX_RANGES, multiprocessors // narrow)
        tiles = SomeTiles(64, 64, 0, 64, 4, 8, ranges) if few else SomeTiles(128, 64, 0, 128, 8, 4, ranges)
    elif _width(num_rows, n, multiprocessors) == 160:
        tiles = SomeTiles(64, 128, 32, 128, 4, 4) if few else SomeTiles(128, 128, 32, 128, 8, 3)
        if num_rows > 128:  # two programs a multiprocessor
            tiles = tiles._replace(block_k=64, num_stages=3)
    else:
        tiles = SomeTiles(64, 128, 0, 128, 4, 4) if few else SomeTiles(128, 128, 0, 64, 8, 3)
    stage = (tiles.block_m + tiles.block_n + tiles.tail_n) * tiles.block_k * 2
    return tiles._replace(num_stages=max(1, min(tiles.num_stages, shared // stage)))


def _width(num_rows: int, n: int, multiprocessors: int) -> int:
    """Rows of the weight of a program: those with which the busiest multiprocessor has the fewest."""
    row_tiles = triton.cdiv(num_rows, 128)

    def most_rows(width: int) -> int:
        programs: int = row_tiles * triton.cdiv(n, width)
        return triton.cdiv(programs, multiprocessors) * width

    return min(WIDTHS, key=most_rows)


def multiply_some_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    tiles: SomeTiles | None = None,
) -> Product:
    """x [M, K], weight [N, K] that `suits_some`, bias [N] or None -> their product, or gated [M, N / 2]."""
    from triton.tools.tensor_descriptor import TensorDescriptor  # Triton may not be there

    (num_rows, k), n, gated = x.shape, len(weight), activation is not None
    assert weight.shape[1] == k and x.dtype == weight.dtype, f"{x.shape=} {weight.shape=} {x.dtype=} {weight.dtype=}"
    assert x.stride(1) == weight.stride(1) == 1, f"{x.stride()=} {weight.stride()=}"
    assert bias is None or (bias.shape == (n,) and bias.is_contiguous()), f"{bias.shape=} {n=}"
    tiles = tiles or choose_some_tiles(num_rows, n, x.device, gated=gated)
    split_len = triton.cdiv(triton.cdiv(k, tiles.ranges), tiles.block_k) * tiles.block_k
    ranges = triton.cdiv(k, split_len)
    assert ranges == 1 or not gated, f"{tiles=}"
    split = ranges > 1
    shape = (ranges, num_rows, n // 2 if gated else n)
    out = torch.empty(shape, dtype=torch.float32 if split else x.dtype, device=x.device)

    def described(rows: int) -> TensorDescriptor:
        stride = weight.stride(0)
        if gated:
            return TensorDescriptor(weight, [2, n // 2, k], [n // 2 * stride, stride, 1], [2, rows // 2, tiles.block_k])
        return TensorDescriptor(weight, [n, k], [stride, 1], [rows, tiles.block_k])

    grid = (triton.cdiv(num_rows, tiles.block_m), triton.cdiv(n, tiles.block_n + tiles.tail_n), ranges)
    some_rows_kernel[grid](
        TensorDescriptor(x, list(x.shape), list(x.stride()), [tiles.block_m, tiles.block_k]),
        *(described(tiles.block_n), described(tiles.tail_n) if tiles.tail_n else None),
        *(None if split else bias, out, num_rows, n, k, split_len),
        ACTIVATION=activation,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        TAIL_N=tiles.tail_n,
        BLOCK_K=tiles.block_k,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **pdl_options(x.device),
    )
    return Product(out, bias if split else None, x.dtype)
