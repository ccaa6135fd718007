"""Kernels that fold: how far each state is, and states of all layers that take in what is certain by now."""

from specdec.attention.recurrence.block_kernels import (
    as_integer,
    fold_tile,
    load_keys,
    load_rows,
    load_tile,
    slots_at,
    store_tile,
)
from specdec.gpu.triton_shim import tl, triton


@triton.jit
def begin_kernel(
    p_rows: tl.tensor,
    p_start: tl.tensor,
    p_length: tl.tensor,
    p_folded_len: tl.tensor,
    p_from: tl.tensor,
    RUNS: tl.constexpr,
    FOLD: tl.constexpr,
) -> None:
    i_request = tl.program_id(0)
    row = tl.load(p_rows + i_request).to(tl.int64)
    start = tl.load(p_start + i_request).to(tl.int64)
    certain = start // FOLD * FOLD
    folded = tl.load(p_folded_len + row)
    tl.store(p_from + i_request, tl.where(start > 0, folded, 0))
    if RUNS:
        certain = (start + tl.load(p_length + i_request)) // FOLD * FOLD
    tl.store(p_folded_len + row, certain)


@triton.jit
def fold_kernel(
    p_layers: tl.tensor,
    p_rows: tl.tensor,
    p_start: tl.tensor,
    p_from: tl.tensor,
    p_table: tl.tensor,
    p_begin: tl.tensor,
    p_float: tl.tensor,
    p_like: tl.tensor,
    stride_table: tl.tensor,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PAGE: tl.constexpr,
    FOLD: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    i_request = tl.program_id(1).to(tl.int64)
    TILES: tl.constexpr = (V_DIM + BLOCK_V - 1) // BLOCK_V
    i_part = tl.program_id(2)  # a tile of a head, or a block of channels
    first = tl.load(p_from + i_request)
    last = tl.load(p_start + i_request).to(tl.int64) // FOLD * FOLD
    if first < last:
        row = tl.load(p_rows + i_request).to(tl.int64)
        begin = tl.load(p_begin + i_request)
        p_table += i_request * stride_table
        p_layers += tl.program_id(0) * 6
        if HEADS > 0:  # noqa: SIM102 - a constant: a convolution alone has no heads to divide by
            if i_part < HEADS * TILES:
                i_head = i_part // TILES
                o_place, o_k = tl.arange(0, FOLD), tl.reshape(tl.arange(0, PARTS * PART), (PARTS, PART))
                o_v = i_part % TILES * BLOCK_V + tl.arange(0, BLOCK_V)
                every, m_v = o_place >= 0, o_v < V_DIM
                p_tile = tl.load(p_layers).to(p_float.dtype) + (row * HEADS + i_head) * (K_DIM * V_DIM) + o_v
                p_k = tl.load(p_layers + 3).to(p_float.dtype) + i_head // (HEADS // KEY_HEADS) * K_DIM
                p_u = tl.load(p_layers + 4).to(p_float.dtype) + i_head * V_DIM
                p_g = tl.load(p_layers + 5).to(p_float.dtype) + i_head
                state = load_tile(p_tile, first, o_k, m_v, K_DIM, V_DIM)
                for position in range(first, last, FOLD):
                    slots = slots_at(p_table, begin, position + o_place, every, PAGE)
                    k = load_keys(p_k, slots, KEY_HEADS * K_DIM, o_k, every, K_DIM)
                    u = load_rows(p_u, slots, HEADS * V_DIM, o_v, every, V_DIM)
                    state = fold_tile(state, k, u, as_integer(tl.load(p_g + slots * HEADS)), o_place, PRECISION)
                store_tile(p_tile, state, o_k, m_v, K_DIM, V_DIM)
        if i_part >= HEADS * TILES:
            o_channel = (i_part - HEADS * TILES) * BLOCK_C + tl.arange(0, BLOCK_C)
            m_channel = o_channel < CHANNELS
            p_inputs = tl.load(p_layers + 1).to(p_like.dtype) + row * (TAPS * CHANNELS) + o_channel
            p_pool = tl.load(p_layers + 2).to(p_like.dtype) + o_channel
            for tap in range(TAPS):
                slot = slots_at(p_table, begin, last - TAPS + tap, first < last, PAGE)
                tl.store(p_inputs + tap * CHANNELS, tl.load(p_pool + slot * CHANNELS, mask=m_channel), mask=m_channel)
