r"""Kernel of trees in the fast mode: token by token, with a tile of the state in registers.

It computes the gated delta rule (Yang, Kautz, Hatamizadeh 2024) with the state's decay multiplied out, as in
`blocks.py`. S is the state of the request and is read once. j runs over the tokens of a node's path after that state; G
are sums of their log decays:

    u_i = b_i (v_i - e^{G_i} S^T k_i - sum_{j < i} e^{G_i - G_j} (k_j . k_i) u_j)
    o_i =            e^{G_i} S^T q_i + sum_{j <= i} e^{G_i - G_j} (k_j . q_i) u_j

In Mamba-2 u_i = v_i. Nothing is folded, even if a path crosses a multiple of FOLD: j runs over the committed records of
the first block, then over ancestors. k_j and u_j are in registers too:

    record    0 ......... m - 1          m ......... m + num_nodes - 1          RECORDS
              committed, m < FOLD        nodes, ancestors first

Under programmatic dependent launch this kernel reads the state and the slots before it waits for the previous kernel.
That is safe: only folds, earlier forwards and the plan write them, and all of these ended before the layer's
convolution, a plain launch, began. This kernel never triggers the next one, so the next is a plain launch.
"""

from specdec.attention.recurrence.block_kernels import load_block, number_of, slots_at
from specdec.gpu.dependent_launch import wait_for_previous
from specdec.gpu.triton_shim import tl, triton


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
