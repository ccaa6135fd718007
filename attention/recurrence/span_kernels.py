r"""Kernels of prompts in the fast mode: the recurrence of `blocks.py` span by span, in products of matrices.

    weights    how much each place of a span weighs for the others, all spans at once        one launch a layer
    spans      steps a state through the spans of a run and computes the outputs             one launch a layer

A span is up to SPAN places of one run and begins at a multiple of FOLD. S is the state before it, G are the sums of log
decays within it, and K, Q, V, U have its keys, queries, values and records as rows:

    A     strictly lower, A_ij = beta_i e^{G_i - G_j} (k_i . k_j)
    B     lower, B_ij = e^{G_i - G_j} (q_i . k_j)
    U     (I + A)^-1 R,  R_i = beta_i (v_i - e^{G_i} S^T k_i);  U = V in a layer without beta
    O     e^G Q S + B U
    S     <- e^{G_end} S + sum_j e^{G_end - G_j} k_j u_j^T

Operands of products are sums of one or two numbers of a smaller type (`SPAN_PARTS`). `weights` stores queries, keys,
(I + A)^-1 - I and B in that form, by token. Records equal those of decoding up to rounding, since
sums run in another order. The unfolded records at the end of a run are stored.
"""

import torch

from specdec.attention.recurrence.block_kernels import load_block, slots_at, store_records
from specdec.gpu.triton_shim import INTERPRETED, tl, triton

SPAN = 64
"""Places of a span: four blocks of FOLD, as `triangular_inverse` requires."""

SPAN_PARTS = (1, torch.float32) if INTERPRETED else (2, torch.bfloat16)
"""Operands of products are sums of one or two parts of a type. With two, the product of the two small parts is left
out. Two bf16 parts are exact to 2^-16; one is exact to 2^-9, which is what other engines use. The interpreter has no
bf16."""

SPAN_COLUMNS = 32
"""Value channels per program of `spans_kernel`."""

SPAN_WARPS, SPAN_STAGES = 8, 2
"""Warps per program of `spans_kernel`, and spans that it loads or uses at one time."""

WEIGHT_WARPS, WEIGHT_CHUNK = 4, 32
"""Warps per program of `weights_kernel`, and key channels that it reads at one time."""


@triton.jit
def low_part(x: tl.tensor, high: tl.tensor) -> tl.tensor:
    return (x - high.to(tl.float32)).to(high.dtype)


@triton.jit
def product(a: tl.tensor, high: tl.tensor, low: tl.tensor, PARTS: tl.constexpr) -> tl.tensor:
    """a [X, Y] float32, high + low [Y, Z] -> [X, Z]. With one part, low is not read."""
    high_a = a.to(high.dtype)
    out = tl.dot(high_a, high, input_precision="ieee")
    if PARTS == 2:  # separate sums, which do not wait for each other
        out += tl.dot(high_a, low) + tl.dot(low_part(a, high_a), high)
    return out


