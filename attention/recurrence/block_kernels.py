r"""Kernels of the recurrence of `blocks.py`: the same sums, place by place, so that a token has the same bits anywhere.

    begin     how far each state is folded already, and will be once this forward has run         one launch a forward
    fold      states of all layers take in what is certain by now, and the convolution's inputs   one launch a forward
    tree      N nodes a request, after at most FOLD - 1 committed records                         one launch a layer
    run       a run of prompt tokens, block by block, each read from the state and folded into it  one launch a layer

A state begins a forward at the last multiple of FOLD that is certain, whatever it was before. A path of drafts that
crosses the next one needs a state of its own: it is computed again from the request's, for each node in the last place
of a block (`tree`). Nothing is read on the host.

Bits: k . k, S^T k and S^T q are products of FOLD rows, which do not see each other. Log decays are added up as
integers, in any order. Records are added in the order of the path, one multiplication and addition each, and those of
other paths add 0. Nodes are in an order in which ancestors come first, so the order of nodes is that of places.
"""

from specdec.gpu.triton_shim import tl, triton

PRECISION = "tf32x3"
"""Precision of products: three of tensor cores, exact to 2^-22. "ieee" rounds each step exactly, and takes longer."""

COLUMNS = 16
"""Numbers of a value in one program: it has a tile DK x COLUMNS of a state in its registers."""

WARPS, PART = 4, 32
"""Warps of a program, and numbers of a key in one part. A product is a sum of those of parts, of which a warp has its
own: all of a tile is loaded at once, and the steps after a product wait for no other warp."""


