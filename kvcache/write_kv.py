"""Write the K and V rows of one layer into its pools, in one launch.

    pool_k[slots[t]] = k[t],   pool_v[slots[t]] = v[t]          t = 0..T-1

The slots are in the space of the pools, looked up once when the step was planned. Padded rows carry the sink slot 0,
as often as they like: which of them it keeps is undefined, and nobody reads it. All other slots are distinct.
"""

from typing import NamedTuple

import torch

from specdec.gpu.triton_shim import tl, triton
from specdec.kvcache.index_spaces import FullLoc, SwaLoc


class Destination(NamedTuple):
    """Where a layer's new K/V go: pools [slots, Hkv, D] and slots [T] of their space."""

    pool_k: torch.Tensor
    pool_v: torch.Tensor
    slots: FullLoc | SwaLoc


def reference_store_kv(
    k: torch.Tensor, v: torch.Tensor, slots: FullLoc | SwaLoc, pool_k: torch.Tensor, pool_v: torch.Tensor
) -> None:
    """Store k, v [T, Hkv, D] at slots [T] of the pools [slots, Hkv, D]."""
    pool_k.index_copy_(0, slots, k)
    pool_v.index_copy_(0, slots, v)


@triton.jit
def _store_kv_kernel(
    p_k: tl.tensor,
    p_v: tl.tensor,
    p_slots: tl.tensor,
    p_pool_k: tl.tensor,
    p_pool_v: tl.tensor,
    stride_k_token: tl.tensor,
    stride_k_head: tl.tensor,
    stride_k_dim: tl.tensor,
    stride_v_token: tl.tensor,
    stride_v_head: tl.tensor,
    stride_v_dim: tl.tensor,
    stride_slots: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    i_token = tl.program_id(0).to(tl.int64)
    o_row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK] of a row of HEADS * DIM numbers
    m_row = o_row < HEADS * DIM
    o_head = o_row // DIM
    o_dim = o_row % DIM
    slot = tl.load(p_slots + i_token * stride_slots).to(tl.int64)
    p_k += i_token * stride_k_token + o_head * stride_k_head + o_dim * stride_k_dim
    p_v += i_token * stride_v_token + o_head * stride_v_head + o_dim * stride_v_dim
    b_k = tl.load(p_k, mask=m_row, other=0.0)
    b_v = tl.load(p_v, mask=m_row, other=0.0)
    tl.store(p_pool_k + slot * (HEADS * DIM) + o_row, b_k, mask=m_row)
    tl.store(p_pool_v + slot * (HEADS * DIM) + o_row, b_v, mask=m_row)


def store_kv(
    k: torch.Tensor, v: torch.Tensor, slots: FullLoc | SwaLoc, pool_k: torch.Tensor, pool_v: torch.Tensor
) -> None:
    """Store k, v [T, Hkv, D], of any strides, at slots [T] of the contiguous pools [slots, Hkv, D]."""
    num_tokens, num_heads, head_dim = k.shape
    assert v.shape == k.shape and slots.shape == (num_tokens,), f"{k.shape=} {v.shape=} {slots.shape=}"
    assert pool_k.shape == pool_v.shape and pool_k.shape[1:] == k.shape[1:], f"{k.shape=} {pool_k.shape=}"
    assert pool_k.is_contiguous() and pool_v.is_contiguous(), "a pool is contiguous"
    assert k.dtype == v.dtype == pool_k.dtype == pool_v.dtype, f"{k.dtype=} {v.dtype=} {pool_k.dtype=}"
    if num_tokens == 0:
        return
    row_len = num_heads * head_dim
    block = min(triton.next_power_of_2(row_len), 1024)
    _store_kv_kernel[(num_tokens, triton.cdiv(row_len, block))](
        k,
        v,
        slots,
        pool_k,
        pool_v,
        *k.stride(),
        *v.stride(),
        slots.stride(0),
        HEADS=num_heads,
        DIM=head_dim,
        BLOCK=block,
        num_warps=4,
    )
