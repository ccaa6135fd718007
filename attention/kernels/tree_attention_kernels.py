"""The Triton kernels of `tree_attention`, which holds the math, the reference and the launch.

    grid of attend_kernel (row tiles, B * Hkv, Z): program z takes the splits z, z + Z, ... of its request, newest first

    rows     0 ............................ N * G       the G query heads of a kv head, packed node-major, so that each
             |tile 0     |tile 1     |tile 2            shared K/V tile is read once for all of them
    keys     |.......|.......|.......|...S...|.......|  positions; tiles of BLOCK_K, splits of SPLIT_LEN and multiples
             |shared: by page        |own: by node   |

A split is one chain of tiles: an online softmax in base 2, whose state (maximum, sum, accumulator) is written to
`part`. If a tile's rows cannot see a column, it loads the nearest visible key, so that no load needs a mask, and gets
weight 0. So a tile that a row does not see adds exactly 0 to the row's state. Together with the fixed order of the
chain and explicit fused multiply-adds (the compiler may contract nothing else), this makes a row's bits a function of
the row alone.

Under programmatic dependent launch both kernels read lengths and positions before they wait for the previous kernel.
That is safe: the kernels that write them let no later kernel start before they end, and other kernels lie between. Own
keys are read after the wait, since the launch just before may have made their table.
"""

from specdec.attention.kernels.key_tiles import (
    FEW_ROWS,
    LOG2E,
    NOWHERE,
    add_values,
    join_parts,
    load_keys,
    load_values,
    multiply_rows,
    page_slots,
    pairs_of,
    parts_of,
    scores_of,
    zero_parts,
)
from specdec.gpu.triton_shim import KEEP, tl, trigger_next, triton, wait_for_previous

SHORT_SPLITS = tl.constexpr(16)
MIDDLE_SPLITS = tl.constexpr(16)


@triton.jit
def split_of(pos: tl.tensor, SPLIT_LEN: tl.constexpr, GROWS: tl.constexpr) -> tl.tensor:
    """The split that holds a position. Splits have SPLIT_LEN keys; if GROWS, after 16 splits twice as many, and after
    32 four times as many."""
    unit = pos // SPLIT_LEN
    if GROWS:
        middle = SHORT_SPLITS + (unit - SHORT_SPLITS) // 2
        far = SHORT_SPLITS + MIDDLE_SPLITS + (unit - SHORT_SPLITS - 2 * MIDDLE_SPLITS) // 4
        unit = tl.where(unit < SHORT_SPLITS, unit, tl.where(unit < SHORT_SPLITS + 2 * MIDDLE_SPLITS, middle, far))
    return unit


@triton.jit
def split_begin(split: tl.tensor, SPLIT_LEN: tl.constexpr, GROWS: tl.constexpr) -> tl.tensor:
    """The first position of a split."""
    unit = split
    if GROWS:
        middle = SHORT_SPLITS + (split - SHORT_SPLITS) * 2
        far = SHORT_SPLITS + 2 * MIDDLE_SPLITS + (split - SHORT_SPLITS - MIDDLE_SPLITS) * 4
        unit = tl.where(split < SHORT_SPLITS, split, tl.where(split < SHORT_SPLITS + MIDDLE_SPLITS, middle, far))
    return unit * SPLIT_LEN


