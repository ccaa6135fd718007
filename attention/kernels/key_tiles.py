"""What both attention kernels do alike: which arguments they take, how a tile of keys is read, what fits a program.

Their online softmaxes differ on purpose. `paged_attention` adds a tile's weights in the order of its layout, and merges
splits 16 at a time. `tree_attention` adds them by a product and folds splits one after the other, so that a row's bits
depend on neither.
"""

import torch

from specdec.gpu.triton_shim import tl, triton
from specdec.kvcache.rounded import Pool
from specdec.kvcache.rounded_kernels import from_e4m3

LOG2E = tl.constexpr(1.4426950408889634)
NOWHERE = tl.constexpr(1 << 30)  # past all keys, and so far from overflow that what a loop loads ahead is past them too


@triton.jit
def page_slots(p_page: tl.tensor, o_column: tl.tensor, s_page: tl.tensor, PAGE_SIZE: tl.constexpr) -> tl.tensor:
    """Slots [BK, 1] int64 of the columns [BK] of a page table."""
    b_page = tl.load(p_page + (o_column // PAGE_SIZE).to(tl.int64) * s_page)
    return (b_page.to(tl.int64) * PAGE_SIZE + o_column % PAGE_SIZE)[:, None]


@triton.jit
def load_keys(
    p_pool: tl.tensor,  # of one head: [slots, D]
    p_scale: tl.tensor,  # of one head: [slots], or None
    b_slot: tl.tensor,  # [BK, 1]
    o_d: tl.tensor,  # [BD]
    m_d: tl.tensor,
    s_slot: tl.constexpr,
    s_d: tl.tensor,
    s_scale: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """K [BK, BD] at these slots, which all exist, and what to multiply scores by, [1, BK] or [1, 1]: see
    `rounded_kernels.py`."""
    b_x = tl.load(p_pool + b_slot * s_slot + o_d[None, :] * s_d, mask=m_d[None, :], other=0.0)
    b_scale = tl.full([1, 1], 1.0, tl.float32)
    if p_scale is not None:
        b_x, b_scale = from_e4m3(b_x, DTYPE), tl.trans(tl.load(p_scale + b_slot * s_scale))
    return b_x, b_scale


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
) -> tuple[tl.tensor, tl.tensor]:
    """`load_keys` of V."""
    b_x = tl.load(p_pool + b_slot * s_slot + o_v[None, :] * s_v, mask=m_v[None, :], other=0.0)
    b_scale = tl.full([1, 1], 1.0, tl.float32)
    if p_scale is not None:
        b_x, b_scale = decode_values(b_x, tl.load(p_scale + b_slot * s_scale), DTYPE)
    return b_x, b_scale


@triton.jit
def decode_values(b_bits: tl.tensor, b_scale: tl.tensor, DTYPE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """V and what to multiply weights by; b_scale [BK, 1]. Such weights may be too small for float16: there V is
    multiplied."""
    if DTYPE.is_fp16():
        b_x, b_weight_scale = (from_e4m3(b_bits, tl.float32) * b_scale).to(DTYPE), tl.full([1, 1], 1.0, tl.float32)
    else:
        b_x, b_weight_scale = from_e4m3(b_bits, DTYPE), tl.trans(b_scale)
    return b_x, b_weight_scale


def check_arguments(
    query: torch.Tensor,
    pool_k: Pool,
    pool_v: Pool,
    pages: torch.Tensor,
    positions: torch.Tensor,
    sinks: torch.Tensor | None,
    *lengths: torch.Tensor | None,
) -> None:
    """query [B, Hq, N, D], pools [slots, Hkv, D] and [slots, Hkv, DV], pages [B, P], positions [B, N], sinks [Hq];
    lengths: [B] each."""
    batch, num_heads, num_rows, head_dim = query.shape
    kv_heads = pool_k.shape[1]
    assert num_heads % kv_heads == 0, f"{num_heads} query heads do not group over {kv_heads}"
    assert pool_k.shape[:2] == pool_v.shape[:2] and pool_k.shape[2] == head_dim, f"{pool_k.shape=} {pool_v.shape=}"
    assert query.dtype == pool_k.dtype == pool_v.dtype, f"{query.dtype=} {pool_k.dtype=} {pool_v.dtype=}"
    assert pages.shape[0] == batch, f"{pages.shape=}, queries {tuple(query.shape)}"
    assert positions.shape == (batch, num_rows), f"{positions.shape=}, queries {tuple(query.shape)}"
    assert sinks is None or (sinks.shape == (num_heads,) and sinks.is_contiguous())
    for length in lengths:
        assert length is None or (length.shape == (batch,) and length.is_contiguous()), f"{length.shape=}, {batch=}"


def padded_channels(head_dim: int) -> int:
    """Channels of a tile: a power of two."""
    channels: int = triton.next_power_of_2(head_dim)
    return max(16, channels)


def fits(block_m: int, block_k: int, num_stages: int, block_d: int, item_size: int, shared: int) -> bool:
    """Do queries and the tiles of K and V on their way fit `shared` bytes? A page lookup takes a stage too."""
    buffers = 2 * block_k * ((num_stages + 1) // 2)  # rows of K and of V
    return (block_m + buffers) * block_d * item_size + 2048 <= shared
