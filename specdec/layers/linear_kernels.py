"""The Triton kernels behind `linear.py`, which holds the math, the references and the launches.

    linear_kernel     grid (row tiles, weight tiles, ranges of K)    a tile of the weight times a tile of rows
    gate_kernel       grid (rows, blocks)                            gates behind the vendor's product
    finish_kernel     grid (blocks)                                  the last sum, for who is no kernel

`linear_tile` is one program of a product, for kernels that have other programs beside it.
"""

from specdec.gpu.dependent_launch import trigger_next, wait_for_previous
from specdec.gpu.triton_shim import KEEP, tl, triton


@triton.jit
def activate(b_x: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """float32 in and out."""
    b_u = b_x
    if ACTIVATION == "gelu_tanh":  # 1 + tanh(u) = 2 sigmoid(2 u), and 1.59.. = 2 sqrt(2 / pi)
        b_u = 1.5957691216057308 * (b_x + 0.044715 * b_x * b_x * b_x)
    return b_x * tl.sigmoid(tl.maximum(b_u, -80.0))  # e^80 is a float32


@triton.jit
def sum_parts(
    p_parts: tl.tensor,
    p_bias: tl.tensor,  # or None
    o_part: tl.tensor,
    o_n: tl.tensor,
    mask: tl.tensor,
    part_len: tl.tensor,
    SPLITS: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """A product's value at offsets `o_part` of each part, as float32 that DTYPE holds."""
    part_len = part_len.to(tl.int64)
    b_sum = tl.load(p_parts + o_part, mask=mask, other=0.0).to(tl.float32)
    for i_split in tl.static_range(1, SPLITS):
        b_sum += tl.load(p_parts + i_split * part_len + o_part, mask=mask, other=0.0).to(tl.float32)
    if p_bias is not None:
        b_sum += tl.load(p_bias + o_n, mask=mask, other=0.0).to(tl.float32)
    return b_sum.to(DTYPE).to(tl.float32)


@triton.jit
def _multiply_range(
    p_w: tl.tensor,  # [BN, 1]
    p_x: tl.tensor,  # [1, BM]
    m_w: tl.tensor,
    m_x: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    b_acc: tl.tensor,
    EVEN_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """b_acc plus the products over columns [begin, end) of K."""
    for i_k in range(begin, end, BLOCK_K):
        o_k = i_k + tl.arange(0, BLOCK_K)
        m_k = o_k < (i_k + BLOCK_K if EVEN_K else end)
        b_w = tl.load(p_w + o_k[None, :], mask=m_w & m_k[None, :], other=0.0)  # [BN, BK]
        b_x = tl.load(p_x + o_k[:, None], mask=m_k[:, None] & m_x, other=0.0)  # [BK, BM]
        b_acc = tl.dot(b_w, b_x, b_acc, input_precision="ieee")
    return b_acc


@triton.jit
def _multiply_both(
    p_w: tl.tensor,  # [BN, 1]
    p_x: tl.tensor,  # [1, BM]
    p_tail: tl.tensor,  # [1, BT]
    m_w: tl.tensor,
    m_x: tl.tensor,
    m_tail: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    b_acc: tl.tensor,
    b_tail: tl.tensor,
    EVEN_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """`_multiply_range` of two tiles of x, for which the weight's is loaded once."""
    for i_k in range(begin, end, BLOCK_K):
        o_k = i_k + tl.arange(0, BLOCK_K)
        m_k = o_k < (i_k + BLOCK_K if EVEN_K else end)
        b_w = tl.load(p_w + o_k[None, :], mask=m_w & m_k[None, :], other=0.0)  # [BN, BK]
        b_x = tl.load(p_x + o_k[:, None], mask=m_k[:, None] & m_x, other=0.0)  # [BK, BM]
        b_y = tl.load(p_tail + o_k[:, None], mask=m_k[:, None] & m_tail, other=0.0)  # [BK, BT]
        b_acc = tl.dot(b_w, b_x, b_acc, input_precision="ieee")
        b_tail = tl.dot(b_w, b_y, b_tail, input_precision="ieee")
    return b_acc, b_tail


@triton.jit
def _store_tile(
    b_sum: tl.tensor,  # [BN, BM]
    p_bias: tl.tensor,  # [N] or None
    p_out: tl.tensor,
    o_row: tl.tensor,  # [1, BM]
    m_x: tl.tensor,
    i_n: tl.tensor,
    i_split: tl.tensor,
    num_rows: tl.tensor,
    tile_rows: tl.tensor,
    N: tl.tensor,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """What a program has summed, as part `i_split` of the product, or activated."""
    if ACTIVATION is None:
        o_n = i_n * tile_rows + tl.arange(0, BLOCK_N)
        m_n = (tl.arange(0, BLOCK_N) < tile_rows) & (o_n < N)
        if p_bias is not None:
            b_sum += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
        p_out += (i_split * num_rows + o_row) * N + o_n[:, None]
        tl.store(p_out, b_sum.to(p_out.dtype.element_ty), mask=m_x & m_n[:, None], eviction_policy=KEEP)
    else:
        BLOCK_M: tl.constexpr = b_sum.shape[1]
        b_gate, b_up = tl.split(tl.permute(tl.reshape(b_sum, (2, BLOCK_N // 2, BLOCK_M)), (1, 2, 0)))
        b_out = activate(b_gate, ACTIVATION) * b_up
        o_half = tl.arange(0, BLOCK_N // 2)
        o_out = i_n * tile_rows + o_half
        m_out = (o_half < tile_rows) & (o_out < N // 2)
        p_out += o_row * (N // 2) + o_out[:, None]
        tl.store(p_out, b_out.to(p_out.dtype.element_ty), mask=m_x & m_out[:, None], eviction_policy=KEEP)


@triton.jit
def linear_tile(
    i_m: tl.tensor,
    i_n: tl.tensor,
    i_split: tl.tensor,
    p_x: tl.tensor,  # [M, K]
    p_w: tl.tensor,  # [N, K]
    p_bias: tl.tensor,  # [N] or None
    p_out: tl.tensor,  # [S, M, N] float32, [1, M, N] or, gated, [M, N / 2]
    num_rows: tl.tensor,
    tile_rows: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    split_len: tl.tensor,
    s_x: tl.tensor,
    s_w: tl.tensor,
    SPLIT: tl.constexpr,  # the ranges of K are programs of their own; otherwise a program sums them
    HELD: tl.constexpr,  # and each is one tile
    WHOLE: tl.constexpr,  # there is one range
    ACTIVATION: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TAIL_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    START: tl.constexpr,  # "usual", or "holds" or "early" (`launch.py`)
    PDL: tl.constexpr,
) -> None:
    """One program of a product, from its trigger to its last store."""
    if START != "holds":
        trigger_next(PDL)
    PARTS: tl.constexpr = 1 if ACTIVATION is None else 2  # of a tile: gates, then what they gate
    o_n = tl.arange(0, BLOCK_N)
    o_part = i_n * tile_rows + o_n % (BLOCK_N // PARTS)  # row of its part of the weight
    m_n = (o_n % (BLOCK_N // PARTS) < tile_rows) & (o_part < N // PARTS)
    p_w += (o_part + o_n // (BLOCK_N // PARTS) * (N // PARTS)).to(tl.int64)[:, None] * s_w
    m_w = m_n[:, None]
    begin = i_split * split_len
    end = tl.minimum(begin + split_len, K) if SPLIT else K
    o_k = begin + tl.arange(0, BLOCK_K)
    m_k = o_k < end
    if HELD:
        b_w = tl.load(p_w + o_k[None, :], mask=m_w & m_k[None, :], other=0.0)  # [BN, BK]
    if START != "early":
        wait_for_previous(PDL)
    if START == "holds":
        trigger_next(PDL)

    o_m = i_m * (BLOCK_M + TAIL_M) + tl.arange(0, BLOCK_M)
    o_row = o_m.to(tl.int64)[None, :]
    m_x = (o_m < num_rows)[None, :]
    b_sum = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if TAIL_M:
        o_t = i_m * (BLOCK_M + TAIL_M) + BLOCK_M + tl.arange(0, TAIL_M)
        o_tail = o_t.to(tl.int64)[None, :]
        m_tail = (o_t < num_rows)[None, :]
        b_tail = tl.zeros([BLOCK_N, TAIL_M], tl.float32)
        b_sum, b_tail = _multiply_both(
            *(p_w, p_x + o_row * s_x, p_x + o_tail * s_x, m_w, m_x, m_tail, begin, end, b_sum, b_tail, EVEN_K, BLOCK_K)
        )
        _store_tile(*(b_tail, p_bias, p_out, o_tail, m_tail, i_n, i_split, num_rows, tile_rows, N, ACTIVATION, BLOCK_N))
    elif HELD:
        b_x = tl.load(p_x + o_row * s_x + o_k[:, None], mask=m_k[:, None] & m_x, other=0.0)  # [BK, BM]
        b_sum = tl.dot(b_w, b_x, b_sum, input_precision="ieee")
    elif SPLIT or WHOLE:
        b_sum = _multiply_range(p_w, p_x + o_row * s_x, m_w, m_x, begin, end, b_sum, EVEN_K, BLOCK_K)
    else:
        for i_k in range(begin, end, split_len):
            b_part = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            i_end = tl.minimum(i_k + split_len, end)
            b_sum += _multiply_range(p_w, p_x + o_row * s_x, m_w, m_x, i_k, i_end, b_part, EVEN_K, BLOCK_K)
    _store_tile(*(b_sum, p_bias, p_out, o_row, m_x, i_n, i_split, num_rows, tile_rows, N, ACTIVATION, BLOCK_N))
    if START == "early":
        wait_for_previous(PDL)


@triton.jit(do_not_specialize=["num_rows", "tile_rows"])
def linear_kernel(
    p_x: tl.tensor,
    p_w: tl.tensor,
    p_bias: tl.tensor,
    p_out: tl.tensor,
    num_rows: tl.tensor,
    tile_rows: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    split_len: tl.tensor,
    s_x: tl.tensor,
    s_w: tl.tensor,
    SPLIT: tl.constexpr,
    HELD: tl.constexpr,
    WHOLE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TAIL_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    START: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    # row tiles of one weight tile are neighbours, so that it is read from memory once
    i_m, i_n, i_split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    linear_tile(
        *(i_m, i_n, i_split, p_x, p_w, p_bias, p_out, num_rows, tile_rows, N, K, split_len, s_x, s_w),
        *(SPLIT, HELD, WHOLE, ACTIVATION, EVEN_K, BLOCK_N, BLOCK_M, TAIL_M, BLOCK_K, START, PDL),
    )


@triton.jit
def gate_kernel(
    p_merged: tl.tensor,  # [M, 2 I]
    p_out: tl.tensor,  # [M, I]
    width: tl.tensor,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    i_row = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = o < width
    wait_for_previous(PDL)
    b_gate = tl.load(p_merged + i_row * 2 * width + o, mask=m, other=0.0).to(tl.float32)
    b_up = tl.load(p_merged + i_row * 2 * width + width + o, mask=m, other=0.0).to(tl.float32)
    b_out = activate(b_gate, ACTIVATION) * b_up
    tl.store(p_out + i_row * width + o, b_out.to(p_out.dtype.element_ty), mask=m, eviction_policy=KEEP)


@triton.jit(do_not_specialize=["part_len"])
def finish_kernel(
    p_parts: tl.tensor,  # [S, M, N]
    p_bias: tl.tensor,  # [N] or None
    p_out: tl.tensor,  # [M, N]
    part_len: tl.tensor,
    N: tl.tensor,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    wait_for_previous(PDL)
    o_part = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = o_part < part_len
    DTYPE: tl.constexpr = p_out.dtype.element_ty
    b_out = sum_parts(p_parts, p_bias, o_part, o_part % N, mask, part_len, SPLITS, DTYPE)
    tl.store(p_out + o_part, b_out.to(DTYPE), mask=mask, eviction_policy=KEEP)