@triton.jit
def absorb_in_order(
    b_q: tl.tuple,  # [BM, BD] in parts, as K and V: see `parts_of`
    b_k: tl.tuple,  # [BK, BD]
    b_v: tl.tuple,  # [BK, BV]
    b_k_scale: tl.tensor,  # [1, BK] or [1, 1]
    b_v_scale: tl.tensor,
    m_seen: tl.tensor,  # [BM, BK], or None: every row sees every key
    b_max: tl.tensor,  # [BM]
    b_sum: tl.tensor,  # [BM, 16], the sum 16 times
    b_acc: tl.tuple,  # [BM, BV]
    scaling: tl.tensor,
    softcap: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tuple]:
    b_x = scores_of(b_q, b_k) * b_k_scale
    if softcap is None:
        factor = scaling * LOG2E
    else:
        b_x = 2.0 * tl.sigmoid(b_x * (2.0 / softcap * scaling)) - 1.0  # tanh(s / c)
        factor = softcap * LOG2E
    if m_seen is not None:
        b_x = tl.where(m_seen, b_x, float("-inf"))
    b_new = tl.maximum(b_max, tl.max(b_x, 1) * factor)
    b_shift = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_p = tl.exp2(tl.fma(b_x, tl.zeros_like(b_x) + factor, tl.zeros_like(b_x) - b_shift[:, None]))
    b_p, b_weight = b_p.to(b_v[0].dtype), (b_p * b_v_scale).to(b_v[0].dtype)
    b_decay = tl.exp2(b_max - b_shift)[:, None]
    # tl.sum's order would depend on the layout
    if b_p.shape[0] <= FEW_ROWS:
        b_ones = tl.full([16, b_p.shape[1]], 1.0, b_p.dtype)
        b_sum = tl.trans(multiply_rows(b_p, b_ones, tl.trans(b_sum * b_decay)))
    else:
        b_sum = multiply_rows(b_p, tl.full([b_p.shape[1], 16], 1.0, b_p.dtype), b_sum * b_decay)
    b_acc = add_values(b_acc, b_decay, b_weight, b_v)
    return b_new, b_sum, b_acc


