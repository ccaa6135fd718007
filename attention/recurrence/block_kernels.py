r"""Parts that the kernels of the recurrence of `blocks.py` share. They add in one fixed order, place by place, so a
token always has the same bits. The kernels:

    begin     notes how far each state is folded now, and how far after this forward              one launch a forward
    fold      folds committed tokens and the convolution's inputs into the states of all layers    one launch a forward
    run       a run of prompt tokens, block by block, each read from the state and folded into it  one launch a layer
    tree      N nodes a request, after at most FOLD - 1 committed records                         one launch a layer
              (`fast_tree_kernel` in the fast mode, up to 49 nodes: another order of sums)

`fold_kernels.py` has the first three, `tree_kernel.py` both kernels for trees.

A forward first folds each state from where it stands to the last multiple of FOLD among committed tokens. Drafts never
enter a state, so a rejected draft leaves nothing to undo. If a path of drafts crosses the next multiple, it needs its
own state: `tree` computes one from the request's state for each node in the last place of a block. The host reads
nothing.

Bits: k . k, S^T k and S^T q are products over FOLD independent rows. All other sums run over the places of a path in
order, with one multiplication and one addition each; places of other paths add 0. Ancestors come first among nodes, so
the order of nodes is the order of places.
"""

from specdec.gpu.triton_shim import tl, triton

CHUNK = 16
"""Key channels per product: the part of a state's tile that is in registers at one time."""


@triton.jit
def slots_at(
    p_table: tl.tensor, begin: tl.tensor, positions: tl.tensor, mask: tl.tensor, PAGE: tl.constexpr
) -> tl.tensor:
    """Slots of these positions from one request's table, whose first column is position `begin`; 0 outside the
    table."""
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
    """Prefix sums of g [FOLD] in order; only its first `count` numbers are not 0."""
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
    """Load rows o_k of a state's tile, whose columns p_tile [V] points at; zeros if the text begins here (position
    0)."""
    begun = tl.zeros_like(o_k) < position
    return tl.load(p_tile[None, :] + o_k[:, None] * V_DIM, mask=m_k & begun[:, None], other=0.0)


@triton.jit
def weigh_records(
    u: tl.tensor, total: tl.tensor, o_place: tl.tensor, FOLD: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Scale records u [FOLD, V], and the state before their block, by the decay up to the block's end. total [FOLD]:
    sums of log decays."""
    end = number_of(total, FOLD - 1, o_place)
    return u * tl.exp(end - total)[:, None], tl.exp(end)


@triton.jit
def fold_chunk(
    state: tl.tensor, decay: tl.tensor, k: tl.tensor, weighted: tl.tensor, PRECISION: tl.constexpr
) -> tl.tensor:
    """Rows of a state after a whole block with keys k [FOLD, CHUNK] and records [FOLD, V]: see `weigh_records`."""
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
    """Weights that earlier records have for the keys and the queries of `rows`. apart [FOLD, FOLD]: log decay between
    two places; -inf if one does not see the other."""
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
    """`add_records` for rows of which some are `new`. Computes the records [FOLD, V] of new rows from earlier ones ->
    u, out."""
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
    """Store records at slots [FOLD]: each program stores its tile of u, the first tile of a head stores g, and the
    first head of a key stores k."""
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
