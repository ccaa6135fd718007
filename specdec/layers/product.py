r"""A product of rows before its last sum, which the kernel that reads it computes; and the ranges that K is cut into.

    y = dtype(((0 + p_0) + p_1) + ... + p_{S-1} + bias)          p_s [M, N] float32: sums over ranges of K

Kernels of this folder call `sum_parts`; `finish` is a launch for any other reader. The cut of K is part of the result's
bits: a function of the weight's shape alone, never of the device or the number of rows. Tiles have no effect on bits.
`linear.py` says which kernel multiplies.
"""

from typing import NamedTuple

import torch

from specdec.gpu.dependent_launch import pdl_options, trigger_next, wait_for_previous
from specdec.gpu.operations import op
from specdec.gpu.triton_shim import KEEP, tl, triton
from specdec.layers.packed.packed_weight import PackedWeight, Weight

MAX_SMALL_ROWS = 32
"""Rows of x up to which `gemm_small` is the fastest over any weight."""

MAX_MEDIUM_ROWS = 256
"""Rows of x above which a product of 2-byte numbers is bound by arithmetic, not by memory."""

RANGE = 128
"""Ranges of K begin at multiples of this number of columns."""

SPLITS = 4
"""Ranges of K of a weight that would otherwise be too few programs."""

SPLIT_HEIGHT = 8192
"""Rows of a weight up to which it is such a weight."""

LOW_HEIGHT = 512
"""Rows of a weight up to which a program can hold its tile of one range of K."""

LOW_RANGE = 512
"""Columns of a range of such a weight at most."""

PACKED_RANGE = 256
"""Ranges of K of a packed weight begin at multiples of this number of columns."""

MAX_PACKED_SPLITS = 8
"""Ranges of K of a packed weight at most: each is a part that the next kernel adds up."""

PACKED_WAVE = 396
"""Programs over a packed weight that an H200 runs at once: ranges of K are as many as fill this to nine tenths."""

PACKED_PROGRAMS = 640
"""Programs over a packed weight at most where no number of ranges fills a wave: others hide the time to unpack."""


class Product(NamedTuple):
    """x W^T before its last sum: y = sum_s parts[s] + bias, rounded to `dtype`.

    parts: [S, M, N] float32, or [1, M, N] in `dtype` with nothing left to add.
    """

    parts: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype

    @classmethod
    def from_value(cls, value: torch.Tensor) -> "Product":
        """The product whose value [M, N] is summed already."""
        return cls(value[None], None, value.dtype)

    @property
    def is_value(self) -> bool:
        """Is parts[0] the value, with nothing left to add or to round?"""
        return len(self.parts) == 1 and self.bias is None and self.parts.dtype == self.dtype


class Cut(NamedTuple):
    """`splits` ranges of `split_len` columns of K, the last of what is left."""

    splits: int
    split_len: int

    def share(self, count: int) -> "Cut":
        """Cut of the columns of one of `count` ranks, which have the same ranges as in the whole."""
        return Cut(self.splits // count, self.split_len)


class OwnedParts(NamedTuple):
    """A rank's share of a product whose parts are experts': which of them are its, it has whole.

    owners [M, S]: part s of row m is this rank's where it is not negative; elsewhere `product` is undefined.
    """

    product: Product
    owners: torch.Tensor


class RankColumns(NamedTuple):
    """What each rank has of the columns of one value [T, N], in the order of ranks: a whole number of float32 a row."""

    own: torch.Tensor


class Tiles(NamedTuple):
    """One launch. A program has `rows` <= `block_n` rows of the weight."""

    block_n: int
    block_m: int
    block_k: int
    num_warps: int
    num_stages: int
    rows: int
    tail_m: int = 0  # rows of x after those block_m, which the same program multiplies with what it has loaded
    registers: int | None = None  # of a thread, at most


def reference_finish(product: Product) -> torch.Tensor:
    """The product's value [M, N]."""
    value = torch.zeros_like(product.parts[0], dtype=torch.float32)
    for part in product.parts:
        value = value + part
    return (value if product.bias is None else value + product.bias).to(product.dtype)


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
    tl.store(p_out + o_part, b_out.to(DTYPE), mask=mask, eviction_policy=KEEP)


@op(reference=reference_finish)
def finish(product: Product) -> torch.Tensor:
    """The product's value [M, N]."""
    parts, bias, dtype = product
    if product.is_value:
        return parts[0]
    out = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    if out.numel():
        options = pdl_options(out.device)
        _finish_kernel[(triton.cdiv(out.numel(), 512),)](
            parts, bias, out, out.numel(), out.shape[1], SPLITS=len(parts), BLOCK=512, num_warps=4, **options
        )
    return out


def choose_cut(n: int, k: int) -> Cut:
    """The ranges of K for a weight [n, k]."""
    steps = triton.cdiv(k, RANGE)
    split_steps = max(2, triton.cdiv(steps, SPLITS)) if n <= SPLIT_HEIGHT else steps
    if n <= LOW_HEIGHT:
        split_steps = min(split_steps, LOW_RANGE // RANGE)
    return Cut(triton.cdiv(steps, split_steps), split_steps * RANGE)


def cut_of(weight: Weight) -> Cut:
    return (choose_packed_cut if isinstance(weight, PackedWeight) else choose_cut)(*weight.shape)


def choose_packed_cut(n: int, k: int) -> Cut:
    """The ranges of K for a packed weight [n, k]."""
    steps, tiles = triton.cdiv(k, PACKED_RANGE), triton.cdiv(n, 64)
    splits = PACKED_WAVE // tiles
    if 10 * splits * tiles < 9 * PACKED_WAVE:
        splits = PACKED_PROGRAMS // tiles
    splits = max(1, min(splits, MAX_PACKED_SPLITS, steps // 2))  # of two tiles at least
    if n <= LOW_HEIGHT:  # one tile a range, which a program can hold
        splits = steps
    split_steps = triton.cdiv(steps, splits)
    return Cut(triton.cdiv(steps, split_steps), split_steps * PACKED_RANGE)
