r"""Chooses the launch of a product with a packed weight.

    choose_packed_rows     more than 32 rows of x: tiles and ranges of K of `packed_gemm`; None: not this kernel
    choose_packed_tiles    tiles of `gemm_small`: up to 32 rows, and any number that no other kernel takes

Three things bound the time of `packed_gemm`: the tensor core, which waits while its program decodes; how evenly
programs are spread over the multiprocessors; and, in any order, the parts that the next kernel adds. A time model has
two figures for each tile and form of a weight, timed on an H200, and the fastest choice is taken. The bits of a sum
over one range of K do not depend on the tile. So in order, tiles are chosen in the same way, with given ranges.
"""

from collections.abc import Iterator
from functools import lru_cache
from math import ceil
from typing import NamedTuple, TypeGuard

import torch

from specdec.gpu.triton_shim import INTERPRETED, device_limits, triton
from specdec.layers.gemm.gemm_medium import is_described
from specdec.layers.gemm.gemm_small import TWO_TILES, can_hold
from specdec.layers.gemm.product import MAX_SMALL_ROWS, PACKED_WAVE, SPLIT_HEIGHT, SplitK, Tiles
from specdec.layers.packed.packed_tile import scale_step, tile_columns
from specdec.layers.packed.packed_weight import BITS, PackedWeight, Weight
from specdec.layers.packed.unpack_asm import is_fast


class TileTiming(NamedTuple):
    """Time of programs with one tile on an H200, where a multiprocessor runs `programs` of them at once.

    Microseconds for 128 columns: `alone` for a single program, `each` for each of several.
    """

    programs: int
    alone: float
    each: float

    def microseconds(self, programs: int) -> float:
        """Microseconds for 128 columns with this number of programs on one multiprocessor; if they do not fit at once,
        they run in turn."""
        turns, rest = divmod(programs, self.programs)
        return turns * max(self.alone, self.programs * self.each) + (max(self.alone, rest * self.each) if rest else 0.0)

    def microseconds_with_others(self, programs: float, other: "TileTiming", others: float) -> float:
        """Microseconds next to programs of another tile, which begin as soon as there is room; numbers on average."""
        after = max(other.alone, others * max(other.each, other.alone / self.programs))
        return max(self.microseconds(ceil(programs)), programs * self.each + after)


