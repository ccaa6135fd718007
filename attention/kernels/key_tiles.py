"""What both attention kernels do alike: which arguments they take, how a tile of keys is read, what fits a program.

Their online softmaxes differ on purpose. `paged_attention` adds a tile's weights in the order of its layout, and merges
splits 16 at a time. `tree_attention` adds them by a product and folds splits one after the other, so that a row's bits
depend on neither.
"""

import torch

from specdec.gpu.triton_shim import tl, triton

LOG2E = tl.constexpr(1.4426950408889634)
NOWHERE = tl.constexpr(1 << 30)  # past all keys, and so far from overflow that what a loop loads ahead is past them too


@triton.jit
def page_slots(p_page: tl.tensor, o_column: tl.tensor, s_page: tl.tensor, PAGE_SIZE: tl.constexpr) -> tl.tensor:
    """Slots [BK, 1] int64 of the columns [BK] of a page table."""
    b_page = tl.load(p_page + (o_column // PAGE_SIZE).to(tl.int64) * s_page)
    return (b_page.to(tl.int64) * PAGE_SIZE + o_column % PAGE_SIZE)[:, None]


@triton.jit
def load_keys(
    p_pool_k: tl.tensor,  # of one head: [slots, D], and of values [slots, DV]
    p_pool_v: tl.tensor,
    b_slot: tl.tensor,  # [BK, 1]
    o_d: tl.tensor,  # [BD], channels of a key
    m_d: tl.tensor,
    o_v: tl.tensor,  # [BV], channels of a value
    m_v: tl.tensor,
    s_pk_t: tl.constexpr,
    s_pk_d: tl.tensor,
    s_pv_t: tl.constexpr,
    s_pv_d: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """K [BK, BD] and V [BK, BV] at these slots, which all exist."""
    b_k = tl.load(p_pool_k + b_slot * s_pk_t + o_d[None, :] * s_pk_d, mask=m_d[None, :], other=0.0)
    b_v = tl.load(p_pool_v + b_slot * s_pv_t + o_v[None, :] * s_pv_d, mask=m_v[None, :], other=0.0)
    return b_k, b_v


def check_arguments(
    query: torch.Tensor,
    pool_k: torch.Tensor,
    pool_v: torch.Tensor,
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
