r"""Kernels of the recurrence of `blocks.py`: the same sums, place by place, so that a token has the same bits anywhere.

    begin     how far each state is folded already, and will be once this forward has run         one launch a forward
    fold      states of all layers take in what is certain by now, and the convolution's inputs   one launch a forward
    tree      N nodes a request, after at most FOLD - 1 committed records                         one launch a layer
              (in the fast mode up to 49 nodes by `fast_tree_kernel.py`, in another order of sums)
    run       a run of prompt tokens, block by block, each read from the state and folded into it  one launch a layer

A forward first folds each state to the last multiple of FOLD among committed tokens, however far it was folded before.
Drafts never enter it, so a rejected draft leaves nothing to undo. A path of drafts that crosses the next multiple needs
a state of its own, which `tree` computes from the request's for each node in the last place of a block. The host reads
nothing.

Bits: k . k, S^T k and S^T q are products of FOLD rows, which do not see each other. All other sums run over the places
of a path in their order, one multiplication and addition each, and skip those of others by adding 0. Nodes are in an
order in which ancestors come first, so the order of nodes is that of places.
"""

from specdec.gpu.triton_shim import tl, triton

CHUNK = 16
"""Numbers of a key in one product: what is in registers of a state's tile at a time."""


@triton.jit
def slots_at(
    p_table: tl.tensor, begin: tl.tensor, positions: tl.tensor, mask: tl.tensor, PAGE: tl.constexpr
) -> tl.tensor:
    """Slots of these positions in the table of one request, whose first column is position `begin`; 0 elsewhere."""
    column = positions - begin
    page = tl.load(p_table + column // PAGE, mask=mask, other=0)
    return tl.where(mask, page * PAGE + column % PAGE, 0)


@triton.jit
def column_of(x: tl.tensor, column: tl.tensor, o_place: tl.tensor) -> tl.tensor:
    """x [FOLD, FOLD] -> [FOLD, 1]: one column."""
    return tl.sum(tl.where(o_place[None, :] == column, x, 0.0), axis=1)[:, None]


@triton.jit
def row_of(x: tl.tensor, row: tl.tensor, o_place: tl.tensor) -> tl.tensor:
    """x [FOLD, V] -> [1, V]: one row."""
    return tl.sum(tl.where(o_place[:, None] == row, x, 0.0), axis=0)[None, :]


@triton.jit
def number_of(x: tl.tensor, place: tl.tensor, o_place: tl.tensor) -> tl.tensor:
    """x [FOLD] -> one of its numbers."""
    return tl.sum(tl.where(o_place == place, x, 0.0), axis=0)


@triton.jit
def running_sum(g: tl.tensor, count: tl.tensor, o_place: tl.tensor) -> tl.tensor:
    """g [FOLD], of which only the first `count` are not 0, added up in its order."""
    total = tl.zeros_like(g)
    for place in range(count):
        total += tl.where(o_place >= place, number_of(g, place, o_place), 0.0)
    return total


@triton.jit
def load_block(
    p: tl.tensor, rows: tl.tensor, stride: tl.tensor, o: tl.tensor, mask: tl.tensor, size: tl.tensor
) -> tl.tensor:
    """Rows [FOLD] of numbers `o`, as float32; 0 where there is no row or number."""
    m = mask[:, None] & (o < size)[None, :]
    return tl.load(p + rows[:, None] * stride + o[None, :], mask=m, other=0.0).to(tl.float32)


@triton.jit
def load_chunk(
    p_tile: tl.tensor, position: tl.tensor, o_k: tl.tensor, m_k: tl.tensor, V_DIM: tl.constexpr
) -> tl.tensor:
    """Load rows o_k of a state's tile, whose columns p_tile [V] points at; zeros at position 0, where texts begin."""
    begun = tl.zeros_like(o_k) < position
    return tl.load(p_tile[None, :] + o_k[:, None] * V_DIM, mask=m_k & begun[:, None], other=0.0)


@triton.jit
def weigh_records(
    u: tl.tensor, total: tl.tensor, o_place: tl.tensor, FOLD: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Weigh records u [FOLD, V] and the state before their block by the decay up to its end. total [FOLD]: sums of log
    decays."""
    end = number_of(total, FOLD - 1, o_place)
    return u * tl.exp(end - total)[:, None], tl.exp(end)


@triton.jit
def fold_chunk(
    state: tl.tensor, decay: tl.tensor, k: tl.tensor, weighted: tl.tensor, PRECISION: tl.constexpr
) -> tl.tensor:
    """Rows of a state after a whole block of keys k [FOLD, CHUNK] and records [FOLD, V]: see `weigh_records`."""
    added = tl.dot(tl.trans(k), weighted, input_precision=PRECISION)
    return tl.fma(state, tl.zeros_like(state) + decay, added)


@triton.jit
def weights_of(
    p_q: tl.tensor,
    p_k: tl.tensor,
    rows: tl.tensor,
    stride_q: tl.tensor,
    stride_k: tl.tensor,
    mask: tl.tensor,
    p_other: tl.tensor,
    other_rows: tl.tensor,
    other_stride: tl.tensor,
    other_mask: tl.tensor,
    apart: tl.tensor,
    K_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Weights of earlier records for the keys and the queries of `rows`. apart [FOLD, FOLD]: log decay between two
    places, -inf where one does not see the other."""
    by_key = tl.zeros_like(apart)
    by_query = tl.zeros_like(apart)
    for i_k in range(0, K_DIM, CHUNK):
        o_k = i_k + tl.arange(0, CHUNK)
        other = tl.trans(load_block(p_other, other_rows, other_stride, o_k, other_mask, K_DIM))
        by_key = tl.dot(load_block(p_k, rows, stride_k, o_k, mask, K_DIM), other, by_key, input_precision=PRECISION)
        by_query = tl.dot(load_block(p_q, rows, stride_q, o_k, mask, K_DIM), other, by_query, input_precision=PRECISION)
    decay = tl.exp(apart)
    return decay * by_key, decay * by_query


@triton.jit
def add_records(
    known: tl.tensor,
    out: tl.tensor,
    by_key: tl.tensor,
    by_query: tl.tensor,
    u: tl.tensor,
    count: tl.tensor,
    o_place: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """Add the first `count` of records u [FOLD, V], one after the other."""
    for place in range(count):
        one = row_of(u, place, o_place)
        known = tl.fma(column_of(by_key, place, o_place), one, known)
        out = tl.fma(column_of(by_query, place, o_place), one, out)
    return known, out


@triton.jit
def solve_records(
    u: tl.tensor,
    v: tl.tensor,
    beta: tl.tensor,
    new: tl.tensor,
    known: tl.tensor,
    out: tl.tensor,
    by_key: tl.tensor,
    by_query: tl.tensor,
    count: tl.tensor,
    o_place: tl.tensor,
    CORRECTED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """`add_records` for rows of which some are `new`: their records [FOLD, V] are computed from earlier ones -> u,
    out."""
    diagonal = o_place[:, None] == o_place[None, :]
    by_key = tl.where(diagonal, 0.0, by_key)
    for place in range(count):
        if CORRECTED:
            mine = (o_place == place) & new
            u = tl.where(mine[:, None], beta[:, None] * (v - known), u)
        one = row_of(u, place, o_place)
        if CORRECTED:
            known = tl.fma(column_of(by_key, place, o_place), one, known)
        out = tl.fma(column_of(by_query, place, o_place), one, out)
    return u, out


@triton.jit
def store_records(
    p_k: tl.tensor,
    p_u: tl.tensor,
    p_g: tl.tensor,
    slots: tl.tensor,
    p_new_k: tl.tensor,
    rows: tl.tensor,
    stride_k: tl.tensor,
    u: tl.tensor,
    g: tl.tensor,
    stored: tl.tensor,
    o_v: tl.tensor,
    i_head: tl.tensor,
    i_tile: tl.tensor,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Store records at slots [FOLD]: a tile of u, g by the first tile of each head, k by that of the first head of each
    key."""
    stored = stored & (slots != 0)
    cells_u = p_u + slots[:, None] * (HEADS * V_DIM) + o_v[None, :]
    tl.store(cells_u, u, mask=stored[:, None] & (o_v < V_DIM)[None, :])
    if i_tile == 0:
        tl.store(p_g + slots * HEADS, g, mask=stored)
        if i_head % (HEADS // KEY_HEADS) == 0:
            for i_k in range(0, K_DIM, CHUNK):
                o_k = i_k + tl.arange(0, CHUNK)
                k = load_block(p_new_k, rows, stride_k, o_k, stored, K_DIM)
                cells_k = p_k + slots[:, None] * (KEY_HEADS * K_DIM) + o_k[None, :]
                tl.store(cells_k, k, mask=stored[:, None] & (o_k < K_DIM)[None, :])
