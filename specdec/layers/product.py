r"""A product before its last sum, which the kernel that reads it next computes on the way; and how it is cut.

    y = dtype(((0 + p_0) + p_1) + ... + p_{S-1} + bias)          p_s [M, N] float32: sums over ranges of K

Kernels of this folder call `sum_parts`; `finish` is a launch for any other reader. The cut of K is part of the result's
bits: a function of the weight's shape alone, never of the device or the number of rows. Tiles have no effect on bits.
They are what was fastest in a whole forward on an H200, not product by product.
"""

from typing import NamedTuple

import torch

from specdec.gpu.dependent_launch import pdl_options, trigger_next, wait_for_previous
from specdec.gpu.operations import op
from specdec.gpu.triton_device import device_limits
from specdec.gpu.triton_shim import KEEP, tl, triton
from specdec.layers.packed.packed_tile import tile_columns
from specdec.layers.packed.packed_weight import BITS, PackedWeight, Weight

RANGE = 128
"""Ranges of K begin at multiples of this."""

SPLITS, SPLIT_ROWS = 4, 8192
"""A weight of at most SPLIT_ROWS rows is cut into SPLITS ranges of K: otherwise it would be too few programs."""

PACKED_RANGE, MAX_PACKED_SPLITS = 256, 8
"""Ranges of a packed weight begin at multiples of PACKED_RANGE. Each is a part that the next kernel adds up, so there
are at most MAX_PACKED_SPLITS."""

PACKED_WAVE, PACKED_PROGRAMS = 396, 640
"""They are so many that programs of 64 rows fill PACKED_WAVE, what an H200 runs at once, to nine tenths or more; where
no number does, as many as PACKED_PROGRAMS allow: unpacking takes time that only other programs hide."""

PACKED_LONG, PACKED_SHORT = 2560, 1280
"""Columns of a range of a packed weight above which a program has four tiles on their way, otherwise three; and up to
which int4 is read in tiles of 128 columns where the weight has many rows and small groups."""

PACKED_LARGE = 40960
"""Rows of a packed weight from which on tiles of 128 rows are enough programs, for more rows of x than 32."""

PACKED_REGISTERS = 128
"""Registers of a thread at most, where that makes room for one more program on a multiprocessor."""

SMALL_ROWS, SMALL_RANGE = 512, 512
"""A weight of at most SMALL_ROWS rows has ranges of at most SMALL_RANGE columns: a program can hold its tile of one."""

HELD_ROWS, FEW_ROWS = 32, 512
"""It does, with a tile of at most HELD_ROWS rows of x, up to FEW_ROWS rows in all."""

MIN_TILE_ROWS = 32
"""Fewer rows a program than this read x more often than they gain."""

DEPTH = {1: (128, 6), 2: (128, 4), 3: (128, 3), 4: (128, 2)}
DEPTH_MANY = {1: (128, 5), 2: (128, 3), 3: (64, 4), 4: (64, 3)}
"""Programs a multiprocessor -> columns a tile, tiles on their way in each: they share 227 KiB. MANY: above 32 rows."""

MANY_WAVES = 2
"""A weight of more waves of tiles than this waits for their loading: more rows of x a program, loaded once for all."""

TWO_TILES = 192
"""Up to this number of rows of x a program can take all of them, as two tiles for which it loads its weight once."""

MANY_ROWS = 256
"""Above this number of rows of x a product is bound by arithmetic, not memory: the largest tiles that fit registers."""


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


