"""Parts that the attention kernels share: argument checks, reading a tile of keys, and the limits of a program.

Their online softmaxes differ on purpose. `paged_attention` adds a tile's weights in an order that depends on the
register layout, and merges splits 16 at a time. `tree_attention` adds weights by a matrix product and folds splits one
by one, so that a row's bits depend neither on the layout nor on the number of splits.

The tensor core's M operand has at least 16 rows, its N operand 8. So in tiles of at most FEW_ROWS rows, keys and value
channels are M and rows are N: half of the products and registers, with the same bits. Loaded values and sums over them
are then transposed.
"""

from typing import NamedTuple

import torch

from specdec.gpu.triton_shim import tl, triton
from specdec.kvcache.fp8_pool import FieldPool, Fp8Pool, from_e4m3, raised

LOG2E = tl.constexpr(1.4426950408889634)
FEW_ROWS = tl.constexpr(8)
NOWHERE = tl.constexpr(1 << 30)  # after all keys, yet far enough from overflow for a loop's prefetch


@triton.jit
def page_slots(p_page: tl.tensor, o_column: tl.tensor, s_page: tl.tensor, PAGE_SIZE: tl.constexpr) -> tl.tensor:
    """Slots [BK, 1] int64 of the columns [BK] of a page table."""
    b_page = tl.load(p_page + (o_column // PAGE_SIZE).to(tl.int64) * s_page)
    return (b_page.to(tl.int64) * PAGE_SIZE + o_column % PAGE_SIZE)[:, None]


@triton.jit
def pairs_of(DIM: tl.constexpr, BLOCK: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Offsets and mask of the pairs of a row of DIM numbers in a tile of BLOCK."""
    o_pair = tl.arange(0, BLOCK // 2)
    m_pair = tl.full([BLOCK // 2], True, tl.int1) if DIM == BLOCK else o_pair < DIM // 2
    return o_pair, m_pair


@triton.jit
def parts_of(b_q: tl.tensor, ROUNDED: tl.constexpr) -> tl.tuple:
    """Split b_q into the parts that products take: (b_q [BM, BD]), or its even and odd channels [BM, BD / 2] if K is
    fp8. K and V come in the same parts."""
    parts = (b_q,)
    if ROUNDED:
        b_raised = (b_q.to(tl.float32) * raised(b_q.dtype)).to(b_q.dtype)
        parts = tl.split(tl.reshape(b_raised, [b_q.shape[0], b_q.shape[1] // 2, 2]))
    return parts


@triton.jit
def zero_parts(BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, ROUNDED: tl.constexpr) -> tl.tuple:
    """Accumulator for products with V: [BM, BV], or two parts [BM, BV / 2]; transposed if there are FEW_ROWS."""
    WIDTH: tl.constexpr = BLOCK_V // 2 if ROUNDED else BLOCK_V
    b_part = tl.zeros([WIDTH, BLOCK_M] if BLOCK_M <= FEW_ROWS else [BLOCK_M, WIDTH], tl.float32)
    parts: tl.tuple = (b_part,)
    if ROUNDED:
        parts = (b_part, b_part)
    return parts


@triton.jit
def join_parts(parts: tl.tuple, BLOCK_M: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """The sum of an accumulator of products with V of this dtype, [BM, BV]."""
    b_x = parts[0]
    if len(parts) == 2:
        b_x = tl.join(parts[0], parts[1]) * raised(DTYPE)  # [BM, BV / 2, 2]
        if BLOCK_M <= FEW_ROWS:
            b_x = tl.permute(b_x, (1, 0, 2))
        b_x = tl.reshape(b_x, (BLOCK_M, b_x.shape[1] * 2))
    elif BLOCK_M <= FEW_ROWS:
        b_x = tl.trans(b_x)
    return b_x


@triton.jit
def multiply_rows(b_rows: tl.tensor, b_x: tl.tensor, b_sum: tl.tensor) -> tl.tensor:
    """b_sum [BM, N] (None: 0) + the product of b_rows [BM, K] and b_x [K, N]. If there are FEW_ROWS, sums and b_x are
    transposed."""
    if b_rows.shape[0] <= FEW_ROWS:
        b_sum = tl.dot(b_x, tl.trans(b_rows), b_sum, input_precision="ieee")
    else:
        b_sum = tl.dot(b_rows, b_x, b_sum, input_precision="ieee")
    return b_sum


@triton.jit
def scores_of(b_q: tl.tuple, b_k: tl.tuple) -> tl.tensor:
    """Products [BM, BK] of queries [BM, BD] and keys [BK, BD]."""
    FEW: tl.constexpr = b_q[0].shape[0] <= FEW_ROWS
    b_s = multiply_rows(b_q[0], b_k[0] if FEW else tl.trans(b_k[0]), None)
    if len(b_k) == 2:
        b_s = multiply_rows(b_q[1], b_k[1] if FEW else tl.trans(b_k[1]), b_s)
    return tl.trans(b_s) if FEW else b_s


@triton.jit
def add_values(b_acc: tl.tuple, b_decay: tl.tensor, b_p: tl.tensor, b_v: tl.tuple) -> tl.tuple:
    """b_acc * b_decay [BM, 1] + the product of weights b_p [BM, BK] and values, as `zero_parts` and `load_values` make
    them."""
    b_factor = tl.trans(b_decay) if b_p.shape[0] <= FEW_ROWS else b_decay
    b_first = multiply_rows(b_p, b_v[0], b_acc[0] * b_factor)
    parts: tl.tuple = (b_first,)
    if len(b_v) == 2:
        parts = (b_first, multiply_rows(b_p, b_v[1], b_acc[1] * b_factor))
    return parts


@triton.jit
def load_keys(
    p_pool: tl.tensor,  # of one head: [slots, D], or [slots, D / 2] pairs
    p_scale: tl.tensor,  # of one head: [slots], or None
    b_slot: tl.tensor,  # [BK, 1]
    o_d: tl.tensor,  # [BD], or [BD / 2]
    m_d: tl.tensor,
    s_slot: tl.constexpr,
    s_d: tl.tensor,
    s_scale: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tuple[tl.tuple, tl.tensor]:
    """K [BK, BD] at these slots, which must all exist, and the factors of their scores, [1, BK] or [1, 1]: see
    `fp8_pool.py`."""
    b_x = tl.load(p_pool + b_slot * s_slot + o_d[None, :] * s_d, mask=m_d[None, :], other=0)
    parts, b_scale = (b_x,), tl.full([1, 1], 1.0, tl.float32)
    if p_scale is not None:
        parts, b_scale = decode_keys(b_x, tl.load(p_scale + b_slot * s_scale), DTYPE)
    return parts, b_scale


@triton.jit
def decode_keys(b_pairs: tl.tensor, b_scale: tl.tensor, DTYPE: tl.constexpr) -> tuple[tl.tuple, tl.tensor]:
    """Decode K; returns K and the factors of its scores. b_scale [BK, 1]."""
    return from_e4m3(b_pairs, DTYPE), tl.trans(b_scale) * raised(DTYPE)


@triton.jit
def load_values(
    p_pool: tl.tensor,
    p_scale: tl.tensor,
    b_slot: tl.tensor,
    o_v: tl.tensor,
    m_v: tl.tensor,
    s_slot: tl.constexpr,
    s_v: tl.tensor,
    s_scale: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> tuple[tl.tuple, tl.tensor]:
    """V [BK, BV], transposed if there are FEW_ROWS, and the factors of its weights: as `load_keys`."""
    o_slot, o_x, m_x = b_slot, o_v[None, :], m_v[None, :]
    if BLOCK_M <= FEW_ROWS:
        o_slot, o_x, m_x = tl.trans(b_slot), o_v[:, None], m_v[:, None]
    b_x = tl.load(p_pool + o_slot * s_slot + o_x * s_v, mask=m_x, other=0)
    parts, b_scale = (b_x,), tl.full([1, 1], 1.0, tl.float32)
    if p_scale is not None:
        parts, b_scale = decode_values(b_x, tl.load(p_scale + b_slot * s_scale), DTYPE, BLOCK_M)
    return parts, b_scale


@triton.jit
def decode_values(
    b_pairs: tl.tensor, b_scale: tl.tensor, DTYPE: tl.constexpr, BLOCK_M: tl.constexpr
) -> tuple[tl.tuple, tl.tensor]:
    """Decode V; returns V and the factors of its weights. b_scale [BK, 1]. In float16 scaled weights may be too small,
    so V itself is scaled."""
    if DTYPE.is_fp16():
        b_even, b_odd = from_e4m3(b_pairs, tl.float32)
        b_factor = tl.trans(b_scale) if BLOCK_M <= FEW_ROWS else b_scale
        parts = ((b_even * b_factor).to(DTYPE), (b_odd * b_factor).to(DTYPE))
        b_weight_scale = tl.full([1, 1], 1.0, tl.float32)
    else:
        parts, b_weight_scale = from_e4m3(b_pairs, DTYPE), tl.trans(b_scale) * raised(DTYPE)
    return parts, b_weight_scale


class HeadShapes(NamedTuple):
    """Heads and channels of a launch: constants of every kernel that attends."""

    KV_HEADS: int
    GROUP: int
    HEAD_DIM: int
    VALUE_DIM: int
    BLOCK_D: int
    BLOCK_V: int

    @classmethod
    def from_inputs(
        cls, query: torch.Tensor, pool_k: FieldPool, pool_v: FieldPool, sinks: torch.Tensor | None
    ) -> "HeadShapes":
        """Check query [B, Hq, N, D], pools [slots, Hkv, D] and [slots, Hkv, DV], and sinks [Hq]."""
        _, num_heads, _, head_dim = query.shape
        _, kv_heads, value_dim = pool_v.shape
        assert num_heads % kv_heads == 0, f"{num_heads} query heads do not group over {kv_heads}"
        assert pool_k.shape[:2] == pool_v.shape[:2] and pool_k.shape[2] == head_dim, f"{pool_k.shape=} {pool_v.shape=}"
        assert query.dtype == pool_k.dtype == pool_v.dtype, f"{query.dtype=} {pool_k.dtype=} {pool_v.dtype=}"
        assert sinks is None or (sinks.shape == (num_heads,) and sinks.is_contiguous())
        block_d, block_v = (padded_channels(dim, fp8=isinstance(pool_k, Fp8Pool)) for dim in (head_dim, value_dim))
        return cls(kv_heads, num_heads // kv_heads, head_dim, value_dim, block_d, block_v)


def check_prefixes(
    query: torch.Tensor, pages: torch.Tensor, positions: torch.Tensor, *lengths: torch.Tensor | None
) -> None:
    """Assert shapes for queries [B, Hq, N, D]: pages [B, P], positions [B, N], and lengths [B] each."""
    batch, _, num_rows, _ = query.shape
    assert pages.shape[0] == batch, f"{pages.shape=}, queries {tuple(query.shape)}"
    assert positions.shape == (batch, num_rows), f"{positions.shape=}, queries {tuple(query.shape)}"
    for length in lengths:
        assert length is None or (length.shape == (batch,) and length.is_contiguous()), f"{length.shape=}, {batch=}"


def padded_channels(head_dim: int, *, fp8: bool = False) -> int:
    """Channels of a tile: a power of two. A product takes at least 16 channels, and with fp8 K/V only every other
    one."""
    channels: int = triton.next_power_of_2(head_dim)
    return max(32 if fp8 else 16, channels)


def fits(
    block_m: int,
    block_k: int,
    num_stages: int,
    block_d: int,
    item_size: int,
    shared: int,
    *,
    block_v: int | None = None,
) -> bool:
    """Do the queries and the buffered tiles of K and V fit `shared` bytes? A page lookup takes a stage too. block_v:
    value channels of a program; None: as many as `block_d`."""
    buffered = block_k * ((num_stages + 1) // 2)  # rows of K, and as many of V
    numbers = block_m * block_d + buffered * (block_d + (block_d if block_v is None else block_v))
    return numbers * item_size + 2048 <= shared