TILE_TIMINGS: dict[Tiles, dict[str, TileTiming]] = {
    Tiles(64, 64, 128, 4, 3, 64): {"8 bits in blocks": TileTiming(3, 1.00, 0.37)},
    Tiles(64, 64, 128, 4, 3, 64, registers=96): {"4 bits": TileTiming(3, 0.58, 0.23)},
    Tiles(64, 64, 128, 4, 4, 64, registers=96): {"4 bits": TileTiming(2, 0.55, 0.25)},
    Tiles(64, 64, 128, 4, 3, 64, registers=104): {"8 bits": TileTiming(3, 0.87, 0.24)},
    Tiles(64, 64, 128, 4, 4, 64, registers=104): {"8 bits": TileTiming(2, 0.55, 0.34)},
    Tiles(64, 64, 128, 4, 3, 64, tail_m=16, registers=104): {
        "4 bits": TileTiming(3, 0.96, 0.26),
        "8 bits": TileTiming(2, 0.82, 0.39),
    },
    Tiles(64, 64, 64, 4, 4, 64, tail_m=32): {"8 bits": TileTiming(3, 1.09, 0.41)},
    Tiles(64, 128, 128, 4, 3, 64, registers=136): {
        "4 bits": TileTiming(2, 0.62, 0.40),
        "8 bits": TileTiming(2, 0.91, 0.42),
    },
    Tiles(64, 128, 64, 4, 3, 64): {"8 bits": TileTiming(3, 1.25, 0.45)},
    Tiles(64, 128, 64, 4, 3, 64, tail_m=32): {"8 bits": TileTiming(3, 1.42, 0.58)},
    Tiles(64, 256, 64, 4, 3, 64): {"8 bits": TileTiming(2, 1.44, 0.77)},
    Tiles(128, 64, 128, 4, 3, 128, registers=168): {"4 bits": TileTiming(3, 1.10, 0.42)},
    Tiles(128, 64, 128, 4, 4, 128): {"4 bits": TileTiming(2, 0.70, 0.49)},
    Tiles(128, 64, 128, 4, 4, 128, registers=176): {"8 bits": TileTiming(2, 1.01, 0.57)},
    Tiles(128, 64, 128, 4, 3, 128, tail_m=32): {
        "4 bits": TileTiming(2, 1.20, 0.74),
        "8 bits": TileTiming(2, 1.28, 0.76),
    },
    Tiles(128, 128, 64, 4, 5, 128): {"8 bits": TileTiming(2, 1.51, 0.90)},
    Tiles(128, 128, 64, 4, 5, 128, registers=200): {"4 bits": TileTiming(2, 1.38, 0.84)},
    Tiles(128, 128, 64, 8, 3, 128, tail_m=32, registers=128): {"8 bits": TileTiming(2, 1.84, 1.27)},
    Tiles(128, 128, 128, 4, 3, 128): {"4 bits": TileTiming(1, 0.91, 0.86)},
    Tiles(128, 128, 128, 8, 3, 128, tail_m=32): {
        "4 bits": TileTiming(1, 1.26, 1.15),
        "8 bits": TileTiming(1, 1.36, 1.23),
    },
}
"""Tiles, by the form of a weight, that were fastest for some of nine weights and 64 to 640 rows. On an H200, a layer
takes on average 0.2 %, and at most 5 %, longer with the time model's choice for one of its products than with the
fastest timed launch.

With a register limit about a tenth below its own choice, the compiler orders a loop in another way, up to 15 % faster
(docs/results/2026-11-29-h200.md)."""

SHORT_TILES: dict[Tiles, tuple[Tiles, ...]] = {
    Tiles(64, 256, 64, 4, 3, 64): (Tiles(64, 64, 128, 4, 3, 64, registers=104), Tiles(64, 128, 64, 4, 3, 64)),
}
"""Smaller tiles that a launch may mix with the key's: they differ in rows of x alone. Next to tiles of 64 x 128 they
gain 1 % at 128 rows, and lose more where a norm and the down product follow."""

LIBRARY_ROWS = 1024
"""Above this many rows of x, products in any order use the vendor's library."""

BLOCK_ROWS = 256
"""Above this many rows of x, products in order with 8-bit weights and block scales use `gemm_small`."""

RANGES = (1, 2, 3, 4, 6, 8)
"""Possible numbers of ranges of K in any order."""

MIN_RANGE = 512
"""Minimum columns of a range of K in any order."""

MAX_PART_ROWS = 2048
"""Maximum rows of all parts of a sum together: more would take much memory."""

SCALES_AND_STORES_BYTES = 10 << 10
"""Bytes of shared memory for scales and for a program's stores."""

# The costs of a launch on an H200, in microseconds (us); bytes and operations on an H100.
WAVE_US = 1.44  # to start and end the programs that a multiprocessor runs at once
PROGRAM_US = 0.42  # for each program of such a wave, in addition
PART_US = 0.52  # for each part that the next kernel adds, besides its bytes
LIBRARY_US = 9.0  # for the library's two additional launches and for what every product takes
TWO_TILES_FACTOR = 1.03  # on the time of a launch with two tile sizes: it is chosen only if clearly faster
BANDWIDTH = 2.8e6  # bytes of memory per us
L2_BANDWIDTH = 5e6  # bytes of the L2 cache per us
ARITHMETIC = 7e8  # operations of the vendor's products per us

DEEP_RANGE = 2560
"""If ranges have more columns than this, a program of `gemm_small` has four tiles in flight, otherwise three."""

SHORT_RANGE = 1280
"""Up to this many columns per range, `gemm_small` reads an int4 weight with SPLIT_HEIGHT rows or more and small groups
in tiles of 128 columns, not 256."""

