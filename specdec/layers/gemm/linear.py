r"""The products of a layer, and the choice of their kernel.

    y[m, n] = sum_k x[m, k] W[n, k] + bias[n]
    gated:  y[m, n] = act(g) u    with g and u the products of rows n and N / 2 + n of a merged gate / up weight;
                                  with a limit: min(act(g), limit) clamp(u, -limit, limit), in a separate launch

In order (`deterministic=True`), the cut of the sum over K depends on the weight only (`split_k_of`), so a row has the
same bits next to any number of other rows. In any order, the cut and the kernel also depend on the number of rows.

    rows of x    weight in 2 bytes: in order   in any order                    packed
    up to 32     `gemm_small`                  `gemm_small`                    `gemm_small`
    up to 64     `gemm_small`                  `gemm_medium`, `gemm_small`     `packed_gemm`
    up to 256    `gemm_small`                  `gemm_medium`, the library      `packed_gemm`, in any order the library
    above        `gemm_large`                  the library                     `packed_gemm`, in any order the library

Where a cell has two kernels, the first runs if `choose_medium_tiles` (weight in 2 bytes) or `choose_packed_rows`
(packed) returns tiles for it. The exceptions:

    weight                                                  rows of x    order       kernel
    2 bytes, at most 512 rows                               above 256    in order    `gemm_small`
    the same, if `can_hold`                                 65 to 512    any         `gemm_small`, never the library
    FP8 with a scale per row, if `can_hold`                 33 to 256    both        `gemm_small`
    FP8 with scales by blocks, or with more ranges of K     above 256    in order    `gemm_small`
    than 2,048 / rows
    no tiles of `packed_gemm` fit (int4 in groups below     above 32     in order    `gemm_small`
    32), or there are no descriptors (float32, odd          33 to 64     any         `gemm_small`
    strides, devices before Hopper)                         above 64     any         the library

Before the library multiplies by a packed weight, the weight is dequantised into temporary memory.
"""

from math import inf
from typing import NamedTuple

import torch
import torch.nn.functional as F

from specdec.gpu.operations import op
from specdec.gpu.triton_shim import KEEP, pdl_options, tl, trigger_next, triton, wait_for_previous
from specdec.layers.gemm.gemm_large import gemm_large
from specdec.layers.gemm.gemm_medium import can_describe, choose_medium_tiles, gemm_medium
from specdec.layers.gemm.gemm_small import HELD_ROWS, can_hold, choose_small_tiles, gemm_small
from specdec.layers.gemm.product import (
    ACTIVATIONS,
    LOW_HEIGHT,
    MAX_MEDIUM_ROWS,
    MAX_SMALL_ROWS,
    Product,
    SplitK,
    Tiles,
    activate,
    finish,
    reference_activate,
    split_k_of,
)
from specdec.layers.packed.packed_gemm import dequantise, packed_gemm
from specdec.layers.packed.packed_launch import choose_packed_rows, choose_packed_tiles, takes_packed_rows
from specdec.layers.packed.packed_weight import PackedWeight, Weight, multiply

MIN_SUMMING_PROGRAMS = 256
"""From this many programs on, one program adds all ranges of K: separate parts would cost more bytes than they gain."""

VENDOR_ROWS = 64
"""Up to this many rows of x `gemm_small` is faster than the vendor's library."""


class Mlp(NamedTuple):
    """A gated MLP: gate_up [2 I, H], the gate's rows first; down [H, I]. limit: see the module's docstring."""

    gate_up: Weight
    activation: str
    down: Weight
    limit: float = inf


def reference_linear(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None, split_k: SplitK | None = None
) -> Product:
    return Product.from_value(multiply(x, weight, bias))


def reference_linear_parts(x: torch.Tensor, weight: torch.Tensor, split_k: SplitK) -> Product:
    ranges = zip(x.float().split(split_k.split_len, 1), weight.float().split(split_k.split_len, 1), strict=True)
    return Product(torch.stack([F.linear(some, columns) for some, columns in ranges]), None, x.dtype)


def reference_gated_linear(x: torch.Tensor, weight: Weight, activation: str, limit: float = inf) -> torch.Tensor:
    gate, up = multiply(x, weight).float().chunk(2, dim=-1)
    return (reference_activate(gate, activation).clamp(max=limit) * up.clamp(-limit, limit)).to(x.dtype)


