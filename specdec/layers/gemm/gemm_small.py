r"""The product of few rows of x and any weight. Rows of the weight are the M operand of the tensor core.

A weight is read once, so the time depends on how evenly its tiles are spread over the multiprocessors. Rows of x are
the N operand, padded to at least 16; rows of x never mix. For few rows each range of K has its own program, and the
reader of the product adds their float32 sums. For many rows one program adds them, with the same bits. If a range is
one tile of the weight (`HELD`: low weights, and some packed ones), its program loads the tile while the previous kernel
still runs.

This kernel also runs any number of rows if tensor descriptors do not work: float32, odd strides, older devices.
"""

import torch

from specdec.gpu.triton_shim import (
    INTERPRETED,
    KEEP,
    device_limits,
    pdl_options,
    tl,
    trigger_next,
    triton,
    wait_for_previous,
)
from specdec.layers.gemm.product import (
    LOW_HEIGHT,
    MAX_MEDIUM_ROWS,
    MAX_SMALL_ROWS,
    PACKED_WAVE,
    SplitK,
    Tiles,
    activate,
    require_operands,
)
from specdec.layers.packed.packed_tile import (
    load_tile,
    multiply_tile,
    scale_sum,
    tile_columns,
    weight_constants,
    weight_pointers,
    weight_rows,
)
from specdec.layers.packed.packed_weight import BITS, PackedWeight, Weight
from specdec.layers.packed.unpack_asm import is_fast

HELD_ROWS = 512
"""Up to this many rows of x a program holds its tile of a low weight."""

HELD_RANGE = 512
"""Columns of a range of a packed weight that a program holds for up to MAX_SMALL_ROWS rows of x: 2.6 us instead of 4.6
for [3072, 2560] in int4 on an H200."""

HELD_PROGRAMS = {4: PACKED_WAVE, 8: 264}
"""Maximum programs that hold a range, by the weight's bits: as many as run at once. Further ones would load only after
these end."""

MIN_TILE_HEIGHT = 32
"""Minimum weight rows per program: fewer would reread x too often."""

DEPTH = {1: (128, 6), 2: (128, 4), 3: (128, 3), 4: (128, 2)}
"""Programs per multiprocessor -> columns of a tile, and tiles in flight per program. They share 227 KiB."""

DEPTH_ABOVE_SMALL = {1: (128, 5), 2: (128, 3), 3: (64, 4), 4: (64, 3)}
"""Depths above MAX_SMALL_ROWS rows of x."""

MANY_WAVES = 2
"""Above this many waves of tiles a weight is bound by loading: programs then use a loaded tile for more rows of x."""

TWO_TILES = 192
"""Up to this many rows of x, one program can take all rows, as two tiles for which it loads the weight once."""


@triton.jit
def load_row_tile(
    x: tl.tensor, place: tl.tensor, i_k: tl.tensor, end: tl.tensor, DESCRIBED: tl.constexpr, BLOCK_K: tl.constexpr
) -> tl.tensor:
    """Load columns [i_k, i_k + BLOCK_K) of a tile of rows of x, [BK, BM]; 0 from `end` on.

    x: pointers [1, BM] to rows and `place` their mask, or a descriptor and `place` the first row.
    """
    if DESCRIBED:
        b_x = x.load([place, i_k]).T
    else:
        o_k = i_k + tl.arange(0, BLOCK_K)
        b_x = tl.load(x + o_k[:, None], mask=(o_k < end)[:, None] & place, other=0.0)
    return b_x


