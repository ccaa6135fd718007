"""The Triton kernel of `ragged_attention`, which holds the math, the reference and the launch.

    grid (tiles * VALUE_PARTS, Hkv, splits)

    places   a a a a a a a b b b c . .       a tile is up to 4 tokens of one run; cu_len gives the tiles per run
             |0      |1    |2    |3|4  |     padding is a run of no keys at the end; programs past the last tile return
    rows     a tile's tokens x the G query heads of a kv head, packed token-major
    keys     lo ........................ end positions; tiles of BLOCK_K at multiples of BLOCK_K; lo is the oldest key
                                             that a row of the tile can see, so that keys outside the window are skipped

There are two ways of adding keys. SPLIT_LEN 0: one online softmax over all keys of a split; splits are cut evenly and
merged by `merge_paged_kernel` of `paged_attention`. Otherwise the same operations as in `tree_attention`: chains of
SPLIT_LEN keys at absolute positions, folded in ascending order, so that a row has the bits of plain decoding.
"""

from specdec.attention.kernels.key_tiles import (
    LOG2E,
    join_parts,
    load_keys,
    load_values,
    pairs_of,
    parts_of,
    zero_parts,
)
from specdec.attention.kernels.paged_attention_kernels import absorb
from specdec.attention.kernels.tree_attention_kernels import absorb_in_order, fold_weights, split_begin, split_of
from specdec.gpu.triton_shim import tl, triton


@triton.jit
def _add_tile(
    p_pool_k: tl.tensor,
    p_pool_v: tl.tensor,
    p_scale_k: tl.tensor,
    p_scale_v: tl.tensor,
    p_slots: tl.tensor,
    i_key: tl.tensor,
    lo: tl.tensor,
    end: tl.tensor,
    begin_of_line: tl.tensor,
    b_q: tl.tuple,
    b_pos: tl.tensor,
    b_oldest: tl.tensor,
    b_max: tl.tensor,
    b_sum: tl.tensor,
    b_acc: tl.tuple,
    scaling: tl.tensor,
    softcap: tl.tensor,
    o_d: tl.tensor,
    m_d: tl.tensor,
    o_v: tl.tensor,
    m_v: tl.tensor,
    s_pk_t: tl.constexpr,
    s_pk_d: tl.tensor,
    s_pv_t: tl.constexpr,
    s_pv_d: tl.tensor,
    KV_HEADS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr,
    IN_ORDER: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tuple]:
    """Add the tile of keys from i_key on. Columns outside [lo, end) load the nearest key inside and get weight 0."""
    o_key = i_key + tl.arange(0, BLOCK_K)
    o_inside = o_key
    if MASKED:
        o_inside = tl.minimum(tl.maximum(o_key, lo), end - 1)
    b_slot = tl.load(p_slots + (o_inside - begin_of_line)).to(tl.int64)[:, None]
    b_k, b_k_scale = load_keys(p_pool_k, p_scale_k, b_slot, o_d, m_d, s_pk_t, s_pk_d, KV_HEADS, b_q[0].dtype)
    b_v, b_v_scale = load_values(
        p_pool_v, p_scale_v, b_slot, o_v, m_v, s_pv_t, s_pv_d, KV_HEADS, b_q[0].dtype, b_q[0].shape[0]
    )
    m_seen = None
    if MASKED:
        m_seen = (o_key[None, :] <= b_pos[:, None]) & (o_key[None, :] >= b_oldest[:, None])
    if IN_ORDER:
        b_max, b_sum, b_acc = absorb_in_order(
            b_q, b_k, b_v, b_k_scale, b_v_scale, m_seen, b_max, b_sum, b_acc, scaling, softcap
        )
    else:
        b_max, b_sum, b_acc = absorb(b_q, b_k, b_v, b_k_scale, b_v_scale, m_seen, b_max, b_sum, b_acc, scaling, softcap)
    return b_max, b_sum, b_acc


