"""The two kernels for trees: one with batch-invariant bits, and a faster one (`block_kernels.py`)."""

from specdec.attention.recurrence.block_kernels import (
    add_records,
    fold_chunk,
    load_block,
    load_chunk,
    number_of,
    running_sum,
    slots_at,
    solve_records,
    store_records,
    weigh_records,
    weights_of,
)
from specdec.gpu.triton_shim import tl, triton, wait_for_previous


@triton.jit(do_not_specialize=["stride_positions", "stride_tree", "stride_node", "num_nodes"])
def tree_kernel(
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
    p_totals: tl.tensor,
    p_rows: tl.tensor,
    p_start: tl.tensor,
    p_table: tl.tensor,
    p_begin: tl.tensor,
    p_write: tl.tensor,
    p_positions: tl.tensor,
    p_ancestors: tl.tensor,
    stride_q: tl.tensor,
    stride_k: tl.tensor,
    stride_v: tl.tensor,
    stride_g: tl.tensor,
    stride_beta: tl.tensor,
    stride_table: tl.tensor,
    stride_positions: tl.tensor,
    stride_tree: tl.tensor,
    stride_node: tl.tensor,
    num_nodes: tl.tensor,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    CORRECTED: tl.constexpr,
    NODES: tl.constexpr,
    PAGE: tl.constexpr,
    FOLD: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    i_head, i_tile = tl.program_id(0), tl.program_id(1)
    i_request = tl.program_id(2).to(tl.int64)
    key_head = i_head // (HEADS // KEY_HEADS)
    row = tl.load(p_rows + i_request).to(tl.int64)
    o_place, o_node = tl.arange(0, FOLD), tl.arange(0, NODES)
    o_v = i_tile * BLOCK_V + tl.arange(0, BLOCK_V)
    m_v = o_v < V_DIM
    first_row = i_request * num_nodes
    p_q += first_row * stride_q + key_head * K_DIM
    p_k += first_row * stride_k + key_head * K_DIM
    p_v += first_row * stride_v + i_head * V_DIM
    p_g += first_row * stride_g + i_head
    p_beta += first_row * stride_beta + i_head
    p_out += (first_row * HEADS + i_head) * V_DIM
    p_totals += (first_row * HEADS + i_head) * tl.num_programs(1) + i_tile
    stride_totals = HEADS * tl.num_programs(1)
    p_write += first_row
    p_positions += i_request * stride_positions
    p_ancestors += i_request * stride_tree
    p_table += i_request * stride_table
    p_pool_k += key_head * K_DIM
    p_pool_u += i_head * V_DIM
    p_pool_g += i_head
    start = tl.load(p_start + i_request).to(tl.int64)
    begin = tl.load(p_begin + i_request)
    first = start // FOLD * FOLD
    p_tile = p_state + (row * HEADS + i_head) * (K_DIM * V_DIM) + o_v
    # committed places of the first block
    m_old = first + o_place < start
    old_slots = slots_at(p_table, begin, first + o_place, m_old, PAGE)
    old_g = tl.load(p_pool_g + old_slots * HEADS, mask=m_old, other=0.0)
    old_total = running_sum(old_g, start - first, o_place)
    all_positions = tl.load(p_positions + o_node, mask=o_node < num_nodes, other=0)
    # nodes in the last place of a block: their descendants begin with a new state
    crossing = (o_node < num_nodes) & (all_positions % FOLD == FOLD - 1)
    for i_item in range(1 + tl.sum(crossing.to(tl.int32), axis=0)):
        node, level = tl.full((), -1, tl.int32), tl.full((), 0, tl.int64)
        m_item = o_node < num_nodes  # nodes that may belong to this item
        if i_item > 0:
            node = tl.min(tl.where(crossing, o_node, NODES), axis=0)
            crossing = crossing & (o_node != node)
            level = (tl.load(p_positions + node) + 1 - first) // FOLD
            m_item = m_item & (o_node != node)
            m_item = tl.load(p_ancestors + o_node * stride_node + node, mask=m_item, other=0) != 0
        m_item = m_item & ((all_positions - first) // FOLD == level)
        if tl.max(m_item.to(tl.int32), axis=0) > 0:
            above = o_node < tl.where(node >= 0, num_nodes, 0)
            above = tl.load(p_ancestors + node * stride_node + o_node, mask=above, other=0) != 0
            for i_rows in range(0, NODES, FOLD):
                rows = i_rows + o_place
                exists = rows < num_nodes
                positions = tl.load(p_positions + rows, mask=exists, other=0)
                exists = exists & ((positions - first) // FOLD == level)
                if i_item > 0:
                    below = tl.load(p_ancestors + rows * stride_node + node, mask=exists & (rows != node), other=0)
                    exists = exists & (below != 0)
                if tl.max(exists.to(tl.int32), axis=0) > 0:
                    v = load_block(p_v, rows, stride_v, o_v, exists, V_DIM)
                    g = tl.load(p_g + rows * stride_g, mask=exists, other=0.0).to(tl.float32)
                    beta = tl.zeros_like(g)
                    if CORRECTED:
                        beta = tl.load(p_beta + rows * stride_beta, mask=exists, other=0.0).to(tl.float32)
                    # sum log decays in the order of the path
                    total = tl.zeros_like(g)
                    if level == 0:
                        total += number_of(old_total, FOLD - 1, o_place)
                    p_above = p_ancestors + rows * stride_node
                    seen = exists[:, None] & exists[None, :]
                    for i_columns in range(0, i_rows + 1, FOLD):
                        columns = i_columns + o_place
                        inside = columns < num_nodes
                        inside = inside & (
                            (tl.load(p_positions + columns, mask=inside, other=0) - first) // FOLD == level
                        )
                        seen = exists[:, None] & inside[None, :]
                        seen = tl.load(p_above[:, None] + columns[None, :], mask=seen, other=0) != 0
                        own = tl.load(p_g + columns * stride_g, mask=inside, other=0.0).to(tl.float32)
                        for place in range(tl.minimum(num_nodes - i_columns, FOLD)):
                            one = tl.where(seen & (o_place == place)[None, :], own[None, :], 0.0)
                            total += tl.sum(one, axis=1)
                    known, out = tl.zeros_like(v), tl.zeros_like(v)
                    for i_k in range(0, K_DIM, CHUNK):
                        o_k = i_k + tl.arange(0, CHUNK)
                        m_k = (o_k < K_DIM)[:, None] & m_v[None, :]
                        state = load_chunk(p_tile, first, o_k, m_k, V_DIM)
                        for i_block in range(level):
                            places = first + i_block * FOLD + o_place
                            m_node = places >= start
                            found = above[None, :] & (all_positions[None, :] == places[:, None])
                            at = tl.sum(tl.where(found, o_node[None, :], 0), axis=1)  # [FOLD]
                            slots = slots_at(p_table, begin, places, places < start, PAGE)
                            slots += tl.load(p_write + at, mask=m_node, other=0)
                            other_u = load_block(p_pool_u, slots, HEADS * V_DIM, o_v, o_place >= 0, V_DIM)
                            own = tl.load(p_pool_g + slots * HEADS, mask=places < start, other=0.0)
                            own += tl.load(p_g + at * stride_g, mask=m_node, other=0.0).to(tl.float32)
                            k = load_block(p_pool_k, slots, KEY_HEADS * K_DIM, o_k, places < start, K_DIM)
                            k += load_block(p_k, at, stride_k, o_k, m_node, K_DIM)
                            weighted, kept = weigh_records(other_u, running_sum(own, FOLD, o_place), o_place, FOLD)
                            state = fold_chunk(state, kept, k, weighted, PRECISION)
                        k = load_block(p_k, rows, stride_k, o_k, exists, K_DIM)
                        q = load_block(p_q, rows, stride_q, o_k, exists, K_DIM)
                        known = tl.dot(k, state, known, input_precision=PRECISION)
                        out = tl.dot(q, state, out, input_precision=PRECISION)
                    decay = tl.exp(total)[:, None]
                    known, out = decay * known, decay * out
                    if level == 0:
                        old = exists[:, None] & m_old[None, :]
                        apart = tl.where(old, total[:, None] - old_total[None, :], float("-inf"))
                        by_key, by_query = weights_of(
                            p_q, p_k, rows, stride_q, stride_k, exists, p_pool_k, old_slots, KEY_HEADS * K_DIM, m_old,
                            apart, K_DIM, CHUNK, PRECISION,
                        )  # fmt: skip
                        old_u = load_block(p_pool_u, old_slots, HEADS * V_DIM, o_v, m_old, V_DIM)
                        known, out = add_records(known, out, by_key, by_query, old_u, start - first, o_place)
                    if NODES > FOLD:
                        for i_columns in range(0, i_rows, FOLD):
                            columns = i_columns + o_place
                            inside = (tl.load(p_positions + columns) - first) // FOLD == level
                            if i_item > 0:
                                inside = inside & (tl.load(p_ancestors + columns * stride_node + node) != 0)
                                inside = inside & (columns != node)
                            other = tl.load(
                                p_above[:, None] + columns[None, :], mask=exists[:, None] & inside[None, :], other=0
                            )
                            other_total = tl.load(p_totals + columns * stride_totals, mask=inside, other=0.0)
                            apart = tl.where(other != 0, total[:, None] - other_total[None, :], float("-inf"))
                            slots = tl.load(p_write + columns)
                            other_u = load_block(p_pool_u, slots, HEADS * V_DIM, o_v, inside, V_DIM)
                            by_key, by_query = weights_of(
                                p_q, p_k, rows, stride_q, stride_k, exists, p_k, columns, stride_k, inside,
                                apart, K_DIM, CHUNK, PRECISION,
                            )  # fmt: skip
                            known, out = add_records(known, out, by_key, by_query, other_u, FOLD, o_place)
                    # the tile itself: the last columns of `seen`
                    apart = tl.where(seen, total[:, None] - total[None, :], float("-inf"))
                    by_key, by_query = weights_of(
                        p_q, p_k, rows, stride_q, stride_k, exists, p_k, rows, stride_k, exists,
                        apart, K_DIM, CHUNK, PRECISION,
                    )  # fmt: skip
                    last = tl.minimum(num_nodes - i_rows, FOLD)
                    u, out = solve_records(v, v, beta, exists, known, out, by_key, by_query, last, o_place, CORRECTED)
                    slots = tl.load(p_write + rows, mask=exists, other=0)
                    store_records(
                        p_pool_k, p_pool_u, p_pool_g, slots, p_k, rows, stride_k, u, g, exists, o_v, i_head, i_tile,
                        HEADS, KEY_HEADS, K_DIM, V_DIM, CHUNK,
                    )  # fmt: skip
                    if NODES > FOLD:
                        tl.store(p_totals + rows * stride_totals, total, mask=exists)
                    cells_out = p_out + rows[:, None] * (HEADS * V_DIM) + o_v[None, :]
                    tl.store(cells_out, out, mask=exists[:, None] & m_v[None, :])
                    tl.debug_barrier()  # later tiles and items read these stores


@triton.jit(do_not_specialize=["stride_tree", "stride_node", "num_nodes"])
def fast_tree_kernel(
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
    p_table: tl.tensor,
    p_begin: tl.tensor,
    p_write: tl.tensor,
    p_ancestors: tl.tensor,
    stride_q: tl.tensor,
    stride_k: tl.tensor,
    stride_v: tl.tensor,
    stride_g: tl.tensor,
    stride_beta: tl.tensor,
    stride_table: tl.tensor,
    stride_tree: tl.tensor,
    stride_node: tl.tensor,
    num_nodes: tl.tensor,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    CORRECTED: tl.constexpr,
    PAGE: tl.constexpr,
    FOLD: tl.constexpr,
    RECORDS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    i_head, i_tile = tl.program_id(0), tl.program_id(1)
    i_request = tl.program_id(2).to(tl.int64)
    key_head = i_head // (HEADS // KEY_HEADS)
    row = tl.load(p_rows + i_request).to(tl.int64)
    start = tl.load(p_start + i_request).to(tl.int64)
    begin = tl.load(p_begin + i_request)
    first = start // FOLD * FOLD
    committed = (start - first).to(tl.int32)
    o_k, o_record = tl.arange(0, BLOCK_K), tl.arange(0, RECORDS)
    o_v = i_tile * BLOCK_V + tl.arange(0, BLOCK_V)
    m_k, m_v = o_k < K_DIM, o_v < V_DIM
    m_state = (m_k & (tl.zeros_like(o_k) < first))[:, None] & m_v[None, :]  # a new text begins with a zero state
    p_state += (row * HEADS + i_head) * (K_DIM * V_DIM)
    state = tl.load(p_state + o_k[:, None] * V_DIM + o_v[None, :], mask=m_state, other=0.0)
    first_row = i_request * num_nodes
    p_q += first_row * stride_q + key_head * K_DIM + o_k
    p_k += first_row * stride_k + key_head * K_DIM
    p_v += first_row * stride_v + i_head * V_DIM + o_v
    p_g += first_row * stride_g + i_head
    p_beta += first_row * stride_beta + i_head
    p_out += (first_row * HEADS + i_head) * V_DIM + o_v
    p_write += first_row
    p_ancestors += i_request * stride_tree
    p_pool_k += key_head * K_DIM
    p_pool_u += i_head * V_DIM
    p_pool_g += i_head
    o_node = o_record - committed
    m_old, m_new = o_node < 0, (o_node >= 0) & (o_node < num_nodes)
    slots = slots_at(p_table + i_request * stride_table, begin, first + o_record, m_old, PAGE)
    g = tl.load(p_pool_g + slots * HEADS, mask=m_old, other=0.0)
    wait_for_previous(PDL)
    g += tl.load(p_g + o_node * stride_g, mask=m_new, other=0.0).to(tl.float32)
    keys = load_block(p_pool_k, slots, KEY_HEADS * K_DIM, o_k, m_old, K_DIM)
    keys += load_block(p_k, o_node, stride_k, o_k, m_new, K_DIM)
    u = load_block(p_pool_u, slots, HEADS * V_DIM, o_v, m_old, V_DIM)
    total = tl.cumsum(tl.where(m_old, g, 0.0), axis=0)
    for node in tl.range(num_nodes, num_stages=2):
        above = tl.load(p_ancestors + node * stride_node + o_node, mask=m_new, other=0) != 0
        path = tl.sum(tl.where(m_old | above, g, 0.0), axis=0)  # log decay after the state
        mine = o_node == node
        total = tl.where(mine, path, total)
        decay = tl.exp(tl.where(m_old | above, path - total, float("-inf")))
        k = tl.load(p_k + node * stride_k + o_k, mask=m_k, other=0.0).to(tl.float32)
        q = tl.load(p_q + node * stride_q, mask=m_k, other=0.0).to(tl.float32)
        record = tl.load(p_v + node * stride_v, mask=m_v, other=0.0).to(tl.float32)
        if CORRECTED:
            by_key = decay * tl.sum(keys * k[None, :], axis=1)  # its own record is still 0
            known = tl.exp(path) * tl.sum(state * k[:, None], axis=0) + tl.sum(u * by_key[:, None], axis=0)
            record = tl.load(p_beta + node * stride_beta).to(tl.float32) * (record - known)
        u = tl.where(mine[:, None], record[None, :], u)
        by_query = decay * tl.sum(keys * q[None, :], axis=1)
        out = tl.exp(path) * tl.sum(state * q[:, None], axis=0) + tl.sum(u * by_query[:, None], axis=0)
        tl.store(p_out + node * (HEADS * V_DIM), out, mask=m_v)
        slot = tl.load(p_write + node)
        if slot != 0:
            tl.store(p_pool_u + slot * (HEADS * V_DIM) + o_v, record, mask=m_v)
            if i_tile == 0:
                tl.store(p_pool_g + slot * HEADS, number_of(g, node + committed, o_record))
                if i_head % (HEADS // KEY_HEADS) == 0:
                    tl.store(p_pool_k + slot * (KEY_HEADS * K_DIM) + o_k, k, mask=m_k)
