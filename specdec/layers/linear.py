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

from specdec.gpu.dependent_launch import pdl_options
from specdec.gpu.operations import op
from specdec.gpu.triton_shim import triton
from specdec.layers.linear_kernels import finish_kernel, gate_kernel, linear_kernel
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


class Mlp(NamedTuple):
    """gate_up [2 I, H], the gate's rows first; down [H, I]."""

    gate_up: torch.Tensor
    activation: str
    down: torch.Tensor


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
    gate_kernel[(len(x), triton.cdiv(out.shape[1], 1024))](
        *(merged, out, out.shape[1]),
        ACTIVATION=activation,
        BLOCK=1024,
        num_warps=4,
        **pdl_options(x.device, behind_library=True),
    )
    return out


@op(reference=reference_linear, vendor=vendor_linear)
def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    tiles: Tiles | None = None,
    apart: bool = False,
    holds: bool = False,
) -> Product:
    """x [M, K], weight [N, K] (rows of both at any stride), bias [N] or None -> their product.

    apart: its ranges of K are parts whatever the number of rows. holds: no kernel behind it starts before x is there.
    """
    cut = choose_cut(*weight.shape)
    tiles = tiles or choose_tiles(len(x), len(weight), cut, x)
    count = triton.cdiv(len(x), tiles.block_m + tiles.tail_m) * triton.cdiv(len(weight), tiles.rows)
    few = count < FEW_PROGRAMS and len(x) <= FEW_ROWS
    split = cut.splits > 1 and (apart or few)
    shape = (cut.splits if split else 1, len(x), len(weight))
    parts = torch.empty(shape, dtype=torch.float32 if split else x.dtype, device=x.device)
    _launch(x, weight, None if split else bias, parts, None, cut, tiles, split, holds)
    return Product(parts, bias if split else None, x.dtype)


@op(reference=reference_gated_linear, vendor=vendor_gated_linear)
def gated_linear(x: torch.Tensor, weight: torch.Tensor, activation: str, *, tiles: Tiles | None = None) -> torch.Tensor:
    """x [M, K], weight [2 I, K] with the gate's rows first -> act(gate) * up [M, I]. One range of K."""
    assert activation in ACTIVATIONS and len(weight) % 2 == 0, f"{activation=} {weight.shape=}"
    out = torch.empty((len(x), len(weight) // 2), dtype=x.dtype, device=x.device)
    cut = Cut(1, weight.shape[1])
    tiles = tiles or choose_tiles(len(x), len(weight), cut, x, gated=True)
    _launch(x, weight, None, out, activation, cut, tiles, split=False)
    return out


@op(reference=reference_finish)
def finish(product: Product) -> torch.Tensor:
    """The product's value [M, N], for a consumer that is no kernel of this folder."""
    parts, bias, dtype = product
    if len(parts) == 1 and bias is None and parts.dtype == dtype:
        return parts[0]
    out = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    if out.numel():
        options = pdl_options(out.device)
        finish_kernel[(triton.cdiv(out.numel(), 512),)](
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
    holds: bool = False,
) -> None:
    (num_rows, k), (n, weight_k) = x.shape, weight.shape
    assert k == weight_k and x.dtype == weight.dtype, f"{x.shape=} {weight.shape=} {x.dtype=} {weight.dtype=}"
    assert x.stride(1) == weight.stride(1) == 1, f"{x.stride()=} {weight.stride()=}"
    assert bias is None or (bias.shape == (n,) and bias.is_contiguous()), f"{bias.shape=} {n=}"
    assert cut.splits == 1 or cut.split_len % tiles.block_k == 0, f"{cut=} {tiles=}"  # a tile lies in one range
    assert tiles.tail_m == 0 or split or cut.splits == 1, f"{cut=} {tiles=}"  # no accumulator of its own for a range
    if num_rows == 0:
        return
    # of a gated weight a program has as many gates as of what they gate
    tile_rows, num_columns = (tiles.rows, n) if activation is None else (tiles.rows // 2, n // 2)
    row_tiles = triton.cdiv(num_rows, tiles.block_m + tiles.tail_m)
    grid = (row_tiles, triton.cdiv(num_columns, tile_rows), cut.splits if split else 1)
    linear_kernel[grid](
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
        TAIL_M=tiles.tail_m,
        BLOCK_K=tiles.block_k,
        START="holds" if holds else "usual",
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **pdl_options(x.device),
    )
