r"""The skinny product: few rows of activations against a large weight.

    y[m, n] = sum_k x[m, k] W[n, k] + bias[n]
    gated:  y[m, n] = act(g) u    with g and u the products of rows n and N / 2 + n of a merged gate / up weight

Weight rows are the M operand of the tensor core's instruction and the rows of x its N operand, so a row of x never
meets another. The sum over K is cut once per weight (`choose_cut`), whatever the number of rows:

    y = ((0 + p_0) + p_1) + ... + p_{S-1},      p_s = sum over the s-th range of K, in ascending order

so a row's result has the same bits beside any number of others. At few rows the S ranges are programs of their own,
which leave p_s in float32 [S, M, N] to whoever reads the product next; at many, one program adds them up. Where a range
is one tile of the weight (`held`: small weights), its program asks for it while the kernel before still runs.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from specdec.kvcache.triton_shim import tl, triton
from specdec.layers.launch import pdl_options, trigger_next, wait_for_previous
from specdec.layers.tiling import FEW_ROWS, Cut, Tiles, can_hold, choose_cut, choose_tiles

ACTIVATIONS = ("gelu_tanh", "silu")

FEW_PROGRAMS = 256
"""With more of them, or more rows, a program adds the ranges up: parts would be more bytes than they are worth."""

VENDOR_ROWS = 64
"""Up to so many rows `linear` is faster than the vendor's library; with weights that programs hold, at more."""


class Product(NamedTuple):
    """x W^T before its last sum: y = sum_s parts[s] + bias, rounded to `dtype`.

    parts: [S, M, N] float32, or [1, M, N] in `dtype` with nothing left to add.
    """

    parts: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype

    @classmethod
    def of(cls, value: torch.Tensor) -> "Product":
        """What is already a sum [M, N]."""
        return cls(value[None], None, value.dtype)


def reference_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Product:
    """x [M, K], weight [N, K], bias [N] -> their product, which is summed already."""
    return Product.of(F.linear(x, weight, bias))


def reference_gated_linear(x: torch.Tensor, weight: torch.Tensor, activation: str) -> torch.Tensor:
    """x [M, K], weight [2 I, K] with the gate's rows first -> act(gate) * up [M, I]."""
    gate, up = F.linear(x, weight).float().chunk(2, dim=-1)
    return (reference_activate(gate, activation) * up).to(x.dtype)


def reference_activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    return F.gelu(x, approximate="tanh") if activation == "gelu_tanh" else F.silu(x)


def reference_finish(product: Product) -> torch.Tensor:
    """The product's value [M, N]."""
    value = torch.zeros_like(product.parts[0], dtype=torch.float32)
    for part in product.parts:
        value = value + part
    return (value if product.bias is None else value + product.bias).to(product.dtype)