class Columns(NamedTuple):
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
    split_steps = max(2, triton.cdiv(steps, SPLITS)) if n <= SPLIT_ROWS else steps
    if n <= SMALL_ROWS:
        split_steps = min(split_steps, SMALL_RANGE // RANGE)
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
    if n <= SMALL_ROWS:  # one tile a range, which a program can hold
        splits = steps
    split_steps = triton.cdiv(steps, splits)
    return Cut(triton.cdiv(steps, split_steps), split_steps * PACKED_RANGE)


def tiles_of(num_rows: int, weight: Weight, cut: Cut, x: torch.Tensor, *, gated: bool = False) -> Tiles:
    """Tiles for `num_rows` rows of x and this weight."""
    if isinstance(weight, PackedWeight):
        return choose_packed_tiles(num_rows, weight, cut, x.dtype)
    return choose_tiles(num_rows, len(weight), cut, x, gated=gated)


def choose_packed_tiles(num_rows: int, weight: PackedWeight, cut: Cut, dtype: torch.dtype) -> Tiles:
    """Tiles for `num_rows` rows of x and this weight, whole ones."""
    fixed = tile_columns(weight)
    if dtype == torch.float32:
        return Tiles(64, 16 if num_rows <= 16 else 64, fixed or 64, 4, 3, 64)
    block_m = max(16, triton.next_power_of_2(num_rows))
    if num_rows > 64:
        return Tiles(128, 64 if num_rows <= TWO_TILES else 128, fixed or 64, 8, 3, 128)
    stages = 4 if cut.split_len > PACKED_LONG else 3
    if block_m == 64:
        block_n, num_warps = (128, 8) if len(weight) > PACKED_LARGE else (64, 4)
        return Tiles(block_n, 64, fixed or 128, num_warps, stages, block_n)
    wide = len(weight) >= SPLIT_ROWS
    if BITS[weight.code] == 8:
        block_k = fixed or (256 if wide and cut.splits == 1 else 128)
        return Tiles(64, block_m, block_k, 4, stages, 64, registers=PACKED_REGISTERS)
    if wide and cut.splits > 1 and cut.split_len <= PACKED_SHORT and weight.code == "int4" and weight.group <= 32:
        return Tiles(64, block_m, fixed or 128, 4, stages, 64, registers=PACKED_REGISTERS)
    return Tiles(64, block_m, fixed or 256, 4, stages, 64)


def choose_tiles(num_rows: int, n: int, cut: Cut, x: torch.Tensor, *, gated: bool = False) -> Tiles:
    """Tiles for `num_rows` rows of x and a weight of n rows."""
    if x.dtype == torch.float32:  # multiplies without tensor cores
        return Tiles(64, 16 if num_rows <= 16 else 64, 32, 4, 3, 64)
    multiprocessors, shared_memory = device_limits(x.device)
    rows, programs = balanced_rows(n, cut.splits, multiprocessors)
    block_m = max(16, triton.next_power_of_2(num_rows))
    if _can_hold(n, cut, num_rows, x.dtype):
        return Tiles(64, min(block_m, HELD_ROWS), cut.split_len, 4, 1, rows if num_rows <= 64 else 64)
    if num_rows > MANY_ROWS and n > SMALL_ROWS:
        block_m = 256 if gated else 128  # a range has an accumulator of its own, and what is stored has its addresses
        return Tiles(128, block_m, 64, 8, min(4, shared_memory // ((128 + block_m) * 64 * x.element_size())), 128)
    if num_rows > TWO_TILES:
        return Tiles(128, 64, 64, 8, 4, 128)
    if num_rows > 64:
        tiles = tiles_of_some(num_rows, n, cut.splits, 2 * multiprocessors, gated=gated)
        stage = (tiles.block_n + tiles.block_m + tiles.tail_m) * tiles.block_k * x.element_size()
        return tiles._replace(num_stages=min(tiles.num_stages, shared_memory // stage))
    block_k, stages = (DEPTH if num_rows <= 32 else DEPTH_MANY)[programs]
    stages = min(stages, shared_memory // ((64 + block_m) * block_k * x.element_size()))
    return Tiles(64, block_m, block_k, 4, stages, rows)


def tiles_of_some(num_rows: int, n: int, splits: int, wave: int, *, gated: bool) -> Tiles:
    """65 to 192 rows of x and a weight of n rows, on a device that runs `wave` programs of 128 of them at once."""
    block_m, tail_m = two_tiles(num_rows)
    weight_tiles = triton.cdiv(n, 128) * splits
    if gated or weight_tiles > MANY_WAVES * wave:
        return Tiles(128, block_m, 64, 8, 3 if gated else 4, 128, tail_m)
    if splits > 1 and 2 * weight_tiles <= wave < weight_tiles * triton.cdiv(num_rows, 64):
        return Tiles(64, block_m, 64, 4, 3, 64, tail_m)  # one wave of programs, not one and a little
    return Tiles(128, 64, 64, 8, 4, 128)


def two_tiles(num_rows: int) -> tuple[int, int]:
    """Powers of two that together hold 65 to 192 rows of x, the second 0 or more: 160 are 128 and 32, not 256."""
    block_m = 64 if num_rows <= 96 else 128
    return block_m, max(16, triton.next_power_of_2(num_rows - block_m)) if num_rows > block_m else 0


def can_hold(weight: Weight, cut: Cut, num_rows: int, dtype: torch.dtype) -> bool:
    """Whether a range of a weight is one tile of a program, for `num_rows` rows of x."""
    return isinstance(weight, torch.Tensor) and _can_hold(len(weight), cut, num_rows, dtype)


def _can_hold(n: int, cut: Cut, num_rows: int, dtype: torch.dtype) -> bool:
    small = n <= SMALL_ROWS and cut.splits > 1 and cut.split_len in (256, 512)
    return small and num_rows <= FEW_ROWS and dtype != torch.float32


def balanced_rows(n: int, splits: int, multiprocessors: int) -> tuple[int, int]:
    """Rows of a weight tile, and programs a multiprocessor, such that all of them have as many programs.

    They share the memory's bandwidth evenly, so the one with most programs ends last: full tiles of 64 rows would leave
    a quarter of it unused where there are 2.4 of them for each. Rows that a tile has not are not read.
    """
    for programs in (2, 3, 4):
        tiles = max(1, programs * multiprocessors // splits)
        rows = 2 * triton.cdiv(n, 2 * tiles)
        if rows <= 64:
            rows = max(rows, MIN_TILE_ROWS)
            return rows, triton.cdiv(triton.cdiv(n, rows) * splits, multiprocessors)
    return 64, 2
