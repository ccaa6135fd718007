"""The Triton kernels behind `mixture`, which holds the math, the references and the launches.

    pick_kernel      grid (rows)                   the last sum of the router's product, and the k best of a row
    list_kernel      grid (experts)                many rows: the assignments of each expert, in ascending order
    product_kernel   grid (weight tiles, slots)    weight rows as M operand, assignments of one expert as N operand
    beside_kernel    grid (programs)               the same, and in front of it the product of a dense MLP

A slot of product_kernel is an expert with a list. At few rows it is an assignment, and needs no list: the program of
an expert's first assignment multiplies for all of them, and the others leave. Either way a weight is read once, and an
assignment is a column of its own in a product whose sum over K is never cut: its bits do not depend on its neighbours.
"""

from specdec.gpu.dependent_launch import trigger_next, wait_for_previous
from specdec.gpu.triton_shim import KEEP, tl, triton
from specdec.layers.linear_kernels import activate, linear_tile, sum_parts

INF = tl.constexpr(float("inf"))


@triton.jit
def _order(b_logit: tl.tensor, o_e: tl.tensor, m_e: tl.tensor, DTYPE: tl.constexpr, BLOCK_E: tl.constexpr) -> tl.tensor:
    """One integer for logit and expert: larger is better, of equal logits the lower expert; lowest where masked."""
    BITS: tl.constexpr = DTYPE.primitive_bitwidth
    SHORT: tl.constexpr = tl.int32 if BITS == 32 else tl.int16
    WIDE: tl.constexpr = tl.int64 if BITS == 32 else tl.int32  # of 32 bits, its maximum over a warp is one instruction
    b_bits = tl.where(b_logit == 0.0, 0.0, b_logit).to(DTYPE).to(SHORT, bitcast=True).to(WIDE)  # -0 is 0
    b_bits = tl.where(b_bits < 0, b_bits ^ (2 ** (BITS - 1) - 1), b_bits)  # floats ordered as integers
    return tl.where(m_e, b_bits * 2**BITS + (BLOCK_E - o_e), -(2 ** (2 * BITS - 1)))