@triton.jit
def fold_weights(b_max: tl.tensor, b_split_max: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(new maximum, factor of the total, factor of the split)."""
    b_new = tl.maximum(b_max, b_split_max)
    b_shift = tl.where(b_new == float("-inf"), 0.0, b_new)
    return b_new, tl.exp2(b_max - b_shift), tl.exp2(b_split_max - b_shift)


@triton.jit(
    do_not_specialize=[
        *("window", "first_key", "tile_rows", "num_rows", "num_pages", "own_rows", "own_width"),
        *("s_page_b", "s_pos_b", "s_pos"),
    ]
)
def attend_kernel(
    p_q: tl.tensor,  # [B, Hq, N, D]
    p_pool_k: tl.tensor,  # [slots, Hkv, D]
    p_pool_v: tl.tensor,  # [slots, Hkv, DV]
    p_scale_k: tl.tensor,  # [slots, Hkv] or None
    p_scale_v: tl.tensor,
    p_pages: tl.tensor,  # [B, P]
    p_start: tl.tensor,  # [B] or None
    p_committed_len: tl.tensor,  # [B]
    p_positions: tl.tensor,  # [B, N]
    p_own: tl.tensor,  # [B, R, W]
    p_run_end: tl.tensor,  # [B, N] or None: the block is a chain
    p_block_len: tl.tensor,  # [B] or None
    p_part: tl.tensor,  # [S, B, Hkv, N * G, DV]
    p_part_max: tl.tensor,  # [S, B, Hkv, N * G]
    p_part_sum: tl.tensor,
    scaling: tl.tensor,
    softcap: tl.tensor,  # or None
    window: tl.tensor,  # or None
    first_key: tl.tensor,  # or None
    tile_rows: tl.tensor,  # packed rows per tile, at most BLOCK_M
    num_rows: tl.tensor,
    num_pages: tl.tensor,
    own_rows: tl.tensor,
    own_width: tl.tensor,
    s_q_b: tl.tensor,
    s_q_h: tl.tensor,
    s_q_n: tl.tensor,
    s_q_d: tl.tensor,
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
    HAS_OWN: tl.constexpr,  # the rows have their own keys
    PAGE_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    GROWS: tl.constexpr,
    FOLD: tl.constexpr,  # one program takes all splits of its rows and folds them into part[0]
    ALIGN: tl.constexpr,
    OWN_STAGES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    i_tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
    i_b = (tl.program_id(1) // KV_HEADS).to(tl.int64)
    i_h = (tl.program_id(1) % KV_HEADS).to(tl.int64)

    start = 0
    if p_start is not None:
        start = tl.load(p_start + i_b).to(tl.int32)
    committed_len = tl.load(p_committed_len + i_b).to(tl.int32)
    valid_rows = num_rows
    if p_block_len is not None:
        valid_rows = tl.minimum(num_rows, tl.load(p_block_len + i_b).to(tl.int32))
    o_row = i_tile * tile_rows + tl.arange(0, BLOCK_M)
    o_node, o_head = o_row // GROUP, i_h * GROUP + o_row % GROUP
    m_row = o_row < tl.minimum((i_tile + 1) * tile_rows, valid_rows * GROUP)
    p_positions += i_b * s_pos_b
    b_pos = tl.load(p_positions + o_node * s_pos, mask=m_row, other=0).to(tl.int32)  # [BM]
    b_last = b_pos if HAS_OWN else tl.zeros_like(b_pos) + (committed_len - 1)  # the newest key that a row sees
    end = tl.max(tl.where(m_row, b_last, -1), 0) + 1
    lo = start  # the oldest key that a row of the tile sees
    request_lo = start
    if window is not None:
        lo = tl.maximum(lo, tl.min(tl.where(m_row, b_pos, NOWHERE), 0) - window + 1)
        request_lo = tl.maximum(start, tl.load(p_positions).to(tl.int32) - window + 1)
    first_split = split_of(request_lo, SPLIT_LEN, GROWS)
    num_splits = tl.where(request_lo < end, split_of(end - 1, SPLIT_LEN, GROWS) - first_split + 1, 0)

    o_d = tl.arange(0, BLOCK_D)
    m_d = tl.full([BLOCK_D], True, tl.int1) if HEAD_DIM == BLOCK_D else o_d < HEAD_DIM
    o_v = tl.arange(0, BLOCK_V)
    m_v = tl.full([BLOCK_V], True, tl.int1) if VALUE_DIM == BLOCK_V else o_v < VALUE_DIM
    wait_for_previous(PDL)  # the plan was complete before its first layer; queries, keys and values may not be
    p_q += i_b * s_q_b + o_head[:, None] * s_q_h + o_node[:, None].to(tl.int64) * s_q_n + o_d[None, :] * s_q_d
    b_q = parts_of(tl.load(p_q, mask=m_row[:, None] & m_d[None, :], other=0.0), p_scale_k is not None)  # [BM, BD]
    DTYPE: tl.constexpr = b_q[0].dtype
    o_k, m_k, o_x, m_x = o_d, m_d, o_v, m_v  # offsets and masks within pools
    p_page = p_pages + i_b * s_page_b
    p_pool_k += i_h * s_pk_h
    p_pool_v += i_h * s_pv_h
    if p_scale_k is not None:
        p_scale_k += i_h
        p_scale_v += i_h
        o_k, m_k = pairs_of(HEAD_DIM, BLOCK_D)
        o_x, m_x = pairs_of(VALUE_DIM, BLOCK_V)
    own_begin = committed_len // BLOCK_K * BLOCK_K
    own_base = committed_len // ALIGN * ALIGN
    shared_end = tl.minimum(own_begin, (start + num_pages * PAGE_SIZE) // BLOCK_K * BLOCK_K)
    first_node = i_tile * tile_rows // GROUP
    end_node = tl.minimum((i_tile * tile_rows + tile_rows - 1) // GROUP + 1, valid_rows)
    # packed rows are neighbours here: one address with constant offsets saves registers
    first_row = tl.program_id(1).to(tl.int64) * num_rows * GROUP + i_tile * tile_rows
    part_rows = tl.num_programs(1).to(tl.int64) * num_rows * GROUP
    o_tile = tl.arange(0, BLOCK_M)
    b_total_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_total_sum = tl.zeros([BLOCK_M], tl.float32)
    b_total = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    p_out = p_part + first_row * VALUE_DIM + o_tile[:, None] * VALUE_DIM + o_v[None, :]
    m_out = m_row[:, None] & m_v[None, :]

    for i_split in range(tl.program_id(2), num_splits, tl.num_programs(2)):
        i_part = i_split if FOLD else num_splits - 1 - i_split  # the newest first: it has the own keys
        begin = tl.maximum(split_begin(first_split + i_part, SPLIT_LEN, GROWS), lo // BLOCK_K * BLOCK_K)
        stop = tl.minimum(split_begin(first_split + i_part + 1, SPLIT_LEN, GROWS), end)
        b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        b_sum = tl.zeros([BLOCK_M, 16], tl.float32)
        b_acc = zero_parts(BLOCK_M, BLOCK_V, p_scale_k is not None)

        for i_key in range(begin, tl.minimum(stop, shared_end), BLOCK_K):
            o_key = i_key + tl.arange(0, BLOCK_K)
            m_seen = None
            if window is not None:
                m_seen = (o_key[None, :] >= lo) & (b_pos[:, None] - o_key[None, :] < window)
                o_key = tl.maximum(o_key, lo)
            elif p_start is not None:
                m_seen = tl.full([BLOCK_M, 1], True, tl.int1) & (o_key[None, :] >= lo)
                o_key = tl.maximum(o_key, lo)
            if first_key is not None:
                m_exists = o_key[None, :] >= tl.minimum(b_pos, first_key)[:, None]
                m_seen = m_exists if m_seen is None else m_seen & m_exists
            o_column = o_key - start
            b_slot = page_slots(p_page, o_column, s_page, PAGE_SIZE)
            b_k, b_k_scale = load_keys(p_pool_k, p_scale_k, b_slot, o_k, m_k, s_pk_t, s_pk_d, KV_HEADS, DTYPE)
            b_v, b_v_scale = load_values(
                p_pool_v, p_scale_v, b_slot, o_x, m_x, s_pv_t, s_pv_d, KV_HEADS, DTYPE, BLOCK_M
            )
            b_max, b_sum, b_acc = absorb_in_order(
                b_q, b_k, b_v, b_k_scale, b_v_scale, m_seen, b_max, b_sum, b_acc, scaling, softcap
            )

        # the node's own tiles: one loop for each run of nodes on one path
        begin = tl.maximum(begin, own_begin)
        node = tl.where(begin < stop, first_node, end_node)
        while node < end_node:
            run_end = end_node - 1
            p_slot = p_own + i_b * own_rows * own_width
            m_run = m_row
            newest = end - 1
            if p_run_end is not None:
                run_end = tl.minimum(tl.load(p_run_end + i_b * num_rows + node), run_end)
                p_slot += run_end * own_width
                m_run = m_row & (o_node >= node) & (o_node <= run_end)
                newest = tl.load(p_positions + run_end * s_pos).to(tl.int32)
            for i_key in tl.range(begin, tl.minimum(stop, newest + 1), BLOCK_K, num_stages=OWN_STAGES):
                o_key = i_key + tl.arange(0, BLOCK_K)
                m_seen = m_run[:, None] & (o_key[None, :] <= b_last[:, None])
                if window is not None:
                    m_seen = m_seen & (b_pos[:, None] - o_key[None, :] < window)
                if p_start is not None:
                    m_seen = m_seen & (o_key[None, :] >= start)
                if first_key is not None:
                    m_seen = m_seen & (o_key[None, :] >= tl.minimum(b_pos, first_key)[:, None])
                o_key = tl.minimum(tl.maximum(o_key, lo), newest)
                b_slot = tl.load(p_slot + (o_key - own_base)).to(tl.int64)[:, None]
                b_k, b_k_scale = load_keys(p_pool_k, p_scale_k, b_slot, o_k, m_k, s_pk_t, s_pk_d, KV_HEADS, DTYPE)
                b_v, b_v_scale = load_values(
                    p_pool_v, p_scale_v, b_slot, o_x, m_x, s_pv_t, s_pv_d, KV_HEADS, DTYPE, BLOCK_M
                )
                b_max, b_sum, b_acc = absorb_in_order(
                    b_q, b_k, b_v, b_k_scale, b_v_scale, m_seen, b_max, b_sum, b_acc, scaling, softcap
                )
            node = run_end + 1

        b_sum, b_split = tl.max(b_sum, 1), join_parts(b_acc, BLOCK_M, DTYPE)
        if FOLD:
            b_total_max, b_decay, b_weight = fold_weights(b_total_max, b_max)
            b_total_sum = tl.fma(b_sum, b_weight, b_total_sum * b_decay)
            b_total = tl.fma(b_split, tl.zeros_like(b_split) + b_weight[:, None], b_total * b_decay[:, None])
        else:
            i_first = i_part * part_rows
            tl.store(p_part_max + i_first + first_row + o_tile, b_max, mask=m_row, eviction_policy=KEEP)
            tl.store(p_part_sum + i_first + first_row + o_tile, b_sum, mask=m_row, eviction_policy=KEEP)
            tl.store(p_out + i_first * VALUE_DIM, b_split, mask=m_out, eviction_policy=KEEP)

    if FOLD:
        m_row = m_row & (o_tile * 0 + num_splits > 0)
        tl.store(p_part_max + first_row + o_tile, b_total_max, mask=m_row, eviction_policy=KEEP)
        tl.store(p_part_sum + first_row + o_tile, b_total_sum, mask=m_row, eviction_policy=KEEP)
        tl.store(p_out, b_total, mask=m_out & m_row[:, None], eviction_policy=KEEP)


@triton.jit(do_not_specialize=["window", "num_rows", "s_pos_b", "s_pos"])
def merge_kernel(
    p_part: tl.tensor,  # [S, B, Hkv, N * G, DV]
    p_part_max: tl.tensor,  # [S, B, Hkv, N * G]
    p_part_sum: tl.tensor,
    p_start: tl.tensor,  # [B] or None
    p_committed_len: tl.tensor,  # [B]
    p_positions: tl.tensor,  # [B, N]
    p_block_len: tl.tensor,  # [B] or None
    p_sinks: tl.tensor,  # [Hq] or None
    p_out: tl.tensor,  # [B, N, Hq, DV]
    window: tl.tensor,  # or None
    num_rows: tl.tensor,
    s_pos_b: tl.tensor,
    s_pos: tl.tensor,
    HAS_OWN: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    GROWS: tl.constexpr,
    FOLD: tl.constexpr,
    UNROLL: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program per packed row: folds its splits in ascending order, then the sink. A row that sees nothing gives
    0."""
    trigger_next(PDL)
    i_row = tl.program_id(0).to(tl.int64)
    part_rows = tl.num_programs(0).to(tl.int64)
    i_node, i_bh = i_row // GROUP % num_rows, i_row // GROUP // num_rows
    i_b, i_head = i_bh // KV_HEADS, i_bh % KV_HEADS * GROUP + i_row % GROUP
    request_lo = 0
    if p_start is not None:
        request_lo = tl.load(p_start + i_b).to(tl.int32)
    p_positions += i_b * s_pos_b
    last = tl.load(p_committed_len + i_b).to(tl.int32) - 1
    if HAS_OWN:
        last = tl.load(p_positions + i_node * s_pos).to(tl.int32)
    if window is not None:
        request_lo = tl.maximum(request_lo, tl.load(p_positions).to(tl.int32) - window + 1)
    num_splits = split_of(last, SPLIT_LEN, GROWS) - split_of(request_lo, SPLIT_LEN, GROWS) + 1
    if FOLD:
        num_splits = 1
    num_splits = tl.where(request_lo <= last, num_splits, 0)
    if p_block_len is not None:
        num_splits = tl.where(i_node < tl.load(p_block_len + i_b), num_splits, 0)
    o_v = tl.arange(0, BLOCK_V)
    m_v = o_v < VALUE_DIM
    b_max, b_sum = float("-inf"), 0.0
    b_acc = tl.zeros([BLOCK_V], tl.float32)
    wait_for_previous(PDL)
    for i_split in range(0, num_splits, UNROLL):
        for i_next in tl.static_range(UNROLL):
            m_split = i_split + i_next < num_splits
            o_part = (i_split + i_next) * part_rows + i_row
            b_split_max = tl.load(p_part_max + o_part, mask=m_split, other=float("-inf"))
            b_split_sum = tl.load(p_part_sum + o_part, mask=m_split, other=0.0)
            b_part = tl.load(p_part + o_part * VALUE_DIM + o_v, mask=o_v < tl.where(m_split, VALUE_DIM, 0), other=0.0)
            b_part = tl.where(b_split_max > float("-inf"), b_part, 0.0)  # unseen parts may hold anything
            b_max, b_decay, b_weight = fold_weights(b_max, b_split_max)
            b_sum = tl.fma(b_split_sum, b_weight, b_sum * b_decay)
            b_acc = tl.fma(b_part, tl.zeros_like(b_part) + b_weight, b_acc * b_decay)
    if p_sinks is not None:
        b_sink = tl.load(p_sinks + i_head).to(tl.float32) * LOG2E
        b_max, b_decay, b_weight = fold_weights(b_max, b_sink)
        b_sum = tl.fma(b_sum, b_decay, b_weight)
        b_acc = b_acc * b_decay
    b_out = b_acc / tl.where(b_sum == 0.0, 1.0, b_sum)
    o_out = (i_b * num_rows + i_node) * (KV_HEADS * GROUP) + i_head
    tl.store(p_out + o_out * VALUE_DIM + o_v, b_out.to(p_out.dtype.element_ty), mask=m_v, eviction_policy=KEEP)
