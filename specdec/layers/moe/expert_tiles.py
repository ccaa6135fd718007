"""How the product of an expert is cut into tiles. K is never cut: a program sums all of it."""

import torch

from specdec.gpu.triton_shim import triton
from specdec.layers.packed.packed_tile import tile_columns
from specdec.layers.packed.packed_weight import BITS, PackedWeight, Weight
from specdec.layers.packed.unpack_asm import is_fast

STAGES = {128: 4, 64: 6, 32: 6}
FEW_STAGES = STAGES | {128: 5}
"""Columns a tile -> tiles on their way, such that two programs fit a multiprocessor; FEW: of 16 rows."""


def expert_tiles(num_rows: int, weight: Weight, dtype: torch.dtype, expected: int | None) -> dict[str, int]:
    """The tiles of a product over K. expected: rows of an expert, twice their mean, where assignments are listed.

    BLOCK_K is part of the bits: a function of the weight alone.
    """
    k = weight.shape[-1]
    rows, most = (num_rows, 256) if expected is None else (expected, 64)
    block_m = min(max(16, triton.next_power_of_2(rows)), most)
    if isinstance(weight, PackedWeight):
        block_k, stages = _packed_columns(weight, dtype, block_m)
    else:
        block_k = 32 if dtype == torch.float32 else 128 if k % 128 == 0 else 64
        stages = (FEW_STAGES if block_m == 16 else STAGES)[block_k] if block_m <= 32 else 3
    tail = _packed_tail(weight, block_k) if isinstance(weight, PackedWeight) and block_m <= 32 else 0
    tiles = {"BLOCK_N": 64, "BLOCK_M": block_m, "BLOCK_K": block_k, "TAIL_K": tail}
    if (block_m, block_k, stages) == (16, 256, 3) and _fits_128_registers(weight, dtype):
        tiles["maxnreg"] = 128  # of a thread: four programs fit a multiprocessor, not three
    return tiles | {"num_warps": 4, "num_stages": stages}


def _fits_128_registers(weight: Weight, dtype: torch.dtype) -> bool:
    """Does nothing spill? Of shorter groups, with zeros or unpacked without assembly, a tile takes more."""
    return isinstance(weight, PackedWeight) and weight.zeros is None and weight.group >= 32 and is_fast(weight, dtype)


def _packed_tail(weight: PackedWeight, block_k: int) -> int:
    """Columns behind the last whole tile that are a tile of their own: of 4 bits a tile takes as long as it is wide,
    however few of its columns there are. 0: there are none, or they do not make one."""
    tail = weight.shape[-1] % block_k
    return tail if BITS[weight.code] == 4 and tail in (64, 128) else 0


def _packed_columns(weight: PackedWeight, dtype: torch.dtype, block_m: int) -> tuple[int, int]:
    """Columns of a tile, and tiles on their way. Sums of 4 bits have the same bits in tiles of any width."""
    if tile_columns(weight):
        return tile_columns(weight), 3
    if dtype == torch.float32:
        return 64, 3
    if block_m > 32 or BITS[weight.code] == 8:
        return 128, 5 if block_m == 16 else 3
    return 256, 4 if weight.shape[-1] > 11 * 256 else 3
