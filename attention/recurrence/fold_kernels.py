"""Kernels that fold (see `block_kernels.py`): `begin_kernel` notes how far states are folded, `fold_kernel` folds
committed tokens into the states of all layers, and `run_kernel` computes runs of prompts and folds them."""

from specdec.attention.recurrence.block_kernels import (
    fold_chunk,
    load_block,
    load_chunk,
    running_sum,
    slots_at,
    solve_records,
    store_records,
    weigh_records,
)
from specdec.gpu.triton_shim import tl, triton


@triton.jit
def run_kernel(
    p_q: tl.tensor,
    p_k: tl.tensor,
    p_v: tl.tensor,
    p_g: tl.tensor,
    p_beta: tl.tensor,
    p_out: tl.tensor,
    p_state: tl.tensor,
    p_pool_k: tl.tensor,
    p_pool_u: tl.tensor,
    p_pool_g: tl.tensor,
    p_rows: tl.tensor,
    p_start: tl.tensor,
    p_length: tl.tensor,
    p_cu_len: tl.tensor,
    p_table: tl.tensor,
    p_begin: tl.tensor,
    p_write: tl.tensor,
    stride_q: tl.tensor,
    stride_k: tl.tensor,
    stride_v: tl.tensor,
    stride_g: tl.tensor,
    stride_beta: tl.tensor,
    stride_table: tl.tensor,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    CORRECTED: tl.constexpr,
    FOLD: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    i_head, i_tile = tl.program_id(0), tl.program_id(1)
    i_run = tl.program_id(2).to(tl.int64)
    key_head = i_head // (HEADS // KEY_HEADS)
    row = tl.load(p_rows + i_run).to(tl.int64)
    length = tl.load(p_length + i_run).to(tl.int64)
    if length > 0:
        start = tl.load(p_start + i_run).to(tl.int64)
        begin = tl.load(p_begin + i_run)
        before = tl.load(p_cu_len + i_run).to(tl.int64) - start  # place of position 0
        first, end = start // FOLD * FOLD, start + length
        p_table += i_run * stride_table
        p_q += key_head * K_DIM
        p_k += key_head * K_DIM
        p_v += i_head * V_DIM
        p_g += i_head
        p_beta += i_head
        p_out += i_head * V_DIM
        p_pool_k += key_head * K_DIM
        p_pool_u += i_head * V_DIM
        p_pool_g += i_head
        o_place = tl.arange(0, FOLD)
        o_v = i_tile * BLOCK_V + tl.arange(0, BLOCK_V)
        m_v = o_v < V_DIM
        p_tile = p_state + (row * HEADS + i_head) * (K_DIM * V_DIM) + o_v
        for position in range(first, end, FOLD):
            positions = position + o_place
            m_old, m_new = positions < start, (positions >= start) & (positions < end)
            rows = before + positions
            slots = slots_at(p_table, begin, positions, m_old, 1)
            v = load_block(p_v, rows, stride_v, o_v, m_new, V_DIM)
            g = tl.load(p_g + rows * stride_g, mask=m_new, other=0.0).to(tl.float32)
            g += tl.load(p_pool_g + slots * HEADS, mask=m_old, other=0.0)
            u = v + load_block(p_pool_u, slots, HEADS * V_DIM, o_v, m_old, V_DIM)
            beta = tl.zeros_like(g)
            if CORRECTED:
                beta = tl.load(p_beta + rows * stride_beta, mask=m_new, other=0.0).to(tl.float32)
            last = tl.minimum(end - position, FOLD)
            total = running_sum(g, last, o_place)
            known, out = tl.zeros_like(v), tl.zeros_like(v)
            by_key = tl.zeros((FOLD, FOLD), tl.float32)
            by_query = tl.zeros((FOLD, FOLD), tl.float32)
            for i_k in range(0, K_DIM, CHUNK):
                o_k = i_k + tl.arange(0, CHUNK)
                m_k = (o_k < K_DIM)[:, None] & m_v[None, :]
                state = load_chunk(p_tile, position, o_k, m_k, V_DIM)
                k = load_block(p_k, rows, stride_k, o_k, m_new, K_DIM)
                k += load_block(p_pool_k, slots, KEY_HEADS * K_DIM, o_k, m_old, K_DIM)
                q = load_block(p_q, rows, stride_q, o_k, m_new, K_DIM)
                known = tl.dot(k, state, known, input_precision=PRECISION)
                out = tl.dot(q, state, out, input_precision=PRECISION)
                by_key = tl.dot(k, tl.trans(k), by_key, input_precision=PRECISION)
                by_query = tl.dot(q, tl.trans(k), by_query, input_precision=PRECISION)
            decay = tl.exp(total)[:, None]
            known, out = decay * known, decay * out
            seen = o_place[:, None] >= o_place[None, :]
            decay = tl.exp(tl.where(seen, total[:, None] - total[None, :], float("-inf")))
            by_key, by_query = decay * by_key, decay * by_query
            u, out = solve_records(u, v, beta, m_new, known, out, by_key, by_query, last, o_place, CORRECTED)
            cells_out = p_out + rows[:, None] * (HEADS * V_DIM) + o_v[None, :]
            tl.store(cells_out, out, mask=m_new[:, None] & m_v[None, :])
            if position + FOLD <= end:
                weighted, kept = weigh_records(u, total, o_place, FOLD)
                for i_k in range(0, K_DIM, CHUNK):
                    o_k = i_k + tl.arange(0, CHUNK)
                    m_k = (o_k < K_DIM)[:, None] & m_v[None, :]
                    state = load_chunk(p_tile, position, o_k, m_k, V_DIM)
                    k = load_block(p_k, rows, stride_k, o_k, m_new, K_DIM)
                    k += load_block(p_pool_k, slots, KEY_HEADS * K_DIM, o_k, m_old, K_DIM)
                    state = fold_chunk(state, kept, k, weighted, PRECISION)
                    tl.store(p_tile[None, :] + o_k[:, None] * V_DIM, state, mask=m_k)
                tl.debug_barrier()  # the next block reads these stores
            else:  # store records of unfolded tokens
                slots = tl.load(p_write + rows, mask=m_new, other=0)
                store_records(
                    p_pool_k, p_pool_u, p_pool_g, slots, p_k, rows, stride_k, u, g, m_new, o_v, i_head, i_tile,
                    HEADS, KEY_HEADS, K_DIM, V_DIM, CHUNK,
                )  # fmt: skip


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
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    i_request = tl.program_id(1).to(tl.int64)
    i_part = tl.program_id(2)  # a head, or a block of channels
    first = tl.load(p_from + i_request)
    last = tl.load(p_start + i_request).to(tl.int64) // FOLD * FOLD
    if first < last:
        row = tl.load(p_rows + i_request).to(tl.int64)
        begin = tl.load(p_begin + i_request)
        p_table += i_request * stride_table
        p_layers += tl.program_id(0) * 6
        if HEADS > 0:  # noqa: SIM102 - a constant: a convolution alone has no heads to divide by
            if i_part < HEADS:
                p_state = tl.load(p_layers).to(p_float.dtype) + (row * HEADS + i_part) * (K_DIM * V_DIM)
                p_k = tl.load(p_layers + 3).to(p_float.dtype) + i_part // (HEADS // KEY_HEADS) * K_DIM
                p_u = tl.load(p_layers + 4).to(p_float.dtype) + i_part * V_DIM
                p_g = tl.load(p_layers + 5).to(p_float.dtype) + i_part
                o_place = tl.arange(0, FOLD)
                every = o_place >= 0
                for i_v in range(0, V_DIM, BLOCK_V):
                    o_v = i_v + tl.arange(0, BLOCK_V)
                    p_tile = p_state + o_v
                    for position in range(first, last, FOLD):
                        slots = slots_at(p_table, begin, position + o_place, every, PAGE)
                        u = load_block(p_u, slots, HEADS * V_DIM, o_v, every, V_DIM)
                        total = running_sum(tl.load(p_g + slots * HEADS), FOLD, o_place)
                        weighted, kept = weigh_records(u, total, o_place, FOLD)
                        for i_k in range(0, K_DIM, CHUNK):
                            o_k = i_k + tl.arange(0, CHUNK)
                            m_k = (o_k < K_DIM)[:, None] & (o_v < V_DIM)[None, :]
                            state = load_chunk(p_tile, position, o_k, m_k, V_DIM)
                            k = load_block(p_k, slots, KEY_HEADS * K_DIM, o_k, every, K_DIM)
                            state = fold_chunk(state, kept, k, weighted, PRECISION)
                            tl.store(p_tile[None, :] + o_k[:, None] * V_DIM, state, mask=m_k)
                        tl.debug_barrier()  # the next block reads these stores
        if i_part >= HEADS:
            o_channel = (i_part - HEADS) * BLOCK_C + tl.arange(0, BLOCK_C)
            m_channel = o_channel < CHANNELS
            p_inputs = tl.load(p_layers + 1).to(p_like.dtype) + row * (TAPS * CHANNELS) + o_channel
            p_pool = tl.load(p_layers + 2).to(p_like.dtype) + o_channel
            for tap in range(TAPS):
                slot = slots_at(p_table, begin, last - TAPS + tap, first < last, PAGE)
                tl.store(p_inputs + tap * CHANNELS, tl.load(p_pool + slot * CHANNELS, mask=m_channel), mask=m_channel)