@triton.jit
def exact_product(a: tl.tensor, b: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    high = b.to(DTYPE)
    return product(a, high, low_part(b, high), 1 if tl.float32 == DTYPE else 2)


@triton.jit
def triangular_inverse(a: tl.tensor, SPAN: tl.constexpr, FOLD: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """(I + a)^-1 for a strictly lower triangular a [SPAN, SPAN]. Inverts the four diagonal blocks by substitution: D.
    Then (I + N)^-1 D = (I - N) (I + N^2) D with N = D (a outside the blocks), since N^4 = 0."""
    BLOCKS: tl.constexpr = SPAN // FOLD
    tl.static_assert(BLOCKS <= 4)
    o_block, o_place, o = tl.arange(0, BLOCKS), tl.arange(0, FOLD), tl.arange(0, SPAN)
    same = (o_block[:, None] == o_block[None, :])[:, None, :, None]
    inside = tl.sum(tl.where(same, a.reshape(BLOCKS, FOLD, BLOCKS, FOLD), 0.0), axis=2)  # [BLOCKS, FOLD, FOLD]
    blocks = tl.zeros_like(inside) + tl.where(o_place[:, None] == o_place[None, :], 1.0, 0.0)[None]
    for place in range(FOLD - 1):
        column = tl.sum(tl.where((o_place == place)[None, None, :], inside, 0.0), axis=2)
        row = tl.sum(tl.where((o_place == place)[None, :, None], blocks, 0.0), axis=1)
        blocks -= column[:, :, None] * row[:, None, :]
    diagonal = tl.where(same, blocks[:, :, None, :], 0.0).reshape(SPAN, SPAN)
    outside = tl.where((o // FOLD)[:, None] > (o // FOLD)[None, :], a, 0.0)
    below = exact_product(diagonal, outside, DTYPE)
    twice = diagonal + exact_product(exact_product(below, below, DTYPE), diagonal, DTYPE)
    return twice - exact_product(below, twice, DTYPE)


@triton.jit
def store_parts(
    p: tl.tensor, x: tl.tensor, high: tl.tensor, mask: tl.tensor, stride_part: tl.tensor, PARTS: tl.constexpr
) -> None:
    tl.store(p, high, mask=mask)
    if PARTS == 2:
        tl.store(p + stride_part, low_part(x, high), mask=mask)


@triton.jit
def load_parts(
    p: tl.tensor, mask: tl.tensor, stride_part: tl.tensor, PARTS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    high = tl.load(p, mask=mask, other=0.0)
    low = high
    if PARTS == 2:
        low = tl.load(p + stride_part, mask=mask, other=0.0)
    return high, low


@triton.jit
def weights_kernel(
    p_q: tl.tensor,
    p_k: tl.tensor,
    p_g: tl.tensor,
    p_beta: tl.tensor,
    p_keys: tl.tensor,  # [2, PARTS, T, HK, DK]: keys, queries
    p_weights: tl.tensor,  # [2, PARTS, T, HV, SPAN]: B, (I + A)^-1 - I
    p_total: tl.tensor,  # [T, HV]: G
    p_run_of: tl.tensor,
    p_position: tl.tensor,
    p_start: tl.tensor,
    p_length: tl.tensor,
    p_cu_len: tl.tensor,
    stride_q: tl.tensor,
    stride_k: tl.tensor,
    stride_g: tl.tensor,
    stride_beta: tl.tensor,
    part_keys: tl.tensor,
    part_weights: tl.tensor,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    CORRECTED: tl.constexpr,
    FOLD: tl.constexpr,
    SPAN: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    i_head = tl.program_id(0)
    i_span = tl.program_id(1)
    DTYPE: tl.constexpr = p_keys.dtype.element_ty
    GROUP: tl.constexpr = HEADS // KEY_HEADS
    key_head = i_head // GROUP
    i_run = tl.load(p_run_of + i_span)
    position = tl.load(p_position + i_span)
    start = tl.load(p_start + i_run)
    length = tl.load(p_length + i_run)
    if (length > 0) & (position < start + length):
        o = tl.arange(0, SPAN)
        positions = position + o
        exists = (positions >= start) & (positions < start + length)
        rows = tl.load(p_cu_len + i_run) - start + positions
        g = tl.load(p_g + rows * stride_g + i_head, mask=exists, other=0.0).to(tl.float32)
        total = tl.cumsum(g, axis=0)
        by_key = tl.zeros((SPAN, SPAN), tl.float32)
        by_query = tl.zeros((SPAN, SPAN), tl.float32)
        for i_k in range(0, K_DIM, CHUNK):
            o_k = i_k + tl.arange(0, CHUNK)
            m_k = exists[:, None] & (o_k < K_DIM)[None, :]
            k = load_block(p_k + key_head * K_DIM, rows, stride_k, o_k, exists, K_DIM)
            q = load_block(p_q + key_head * K_DIM, rows, stride_q, o_k, exists, K_DIM)
            high_k = k.to(DTYPE)
            low_k = low_part(k, high_k)
            by_query += product(q, tl.trans(high_k), tl.trans(low_k), PARTS)
            if CORRECTED:
                by_key += product(k, tl.trans(high_k), tl.trans(low_k), PARTS)
            if i_head % GROUP == 0:
                cells = p_keys + (rows[:, None] * KEY_HEADS + key_head) * K_DIM + o_k[None, :]
                store_parts(cells, k, high_k, m_k, part_keys, PARTS)
                store_parts(cells + PARTS * part_keys, q, q.to(DTYPE), m_k, part_keys, PARTS)
        seen = o[:, None] >= o[None, :]
        decay = tl.exp(tl.where(seen, total[:, None] - total[None, :], float("-inf")))
        cells = p_weights + (rows[:, None] * HEADS + i_head) * SPAN + o[None, :]
        by_query *= decay
        store_parts(cells, by_query, by_query.to(DTYPE), exists[:, None], part_weights, PARTS)
        if CORRECTED:
            beta = tl.load(p_beta + rows * stride_beta + i_head, mask=exists, other=0.0).to(tl.float32)
            before = o[:, None] > o[None, :]
            by_key = tl.where(before, beta[:, None] * by_key * decay, 0.0)
            by_key = tl.where(before, triangular_inverse(by_key, SPAN, FOLD, DTYPE), 0.0)
            cells += PARTS * part_weights
            store_parts(cells, by_key, by_key.to(DTYPE), exists[:, None], part_weights, PARTS)
        tl.store(p_total + rows * HEADS + i_head, total, mask=exists)


@triton.jit
def after_records(
    state: tl.tensor,
    high_k: tl.tensor,
    low_k: tl.tensor,
    u: tl.tensor,
    total: tl.tensor,
    count: tl.tensor,
    o: tl.tensor,
    PARTS: tl.constexpr,
) -> tl.tensor:
    """Fold the first `count` of records k [X, K] and u [V, X] into state [V, K]. total [X]: sums of log decays."""
    end = tl.sum(tl.where(o == count - 1, total, 0.0), axis=0)
    weight = tl.exp(tl.where(o < count, end - total, float("-inf")))
    return state * tl.exp(end) + product(u * weight[None, :], high_k, low_k, PARTS)


@triton.jit(do_not_specialize=["num_places"])
def spans_kernel(
    p_k: tl.tensor,
    p_v: tl.tensor,
    p_g: tl.tensor,
    p_beta: tl.tensor,
    p_out: tl.tensor,
    p_state: tl.tensor,
    p_pool_k: tl.tensor,
    p_pool_u: tl.tensor,
    p_pool_g: tl.tensor,
    p_keys: tl.tensor,
    p_weights: tl.tensor,
    p_total: tl.tensor,
    p_rows: tl.tensor,
    p_start: tl.tensor,
    p_length: tl.tensor,
    p_cu_len: tl.tensor,
    p_table: tl.tensor,
    p_begin: tl.tensor,
    p_write: tl.tensor,
    stride_k: tl.tensor,
    stride_v: tl.tensor,
    stride_g: tl.tensor,
    stride_beta: tl.tensor,
    stride_table: tl.tensor,
    part_keys: tl.tensor,
    part_weights: tl.tensor,
    num_places: tl.tensor,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    CORRECTED: tl.constexpr,
    FOLD: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    i_head, i_tile = tl.program_id(0), tl.program_id(1)
    i_run = tl.program_id(2).to(tl.int64)
    key_head = i_head // (HEADS // KEY_HEADS)
    row = tl.load(p_rows + i_run).to(tl.int64)
    o, o_v = tl.arange(0, SPAN), i_tile * BLOCK_V + tl.arange(0, BLOCK_V)
    m_v = o_v < V_DIM
    p_out += i_head * V_DIM + o_v[:, None]
    if i_run == tl.num_programs(2) - 1:  # the places after the last run are padding
        for place in range(tl.load(p_cu_len + i_run + 1).to(tl.int64), num_places, SPAN):
            padding = place + o
            m_padding = m_v[:, None] & (padding < num_places)[None, :]
            nothing = tl.zeros((BLOCK_V, SPAN), tl.float32)
            tl.store(p_out + padding[None, :] * (HEADS * V_DIM), nothing, mask=m_padding)
    length = tl.load(p_length + i_run).to(tl.int64)
    if length > 0:
        start = tl.load(p_start + i_run).to(tl.int64)
        before = tl.load(p_cu_len + i_run).to(tl.int64) - start  # place of position 0
        first, end = start // FOLD * FOLD, start + length
        folded = end // FOLD * FOLD
        p_k += key_head * K_DIM
        p_v += i_head * V_DIM
        p_g += i_head
        p_beta += i_head
        p_pool_k += key_head * K_DIM
        p_pool_u += i_head * V_DIM
        p_pool_g += i_head
        p_keys += key_head * K_DIM
        p_weights += i_head * SPAN
        p_total += i_head
        o_place, o_k = tl.arange(0, FOLD), tl.arange(0, BLOCK_K)
        m_k = o_k < K_DIM
        # the state at `start`: the folded state and the later records
        p_tile = p_state + (row * HEADS + i_head) * (K_DIM * V_DIM) + o_v[:, None] + o_k[None, :] * V_DIM
        m_tile = m_v[:, None] & m_k[None, :]
        begun = (tl.zeros_like(o_k) < first)[None, :]
        state = tl.load(p_tile, mask=m_tile & begun, other=0.0)  # [BLOCK_V, BLOCK_K]
        m_old = first + o_place < start
        old_slots = slots_at(p_table + i_run * stride_table, tl.load(p_begin + i_run), first + o_place, m_old, 1)
        old_total = tl.cumsum(tl.load(p_pool_g + old_slots * HEADS, mask=m_old, other=0.0), axis=0)
        old_k = load_block(p_pool_k, old_slots, KEY_HEADS * K_DIM, o_k, m_old, K_DIM)
        old_u = load_block(p_pool_u, old_slots, HEADS * V_DIM, o_v, m_old, V_DIM)
        high_old = old_k.to(p_keys.dtype.element_ty)
        state = after_records(
            state, high_old, low_part(old_k, high_old), tl.trans(old_u), old_total, start - first, o_place, PARTS
        )
        for position in range(first, end, SPAN):
            positions = position + o
            exists = (positions >= start) & (positions < end)
            rows = before + positions
            m_new = m_v[:, None] & exists[None, :]
            m_keys = exists[:, None] & m_k[None, :]
            cells = p_keys + rows[:, None] * (KEY_HEADS * K_DIM) + o_k[None, :]
            high_k, low_k = load_parts(cells, m_keys, part_keys, PARTS)
            high_q, low_q = load_parts(cells + PARTS * part_keys, m_keys, part_keys, PARTS)
            cells_w = p_weights + rows[:, None] * (HEADS * SPAN) + o[None, :]
            high_b, low_b = load_parts(cells_w, exists[:, None], part_weights, PARTS)
            total = tl.load(p_total + rows * HEADS, mask=exists, other=0.0)
            decay = tl.exp(total)[None, :]
            u = tl.load(p_v + rows[None, :] * stride_v + o_v[:, None], mask=m_new, other=0.0).to(tl.float32)
            out = decay * product(state, tl.trans(high_q), tl.trans(low_q), PARTS)
            if CORRECTED:
                beta = tl.load(p_beta + rows * stride_beta, mask=exists, other=0.0).to(tl.float32)
                u = beta[None, :] * (u - decay * product(state, tl.trans(high_k), tl.trans(low_k), PARTS))
                high_a, low_a = load_parts(cells_w + PARTS * part_weights, exists[:, None], part_weights, PARTS)
                u += product(u, tl.trans(high_a), tl.trans(low_a), PARTS)
            out += product(u, tl.trans(high_b), tl.trans(low_b), PARTS)
            tl.store(p_out + rows[None, :] * (HEADS * V_DIM), out, mask=m_new)
            taken = tl.minimum(folded - position, SPAN)
            state = after_records(state, high_k, low_k, u, total, taken, o, PARTS)
            if position + SPAN >= end:  # store records of unfolded tokens
                m_left = exists & (positions >= folded)
                slots = tl.load(p_write + rows, mask=m_left, other=0)
                g = tl.load(p_g + rows * stride_g, mask=m_left, other=0.0).to(tl.float32)
                store_records(
                    p_pool_k, p_pool_u, p_pool_g, slots, p_k, rows, stride_k, tl.trans(u), g, m_left, o_v, i_head,
                    i_tile, HEADS, KEY_HEADS, K_DIM, V_DIM, CHUNK,
                )  # fmt: skip
        if folded > first:
            tl.store(p_tile, state, mask=m_tile)
