"""How an expert's product is cut into tiles. K is never cut: one program sums all of it."""

import torch

from specdec.gpu.triton_shim import triton
from specdec.layers.packed.packed_tile import tile_columns
from specdec.layers.packed.packed_weight import BITS, PackedWeight, Weight
from specdec.layers.packed.unpack_asm import is_fast

STAGES = {128: 4, 64: 6, 32: 6}
FEW_STAGES = STAGES | {128: 5}
"""Columns per tile -> tiles in flight, such that two programs fit a multiprocessor. FEW: for tiles of 16 rows."""


def expert_tiles(num_rows: int, weight: Weight, dtype: torch.dtype, expected: int | None) -> dict[str, int]:
    """Tiles of a product over K. expected: twice the mean rows per expert if assignments are listed, else None.

    A row's bits do not depend on the other rows: where BLOCK_K affects bits, it depends only on weight and dtype. For
    4-bit weights it does not affect them, and is smaller above 32 rows.
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
        tiles["maxnreg"] = 128  # per thread: then four programs fit a multiprocessor instead of three
    return tiles | {"num_warps": 4, "num_stages": stages}


def _fits_128_registers(weight: Weight, dtype: torch.dtype) -> bool:
    """Does a tile fit 128 registers without spilling? Shorter groups, zeros and unpacking without assembly need
    more."""
    return isinstance(weight, PackedWeight) and weight.zeros is None and weight.group >= 32 and is_fast(weight, dtype)


def _packed_tail(weight: PackedWeight, block_k: int) -> int:
    """Columns after the last whole tile that get a tile of their own. For 4-bit weights a tile's time depends on its
    full width, so a narrow tile is cheaper than a wide one that is mostly empty. 0: no columns are left, or no tile is
    that narrow."""
    tail = weight.shape[-1] % block_k
    return tail if BITS[weight.code] == 4 and tail in (64, 128) else 0


def _packed_columns(weight: PackedWeight, dtype: torch.dtype, block_m: int) -> tuple[int, int]:
    """Columns of a tile, and tiles in flight. For 4-bit weights, bits do not depend on the width of a tile."""
    if tile_columns(weight):
        return tile_columns(weight), 3
    if dtype == torch.float32:
        return 64, 3
    if block_m > 32 or BITS[weight.code] == 8:
        return 128, 5 if block_m == 16 else 3
    return 256, 4 if weight.shape[-1] > 11 * 256 else 3
