"""Kernel of trees: see `block_kernels.py`."""

from specdec.attention.recurrence.block_kernels import (
    add_records,
    as_integer,
    decay_of,
    fold_tile,
    load_keys,
    load_rows,
    load_tile,
    product_of,
    slots_at,
    solve_records,
    store_records,
    weights_of,
)
from specdec.gpu.triton_shim import tl, triton


@triton.jit
def in_item(
    p_positions: tl.tensor,
    p_ancestors: tl.tensor,
    stride_node: tl.tensor,
    num_nodes: tl.tensor,
    nodes: tl.tensor,
    first: tl.tensor,
    node: tl.tensor,
    level: tl.tensor,
    FOLD: tl.constexpr,
) -> tl.tensor:
    """Which of `nodes` are `level` blocks after position `first`, and below `node`, if that is not -1."""
    exists = nodes < num_nodes
    positions = tl.load(p_positions + nodes, mask=exists, other=0)
    exists = exists & ((positions - first) // FOLD == level)
    below = exists & (tl.zeros_like(nodes) <= node) & (nodes != node)
    below = tl.load(p_ancestors + nodes * stride_node + node, mask=below, other=0) != 0
    return exists & (below | (tl.zeros_like(nodes) > node))


@triton.jit
def load_path(
    p_k: tl.tensor,
    p_g: tl.tensor,
    p_pool_k: tl.tensor,
    p_pool_u: tl.tensor,
    p_pool_g: tl.tensor,
    p_table: tl.tensor,
    p_write: tl.tensor,
    stride_k: tl.tensor,
    stride_g: tl.tensor,
    begin: tl.tensor,
    places: tl.tensor,
    start: tl.tensor,
    above: tl.tensor,
    positions: tl.tensor,
    o_node: tl.tensor,
    o_k: tl.tensor,
    o_v: tl.tensor,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    PAGE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Records at `places` [FOLD] of a path: committed before `start`, else of the nodes `above` at their positions."""
    m_old, m_node = places < start, places >= start
    found = (above != 0)[None, :] & (positions[None, :] == places[:, None])
    at = tl.sum(tl.where(found, o_node[None, :], 0), axis=1)  # [FOLD]
    slots = slots_at(p_table, begin, places, m_old, PAGE) + tl.load(p_write + at, mask=m_node, other=0)
    k = load_keys(p_pool_k, slots, KEY_HEADS * K_DIM, o_k, m_old, K_DIM)
    k += load_keys(p_k, at, stride_k, o_k, m_node, K_DIM)
    g = tl.load(p_pool_g + slots * HEADS, mask=m_old, other=0.0)
    g += tl.load(p_g + at * stride_g, mask=m_node, other=0.0).to(tl.float32)
    return k, load_rows(p_pool_u, slots, HEADS * V_DIM, o_v, places >= 0, V_DIM), as_integer(g)


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
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    i_head, i_tile = tl.program_id(0), tl.program_id(1)
    i_request = tl.program_id(2).to(tl.int64)
    key_head = i_head // (HEADS // KEY_HEADS)
    row = tl.load(p_rows + i_request).to(tl.int64)
    o_place, o_node = tl.arange(0, FOLD), tl.arange(0, NODES)
    o_key = tl.arange(0, PARTS * PART)
    o_k = tl.reshape(o_key, (PARTS, PART))
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
    all_positions = tl.load(p_positions + o_node, mask=o_node < num_nodes, other=0)
    # nodes in the last place of a block: their descendants begin with a state of their own
    crossing = (o_node < num_nodes) & (all_positions % FOLD == FOLD - 1)
    for i_item in range(1 + tl.sum(crossing.to(tl.int32), axis=0)):
        node, level = tl.full((), -1, tl.int32), tl.full((), 0, tl.int64)
        if i_item > 0:
            node = tl.min(tl.where(crossing, o_node, NODES), axis=0)
            crossing = crossing & (o_node != node)
            level = (tl.load(p_positions + node) + 1 - first) // FOLD
        above = tl.load(
            p_ancestors + node * stride_node + o_node, mask=o_node < tl.where(level > 0, num_nodes, 0), other=0
        )
        state = load_tile(p_tile, first, o_k, m_v, K_DIM, V_DIM)
        for i_block in range(level):  # of the path to `node`
            path_k, path_u, path_g = load_path(
                p_k, p_g, p_pool_k, p_pool_u, p_pool_g, p_table, p_write, stride_k, stride_g, begin,
                first + i_block * FOLD + o_place, start, above, all_positions, o_node, o_k, o_v,
                HEADS, KEY_HEADS, K_DIM, V_DIM, PAGE,
            )  # fmt: skip
            state = fold_tile(state, path_k, path_u, path_g, o_place, PRECISION)
        # what is committed of the block, if it is the first
        num_old = tl.where(level == 0, start - first, 0)
        m_old = o_place < num_old
        old_slots = slots_at(p_table, begin, first + o_place, m_old, PAGE)
        old_g = as_integer(tl.load(p_pool_g + old_slots * HEADS, mask=m_old, other=0.0))
        old_total = tl.cumsum(old_g, axis=0)
        old_u = load_rows(p_pool_u, old_slots, HEADS * V_DIM, o_v, m_old, V_DIM)
        for i_rows in range(0, NODES, FOLD):
            rows = i_rows + o_place
            exists = in_item(p_positions, p_ancestors, stride_node, num_nodes, rows, first, node, level, FOLD)
            v = load_rows(p_v, rows, stride_v, o_v, exists, V_DIM)
            g = tl.load(p_g + rows * stride_g, mask=exists, other=0.0).to(tl.float32)
            beta = tl.zeros_like(g)
            if CORRECTED:
                beta = tl.load(p_beta + rows * stride_beta, mask=exists, other=0.0).to(tl.float32)
            p_above = p_ancestors + rows[:, None] * stride_node
            seen = tl.load(p_above + rows[None, :], mask=exists[:, None] & exists[None, :], other=0) != 0
            total = tl.sum(tl.where(seen, as_integer(g)[None, :], 0), axis=1) + tl.sum(old_g, axis=0)
            if NODES > FOLD:
                for i_columns in range(0, i_rows, FOLD):
                    others = i_columns + o_place
                    inside = in_item(p_positions, p_ancestors, stride_node, num_nodes, others, first, node, level, FOLD)
                    other = exists[:, None] & inside[None, :]
                    other = tl.load(p_above + others[None, :], mask=other, other=0) != 0
                    other_g = tl.load(p_g + others * stride_g, mask=inside, other=0.0).to(tl.float32)
                    total += tl.sum(tl.where(other, as_integer(other_g)[None, :], 0), axis=1)
            k = load_keys(p_k, rows, stride_k, o_k, exists, K_DIM)
            q = load_keys(p_q, rows, stride_q, o_k, exists, K_DIM)
            known = decay_of(total)[:, None] * product_of(k, state, PRECISION)
            out = decay_of(total)[:, None] * product_of(q, state, PRECISION)
            old_k = load_keys(p_pool_k, old_slots, KEY_HEADS * K_DIM, o_k, m_old, K_DIM)
            m_seen = exists[:, None] & m_old[None, :]
            by_key, by_query = weights_of(k, q, old_k, total[:, None] - old_total[None, :], m_seen, PRECISION)
            known, out = add_records(known, out, by_key, by_query, old_u, num_old, o_place)
            if NODES > FOLD:
                for i_columns in range(0, i_rows, FOLD):
                    others = i_columns + o_place
                    inside = in_item(p_positions, p_ancestors, stride_node, num_nodes, others, first, node, level, FOLD)
                    other = exists[:, None] & inside[None, :]
                    other = tl.load(p_above + others[None, :], mask=other, other=0) != 0
                    other_total = tl.load(p_totals + others * stride_totals, mask=inside, other=0)
                    other_slots = tl.load(p_write + others, mask=inside, other=0)
                    other_u = load_rows(p_pool_u, other_slots, HEADS * V_DIM, o_v, inside, V_DIM)
                    other_k = load_keys(p_k, others, stride_k, o_k, inside, K_DIM)
                    apart = total[:, None] - other_total[None, :]
                    by_key, by_query = weights_of(k, q, other_k, apart, other, PRECISION)
                    known, out = add_records(known, out, by_key, by_query, other_u, FOLD, o_place)
            by_key, by_query = weights_of(k, q, k, total[:, None] - total[None, :], seen, PRECISION)
            last = tl.minimum(num_nodes - i_rows, FOLD)
            u, out = solve_records(v, v, beta, exists, known, out, by_key, by_query, last, o_place, CORRECTED)
            slots = tl.load(p_write + rows, mask=exists, other=0)
            store_records(
                p_pool_k, p_pool_u, p_pool_g, slots, p_k, rows, stride_k, u, g, exists, o_key, o_v, i_head, i_tile,
                HEADS, KEY_HEADS, K_DIM, V_DIM,
            )  # fmt: skip
            if NODES > FOLD:
                tl.store(p_totals + rows * stride_totals, total, mask=exists)
            cells_out = p_out + rows[:, None] * (HEADS * V_DIM) + o_v[None, :]
            tl.store(cells_out, out, mask=exists[:, None] & m_v[None, :])
            tl.debug_barrier()  # later tiles and items read what was stored
