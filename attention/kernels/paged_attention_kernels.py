"""The Triton kernels of `paged_attention`, which holds the math, the reference and the launch.

    grid of paged_attention_kernel (row tiles, B * Hkv, splits)

    rows     0 ............................ N * G       the G query heads of a kv head, packed node-major, so that each
             |tile 0     |tile 1     |tile 2            K/V tile is read once for all of them
    keys     block | lo ........................... hi  positions; lo is the oldest key that a row of the tile can see
             |split 0    |split 1   |split 2   |split 3|

Key tiles of the prefix begin at multiples of BLOCK_K. Columns of a tile outside [lo, hi) load the nearest key inside,
so that loads need no mask, and get weight 0. Only split 0 starts its running maximum and denominator from the sink, so
the sink enters once. A row that saw nothing has lse = -inf, and its partial result is not written. Lengths are run-time
values: no length compiles a new kernel.
"""

from specdec.attention.kernels.key_tiles import (
    LOG2E,
    NOWHERE,
    add_values,
    decode_keys,
    decode_values,
    join_parts,
    load_keys,
    load_values,
    page_slots,
    pairs_of,
    parts_of,
    scores_of,
    zero_parts,
)
from specdec.gpu.triton_shim import tl, triton

BLOCK_N = tl.constexpr(16)  # keys per tile of the block


@triton.jit
def absorb(
    b_q: tl.tuple,
    b_k: tl.tuple,
    b_v: tl.tuple,
    b_k_scale: tl.tensor,
    b_v_scale: tl.tensor,
    m_seen: tl.tensor,
    b_max: tl.tensor,
    b_sum: tl.tensor,
    b_acc: tl.tuple,
    scaling: tl.tensor,
    softcap: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tuple]:
    """One step of the online softmax, base 2: b_q [BM, BD], b_k [BK, BD], b_v [BK, BV] in parts, scales [1, BK] or [1,
    1], m_seen [BM, BK], [1, BK], or None."""
    b_s = scores_of(b_q, b_k) * b_k_scale
    if softcap is None:
        b_s = b_s * (scaling * LOG2E)
    else:
        b_s = (softcap * LOG2E) * (2.0 * tl.sigmoid(2.0 / softcap * scaling * b_s) - 1.0)  # c tanh(s / c)
    if m_seen is not None:
        b_s = tl.where(m_seen, b_s, float("-inf"))
    b_new = tl.maximum(b_max, tl.max(b_s, 1))
    b_shift = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_p = tl.exp2(b_s - b_shift[:, None])
    b_decay = tl.exp2(b_max - b_shift)
    b_acc = add_values(b_acc, b_decay[:, None], (b_p * b_v_scale).to(b_v[0].dtype), b_v)
    return b_new, b_sum * b_decay + tl.sum(b_p, 1), b_acc