@triton.jit
def sum_range(
    p_w: tl.tensor,  # [BN, 1], and scales and zeros: a weight as `load_tile` takes it
    p_scales: tl.tensor,
    p_zeros: tl.tensor,
    s_scales: tl.tensor,
    m_w: tl.tensor,
    m_n: tl.tensor,
    x: tl.tensor,  # and `place`: a tile of x as `load_row_tile` takes it
    place: tl.tensor,
    tail: tl.tensor,  # the same for a second tile; both use one loaded weight tile
    tail_place: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    EVEN_K: tl.constexpr,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    FAST: tl.constexpr,
    DESCRIBED: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TAIL_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Sums of products over columns [begin, end) of K, [BN, BM] and [BN, TAIL_M]; without a tail, the first sum
    twice."""
    b_sum = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if TAIL_M:
        b_tail = tl.zeros([BLOCK_N, TAIL_M], tl.float32)
    for i_k in range(begin, end, BLOCK_K):
        last = i_k + BLOCK_K if EVEN_K else end
        b_w = load_tile(
            *(p_w, p_scales, p_zeros, s_scales, i_k, end, m_w, m_n, EVEN_K, CODE, GROUP, FAST, BLOCK_K, DTYPE)
        )
        b_x = load_row_tile(x, place, i_k, last, DESCRIBED, BLOCK_K)
        b_sum = multiply_tile(b_w, b_x, b_sum, p_scales, s_scales, i_k, m_n, CODE, GROUP)
        if TAIL_M:
            b_next = load_row_tile(tail, tail_place, i_k, last, DESCRIBED, BLOCK_K)
            b_tail = multiply_tile(b_w, b_next, b_tail, p_scales, s_scales, i_k, m_n, CODE, GROUP)
    b_sum = scale_sum(b_sum, p_scales, m_n, CODE, GROUP, FAST, DTYPE)
    if TAIL_M:
        b_tail = scale_sum(b_tail, p_scales, m_n, CODE, GROUP, FAST, DTYPE)
    else:
        b_tail = b_sum
    return b_sum, b_tail


@triton.jit
def _store_tile(
    b_sum: tl.tensor,  # [BN, BM]
    p_bias: tl.tensor,  # [N] or None
    p_out: tl.tensor,
    o_row: tl.tensor,  # [1, BM]
    m_x: tl.tensor,
    i_n: tl.tensor,
    i_split: tl.tensor,
    num_rows: tl.tensor,
    tile_rows: tl.tensor,
    N: tl.tensor,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Store a program's sum as part `i_split` of the product, or activated."""
    if ACTIVATION is None:
        o_n = i_n * tile_rows + tl.arange(0, BLOCK_N)
        m_n = (tl.arange(0, BLOCK_N) < tile_rows) & (o_n < N)
        if p_bias is not None:
            b_sum += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
        p_out += (i_split * num_rows + o_row) * N + o_n[:, None]
        tl.store(p_out, b_sum.to(p_out.dtype.element_ty), mask=m_x & m_n[:, None], eviction_policy=KEEP)
    else:
        BLOCK_M: tl.constexpr = b_sum.shape[1]
        b_gate, b_up = tl.split(tl.permute(tl.reshape(b_sum, (2, BLOCK_N // 2, BLOCK_M)), (1, 2, 0)))
        b_out = activate(b_gate, ACTIVATION) * b_up
        o_half = tl.arange(0, BLOCK_N // 2)
        o_out = i_n * tile_rows + o_half
        m_out = (o_half < tile_rows) & (o_out < N // 2)
        p_out += o_row * (N // 2) + o_out[:, None]
        tl.store(p_out, b_out.to(p_out.dtype.element_ty), mask=m_x & m_out[:, None], eviction_policy=KEEP)


@triton.jit(do_not_specialize=["num_rows", "tile_rows"])
def gemm_small_kernel(
    row_tile: tl.tensor,  # this program's, if another kernel calls this one; None if launched
    weight_tile: tl.tensor,
    split: tl.tensor,
    p_x: tl.tensor,  # [M, K]
    p_w: tl.tensor,  # [N, K], and scales and zeros: a weight by `weight_pointers`
    p_scales: tl.tensor,
    p_zeros: tl.tensor,
    p_bias: tl.tensor,  # [N] or None
    p_out: tl.tensor,  # [S, M, N] float32, [1, M, N] or, gated, [M, N / 2]
    num_rows: tl.tensor,
    tile_rows: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    split_len: tl.tensor,
    s_x: tl.tensor,
    s_w: tl.tensor,
    s_scales: tl.tensor,
    CODE: tl.constexpr,  # and GROUP and FAST: `weight_constants`
    GROUP: tl.constexpr,
    FAST: tl.constexpr,
    SPLIT: tl.constexpr,  # each range of K has a program; otherwise one program sums the ranges
    HELD: tl.constexpr,  # each range is one tile
    WHOLE: tl.constexpr,  # there is one range
    ACTIVATION: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TAIL_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    START: tl.constexpr,  # "usual", or "holds" or "early" (`triton_shim.py`)
    PDL: tl.constexpr,
) -> None:
    """grid (row tiles, weight tiles, ranges of K): a tile of the weight times a tile of rows."""
    if weight_tile is None:  # row tiles of one weight tile are neighbours, so that memory is read once
        i_m, i_n, i_split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    else:
        i_m, i_n, i_split = row_tile, weight_tile, split
    if START != "holds":
        trigger_next(PDL)
    PARTS: tl.constexpr = 1 if ACTIVATION is None else 2  # of a tile: gate rows, then up rows
    p_w, p_scale, p_zero, m_w, m_n = weight_rows(
        *(p_w, p_scales, p_zeros, i_n, tile_rows, N, s_w, CODE, BLOCK_N, PARTS)
    )
    begin = i_split * split_len
    end = tl.minimum(begin + split_len, K) if SPLIT else K
    DTYPE: tl.constexpr = p_x.dtype.element_ty
    if HELD:
        b_w = load_tile(
            *(p_w, p_scale, p_zero, s_scales, begin, end, m_w, m_n, EVEN_K, CODE, GROUP, FAST, BLOCK_K, DTYPE)
        )
    if START != "early":
        wait_for_previous(PDL)
    if START == "holds":
        trigger_next(PDL)

    o_m = i_m * (BLOCK_M + TAIL_M) + tl.arange(0, BLOCK_M)
    o_row = o_m.to(tl.int64)[None, :]
    m_x = (o_m < num_rows)[None, :]
    p_row = p_x + o_row * s_x
    if TAIL_M:
        o_t = i_m * (BLOCK_M + TAIL_M) + BLOCK_M + tl.arange(0, TAIL_M)
        o_tail = o_t.to(tl.int64)[None, :]
        m_tail = (o_t < num_rows)[None, :]
        b_sum, b_tail = sum_range(
            *(p_w, p_scale, p_zero, s_scales, m_w, m_n, p_row, m_x, p_x + o_tail * s_x, m_tail, begin, end, EVEN_K),
            *(CODE, GROUP, FAST, False, DTYPE, BLOCK_N, BLOCK_M, TAIL_M, BLOCK_K),
        )
        _store_tile(*(b_tail, p_bias, p_out, o_tail, m_tail, i_n, i_split, num_rows, tile_rows, N, ACTIVATION, BLOCK_N))
    elif HELD:
        b_x = load_row_tile(p_row, m_x, begin, end, False, BLOCK_K)
        b_sum = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        b_sum = multiply_tile(b_w, b_x, b_sum, p_scale, s_scales, begin, m_n, CODE, GROUP)
        b_sum = scale_sum(b_sum, p_scale, m_n, CODE, GROUP, FAST, DTYPE)
    elif SPLIT or WHOLE:
        b_sum, _ = sum_range(
            *(p_w, p_scale, p_zero, s_scales, m_w, m_n, p_row, m_x, p_row, m_x, begin, end, EVEN_K),
            *(CODE, GROUP, FAST, False, DTYPE, BLOCK_N, BLOCK_M, 0, BLOCK_K),
        )
    else:
        b_sum = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for i_k in range(begin, end, split_len):
            i_end = tl.minimum(i_k + split_len, end)
            b_part, _ = sum_range(
                *(p_w, p_scale, p_zero, s_scales, m_w, m_n, p_row, m_x, p_row, m_x, i_k, i_end, EVEN_K),
                *(CODE, GROUP, FAST, False, DTYPE, BLOCK_N, BLOCK_M, 0, BLOCK_K),
            )
            b_sum += b_part
    _store_tile(*(b_sum, p_bias, p_out, o_row, m_x, i_n, i_split, num_rows, tile_rows, N, ACTIVATION, BLOCK_N))
    if START == "early":
        wait_for_previous(PDL)


def gemm_small(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    activation: str | None,
    split_k: SplitK,
    tiles: Tiles,
    split: bool,
    *,
    hold_next: bool = False,
) -> None:
    """Write x [M, K] times the weight [N, K] to `out`: [S, M, N] if split, otherwise [1, M, N] or, if gated, [M, N /
    2].

    hold_next: no later kernel starts before x is written.
    """
    require_operands(x, weight, bias)
    (num_rows, k), n = x.shape, len(weight)
    # each tile is within one range
    assert split_k.splits == 1 or split_k.split_len % tiles.block_k == 0, f"{split_k=} {tiles=}"
    # a tail has no accumulator per range
    assert tiles.tail_m == 0 or split or split_k.splits == 1, f"{split_k=} {tiles=}"
    if num_rows == 0:
        return
    # for a gated weight, a program has as many gate rows as up rows
    tile_rows, num_columns = (tiles.rows, n) if activation is None else (tiles.rows // 2, n // 2)
    row_tiles = triton.cdiv(num_rows, tiles.block_m + tiles.tail_m)
    grid = (row_tiles, triton.cdiv(num_columns, tile_rows), split_k.splits if split else 1)
    words, scales, zeros, s_w, s_scales = weight_pointers(weight)
    gemm_small_kernel[grid](
        *(None, None, None, x, words, scales, zeros, bias, out),
        *(num_rows, tile_rows, n, k, split_k.split_len, x.stride(0), s_w, s_scales),
        **weight_constants(weight, x.dtype),
        SPLIT=split,
        HELD=split and split_k.split_len == tiles.block_k,
        WHOLE=split_k.splits == 1,
        ACTIVATION=activation,
        EVEN_K=k % tiles.block_k == 0,
        TAIL_M=tiles.tail_m,
        START="holds" if hold_next else "usual",
        **tiles.options,
        **pdl_options(x.device),
    )


def choose_small_tiles(num_rows: int, n: int, split_k: SplitK, x: torch.Tensor, *, gated: bool) -> Tiles:
    """Tiles for `num_rows` rows of x and a weight of n rows."""
    if x.dtype == torch.float32:  # float32 products do not use tensor cores
        return Tiles(64, 16 if num_rows <= 16 else 64, 32, 4, 3, 64)
    multiprocessors, shared_memory = device_limits(x.device)
    rows, programs = balanced_rows(n, split_k.splits, multiprocessors)
    block_m = max(16, triton.next_power_of_2(num_rows))
    if _can_hold(n, split_k, num_rows, x.dtype):
        return Tiles(64, min(block_m, MAX_SMALL_ROWS), split_k.split_len, 4, 1, rows if num_rows <= 64 else 64)
    if num_rows > MAX_MEDIUM_ROWS and n > LOW_HEIGHT:
        block_m = 256 if gated else 128  # accumulators per range, and addresses, take registers
        return Tiles(128, block_m, 64, 8, 4, 128).fit(shared_memory)
    if num_rows > TWO_TILES:
        return Tiles(128, 64, 64, 8, 4, 128)
    if num_rows > 64:
        return tiles_for_some_rows(num_rows, n, split_k.splits, 2 * multiprocessors, gated=gated).fit(shared_memory)
    block_k, stages = (DEPTH if num_rows <= MAX_SMALL_ROWS else DEPTH_ABOVE_SMALL)[programs]
    return Tiles(64, block_m, block_k, 4, stages, rows).fit(shared_memory)


def tiles_for_some_rows(num_rows: int, n: int, splits: int, wave: int, *, gated: bool) -> Tiles:
    """Tiles for 65 to 192 rows of x and a weight of n rows, on a device that runs `wave` programs of 128 rows at
    once."""
    # two powers of two, of which the second may be 0: 160 rows are 128 and 32, not 256
    block_m = 64 if num_rows <= 96 else 128
    tail_m = max(16, triton.next_power_of_2(num_rows - block_m)) if num_rows > block_m else 0
    weight_tiles = triton.cdiv(n, 128) * splits
    if gated or weight_tiles > MANY_WAVES * wave:
        return Tiles(128, block_m, 64, 8, 3 if gated else 4, 128, tail_m)
    if splits > 1 and 2 * weight_tiles <= wave < weight_tiles * triton.cdiv(num_rows, 64):
        return Tiles(64, block_m, 64, 4, 3, 64, tail_m)  # one wave of programs, not slightly more
    return Tiles(128, 64, 64, 8, 4, 128)


def can_hold(weight: Weight, split_k: SplitK, num_rows: int, dtype: torch.dtype) -> bool:
    """Is a range of the weight one tile of a program, for `num_rows` rows of x?"""
    if not isinstance(weight, PackedWeight):
        return _can_hold(len(weight), split_k, num_rows, dtype)
    if not fits_registers(weight, dtype):
        return False
    if num_rows > MAX_SMALL_ROWS:  # timed for FP8 alone
        is_timed = num_rows <= MAX_MEDIUM_ROWS and weight.has_row_scales
        return is_timed and _can_hold(len(weight), split_k, num_rows, dtype)
    programs = triton.cdiv(len(weight), 64) * split_k.splits
    return split_k.splits > 1 and split_k.split_len == HELD_RANGE and programs <= HELD_PROGRAMS[BITS[weight.code]]


def fits_registers(weight: Weight, dtype: torch.dtype) -> bool:
    """May a program hold a whole tile? A packed one only if it is unpacked fast, and has no scales for several sums."""
    if not isinstance(weight, PackedWeight):
        return True
    return (INTERPRETED or is_fast(weight, dtype)) and not tile_columns(weight)


def _can_hold(n: int, split_k: SplitK, num_rows: int, dtype: torch.dtype) -> bool:
    small = n <= LOW_HEIGHT and split_k.splits > 1 and split_k.split_len in (256, 512)
    return small and num_rows <= HELD_ROWS and dtype != torch.float32


def balanced_rows(n: int, splits: int, multiprocessors: int) -> tuple[int, int]:
    """Rows of a weight tile, and programs per multiprocessor, such that all multiprocessors have equally many programs.

    Multiprocessors share the memory's bandwidth evenly, so the one with most programs ends last: with 2.4 full tiles of
    64 rows for each, a quarter of the bandwidth would be unused. Rows outside a tile are not read.
    """
    for programs in (2, 3, 4):
        tiles = max(1, programs * multiprocessors // splits)
        rows = 2 * triton.cdiv(n, 2 * tiles)
        if rows <= 64:
            rows = max(rows, MIN_TILE_HEIGHT)
            return rows, triton.cdiv(triton.cdiv(n, rows) * splits, multiprocessors)
    return 64, 2