@triton.jit
def _walk(
    p_pool_k: tl.tensor,
    p_pool_v: tl.tensor,
    p_scale_k: tl.tensor,
    p_scale_v: tl.tensor,
    p_slots: tl.tensor,
    begin: tl.tensor,
    stop: tl.tensor,
    free_end: tl.tensor,
    lo: tl.tensor,
    end: tl.tensor,
    begin_of_line: tl.tensor,
    b_q: tl.tuple,
    b_pos: tl.tensor,
    b_oldest: tl.tensor,
    b_max: tl.tensor,
    b_sum: tl.tensor,
    b_acc: tl.tuple,
    scaling: tl.tensor,
    softcap: tl.tensor,
    o_d: tl.tensor,
    m_d: tl.tensor,
    o_v: tl.tensor,
    m_v: tl.tensor,
    s_pk_t: tl.constexpr,
    s_pk_d: tl.tensor,
    s_pv_t: tl.constexpr,
    s_pv_d: tl.tensor,
    KV_HEADS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IN_ORDER: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tuple]:
    """Add the keys [begin, stop). Before free_end every row sees every key, so no mask is needed."""
    # fmt: off
    for i_key in range(begin, tl.minimum(stop, free_end), BLOCK_K):
        b_max, b_sum, b_acc = _add_tile(
            p_pool_k, p_pool_v, p_scale_k, p_scale_v, p_slots, i_key, lo, end, begin_of_line, b_q, b_pos, b_oldest,
            b_max, b_sum, b_acc, scaling, softcap, o_d, m_d, o_v, m_v, s_pk_t, s_pk_d, s_pv_t, s_pv_d, KV_HEADS,
            BLOCK_K, False, IN_ORDER,
        )
    for i_key in range(tl.maximum(begin, free_end), stop, BLOCK_K):
        b_max, b_sum, b_acc = _add_tile(
            p_pool_k, p_pool_v, p_scale_k, p_scale_v, p_slots, i_key, lo, end, begin_of_line, b_q, b_pos, b_oldest,
            b_max, b_sum, b_acc, scaling, softcap, o_d, m_d, o_v, m_v, s_pk_t, s_pk_d, s_pv_t, s_pv_d, KV_HEADS,
            BLOCK_K, True, IN_ORDER,
        )
    # fmt: on
    return b_max, b_sum, b_acc


