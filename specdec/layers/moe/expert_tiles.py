"""How an expert's product is cut into tiles. K is never cut: one program sums all of it.

A row's bits do not depend on the other rows: where the columns of a tile affect bits, they depend only on weight and
dtype. For 4-bit weights they do not, and tiles are narrower above 16 rows of x. Each choice was the fastest of some
twenty, timed on an H200 for the experts of GPT-OSS 20B and Gemma 4 26B-A4B.
"""

from math import ceil, inf

import torch

from specdec.gpu.triton_shim import device_limits, triton
from specdec.layers.gemm.product import Tiles
from specdec.layers.packed.packed_launch import REGISTERS_FOR_FOUR
from specdec.layers.packed.packed_tile import tile_columns
from specdec.layers.packed.packed_weight import BITS, PackedWeight, Weight
from specdec.layers.packed.unpack_asm import is_fast

UNLISTED_ROWS = 16
"""Maximum rows of x whose assignments are not listed by expert first: those of the smallest tile."""

STATIC_BYTES = 4 << 10
"""Shared memory of a program besides its tiles in flight."""

MANY_COLUMNS = 11 * 256
"""Above this number of columns, 4-bit tiles are loaded further ahead if few programs share a multiprocessor."""

LONG_LIST = 64
"""If more rows than this are expected in a list, tiles of a 2-byte weight have 128 rows of x."""

LONG_PACKED_LIST = 256
"""LONG_LIST for packed weights: their decoded tiles need registers as well."""


def expert_tiles(slots: int, weight: Weight, dtype: torch.dtype, *, listed: bool) -> Tiles:
    """Tiles for the product of `slots` assignments and a weight [E, N, K]. If they are not listed, one tile has all the
    rows of an expert."""
    num_experts, n, k = weight.shape
    # rows in a list: twice the mean, so that most lists fit one tile
    expected = max(UNLISTED_ROWS, triton.next_power_of_2(2 * slots // num_experts)) if listed else UNLISTED_ROWS
    # upper bound on the programs of a multiprocessor; with lists there is none
    programs = inf if listed else ceil(slots * triton.cdiv(n, 64) / device_limits(weight.device)[0])
    if dtype == torch.float32:
        tiles = _float32_tiles(weight, min(expected, 64))
    elif not isinstance(weight, PackedWeight):
        tiles = _plain_tiles(k, expected)
    elif columns := tile_columns(weight):
        tiles = Tiles(64, min(expected, 64), columns, 4, 3, 64)
    elif expected > 32:
        tiles = Tiles(64, 128, 128, 4, 3, 64) if expected > LONG_PACKED_LIST else Tiles(128, 64, 128, 4, 3, 128)
    elif BITS[weight.code] == 8:
        tiles = _fp8_tiles(expected, programs, listed)
    else:
        tiles = _int4_tiles(weight, dtype, expected, programs)
    return tiles_that_fit(tiles, weight)


def _float32_tiles(weight: Weight, block_m: int) -> Tiles:
    if isinstance(weight, PackedWeight):
        return Tiles(64, block_m, tile_columns(weight) or 64, 4, 3, 64)
    return Tiles(64, block_m, 32, 4, 6 if block_m <= 32 else 3, 64)


def _plain_tiles(k: int, expected: int) -> Tiles:
    block_k = 128 if k % 128 == 0 else 64
    if expected > LONG_LIST:
        return Tiles(128, 128, block_k, 4, 3, 128)
    if expected > 32:
        return Tiles(128, 64, block_k, 8, 4, 128)
    stages = 6 if block_k == 64 else 5 if expected == UNLISTED_ROWS else 4  # two programs fit a multiprocessor
    return Tiles(64, expected, block_k, 4, stages, 64)


def _fp8_tiles(expected: int, programs: float, listed: bool) -> Tiles:
    if expected > UNLISTED_ROWS:
        return Tiles(64, 32, 128, 4, 4, 64, registers=REGISTERS_FOR_FOUR)
    if listed:
        return Tiles(64, UNLISTED_ROWS, 128, 4, 5, 64, registers=REGISTERS_FOR_FOUR)
    return Tiles(64, UNLISTED_ROWS, 128, 4, 5 if programs <= 3 else 4, 64)  # five programs with four tiles fit


def _int4_tiles(weight: PackedWeight, dtype: torch.dtype, expected: int, programs: float) -> Tiles:
    if weight.shape[-1] > MANY_COLUMNS and programs <= 3:
        return Tiles(64, UNLISTED_ROWS, 256, 4, 4 if programs == 3 else 5, 64)
    # shorter groups, zeros and unpacking without assembly would spill
    fits = weight.zeros is None and weight.group >= 32 and is_fast(weight, dtype)
    registers = REGISTERS_FOR_FOUR if fits else None
    if expected > UNLISTED_ROWS:
        return Tiles(64, 32, 128, 4, 4, 64, registers=registers)
    return Tiles(64, UNLISTED_ROWS, 256, 4, 3, 64, registers=registers)


def tiles_that_fit(tiles: Tiles, weight: Weight) -> Tiles:
    """These tiles, with no more of them in flight than fit a program's shared memory. Before Hopper, plain tiles leave
    it early, and unpacked numbers pass through it."""
    bits = BITS[weight.code] if isinstance(weight, PackedWeight) else 16
    with_scales = bits + 1 if bits == 4 else bits
    stage = (tiles.block_n * with_scales // 8 + tiles.block_m * 2) * tiles.block_k
    shared = device_limits(weight.device)[1] - STATIC_BYTES
    fitting = shared // stage + 1 if bits == 16 else (shared - tiles.block_n * tiles.block_k) // stage
    return tiles._replace(num_stages=max(1, min(tiles.num_stages, fitting)))


def tail_columns(tiles: Tiles, weight: Weight) -> int:
    """Columns after the last whole tile that get a tile of their own. For 4-bit weights a tile's time depends on its
    full width, so a narrow tile is cheaper than a wide one that is mostly empty. 0: no columns are left, or no tile is
    that narrow."""
    if not isinstance(weight, PackedWeight) or BITS[weight.code] != 4 or tiles.block_m > 32:
        return 0
    tail: int = weight.shape[-1] % tiles.block_k
    return tail if tail in (64, 128) else 0