@triton.jit(
    do_not_specialize=[
        *("window", "first_key", "num_rows", "num_keys", "num_splits", "num_pages"),
        *("s_page_b", "s_pos_b", "s_pos", "s_key_b", "s_key", "s_anc_b", "s_anc", "s_anc_w"),
    ]
)
def paged_attention_kernel(
    p_q: tl.tensor,  # [B, Hq, N, D]
    p_block_k: tl.tensor,  # [B, Hkv, M, D]
    p_block_v: tl.tensor,
    p_pool_k: tl.tensor,  # [slots, Hkv, D]
    p_pool_v: tl.tensor,
    p_block_k_scale: tl.tensor,  # [B * M, Hkv] or None, as all scales then
    p_block_v_scale: tl.tensor,
    p_scale_k: tl.tensor,  # [slots, Hkv]
    p_scale_v: tl.tensor,
    p_pages: tl.tensor,  # [B, P]
    p_start: tl.tensor,  # [B], or None: 0 for all
    p_committed_len: tl.tensor,  # [B]
    p_positions: tl.tensor,  # [B, N]
    p_key_pos: tl.tensor,  # [B, M], the positions of the block's keys
    p_ancestors: tl.tensor,  # [B, N, WORDS]
    p_sinks: tl.tensor,  # [Hq] or None
    p_out: tl.tensor,  # [splits, B, N, Hq, DV]
    p_lse: tl.tensor,  # [splits, B, N, Hq] or None when there is one split
    scaling: tl.tensor,
    softcap: tl.tensor,  # or None
    window: tl.tensor,  # or None
    first_key: tl.tensor,  # or None
    num_rows: tl.tensor,
    num_keys: tl.tensor,  # M
    num_splits: tl.tensor,
    num_pages: tl.tensor,
    s_q_b: tl.tensor,
    s_q_h: tl.tensor,
    s_q_n: tl.tensor,
    s_q_d: tl.tensor,
    s_bk_b: tl.tensor,
    s_bk_h: tl.tensor,
    s_bk_n: tl.tensor,
    s_bk_d: tl.tensor,
    s_bv_b: tl.tensor,
    s_bv_h: tl.tensor,
    s_bv_n: tl.tensor,
    s_bv_d: tl.tensor,
    s_pk_t: tl.constexpr,
    s_pk_h: tl.tensor,
    s_pk_d: tl.tensor,
    s_pv_t: tl.constexpr,
    s_pv_h: tl.tensor,
    s_pv_d: tl.tensor,
    s_page_b: tl.tensor,
    s_page: tl.tensor,
    s_pos_b: tl.tensor,
    s_pos: tl.tensor,
    s_key_b: tl.tensor,
    s_key: tl.tensor,
    s_anc_b: tl.tensor,
    s_anc: tl.tensor,
    s_anc_w: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:
    i_tile, i_split = tl.program_id(0), tl.program_id(2)
    i_b = (tl.program_id(1) // KV_HEADS).to(tl.int64)
    i_h = (tl.program_id(1) % KV_HEADS).to(tl.int64)

    committed_len = tl.load(p_committed_len + i_b).to(tl.int32)
    o_row = i_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    o_node, o_head = o_row // GROUP, i_h * GROUP + o_row % GROUP
    o_d = tl.arange(0, BLOCK_D)
    m_d = tl.full([BLOCK_D], True, tl.int1) if HEAD_DIM == BLOCK_D else o_d < HEAD_DIM
    o_v = tl.arange(0, BLOCK_V)
    m_v = tl.full([BLOCK_V], True, tl.int1) if VALUE_DIM == BLOCK_V else o_v < VALUE_DIM
    m_row = o_node < num_rows
    b_pos = tl.load(p_positions + i_b * s_pos_b + o_node * s_pos, mask=m_row, other=0).to(tl.int32)  # [BM]
    p_q += i_b * s_q_b + o_head[:, None] * s_q_h + o_node[:, None].to(tl.int64) * s_q_n + o_d[None, :] * s_q_d
    b_q = parts_of(tl.load(p_q, mask=m_row[:, None] & m_d[None, :], other=0.0), p_scale_k is not None)  # [BM, BD]

    p_ancestors += i_b * s_anc_b + o_node * s_anc
    # loaded here, far from its use: between the loops, it would make ptxas serialise every wgmma
    b_bits = tl.load(p_ancestors, mask=m_row, other=0)  # [BM]
    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if p_sinks is not None:
        b_sink = tl.load(p_sinks + o_head, mask=m_row, other=float("-inf")).to(tl.float32) * LOG2E
        b_max = tl.where(i_split == 0, b_sink, b_max)
    b_sum = tl.full([BLOCK_M], 1.0, tl.float32)  # the sink's; without a sink, the first key scales it to 0
    b_acc = zero_parts(BLOCK_M, BLOCK_V, p_scale_k is not None)

    # the prefix: keys [lo, hi) by position, of which this split takes [begin, end)
    start = 0
    if p_start is not None:
        start = tl.load(p_start + i_b).to(tl.int32)
    lo = start
    if window is not None:
        lo = tl.maximum(tl.min(tl.where(m_row, b_pos, NOWHERE), 0) - window + 1, start)
    hi = tl.minimum(committed_len, start + num_pages * PAGE_SIZE)
    hi = tl.where(lo < hi, hi, 0)
    begin = lo // BLOCK_K * BLOCK_K
    spare = 4 * BLOCK_K  # split 0 takes this many keys fewer, since it has the block
    chunk = tl.cdiv(tl.cdiv(tl.maximum(hi - begin, 0) + spare, num_splits), BLOCK_K) * BLOCK_K
    begin += i_split * chunk - spare
    end = tl.minimum(begin + chunk, hi)
    begin = tl.maximum(begin, lo // BLOCK_K * BLOCK_K)
    o_k, m_k, o_x, m_x = o_d, m_d, o_v, m_v  # offsets and masks within pools
    p_page = p_pages + i_b * s_page_b
    p_pool_k += i_h * s_pk_h
    p_pool_v += i_h * s_pv_h
    if p_scale_k is not None:
        p_scale_k += i_h
        p_scale_v += i_h
        o_k, m_k = pairs_of(HEAD_DIM, BLOCK_D)
        o_x, m_x = pairs_of(VALUE_DIM, BLOCK_V)
    for i_key in range(begin, end, BLOCK_K):
        o_key = i_key + tl.arange(0, BLOCK_K)
        m_key = (o_key >= lo) & (o_key < hi)
        o_col = tl.minimum(tl.maximum(o_key, lo), hi - 1)
        b_slot = page_slots(p_page, o_col - start, s_page, PAGE_SIZE)
        b_k, b_k_scale = load_keys(p_pool_k, p_scale_k, b_slot, o_k, m_k, s_pk_t, s_pk_d, KV_HEADS, b_q[0].dtype)
        b_v, b_v_scale = load_values(
            p_pool_v, p_scale_v, b_slot, o_x, m_x, s_pv_t, s_pv_d, KV_HEADS, b_q[0].dtype, BLOCK_M
        )
        m_seen = m_key[None, :]
        if window is not None:
            m_seen = m_seen & (b_pos[:, None] - o_key[None, :] < window)
        if first_key is not None:
            m_seen = m_seen & (o_key[None, :] >= tl.minimum(b_pos, first_key)[:, None])
        b_max, b_sum, b_acc = absorb(b_q, b_k, b_v, b_k_scale, b_v_scale, m_seen, b_max, b_sum, b_acc, scaling, softcap)

    # split 0: the block
    for i_key in tl.range(0, tl.where(i_split == 0, num_keys, 0), BLOCK_N, num_stages=1):
        o_key = i_key + tl.arange(0, BLOCK_N)
        m_key = o_key < num_keys
        if WORDS > 1:
            b_bits = tl.load(p_ancestors + i_key // 64 * s_anc_w, mask=m_row, other=0)
        m_seen = ((b_bits[:, None] >> (o_key % 64)[None, :]) & 1) != 0
        m_seen = m_seen & m_row[:, None] & m_key[None, :]
        if window is not None or first_key is not None:
            b_key_pos = tl.load(p_key_pos + i_b * s_key_b + o_key * s_key, mask=m_key, other=0).to(tl.int32)
            if window is not None:
                m_seen = m_seen & (b_pos[:, None] - b_key_pos[None, :] < window)
            if first_key is not None:
                m_seen = m_seen & (b_key_pos[None, :] >= tl.minimum(b_pos, first_key)[:, None])
        m_key = tl.max(m_seen.to(tl.int32), 0) > 0  # a key that no row sees may be NaN
        o_kv = o_key[:, None].to(tl.int64)
        o_bk = i_b * s_bk_b + i_h * s_bk_h + o_kv * s_bk_n + o_k[None, :] * s_bk_d
        o_bv = i_b * s_bv_b + i_h * s_bv_h + o_kv * s_bv_n + o_x[None, :] * s_bv_d
        b_own_k = tl.load(p_block_k + o_bk, mask=m_key[:, None] & m_k[None, :], other=0)
        b_own_v = tl.load(p_block_v + o_bv, mask=m_key[:, None] & m_x[None, :], other=0)
        b_k, b_v = (b_own_k,), (b_own_v,)
        b_k_scale, b_v_scale = tl.full([1, 1], 1.0, tl.float32), tl.full([1, 1], 1.0, tl.float32)
        if p_block_k_scale is not None:
            o_scale = (i_b * s_bk_b + i_h * s_bk_h + o_kv * s_bk_n) // (HEAD_DIM // 2)  # rows are contiguous
            b_k_scale = tl.load(p_block_k_scale + o_scale, mask=m_key[:, None], other=0.0)
            b_k, b_k_scale = decode_keys(b_own_k, b_k_scale, b_q[0].dtype)
            b_v_scale = tl.load(p_block_v_scale + o_scale, mask=m_key[:, None], other=0.0)
            b_v, b_v_scale = decode_values(b_own_v, b_v_scale, b_q[0].dtype, BLOCK_M)
        b_max, b_sum, b_acc = absorb(b_q, b_k, b_v, b_k_scale, b_v_scale, m_seen, b_max, b_sum, b_acc, scaling, softcap)

    b_sum = tl.where(b_sum == 0.0, 1.0, b_sum)  # a row that saw nothing
    b_scale = tl.where(m_row, 1.0 / b_sum, 0.0)
    o_out = (i_b * num_rows + o_node) * (KV_HEADS * GROUP) + o_head
    m_out = m_row
    if p_lse is not None:
        o_out += i_split * (tl.num_programs(1) * GROUP).to(tl.int64) * num_rows
        b_lse = tl.where(m_row, b_max + tl.log2(b_sum), float("-inf"))
        tl.store(p_lse + o_out, b_lse, mask=m_out)
        m_out = m_out & (b_lse > float("-inf"))
    b_out = (join_parts(b_acc, BLOCK_M, b_q[0].dtype) * b_scale[:, None]).to(p_out.dtype.element_ty)
    tl.store(p_out + o_out[:, None] * VALUE_DIM + o_v[None, :], b_out, mask=m_out[:, None] & m_v[None, :])


@triton.jit(do_not_specialize=["num_splits"])
def merge_paged_kernel(
    p_part: tl.tensor,  # [splits, rows, D]
    p_lse: tl.tensor,  # [splits, rows]
    p_out: tl.tensor,  # [rows, D]
    num_splits: tl.tensor,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """One program per row: out = sum_s 2^lse_s part_s / sum_s 2^lse_s, 16 splits at a time."""
    i_row = tl.program_id(0).to(tl.int64)
    num_rows = tl.num_programs(0).to(tl.int64)
    o_v = tl.arange(0, BLOCK_V)
    m_v = o_v < VALUE_DIM
    b_max, b_sum = float("-inf"), 0.0
    b_acc = tl.zeros([BLOCK_V], tl.float32)
    for i_split in range(0, num_splits, 16):
        o_split = i_split + tl.arange(0, 16)
        o_part = o_split * num_rows + i_row
        b_lse = tl.load(p_lse + o_part, mask=o_split < num_splits, other=float("-inf"))
        m_part = (o_split < num_splits)[:, None] & m_v[None, :]
        b_part = tl.load(p_part + o_part[:, None] * VALUE_DIM + o_v[None, :], mask=m_part, other=0.0)
        # load the part together with its lse, not after it
        b_part = tl.where((b_lse > float("-inf"))[:, None], b_part, 0.0)
        b_new = tl.maximum(b_max, tl.max(b_lse, 0))
        b_shift = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_decay, b_weight = tl.exp2(b_max - b_shift), tl.exp2(b_lse - b_shift)
        b_acc = b_acc * b_decay + tl.sum(b_part * b_weight[:, None], 0)
        b_sum = b_sum * b_decay + tl.sum(b_weight, 0)
        b_max = b_new
    b_out = b_acc / tl.where(b_sum == 0.0, 1.0, b_sum)
    tl.store(p_out + i_row * VALUE_DIM + o_v, b_out.to(p_out.dtype.element_ty), mask=m_v)