@triton.jit(do_not_specialize=["num_rows"])
def pick_kernel(
    p_parts: tl.tensor,  # [S, T, E]
    p_bias: tl.tensor,  # [E] or None
    p_scale: tl.tensor,  # [E] or None
    p_experts: tl.tensor,  # [T, top_k] out
    p_weights: tl.tensor,  # [T, top_k] out
    num_rows: tl.tensor,
    num_experts: tl.tensor,
    TOP_K: tl.constexpr,
    NORMALISED: tl.constexpr,
    DTYPE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    i_row = tl.program_id(0).to(tl.int64)
    o_e = tl.arange(0, BLOCK_E)
    m_e = o_e < num_experts
    b_scale = tl.load(p_scale + o_e, mask=m_e, other=0.0).to(tl.float32) if p_scale is not None else 1.0
    wait_for_previous(PDL)
    part_len = num_rows.to(tl.int64) * num_experts
    b_logit = sum_parts(p_parts, p_bias, i_row * num_experts + o_e, o_e, m_e, part_len, SPLITS, DTYPE)
    b_order = _order(b_logit, o_e, m_e, DTYPE, BLOCK_E)
    NONE: tl.constexpr = -(2 ** (2 * DTYPE.primitive_bitwidth - 1))
    b_rank = tl.full([BLOCK_E], TOP_K, tl.int32)
    for i_rank in tl.static_range(TOP_K):
        m_best = b_order == tl.max(b_order)
        b_rank = tl.where(m_best, i_rank, b_rank)
        b_order = tl.where(m_best, NONE, b_order)
    m_picked = b_rank < TOP_K
    b_logit = tl.where(m_e, b_logit, -INF)
    b_weight = tl.exp(b_logit - tl.max(b_logit))
    b_weight = b_weight / tl.sum(tl.where(m_picked, b_weight, 0.0) if NORMALISED else b_weight) * b_scale
    o_out = i_row * TOP_K + b_rank
    tl.store(p_experts + o_out, o_e, mask=m_picked, eviction_policy=KEEP)
    tl.store(p_weights + o_out, b_weight, mask=m_picked, eviction_policy=KEEP)


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
    p_out: tl.tensor,  # [top_k, T, N], or [A, N / 2] where activated
    b_slot: tl.tensor,  # [BM] assignments
    m_slot: tl.tensor,
    num_slots: tl.tensor,
    o_bias: tl.tensor,  # [BN]
    i_n: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    s_x: tl.tensor,
    s_wk: tl.tensor,
    alpha: tl.tensor,
    limit: tl.tensor,
    TOP_K: tl.constexpr,
    ACT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """One tile of an expert's weight times BLOCK_M assignments, and what follows the product."""
    b_row = b_slot // TOP_K
    p_x += (b_slot if ACT is None else b_row).to(tl.int64)[None, :] * s_x
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
    if ACT is None:
        o_out = (b_slot % TOP_K * (num_slots // TOP_K) + b_row).to(tl.int64)[None, :]
        b_acc *= tl.load(p_weights + b_slot, mask=m_slot, other=0.0)[None, :]
        o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
        tl.store(p_out + o_out * N + o_n, b_acc, mask=m_slot[None, :] & (o_n < N), eviction_policy=KEEP)
    else:
        HALF: tl.constexpr = BLOCK_N // 2
        if INTERLEAVED:
            b_pair = tl.permute(tl.reshape(b_acc, (HALF, 2, BLOCK_M)), (0, 2, 1))
        else:
            b_pair = tl.permute(tl.reshape(b_acc, (2, HALF, BLOCK_M)), (1, 2, 0))
        b_gate, b_up = tl.split(b_pair)
        o_n = i_n * HALF + tl.arange(0, HALF)[:, None]
        b_out = _gate(b_gate, b_up, alpha, limit, ACT).to(p_out.dtype.element_ty)
        tl.store(
            p_out + b_slot.to(tl.int64)[None, :] * (N // 2) + o_n,
            b_out,
            mask=m_slot[None, :] & (o_n < N // 2),
            eviction_policy=KEEP,
        )


@triton.jit
def expert_program(
    i_n: tl.tensor,
    i_slot: tl.tensor,
    p_x: tl.tensor,  # [T, K], or [A, K] behind the first product
    p_w: tl.tensor,  # [E, N, K] at any strides
    p_bias: tl.tensor,  # [E, N] or None
    p_experts: tl.tensor,  # [A], or None with a list
    p_first: tl.tensor,  # [E + 1], or None
    p_order: tl.tensor,  # [A], or None
    p_weights: tl.tensor,  # [A], or None where activated
    p_out: tl.tensor,  # [top_k, T, N] float32, or [A, N / 2] where activated
    num_slots: tl.tensor,  # A = T * top_k
    N: tl.tensor,
    K: tl.tensor,
    s_x: tl.tensor,
    s_we: tl.tensor,
    s_wn: tl.tensor,
    s_wk: tl.tensor,
    alpha: tl.tensor,
    limit: tl.tensor,
    TOP_K: tl.constexpr,
    ACT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    SLOTS: tl.constexpr,  # A, rounded up to a power of 2; unused with a list
    LONE: tl.constexpr,  # one row, so no expert has two assignments; unused with a list
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program of a product, from its wait to its last store."""
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
                *(p_x, p_tile, p_bias, p_weights, p_out, b_slot, o_list < end, num_slots, i_slot * N + o_w, i_n, N, K),
                *(s_x, s_wk, alpha, limit, TOP_K, ACT, INTERLEAVED, EVEN_K, BLOCK_N, BLOCK_M, BLOCK_K),
            )
    else:
        i_expert = tl.load(p_experts + i_slot)
        o_slot, o_m = tl.arange(0, SLOTS), tl.arange(0, BLOCK_M)
        first = i_slot
        if not LONE:
            m_same = tl.load(p_experts + o_slot, mask=o_slot < num_slots, other=-1) == i_expert
            first = tl.min(tl.where(m_same, o_slot, SLOTS))
        if first == i_slot:
            b_slot = tl.where(o_m == 0, i_slot, -1)  # [BM]
            if not LONE:
                b_rank = tl.where(m_same, tl.cumsum(m_same.to(tl.int32)) - 1, -1)
                b_slot = tl.max(tl.where(b_rank[:, None] == o_m[None, :], o_slot[:, None], -1), 0)
            p_tile = p_w + i_expert.to(tl.int64) * s_we + o_w.to(tl.int64)[:, None] * s_wn
            o_bias = i_expert * N + o_w
            _multiply(
                *(p_x, p_tile, p_bias, p_weights, p_out, tl.maximum(b_slot, 0), b_slot >= 0, num_slots, o_bias, i_n, N),
                *(K, s_x, s_wk, alpha, limit, TOP_K, ACT, INTERLEAVED, EVEN_K, BLOCK_N, BLOCK_M, BLOCK_K),
            )


@triton.jit(do_not_specialize=["num_slots"])
def product_kernel(
    p_x: tl.tensor,
    p_w: tl.tensor,
    p_bias: tl.tensor,
    p_experts: tl.tensor,
    p_first: tl.tensor,
    p_order: tl.tensor,
    p_weights: tl.tensor,
    p_out: tl.tensor,
    num_slots: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    s_x: tl.tensor,
    s_we: tl.tensor,
    s_wn: tl.tensor,
    s_wk: tl.tensor,
    alpha: tl.tensor,
    limit: tl.tensor,
    TOP_K: tl.constexpr,
    ACT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    SLOTS: tl.constexpr,
    LONE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    expert_program(
        *(tl.program_id(0), tl.program_id(1), p_x, p_w, p_bias, p_experts, p_first, p_order, p_weights, p_out),
        *(num_slots, N, K, s_x, s_we, s_wn, s_wk, alpha, limit, TOP_K, ACT, INTERLEAVED, EVEN_N, EVEN_K),
        *(SLOTS, LONE, BLOCK_N, BLOCK_M, BLOCK_K, PDL),
    )


@triton.jit(do_not_specialize=["num_rows", "num_dense", "num_slots"])
def beside_kernel(
    p_dense_x: tl.tensor,  # [T, K'], and so on: what `linear_tile` is given
    p_dense_w: tl.tensor,
    p_dense_out: tl.tensor,
    num_rows: tl.tensor,
    num_dense: tl.tensor,  # programs of the dense product
    dense_tiles: tl.tensor,  # those of one range of its K
    dense_n: tl.tensor,
    dense_k: tl.tensor,
    split_len: tl.tensor,
    s_dense_x: tl.tensor,
    s_dense_w: tl.tensor,
    p_x: tl.tensor,  # what `expert_program` is given
    p_w: tl.tensor,
    p_bias: tl.tensor,
    p_experts: tl.tensor,
    p_first: tl.tensor,
    p_order: tl.tensor,
    p_weights: tl.tensor,
    p_out: tl.tensor,
    num_slots: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    s_x: tl.tensor,
    s_we: tl.tensor,
    s_wn: tl.tensor,
    s_wk: tl.tensor,
    alpha: tl.tensor,
    limit: tl.tensor,
    DENSE_ACT: tl.constexpr,  # None: the ranges of K are programs of their own
    DENSE_WHOLE: tl.constexpr,  # there is one range
    DENSE_EVEN_K: tl.constexpr,
    START: tl.constexpr,
    TOP_K: tl.constexpr,
    ACT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    SLOTS: tl.constexpr,
    LONE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    if program < num_dense:
        i_n, i_split = program % dense_tiles, program // dense_tiles
        TILE_ROWS: tl.constexpr = BLOCK_N if DENSE_ACT is None else BLOCK_N // 2
        linear_tile(
            *(0, i_n, i_split, p_dense_x, p_dense_w, None, p_dense_out, num_rows, TILE_ROWS, dense_n, dense_k),
            *(split_len, s_dense_x, s_dense_w, DENSE_ACT is None, False, DENSE_WHOLE, DENSE_ACT, DENSE_EVEN_K),
            *(BLOCK_N, BLOCK_M, 0, BLOCK_K, START, PDL),
        )
    else:
        trigger_next(PDL)
        program -= num_dense
        tiles = tl.cdiv(N, BLOCK_N)
        expert_program(
            *(program % tiles, program // tiles, p_x, p_w, p_bias, p_experts, p_first, p_order, p_weights, p_out),
            *(num_slots, N, K, s_x, s_we, s_wn, s_wk, alpha, limit, TOP_K, ACT, INTERLEAVED, EVEN_N, EVEN_K),
            *(SLOTS, LONE, BLOCK_N, BLOCK_M, BLOCK_K, PDL),
        )