@triton.jit(do_not_specialize=["limit"])
def _gate_kernel(
    p_merged: tl.tensor,  # [M, 2 I]
    p_out: tl.tensor,  # [M, I]
    width: tl.tensor,
    limit: tl.tensor,
    ACTIVATION: tl.constexpr,
    LIMITED: tl.constexpr,
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
    b_gate = activate(b_gate, ACTIVATION)
    if LIMITED:
        b_gate, b_up = tl.minimum(b_gate, limit), tl.clamp(b_up, -limit, limit)
    b_out = b_gate * b_up
    tl.store(p_out + i_row * width + o, b_out.to(p_out.dtype.element_ty), mask=m, eviction_policy=KEEP)


def _by_other_kernels(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, activation: str | None, split_k: SplitK, in_order: bool
) -> Product | None:
    """The product by another kernel than `gemm_small`, or in any order by the library; None: `gemm_small` is to compute
    it."""
    gated, held = activation is not None, can_hold(weight, split_k, len(x), x.dtype)
    if takes_packed_rows(weight, x) and not held:
        given = split_k if in_order else None
        if launch := choose_packed_rows(len(x), weight, x.device, gated=gated, split_k=given):
            return packed_gemm(x, weight, bias, activation, launch)
    elif can_describe(weight, x):
        if not in_order:
            if tiles := choose_medium_tiles(len(x), weight.shape, x.device, gated=gated):
                return gemm_medium(x, weight, bias, activation, tiles)
        elif len(x) > MAX_MEDIUM_ROWS and len(weight) > LOW_HEIGHT:
            return Product.from_value(gemm_large(x, weight, bias, activation, split_k))
    if in_order:
        return None
    if len(x) > VENDOR_ROWS and not held:
        whole = F.linear(x, dequantise(weight, x.dtype) if isinstance(weight, PackedWeight) else weight, bias)
        return Product.from_value(whole if activation is None else _gate(whole, activation, inf, after_library=True))
    return _by_other_kernels(x, weight, bias, activation, split_k, in_order=True)


def _gate(merged: torch.Tensor, activation: str, limit: float, *, after_library: bool) -> torch.Tensor:
    """Gate a product: merged [M, 2 I] -> act(gate) * up [M, I]."""
    out = merged.new_empty((len(merged), merged.shape[1] // 2))
    if out.numel():
        _gate_kernel[(len(out), triton.cdiv(out.shape[1], 1024))](
            *(merged, out, out.shape[1], limit),
            ACTIVATION=activation,
            LIMITED=limit < inf,
            BLOCK=1024,
            num_warps=4,
            **pdl_options(merged.device, after_library=after_library),
        )
    return out


def tiles_of(x: torch.Tensor, weight: Weight, split_k: SplitK, *, gated: bool = False) -> Tiles:
    """Tiles of `gemm_small`."""
    if isinstance(weight, PackedWeight):
        return choose_packed_tiles(len(x), weight, split_k, x.dtype)
    return choose_small_tiles(len(x), len(weight), split_k, x, gated=gated)


@op(reference=reference_linear, has_orders=True)
def linear(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    split_k: SplitK | None = None,
    *,
    in_order: bool = True,
    tiles: Tiles | None = None,
    keep_parts: bool = False,
    hold_next: bool = False,
) -> Product:
    """Multiply: x [M, K], weight [N, K] (rows of both at any stride; packed or not), bias [N] or None -> the product.

    split_k: that of a larger weight to which these rows belong; None: the weight's own. in_order: see above; in any
    order it is faster. keep_parts: ranges of K always stay separate float32 parts. hold_next: no later kernel starts
    before x is written.
    """
    split_k = split_k or split_k_of(weight)
    if tiles is None and not keep_parts and not hold_next:
        product = _by_other_kernels(x, weight, bias, None, split_k, in_order)
        if product is not None:
            return product
    tiles = tiles or tiles_of(x, weight, split_k)
    count = triton.cdiv(len(x), tiles.block_m + tiles.tail_m) * triton.cdiv(len(weight), tiles.rows)
    few = count < MIN_SUMMING_PROGRAMS and len(x) <= HELD_ROWS
    if isinstance(weight, PackedWeight):  # its ranges exist to have more programs
        few |= len(x) <= MAX_SMALL_ROWS
    split = split_k.splits > 1 and (keep_parts or few)
    shape = (split_k.splits if split else 1, len(x), len(weight))
    parts = torch.empty(shape, dtype=torch.float32 if split or keep_parts else x.dtype, device=x.device)
    gemm_small(x, weight, None if split else bias, parts, None, split_k, tiles, split, hold_next=hold_next)
    return Product(parts, bias if split else None, x.dtype)


@op(reference=reference_linear_parts)
def linear_parts(x: torch.Tensor, weight: torch.Tensor, split_k: SplitK) -> Product:
    """Multiply x [M, K] by a weight [N, K] with some columns of a larger one, in the ranges of that one -> a float32
    part for each range of K."""
    assert split_k.splits * split_k.split_len >= weight.shape[1] > (split_k.splits - 1) * split_k.split_len, (
        f"{split_k=} {weight.shape=}"
    )
    return linear(x, weight, None, split_k, keep_parts=True)


@op(reference=reference_gated_linear, has_orders=True)
def gated_linear(
    x: torch.Tensor,
    weight: Weight,
    activation: str,
    limit: float = inf,
    *,
    in_order: bool = True,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """Multiply and gate: x [M, K], weight [2 I, K] with the gate's rows first -> act(gate) * up [M, I]. K is cut into
    ranges only with a limit, since the gate then has a launch of its own."""
    assert activation in ACTIVATIONS and len(weight) % 2 == 0, f"{activation=} {weight.shape=}"
    if limit < inf:
        return _gate(finish(linear(x, weight, in_order=in_order)), activation, limit, after_library=False)
    split_k = SplitK(1, weight.shape[1])
    if tiles is None:
        product = _by_other_kernels(x, weight, None, activation, split_k, in_order)
        if product is not None:
            return product.parts[0]
    out = torch.empty((len(x), len(weight) // 2), dtype=x.dtype, device=x.device)
    tiles = tiles or tiles_of(x, weight, split_k, gated=True)
    gemm_small(x, weight, None, out, activation, split_k, tiles, split=False)
    return out