@triton.jit(do_not_specialize=["window", "first_key", "num_runs", "num_tokens", "num_splits", "s_line"])
def ragged_kernel(
    p_q: tl.tensor,  # [Hq, T, D]
    p_pool_k: tl.tensor,  # [slots, Hkv, D]
    p_pool_v: tl.tensor,
    p_scale_k: tl.tensor,  # [slots, Hkv] or None
    p_scale_v: tl.tensor,
    p_slots: tl.tensor,  # [L, W]
    p_line: tl.tensor,  # [R]
    p_begin: tl.tensor,  # [R] or None
    p_start: tl.tensor,  # [R]
    p_cu_len: tl.tensor,  # [R + 1]
    p_sinks: tl.tensor,  # [Hq] or None
    p_out: tl.tensor,  # [splits, T, Hq, DV]
    p_lse: tl.tensor,  # [splits, T, Hq] or None when there is one split
    scaling: tl.tensor,
    softcap: tl.tensor,  # or None
    window: tl.tensor,  # or None
    first_key: tl.tensor,  # or None
    num_runs: tl.tensor,
    num_tokens: tl.tensor,
    num_splits: tl.tensor,
    s_line: tl.tensor,
    s_q_h: tl.tensor,
    s_q_t: tl.tensor,
    s_q_d: tl.tensor,
    s_pk_t: tl.constexpr,
    s_pk_h: tl.tensor,
    s_pk_d: tl.tensor,
    s_pv_t: tl.constexpr,
    s_pv_h: tl.tensor,
    s_pv_d: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TOKENS: tl.constexpr,  # per tile
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,  # value channels of a program
    BLOCK_R: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    GROWS: tl.constexpr,
    VALUE_PARTS: tl.constexpr,  # programs that divide the value channels of a tile among them
) -> None:
    i_program = tl.num_programs(0) - 1 - tl.program_id(0)  # tiles that see most keys first
    i_tile, first_v = i_program // VALUE_PARTS, i_program % VALUE_PARTS * BLOCK_V
    i_h, i_split = tl.program_id(1).to(tl.int64), tl.program_id(2)

    # the tile map: run `num_runs` is padding
    o_run = tl.arange(0, BLOCK_R)
    b_first = tl.load(p_cu_len + o_run, mask=o_run <= num_runs, other=0).to(tl.int32)
    b_first = tl.where(o_run <= num_runs, b_first, num_tokens)
    b_end = tl.load(p_cu_len + o_run + 1, mask=o_run < num_runs, other=0).to(tl.int32)
    b_end = tl.where(o_run < num_runs, b_end, num_tokens)
    b_tiles = (b_end - b_first + TOKENS - 1) // TOKENS
    b_cu_tiles = tl.cumsum(b_tiles, 0)
    run = tl.sum((b_cu_tiles <= i_tile).to(tl.int32), 0)
    if run > num_runs:
        return
    m_run = o_run == run
    run_first = tl.sum(tl.where(m_run, b_first, 0), 0)
    run_end = tl.sum(tl.where(m_run, b_end, 0), 0)
    tile_of_run = i_tile - tl.sum(tl.where(m_run, b_cu_tiles - b_tiles, 0), 0)
    first = run_first + tile_of_run * TOKENS
    count = tl.minimum(TOKENS, run_end - first)
    is_real = run < num_runs
    run = tl.minimum(run, num_runs - 1)

    first_pos = tl.load(p_start + run).to(tl.int32) + tile_of_run * TOKENS
    line = tl.load(p_line + run).to(tl.int64)
    begin_of_line = 0
    if p_begin is not None:
        begin_of_line = tl.load(p_begin + run).to(tl.int32)
    o_row = tl.arange(0, BLOCK_M)
    o_token = o_row // GROUP
    o_head = i_h * GROUP + o_row % GROUP
    m_row = o_token < count
    b_pos = first_pos + o_token
    b_oldest = tl.zeros([BLOCK_M], tl.int32) + begin_of_line  # each row's oldest key
    lo = begin_of_line
    if window is not None:
        lo = tl.maximum(lo, first_pos - window + 1)
        b_oldest = tl.maximum(b_oldest, b_pos - window + 1)
    if first_key is not None:
        b_oldest = tl.maximum(b_oldest, tl.minimum(b_pos, first_key))
    end = tl.where(is_real, first_pos + count, 0)

    o_d = tl.arange(0, BLOCK_D)
    m_d = tl.full([BLOCK_D], True, tl.int1) if HEAD_DIM == BLOCK_D else o_d < HEAD_DIM
    o_v = first_v + tl.arange(0, BLOCK_V)
    m_v = tl.full([BLOCK_V], True, tl.int1) if VALUE_DIM == BLOCK_V * VALUE_PARTS else o_v < VALUE_DIM
    o_place = (first + o_token).to(tl.int64)
    p_q += o_head[:, None] * s_q_h + o_place[:, None] * s_q_t + o_d[None, :] * s_q_d
    b_q = parts_of(tl.load(p_q, mask=m_row[:, None] & m_d[None, :], other=0.0), p_scale_k is not None)  # [BM, BD]
    o_k, m_k, o_x, m_x = o_d, m_d, o_v, m_v  # offsets and masks within pools
    p_slots += line * s_line
    p_pool_k += i_h * s_pk_h
    p_pool_v += i_h * s_pv_h
    if p_scale_k is not None:
        p_scale_k += i_h
        p_scale_v += i_h
        o_k, m_k = pairs_of(HEAD_DIM, BLOCK_D)
        o_x = first_v // 2 + tl.arange(0, BLOCK_V // 2)
        m_x = tl.full([BLOCK_V // 2], True, tl.int1) if VALUE_DIM == BLOCK_V * VALUE_PARTS else o_x < VALUE_DIM // 2
    # without a first key, every row sees every key from free_begin to before free_end
    free_begin, free_end = begin_of_line, 0
    if first_key is None:
        free_end = tl.where(is_real, (first_pos + 1) // BLOCK_K * BLOCK_K, 0)
    if window is not None:
        free_begin = tl.maximum(free_begin, first_pos + count - window)
    o_out = o_place * (KV_HEADS * GROUP) + o_head
    m_out = m_row[:, None] & m_v[None, :]

    if SPLIT_LEN == 0:
        begin = lo // BLOCK_K * BLOCK_K
        chunk = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), num_splits), BLOCK_K) * BLOCK_K
        begin += i_split * chunk
        stop = tl.minimum(begin + chunk, end)
        free_stop = free_end if GROWS else 0
        b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        if p_sinks is not None:
            b_sink = tl.load(p_sinks + o_head, mask=m_row, other=float("-inf")).to(tl.float32) * LOG2E
            b_max = tl.where(i_split == 0, b_sink, b_max)
        b_sum = tl.full([BLOCK_M], 1.0, tl.float32)  # the sink's; without a sink, the first key scales it to 0
        b_acc = zero_parts(BLOCK_M, BLOCK_V, p_scale_k is not None)
        # fmt: off
        b_max, b_sum, b_acc = _walk(
            p_pool_k, p_pool_v, p_scale_k, p_scale_v, p_slots, begin, stop, free_stop, lo, end, begin_of_line, b_q,
            b_pos, b_oldest, b_max, b_sum, b_acc, scaling, softcap, o_k, m_k, o_x, m_x, s_pk_t, s_pk_d,
            s_pv_t, s_pv_d, KV_HEADS, BLOCK_K, False,
        )
        # fmt: on
        b_sum = tl.where(b_sum == 0.0, 1.0, b_sum)
        if p_lse is not None:
            o_out += i_split * num_tokens.to(tl.int64) * (KV_HEADS * GROUP)
            b_lse = b_max + tl.log2(b_sum)
            tl.store(p_lse + o_out, b_lse, mask=m_row)
            m_out = m_out & (b_lse > float("-inf"))[:, None]
        b_out = join_parts(b_acc, BLOCK_M, b_q[0].dtype) * (1.0 / b_sum)[:, None]
    else:
        b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        b_sum = tl.zeros([BLOCK_M], tl.float32)
        b_acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        first_split = split_of(lo, SPLIT_LEN, GROWS)
        end_split = tl.where(lo < end, split_of(end - 1, SPLIT_LEN, GROWS) + 1, first_split)
        for i_part in range(first_split, end_split):
            begin = tl.maximum(split_begin(i_part, SPLIT_LEN, GROWS), lo // BLOCK_K * BLOCK_K)
            stop = tl.minimum(split_begin(i_part + 1, SPLIT_LEN, GROWS), end)
            free_stop = tl.where(begin >= free_begin, free_end, 0)
            b_part_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
            b_part_sum = tl.zeros([BLOCK_M, 16], tl.float32)
            b_part = zero_parts(BLOCK_M, BLOCK_V, p_scale_k is not None)
            # fmt: off
            b_part_max, b_part_sum, b_part = _walk(
                p_pool_k, p_pool_v, p_scale_k, p_scale_v, p_slots, begin, stop, free_stop, lo, end, begin_of_line, b_q,
                b_pos, b_oldest, b_part_max, b_part_sum, b_part, scaling, softcap, o_k, m_k, o_x, m_x, s_pk_t,
                s_pk_d, s_pv_t, s_pv_d, KV_HEADS, BLOCK_K, True,
            )
            # fmt: on
            b_part = join_parts(b_part, BLOCK_M, b_q[0].dtype)
            b_max, b_decay, b_weight = fold_weights(b_max, b_part_max)
            b_sum = tl.fma(tl.max(b_part_sum, 1), b_weight, b_sum * b_decay)
            b_acc = tl.fma(b_part, tl.zeros_like(b_part) + b_weight[:, None], b_acc * b_decay[:, None])
        if p_sinks is not None:
            b_sink = tl.load(p_sinks + o_head, mask=m_row, other=0.0).to(tl.float32) * LOG2E
            b_max, b_total_decay, b_weight = fold_weights(b_max, b_sink)
            b_sum = tl.fma(b_sum, b_total_decay, b_weight)
            b_acc = b_acc * b_total_decay[:, None]
        b_out = b_acc / tl.where(b_sum == 0.0, 1.0, b_sum)[:, None]
    if not is_real:
        b_out = tl.zeros_like(b_out)
    tl.store(p_out + o_out[:, None] * VALUE_DIM + o_v[None, :], b_out.to(p_out.dtype.element_ty), mask=m_out)
