"""The Triton kernels behind `mixture`, which holds the math, the references and the launches.

    route_kernel     grid (row tiles, splits)      router logits of one range of K; the last program of a row tile to
                                                   finish adds the ranges up, in order, and picks the top k
    list_kernel      grid (experts)                many rows: the assignments of each expert, in ascending order
    product_kernel   grid (weight tiles, slots)    weight rows as M operand, assignments of one expert as N operand
    sum_kernel       grid (column tiles, rows)     a token's k partial results, in rank order

A slot of product_kernel is an expert with a list. At few rows it is an assignment, and needs no list: the program of
an expert's first assignment multiplies for all of them, and the others leave. Either way a weight is read once, and an
assignment is a column of its own in a product whose sum over K is never cut: its bits do not depend on its neighbours.
"""

from specdec.kvcache.triton_shim import tl, triton
from specdec.layers.launch import trigger_next, wait_for_previous
from specdec.layers.linear import activate

INF = tl.constexpr(float("inf"))


@triton.jit(do_not_specialize=["num_rows", "eps"])
def route_kernel(
    p_x: tl.tensor,  # [T, K]
    p_w: tl.tensor,  # [E, K]
    p_bias: tl.tensor,  # [E] or None
    p_scale: tl.tensor,  # [K] or None: x is RMS-normed, then scaled
    p_expert_scale: tl.tensor,  # [E] or None
    p_parts: tl.tensor,  # [splits, T, E]
    p_squares: tl.tensor,  # [splits, T]
    p_arrived: tl.tensor,  # [row tiles], 0 before and after
    p_experts: tl.tensor,  # [T, top_k] out
    p_weights: tl.tensor,  # [T, top_k] out
    num_rows: tl.tensor,
    num_experts: tl.tensor,
    K: tl.tensor,
    s_x: tl.tensor,
    split_len: tl.tensor,
    eps: tl.tensor,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,  # TOP_K, rounded up to a power of 2
    NORMALISED: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    i_tile, i_split = tl.program_id(0), tl.program_id(1)
    o_e = tl.arange(0, BLOCK_E)
    o_t = i_tile * BLOCK_T + tl.arange(0, BLOCK_T)
    m_e, m_t = o_e < num_experts, o_t < num_rows
    o_row = o_t.to(tl.int64)
    wait_for_previous(PDL)
    b_acc = tl.zeros([BLOCK_E, BLOCK_T], tl.float32)
    b_squares = tl.zeros([BLOCK_K, BLOCK_T], tl.float32)
    begin = i_split * split_len
    for i_k in range(begin, tl.minimum(begin + split_len, K), BLOCK_K):
        o_k = i_k + tl.arange(0, BLOCK_K)
        m_k = o_k < K
        b_w = tl.load(p_w + o_e[:, None] * K + o_k[None, :], mask=m_e[:, None] & m_k[None, :], other=0.0)  # [BE, BK]
        b_x = tl.load(
            p_x + o_row[None, :] * s_x + o_k[:, None], mask=m_k[:, None] & m_t[None, :], other=0.0
        )  # [BK, BT]
        if p_scale is not None:
            b_wide = b_x.to(tl.float32)
            b_squares += b_wide * b_wide
            b_x = (b_wide * tl.load(p_scale + o_k, mask=m_k, other=0.0).to(tl.float32)[:, None]).to(b_x.dtype)
        b_acc = tl.dot(b_w, b_x, b_acc, input_precision="ieee")
    o_part = o_row[None, :] * num_experts + o_e[:, None]
    part_len = num_rows.to(tl.int64) * num_experts
    tl.store(p_parts + i_split * part_len + o_part, b_acc, mask=m_e[:, None] & m_t[None, :])
    if p_scale is not None:
        tl.store(p_squares + i_split * num_rows + o_row, tl.sum(b_squares, 0), mask=m_t)
    tl.debug_barrier()  # the whole program has written before it says so
    if tl.atomic_add(p_arrived + i_tile, 1, sem="acq_rel") == SPLITS - 1:
        tl.store(p_arrived + i_tile, 0)
        o_logit = o_row[:, None] * num_experts + o_e[None, :]  # [BT, BE]
        m_part = m_t[:, None] & m_e[None, :]
        b_logit = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
        b_square = tl.zeros([BLOCK_T], tl.float32)
        for i_part in tl.static_range(SPLITS):  # all loads at once
            p_part = p_parts + i_part * part_len + o_logit
            b_logit += tl.load(p_part, mask=m_part, other=0.0, cache_modifier=".cg")
            if p_scale is not None:
                b_square += tl.load(p_squares + i_part * num_rows + o_row, mask=m_t, other=0.0, cache_modifier=".cg")
        if p_scale is not None:
            b_logit *= (tl.rsqrt(b_square / K + eps) * tl.rsqrt(K.to(tl.float32)))[:, None]
        if p_bias is not None:
            b_logit += tl.load(p_bias + o_e, mask=m_e, other=0.0).to(tl.float32)[None, :]
        b_logit = b_logit.to(p_x.dtype.element_ty).to(tl.float32)  # as the model's own router rounds them
        b_logit = tl.where(m_e[None, :], b_logit, -INF)
        b_first = tl.max(b_logit, 1)
        b_all = tl.sum(tl.exp(b_logit - b_first[:, None]), 1)
        o_slot = tl.arange(0, SLOTS)
        b_weight = tl.zeros([BLOCK_T, SLOTS], tl.float32)
        b_expert = tl.zeros([BLOCK_T, SLOTS], tl.int32)
        for i_slot in tl.static_range(TOP_K):
            b_best = tl.max(b_logit, 1)
            b_id = tl.min(tl.where(b_logit == b_best[:, None], o_e[None, :], BLOCK_E - 1), 1)  # lowest id first
            b_weight = tl.where(o_slot[None, :] == i_slot, tl.exp(b_best - b_first)[:, None], b_weight)
            b_expert = tl.where(o_slot[None, :] == i_slot, b_id[:, None], b_expert)
            b_logit = tl.where(o_e[None, :] == b_id[:, None], -INF, b_logit)
        b_weight = b_weight / (tl.sum(b_weight, 1) if NORMALISED else b_all)[:, None]
        m_slot = m_t[:, None] & (o_slot < TOP_K)[None, :]
        if p_expert_scale is not None:
            b_weight *= tl.load(p_expert_scale + b_expert, mask=m_slot, other=0.0).to(tl.float32)
        o_slot = o_row[:, None] * TOP_K + o_slot[None, :]
        tl.store(p_experts + o_slot, b_expert, mask=m_slot)
        tl.store(p_weights + o_slot, b_weight, mask=m_slot)


@triton.jit(do_not_specialize=["num_slots"])
def list_kernel(
    p_experts: tl.tensor,  # [T * top_k]
    p_first: tl.tensor,  # [E + 1] out: where the list of each expert begins
    p_order: tl.tensor,  # [T * top_k] out: assignments by expert
    num_slots: tl.tensor,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    i_expert = tl.program_id(0)
    wait_for_previous(PDL)
    b_before, b_mine = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for i_slot in range(0, num_slots, BLOCK):
        o_slot = i_slot + tl.arange(0, BLOCK)
        b_expert = tl.load(p_experts + o_slot, mask=o_slot < num_slots, other=0x7FFFFFFF)
        b_before += (b_expert < i_expert).to(tl.int32)
        b_mine += (b_expert == i_expert).to(tl.int32)
    first, count = tl.sum(b_before), tl.sum(b_mine)
    tl.store(p_first + i_expert, first)
    tl.store(p_first + i_expert + 1, first + count, mask=i_expert == tl.num_programs(0) - 1)
    for i_slot in range(0, num_slots, BLOCK):
        o_slot = i_slot + tl.arange(0, BLOCK)
        m_mine = tl.load(p_experts + o_slot, mask=o_slot < num_slots, other=0x7FFFFFFF) == i_expert
        b_mine = m_mine.to(tl.int32)
        tl.store(p_order + first + tl.cumsum(b_mine) - 1, o_slot, mask=m_mine)
        first += tl.sum(b_mine)


@triton.jit
def _gate(b_gate: tl.tensor, b_up: tl.tensor, alpha: tl.tensor, limit: tl.tensor, ACT: tl.constexpr) -> tl.tensor:
    """float32 in and out."""
    if ACT == "swiglu_clamped":
        b_gate = tl.minimum(b_gate, limit)
        b_sigmoid = tl.sigmoid(tl.maximum(alpha * b_gate, -80.0))  # e^80 is a float32
        return (tl.clamp(b_up, -limit, limit) + 1.0) * b_gate * b_sigmoid
    return activate(b_gate, ACT) * b_up


@triton.jit
def _multiply(
    p_x: tl.tensor,
    p_w: tl.tensor,  # [BN, 1]
    p_bias: tl.tensor,
    p_weights: tl.tensor,  # [A], or None where activated
    p_out: tl.tensor,  # [A, N], or [A, N / 2] where activated
    b_slot: tl.tensor,  # [BM] assignments
    m_slot: tl.tensor,
    o_bias: tl.tensor,  # [BN]
    i_n: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    s_x: tl.tensor,
    s_wk: tl.tensor,
    alpha: tl.tensor,
    limit: tl.tensor,
    PER_ROW: tl.constexpr,  # assignments of a row of x
    ACT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """One tile of an expert's weight times BLOCK_M assignments, and what follows the product."""
    p_x += (b_slot // PER_ROW).to(tl.int64)[None, :] * s_x
    b_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for i_k in range(0, K, BLOCK_K):
        o_k = i_k + tl.arange(0, BLOCK_K)
        if EVEN_K:
            b_w = tl.load(p_w + o_k[None, :] * s_wk)  # [BN, BK]
            b_x = tl.load(p_x + o_k[:, None], mask=m_slot[None, :], other=0.0)  # [BK, BM]
        else:
            m_k = o_k < K
            b_w = tl.load(p_w + o_k[None, :] * s_wk, mask=m_k[None, :], other=0.0)
            b_x = tl.load(p_x + o_k[:, None], mask=m_k[:, None] & m_slot[None, :], other=0.0)
        b_acc = tl.dot(b_w, b_x, b_acc, input_precision="ieee")
    if p_bias is not None:
        b_acc += tl.load(p_bias + o_bias).to(tl.float32)[:, None]
    o_slot = b_slot.to(tl.int64)[None, :]
    if ACT is None:
        b_acc *= tl.load(p_weights + b_slot, mask=m_slot, other=0.0)[None, :]
        o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
        tl.store(p_out + o_slot * N + o_n, b_acc, mask=m_slot[None, :] & (o_n < N))
    else:
        HALF: tl.constexpr = BLOCK_N // 2
        if INTERLEAVED:
            b_pair = tl.permute(tl.reshape(b_acc, (HALF, 2, BLOCK_M)), (0, 2, 1))
        else:
            b_pair = tl.permute(tl.reshape(b_acc, (2, HALF, BLOCK_M)), (1, 2, 0))
        b_gate, b_up = tl.split(b_pair)
        o_n = i_n * HALF + tl.arange(0, HALF)[:, None]
        b_out = _gate(b_gate, b_up, alpha, limit, ACT).to(p_out.dtype.element_ty)
        tl.store(p_out + o_slot * (N // 2) + o_n, b_out, mask=m_slot[None, :] & (o_n < N // 2))


@triton.jit(do_not_specialize=["num_slots"])
def product_kernel(
    p_x: tl.tensor,  # [T, K], or [A, K] behind the first product
    p_w: tl.tensor,  # [E, N, K] at any strides
    p_bias: tl.tensor,  # [E, N] or None
    p_experts: tl.tensor,  # [A], or None with a list
    p_first: tl.tensor,  # [E + 1], or None
    p_order: tl.tensor,  # [A], or None
    p_weights: tl.tensor,  # [A], or None where activated
    p_out: tl.tensor,  # [A, N] float32, or [A, N / 2] where activated
    num_slots: tl.tensor,  # A
    N: tl.tensor,
    K: tl.tensor,
    s_x: tl.tensor,
    s_we: tl.tensor,
    s_wn: tl.tensor,
    s_wk: tl.tensor,
    alpha: tl.tensor,
    limit: tl.tensor,
    PER_ROW: tl.constexpr,
    ACT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    SLOTS: tl.constexpr,  # A, rounded up to a power of 2; unused with a list
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    i_n, i_slot = tl.program_id(0), tl.program_id(1)
    o_n = tl.arange(0, BLOCK_N)
    if ACT is None or INTERLEAVED:
        o_w = i_n * BLOCK_N + o_n
        if not EVEN_N:  # a minimum hides from the compiler that neighbours are
            o_w = tl.minimum(o_w, N - 1)
    else:  # half a tile of gates, then what they gate
        o_w = tl.minimum(i_n * (BLOCK_N // 2) + o_n % (BLOCK_N // 2), N // 2 - 1) + o_n // (BLOCK_N // 2) * (N // 2)
    wait_for_previous(PDL)
    if p_order is not None:
        begin, end = tl.load(p_first + i_slot), tl.load(p_first + i_slot + 1)
        p_tile = p_w + i_slot.to(tl.int64) * s_we + o_w.to(tl.int64)[:, None] * s_wn
        for i_first in range(begin, end, BLOCK_M):
            o_list = i_first + tl.arange(0, BLOCK_M)
            b_slot = tl.load(p_order + o_list, mask=o_list < end, other=0)
            _multiply(
                *(p_x, p_tile, p_bias, p_weights, p_out, b_slot, o_list < end, i_slot * N + o_w, i_n, N, K, s_x, s_wk),
                *(alpha, limit, PER_ROW, ACT, INTERLEAVED, EVEN_K, BLOCK_N, BLOCK_M, BLOCK_K),
            )
    else:
        i_expert = tl.load(p_experts + i_slot)
        o_slot = tl.arange(0, SLOTS)
        m_same = tl.load(p_experts + o_slot, mask=o_slot < num_slots, other=-1) == i_expert
        if tl.min(tl.where(m_same, o_slot, SLOTS)) == i_slot:
            b_rank = tl.where(m_same, tl.cumsum(m_same.to(tl.int32)) - 1, -1)
            o_m = tl.arange(0, BLOCK_M)
            b_slot = tl.max(tl.where(b_rank[:, None] == o_m[None, :], o_slot[:, None], -1), 0)  # [BM]
            p_tile = p_w + i_expert.to(tl.int64) * s_we + o_w.to(tl.int64)[:, None] * s_wn
            _multiply(
                *(p_x, p_tile, p_bias, p_weights, p_out, tl.maximum(b_slot, 0), b_slot >= 0, i_expert * N + o_w),
                *(i_n, N, K, s_x, s_wk, alpha, limit, PER_ROW, ACT, INTERLEAVED, EVEN_K, BLOCK_N, BLOCK_M, BLOCK_K),
            )


@triton.jit
def sum_kernel(
    p_parts: tl.tensor,  # [T, top_k, N] float32
    p_out: tl.tensor,  # [T, N]
    N: tl.tensor,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    i_row = tl.program_id(1).to(tl.int64)
    o_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    b_sum = tl.zeros([BLOCK], tl.float32)
    for i_k in tl.static_range(TOP_K):
        b_sum += tl.load(p_parts + (i_row * TOP_K + i_k) * N + o_n, mask=o_n < N, other=0.0)
    tl.store(p_out + i_row * N + o_n, b_sum.to(p_out.dtype.element_ty), mask=o_n < N)