@triton.jit
def activate(b_x: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """float32 in and out."""
    b_u = b_x
    if ACTIVATION == "gelu_tanh":  # 1 + tanh(u) = 2 sigmoid(2 u), and 1.59.. = 2 sqrt(2 / pi)
        b_u = 1.5957691216057308 * (b_x + 0.044715 * b_x * b_x * b_x)
    return b_x * tl.sigmoid(tl.maximum(b_u, -80.0))  # e^80 is a float32


@triton.jit
def sum_parts(
    p_parts: tl.tensor,
    p_bias: tl.tensor,  # or None
    o_part: tl.tensor,
    o_n: tl.tensor,
    mask: tl.tensor,
    part_len: tl.tensor,
    SPLITS: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """A product's value at offsets `o_part` of each part, as float32 that DTYPE holds."""
    part_len = part_len.to(tl.int64)
    b_sum = tl.load(p_parts + o_part, mask=mask, other=0.0).to(tl.float32)
    for i_split in tl.static_range(1, SPLITS):
        b_sum += tl.load(p_parts + i_split * part_len + o_part, mask=mask, other=0.0).to(tl.float32)
    if p_bias is not None:
        b_sum += tl.load(p_bias + o_n, mask=mask, other=0.0).to(tl.float32)
    return b_sum.to(DTYPE).to(tl.float32)


@triton.jit
def _multiply_range(
    p_w: tl.tensor,  # [BN, 1]
    p_x: tl.tensor,  # [1, BM]
    m_w: tl.tensor,
    m_x: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    b_acc: tl.tensor,
    EVEN_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """b_acc plus the products over columns [begin, end) of K."""
    for i_k in range(begin, end, BLOCK_K):
        o_k = i_k + tl.arange(0, BLOCK_K)
        m_k = o_k < (i_k + BLOCK_K if EVEN_K else end)
        b_w = tl.load(p_w + o_k[None, :], mask=m_w & m_k[None, :], other=0.0)  # [BN, BK]
        b_x = tl.load(p_x + o_k[:, None], mask=m_k[:, None] & m_x, other=0.0)  # [BK, BM]
        b_acc = tl.dot(b_w, b_x, b_acc, input_precision="ieee")
    return b_acc


@triton.jit(do_not_specialize=["num_rows", "tile_rows"])
def _linear_kernel(
    p_x: tl.tensor,  # [M, K]
    p_w: tl.tensor,  # [N, K]
    p_bias: tl.tensor,  # [N] or None
    p_out: tl.tensor,  # [S, M, N] float32, [1, M, N] or, gated, [M, N / 2]
    num_rows: tl.tensor,
    tile_rows: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    split_len: tl.tensor,
    s_x: tl.tensor,
    s_w: tl.tensor,
    SPLIT: tl.constexpr,  # the ranges of K are programs of their own; otherwise a program sums them
    HELD: tl.constexpr,  # and each is one tile
    WHOLE: tl.constexpr,  # there is one range
    ACTIVATION: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    # row tiles of one weight tile are neighbours, so that it is read from memory once
    i_m, i_n, i_split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    PARTS: tl.constexpr = 1 if ACTIVATION is None else 2  # of a tile: gates, then what they gate
    o_n = tl.arange(0, BLOCK_N)
    o_part = i_n * tile_rows + o_n % (BLOCK_N // PARTS)  # row of its part of the weight
    m_n = (o_n % (BLOCK_N // PARTS) < tile_rows) & (o_part < N // PARTS)
    p_w += (o_part + o_n // (BLOCK_N // PARTS) * (N // PARTS)).to(tl.int64)[:, None] * s_w
    m_w = m_n[:, None]
    begin = i_split * split_len
    end = tl.minimum(begin + split_len, K) if SPLIT else K
    o_k = begin + tl.arange(0, BLOCK_K)
    m_k = o_k < end
    if HELD:
        b_w = tl.load(p_w + o_k[None, :], mask=m_w & m_k[None, :], other=0.0)  # [BN, BK]
    wait_for_previous(PDL)

    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_row = o_m.to(tl.int64)[None, :]
    m_x = (o_m < num_rows)[None, :]
    p_x += o_row * s_x
    b_sum = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if HELD:
        b_x = tl.load(p_x + o_k[:, None], mask=m_k[:, None] & m_x, other=0.0)  # [BK, BM]
        b_sum = tl.dot(b_w, b_x, b_sum, input_precision="ieee")
    elif SPLIT or WHOLE:
        b_sum = _multiply_range(p_w, p_x, m_w, m_x, begin, end, b_sum, EVEN_K, BLOCK_K)
    else:
        for i_k in range(begin, end, split_len):
            b_part = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            i_end = tl.minimum(i_k + split_len, end)
            b_sum += _multiply_range(p_w, p_x, m_w, m_x, i_k, i_end, b_part, EVEN_K, BLOCK_K)

    if ACTIVATION is None:
        if p_bias is not None:
            b_sum += tl.load(p_bias + o_part, mask=m_n, other=0.0).to(tl.float32)[:, None]
        p_out += (i_split * num_rows + o_row) * N + o_part[:, None]
        tl.store(p_out, b_sum.to(p_out.dtype.element_ty), mask=m_x & m_w)
    else:
        b_gate, b_up = tl.split(tl.permute(tl.reshape(b_sum, (2, BLOCK_N // 2, BLOCK_M)), (1, 2, 0)))
        b_out = activate(b_gate, ACTIVATION) * b_up
        o_half = tl.arange(0, BLOCK_N // 2)
        o_out = i_n * tile_rows + o_half
        m_out = (o_half < tile_rows) & (o_out < N // 2)
        p_out += o_row * (N // 2) + o_out[:, None]
        tl.store(p_out, b_out.to(p_out.dtype.element_ty), mask=m_x & m_out[:, None])


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
    tl.store(p_out + i_row * width + o, b_out.to(p_out.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["part_len"])
def _finish_kernel(
    p_parts: tl.tensor,  # [S, M, N]
    p_bias: tl.tensor,  # [N] or None
    p_out: tl.tensor,  # [M, N]
    part_len: tl.tensor,
    N: tl.tensor,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    wait_for_previous(PDL)
    o_part = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = o_part < part_len
    DTYPE: tl.constexpr = p_out.dtype.element_ty
    b_out = sum_parts(p_parts, p_bias, o_part, o_part % N, mask, part_len, SPLITS, DTYPE)
    tl.store(p_out + o_part, b_out.to(DTYPE), mask=mask)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tiles: Tiles | None = None,
    apart: bool = False,
) -> Product:
    """x [M, K], weight [N, K] (rows of both at any stride), bias [N] or None -> their product.

    apart: its ranges of K are parts whatever the number of rows.
    """
    cut = choose_cut(*weight.shape)
    tiles = tiles or choose_tiles(len(x), len(weight), cut, x)
    count = triton.cdiv(len(x), tiles.block_m) * triton.cdiv(len(weight), tiles.rows)
    few = count < FEW_PROGRAMS and len(x) <= FEW_ROWS
    split = cut.splits > 1 and (apart or few)
    shape = (cut.splits if split else 1, len(x), len(weight))
    parts = torch.empty(shape, dtype=torch.float32 if split else x.dtype, device=x.device)
    _launch(x, weight, None if split else bias, parts, None, cut, tiles, split)
    return Product(parts, bias if split else None, x.dtype)


def gated_linear(x: torch.Tensor, weight: torch.Tensor, activation: str, *, tiles: Tiles | None = None) -> torch.Tensor:
    """x [M, K], weight [2 I, K] with the gate's rows first -> act(gate) * up [M, I]. One range of K."""
    assert activation in ACTIVATIONS and len(weight) % 2 == 0, f"{activation=} {weight.shape=}"
    out = torch.empty((len(x), len(weight) // 2), dtype=x.dtype, device=x.device)
    cut = Cut(1, weight.shape[1])
    tiles = tiles or choose_tiles(len(x), len(weight), cut, x, gated=True)
    _launch(x, weight, None, out, activation, cut, tiles, split=False)
    return out


def vendor_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Product:
    """`linear`, by the vendor's library where x has many rows: faster there, with bits that depend on their number."""
    if len(x) <= VENDOR_ROWS or can_hold(len(weight), choose_cut(*weight.shape), len(x), x.dtype):
        return linear(x, weight, bias)
    return Product.of(F.linear(x, weight, bias))


def vendor_gated_linear(x: torch.Tensor, weight: torch.Tensor, activation: str) -> torch.Tensor:
    """`gated_linear`, likewise."""
    if len(x) <= VENDOR_ROWS:
        return gated_linear(x, weight, activation)
    merged = F.linear(x, weight)
    out = torch.empty((len(x), len(weight) // 2), dtype=x.dtype, device=x.device)
    _gate_kernel[(len(x), triton.cdiv(out.shape[1], 1024))](
        *(merged, out, out.shape[1]),
        ACTIVATION=activation,
        BLOCK=1024,
        num_warps=4,
        **pdl_options(x.device, behind_library=True),
    )
    return out


def finish(product: Product) -> torch.Tensor:
    """The product's value [M, N], for a consumer that is no kernel of this folder."""
    parts, bias, dtype = product
    if len(parts) == 1 and bias is None and parts.dtype == dtype:
        return parts[0]
    out = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    if out.numel():
        options = pdl_options(out.device)
        _finish_kernel[(triton.cdiv(out.numel(), 512),)](
            parts, bias, out, out.numel(), out.shape[1], SPLITS=len(parts), BLOCK=512, num_warps=4, **options
        )
    return out


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    activation: str | None,
    cut: Cut,
    tiles: Tiles,
    split: bool,
) -> None:
    (num_rows, k), (n, weight_k) = x.shape, weight.shape
    assert k == weight_k and x.dtype == weight.dtype, f"{x.shape=} {weight.shape=} {x.dtype=} {weight.dtype=}"
    assert x.stride(1) == weight.stride(1) == 1, f"{x.stride()=} {weight.stride()=}"
    assert bias is None or (bias.shape == (n,) and bias.is_contiguous()), f"{bias.shape=} {n=}"
    assert cut.splits == 1 or cut.split_len % tiles.block_k == 0, f"{cut=} {tiles=}"  # a tile lies in one range
    if num_rows == 0:
        return
    # of a gated weight a program has as many gates as of what they gate
    tile_rows, num_columns = (tiles.rows, n) if activation is None else (tiles.rows // 2, n // 2)
    grid = (triton.cdiv(num_rows, tiles.block_m), triton.cdiv(num_columns, tile_rows), cut.splits if split else 1)
    _linear_kernel[grid](
        x,
        weight,
        bias,
        out,
        num_rows,
        tile_rows,
        n,
        k,
        cut.split_len,
        x.stride(0),
        weight.stride(0),
        SPLIT=split,
        HELD=split and cut.split_len == tiles.block_k,
        WHOLE=cut.splits == 1,
        ACTIVATION=activation,
        EVEN_K=k % tiles.block_k == 0,
        BLOCK_N=tiles.block_n,
        BLOCK_M=tiles.block_m,
        BLOCK_K=tiles.block_k,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **pdl_options(x.device),
    )