@triton.jit
def slots_at(
    p_table: tl.tensor, begin: tl.tensor, positions: tl.tensor, mask: tl.tensor, PAGE: tl.constexpr
) -> tl.tensor:
    """Slots of these positions in the table of one request, whose first column is position `begin`; 0 elsewhere."""
    column = positions - begin
    page = tl.load(p_table + column // PAGE, mask=mask, other=0)
    return tl.where(mask, page * PAGE + column % PAGE, 0)


@triton.jit
def as_integer(g: tl.tensor) -> tl.tensor:
    """Log decays in units of 2^-32: e to the least of them is 0."""
    return (tl.maximum(g, -1e6) * 4294967296.0).to(tl.int64)


@triton.jit
def decay_of(total: tl.tensor) -> tl.tensor:
    """e to a sum of `as_integer`."""
    return tl.exp(total.to(tl.float32) * (1.0 / 4294967296.0))


@triton.jit
def column_of(x: tl.tensor, column: tl.tensor, o_place: tl.tensor) -> tl.tensor:
    """x [FOLD, FOLD] -> [FOLD, 1]: one column."""
    return tl.sum(tl.where(o_place[None, :] == column, x, 0.0), axis=1)[:, None]


@triton.jit
def row_of(x: tl.tensor, row: tl.tensor, o_place: tl.tensor) -> tl.tensor:
    """x [FOLD, V] -> [1, V]: one row."""
    return tl.sum(tl.where(o_place[:, None] == row, x, 0.0), axis=0)[None, :]


@triton.jit
def load_rows(
    p: tl.tensor, rows: tl.tensor, stride: tl.tensor, o: tl.tensor, mask: tl.tensor, size: tl.tensor
) -> tl.tensor:
    """Rows [X] of numbers `o`, as float32; 0 where there is no row or number."""
    m = mask[:, None] & (o < size)[None, :]
    return tl.load(p + rows[:, None] * stride + o[None, :], mask=m, other=0.0).to(tl.float32)


@triton.jit
def load_keys(
    p: tl.tensor, rows: tl.tensor, stride: tl.tensor, o_k: tl.tensor, mask: tl.tensor, K_DIM: tl.constexpr
) -> tl.tensor:
    """Keys of rows [FOLD] in parts, by numbers o_k [P, K] -> [P, FOLD, K]."""
    m = mask[None, :, None] & (o_k < K_DIM)[:, None, :]
    return tl.load(p + rows[None, :, None] * stride + o_k[:, None, :], mask=m, other=0.0).to(tl.float32)


@triton.jit
def load_tile(
    p_tile: tl.tensor, position: tl.tensor, o_k: tl.tensor, m_v: tl.tensor, K_DIM: tl.constexpr, V_DIM: tl.constexpr
) -> tl.tensor:
    """The tile [P, K, V] of a state whose columns p_tile [V] points at: zeros at position 0, where texts begin."""
    begun = (o_k < K_DIM) & (tl.zeros_like(o_k) < position)
    cells = p_tile[None, None, :] + o_k[:, :, None] * V_DIM
    return tl.load(cells, mask=begun[:, :, None] & m_v[None, None, :], other=0.0)


@triton.jit
def store_tile(
    p_tile: tl.tensor, state: tl.tensor, o_k: tl.tensor, m_v: tl.tensor, K_DIM: tl.constexpr, V_DIM: tl.constexpr
) -> None:
    cells = p_tile[None, None, :] + o_k[:, :, None] * V_DIM
    tl.store(cells, state, mask=(o_k < K_DIM)[:, :, None] & m_v[None, None, :])


@triton.jit
def fold_tile(
    state: tl.tensor, k: tl.tensor, u: tl.tensor, g: tl.tensor, o_place: tl.tensor, PRECISION: tl.constexpr
) -> tl.tensor:
    """state [P, K, V] after a whole block of keys k [P, FOLD, K] and records u [FOLD, V]; g [FOLD]: `as_integer`."""
    after = tl.sum(tl.where(o_place[None, :] > o_place[:, None], g[None, :], 0), axis=1)  # [FOLD]
    weighted = (u * decay_of(after)[:, None])[None, :, :].broadcast_to(k.shape[0], u.shape[0], u.shape[1])
    added = tl.dot(tl.permute(k, (0, 2, 1)), weighted, input_precision=PRECISION)
    return tl.fma(state, tl.zeros_like(state) + decay_of(tl.sum(g, axis=0)), added)


@triton.jit
def product_of(rows: tl.tensor, other: tl.tensor, PRECISION: tl.constexpr) -> tl.tensor:
    """rows [P, FOLD, K], other [P, K, X] -> [FOLD, X]."""
    return tl.sum(tl.dot(rows, other, input_precision=PRECISION), axis=0)


@triton.jit
def weights_of(
    k: tl.tensor, q: tl.tensor, other: tl.tensor, apart: tl.tensor, seen: tl.tensor, PRECISION: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """How much records of other keys count for keys k and queries q, all [P, FOLD, K]. apart [FOLD, FOLD]: log decays
    between them, where they are `seen`."""
    other = tl.permute(other, (0, 2, 1))
    decay = tl.where(seen, decay_of(apart), 0.0)
    return decay * product_of(k, other, PRECISION), decay * product_of(q, other, PRECISION)


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
    """`add_records` of rows that are `new` in part: their records [FOLD, V] follow from those before -> u, out."""
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
    o_k: tl.tensor,
    o_v: tl.tensor,
    i_head: tl.tensor,
    i_tile: tl.tensor,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
) -> None:
    """Store records at slots [X]: a tile of u, g by the first tile of each head, k by that of the first head of each
    key."""
    stored = stored & (slots != 0)
    cells_u = p_u + slots[:, None] * (HEADS * V_DIM) + o_v[None, :]
    tl.store(cells_u, u, mask=stored[:, None] & (o_v < V_DIM)[None, :])
    if i_tile == 0:
        tl.store(p_g + slots * HEADS, g, mask=stored)
        if i_head % (HEADS // KEY_HEADS) == 0:
            k = load_rows(p_new_k, rows, stride_k, o_k, stored, K_DIM)
            cells_k = p_k + slots[:, None] * (KEY_HEADS * K_DIM) + o_k[None, :]
            tl.store(cells_k, k, mask=stored[:, None] & (o_k < K_DIM)[None, :])