REGISTERS_FOR_FOUR = 128
"""Register limit per thread with which four programs run on a multiprocessor."""

REGISTERS_FOR_THREE = 168
"""Register limit per thread with which three programs run on a multiprocessor."""

REGISTERS_IN_LONG_GROUPS = 144
"""Register limit per thread that is fastest for int4 in groups of more than 32 columns; three programs run too."""

REGISTERS_FOR_NEXT = 72
"""Register limit per thread that leaves room for programs of the next kernel while the last of these run."""

WAVE_OF_FOUR = 528
"""Programs that an H200 runs at once if each multiprocessor runs four; without a register limit it runs three."""


def choose_packed_tiles(num_rows: int, weight: PackedWeight, split_k: SplitK, dtype: torch.dtype) -> Tiles:
    """Full tiles of `gemm_small`: unpacking absent rows of a tile costs as much as real ones."""
    fixed = tile_columns(weight)
    if dtype == torch.float32:
        return Tiles(64, 16 if num_rows <= 16 else 64, fixed or 64, 4, 3, 64)
    block_m = min(MAX_SMALL_ROWS, max(16, triton.next_power_of_2(num_rows)))
    if can_hold(weight, split_k, num_rows, dtype):
        return Tiles(64, block_m, split_k.split_len, 4, 1, 64)
    if num_rows > 64:
        return Tiles(128, 64 if num_rows <= TWO_TILES else 128, fixed or 64, 8, 3, 128)
    stages = 4 if split_k.split_len > DEEP_RANGE else 3
    if num_rows > MAX_SMALL_ROWS:
        return Tiles(64, 64, fixed or 128, 4, stages, 64)
    in_parts, few_rows = split_k.splits > 1, block_m == 16
    programs = triton.cdiv(len(weight), 64) * split_k.splits
    if BITS[weight.code] == 8:
        if in_parts and few_rows and not fixed:
            return Tiles(64, block_m, 256, 4, 3, 64)
        at_once = programs <= PACKED_WAVE
        if not few_rows:
            stages = 5 if at_once else 4
        elif not in_parts:
            stages = 4
        fits_next = few_rows and at_once and not in_parts and not fixed and is_fast(weight, dtype)
        return Tiles(
            64, block_m, fixed or 128, 4, stages, 64, registers=REGISTERS_FOR_NEXT if fits_next else REGISTERS_FOR_FOUR
        )
    small_groups = weight.code == "int4" and weight.group <= 32
    if len(weight) >= SPLIT_HEIGHT and small_groups and in_parts and split_k.split_len <= SHORT_RANGE:
        return Tiles(64, block_m, 128, 4, stages, 64, registers=REGISTERS_FOR_FOUR)
    if few_rows and PACKED_WAVE < programs <= WAVE_OF_FOUR:
        return Tiles(64, block_m, 256, 4, 3, 64, registers=REGISTERS_FOR_FOUR)
    if not few_rows and programs > PACKED_WAVE:
        return Tiles(64, block_m, 128, 4, 4, 64, registers=REGISTERS_FOR_FOUR)
    if not in_parts:
        return Tiles(64, block_m, 256, 4, stages, 64)
    if few_rows:
        return Tiles(64, block_m, 256, 4, 4, 64)
    long_groups = weight.code == "int4" and weight.group > 32 and weight.zeros is None and is_fast(weight, dtype)
    registers = REGISTERS_FOR_THREE if small_groups else REGISTERS_IN_LONG_GROUPS if long_groups else None
    return Tiles(64, block_m, 256, 4, stages, 64, registers=registers)


def takes_packed_rows(weight: Weight, x: torch.Tensor) -> TypeGuard[PackedWeight]:
    """Can the kernel multiply this x by this packed weight fast?"""
    if not isinstance(weight, PackedWeight) or len(x) <= MAX_SMALL_ROWS or not is_described(x):
        return False
    return INTERPRETED or is_fast(weight, x.dtype)


