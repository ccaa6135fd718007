"""The inner loop of a product: a tile of the weight times one tile of x, or two, over a range of K."""

from specdec.gpu.triton_shim import tl, triton
from specdec.layers.packed.packed_tile import load_tile, multiply_tile, scale_sum


@triton.jit
def multiply_range(
    p_w: tl.tensor,  # [BN, 1], and scales and zeros: a weight as `load_tile` takes it
    p_scales: tl.tensor,
    p_zeros: tl.tensor,
    s_scales: tl.tensor,
    p_x: tl.tensor,  # [1, BM]
    m_w: tl.tensor,
    m_n: tl.tensor,
    m_x: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    EVEN_K: tl.constexpr,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """The sum of products over columns [begin, end) of K."""
    DTYPE: tl.constexpr = p_x.dtype.element_ty
    b_sum = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for i_k in range(begin, end, BLOCK_K):
        o_k = i_k + tl.arange(0, BLOCK_K)
        m_k = o_k < (i_k + BLOCK_K if EVEN_K else end)
        b_w = load_tile(
            *(p_w, p_scales, p_zeros, s_scales, i_k, end, m_w, m_n, EVEN_K, CODE, GROUP, FAST, BLOCK_K, DTYPE)
        )
        b_x = tl.load(p_x + o_k[:, None], mask=m_k[:, None] & m_x, other=0.0)  # [BK, BM]
        b_sum = multiply_tile(b_w, b_x, b_sum, p_scales, s_scales, i_k, m_n, CODE, GROUP)
    return scale_sum(b_sum, p_scales, m_n, CODE, GROUP, FAST, DTYPE)


@triton.jit
def multiply_both(
    p_w: tl.tensor,
    p_scales: tl.tensor,
    p_zeros: tl.tensor,
    s_scales: tl.tensor,
    p_x: tl.tensor,  # [1, BM]
    p_tail: tl.tensor,  # [1, BT]
    m_w: tl.tensor,
    m_n: tl.tensor,
    m_x: tl.tensor,
    m_tail: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    EVEN_K: tl.constexpr,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TAIL_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """`multiply_range` of two tiles of x, for which the weight's is loaded once."""
    DTYPE: tl.constexpr = p_x.dtype.element_ty
    b_sum = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    b_tail = tl.zeros([BLOCK_N, TAIL_M], tl.float32)
    for i_k in range(begin, end, BLOCK_K):
        o_k = i_k + tl.arange(0, BLOCK_K)
        m_k = o_k < (i_k + BLOCK_K if EVEN_K else end)
        b_w = load_tile(
            *(p_w, p_scales, p_zeros, s_scales, i_k, end, m_w, m_n, EVEN_K, CODE, GROUP, FAST, BLOCK_K, DTYPE)
        )
        b_x = tl.load(p_x + o_k[:, None], mask=m_k[:, None] & m_x, other=0.0)  # [BK, BM]
        b_y = tl.load(p_tail + o_k[:, None], mask=m_k[:, None] & m_tail, other=0.0)  # [BK, BT]
        b_sum = multiply_tile(b_w, b_x, b_sum, p_scales, s_scales, i_k, m_n, CODE, GROUP)
        b_tail = multiply_tile(b_w, b_y, b_tail, p_scales, s_scales, i_k, m_n, CODE, GROUP)
    b_sum = scale_sum(b_sum, p_scales, m_n, CODE, GROUP, FAST, DTYPE)
    return b_sum, scale_sum(b_tail, p_scales, m_n, CODE, GROUP, FAST, DTYPE)