class PackedShape(NamedTuple):
    """A packed weight [n, k]. group: columns per scale within a tile; 0: tiles have no scales."""

    n: int
    k: int
    bits: int
    group: int

    @property
    def kind(self) -> str:
        return f"{self.bits} bits" + " in blocks" * (self.bits == 8 and self.group > 0)

    @property
    def nbytes(self) -> int:
        return self.n * self.k * self.bits // 8 + (2 * self.n * self.k // self.group if self.group else 0)


class PackedLaunch(NamedTuple):
    """One launch. summed: one program adds all ranges of K; otherwise each range has a program.

    short_tiles: shorter tiles. They cover the rows of x after the last whole tile, and all rows of x for the weight's
    tiles numbered `num_tall` and above.
    """

    tiles: Tiles
    split_k: SplitK
    summed: bool = False
    short_tiles: Tiles | None = None
    num_tall: int = 0

    @property
    def parts(self) -> int:
        return 1 if self.summed else self.split_k.splits

    def count_programs(self, num_rows: int, n: int) -> tuple[int, int, int]:
        """Returns tiles of x, tiles of a weight of n rows that have a program for each of them, and programs of short
        tiles; all for each range of K.

        The last tile of x ends with the last row. Next to short tiles, a tall one counts only if `_rounded` rows fill
        it, or if it is the first."""
        each, weight_tiles = self.tiles.block_m + self.tiles.tail_m, triton.cdiv(n, self.tiles.block_n)
        if self.short_tiles is None:
            return triton.cdiv(num_rows, each), weight_tiles, 0
        row_tiles, short_m = max(1, _rounded(num_rows) // each), self.short_tiles.block_m
        rest, all_rows = triton.cdiv(max(0, num_rows - row_tiles * each), short_m), triton.cdiv(num_rows, short_m)
        return row_tiles, self.num_tall, rest * self.num_tall + all_rows * (weight_tiles - self.num_tall)


def _rounded(num_rows: int) -> int:
    """Rows as the time model counts them: rounded up to a multiple of 32."""
    return -(-num_rows // 32) * 32


def choose_packed_rows(
    num_rows: int, weight: PackedWeight, device: torch.device, *, gated: bool = False, split_k: SplitK | None = None
) -> PackedLaunch | None:
    """Choose the launch. split_k: the ranges of K, in order; None: any order. Returns None if other kernels are faster
    or no tiles fit."""
    if split_k is None and num_rows > LIBRARY_ROWS:
        return None
    if split_k is not None and num_rows > BLOCK_ROWS and tile_columns(weight):
        return None
    n, k = weight.shape
    shape = PackedShape(n, k, BITS[weight.code], 0 if weight.has_row_scales else weight.group)
    return _choose(_rounded(num_rows), shape, gated, split_k, *device_limits(device))


@lru_cache(maxsize=4096)
def _choose(
    num_rows: int, shape: PackedShape, gated: bool, split_k: SplitK | None, multiprocessors: int, shared: int
) -> PackedLaunch | None:
    times = {
        launch: _microseconds(num_rows, shape, launch, multiprocessors)
        for tiles in TILE_TIMINGS
        if tiles.block_m <= num_rows and _fits(tiles, shape, shared)  # absent rows take longer than real ones
        for launch in _launches(num_rows, shape, tiles, gated, split_k, multiprocessors)
    }
    if not times or (split_k is None and min(times.values()) > _library_microseconds(num_rows, shape)):
        return None
    return min(times, key=lambda launch: times[launch])


def _launches(
    num_rows: int, shape: PackedShape, tiles: Tiles, gated: bool, split_k: SplitK | None, multiprocessors: int
) -> Iterator[PackedLaunch]:
    in_order = split_k is not None
    # for a second sum, to which a program adds the sum of each range; for 8 bits `gemm_small` is as fast
    has_registers = tiles.block_m == 64 and not tiles.tail_m and (tiles.block_n == 64 or tiles.registers is None)
    split_ks = [split_k] if split_k else [_equal_ranges(shape.k, ranges) for ranges in ((1,) if gated else RANGES)]
    for cut in split_ks:
        if cut.splits == 1:
            yield PackedLaunch(tiles, cut)
            for short in SHORT_TILES.get(tiles, ()):
                yield from _mixed(num_rows, shape, PackedLaunch(tiles, cut, short_tiles=short), multiprocessors)
        elif cut.splits * num_rows <= MAX_PART_ROWS and (in_order or cut.split_len >= MIN_RANGE):
            yield PackedLaunch(tiles, cut)
        if in_order and cut.splits > 1 and shape.bits == 4 and has_registers:
            yield PackedLaunch(tiles, cut, summed=True)


def _mixed(num_rows: int, shape: PackedShape, launch: PackedLaunch, multiprocessors: int) -> Iterator[PackedLaunch]:
    """Launches whose tall tiles make 1, 2, ... programs for each multiprocessor, or all if rows are left over."""
    row_tiles, weight_tiles = launch.count_programs(num_rows, shape.n)[0], triton.cdiv(shape.n, launch.tiles.block_n)
    if num_rows > row_tiles * launch.tiles.block_m:
        yield launch._replace(num_tall=weight_tiles)
    for each in range(1, row_tiles * weight_tiles // multiprocessors + 1):
        num_tall = each * multiprocessors // row_tiles
        if 0 < num_tall < weight_tiles:
            yield launch._replace(num_tall=num_tall)


def _equal_ranges(k: int, ranges: int) -> SplitK:
    split_len = triton.cdiv(triton.cdiv(k, ranges), 128) * 128
    return SplitK(triton.cdiv(k, split_len), split_len)


def _fits(tiles: Tiles, shape: PackedShape, shared: int) -> bool:
    stage = (2 * (tiles.block_m + tiles.tail_m) + tiles.block_n * shape.bits // 8) * tiles.block_k
    if shape.kind not in TILE_TIMINGS[tiles] or tiles.num_stages * stage + SCALES_AND_STORES_BYTES > shared:
        return False
    if shape.bits == 4:  # scales are copied asynchronously if there are 4 bytes for each thread
        step = scale_step(tiles.block_n, tiles.block_k, shape.group)
        return shape.group >= 32 and tiles.block_n * (tiles.block_k // step) >= 64 * tiles.num_warps
    return shape.group in (0, tiles.block_k)


def _microseconds(num_rows: int, shape: PackedShape, launch: PackedLaunch, multiprocessors: int) -> float:
    tiles, split_k, parts = launch.tiles, launch.split_k, launch.parts
    row_tiles, num_tall, num_short = launch.count_programs(num_rows, shape.n)
    timing, programs = TILE_TIMINGS[tiles][shape.kind], row_tiles * num_tall + num_short
    each = ceil(programs * parts / multiprocessors)
    columns = shape.k if parts == 1 else min(split_k.split_len, shape.k)
    if launch.short_tiles is None:
        for_128 = timing.microseconds(each)
    else:
        short = num_short / multiprocessors
        tall = programs / multiprocessors - short
        short_timing = TILE_TIMINGS[launch.short_tiles][shape.kind]
        for_128 = TWO_TILES_FACTOR * timing.microseconds_with_others(tall, short_timing, short)
    begun = triton.cdiv(each, timing.programs) * WAVE_US + each * PROGRAM_US
    took: float = max(begun + triton.cdiv(columns, 128) * for_128, shape.nbytes / BANDWIDTH)
    return took if parts == 1 else took + parts * (PART_US + num_rows * shape.n * 8 / L2_BANDWIDTH)


def _library_microseconds(num_rows: int, shape: PackedShape) -> float:
    """Time of the library: the weight is dequantised into memory and read again."""
    whole = 2 * shape.n * shape.k
    return LIBRARY_US + (shape.nbytes + whole) / BANDWIDTH + max(whole / BANDWIDTH, whole * num_rows / ARITHMETIC)
