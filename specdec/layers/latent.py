r"""Multi-head latent attention (DeepSeek-V3), expanded: turns one narrow product into the QKV product of other
families.

    [c_q | c | r] = x W_down                       latents of queries and of keys and values, and the key's rotary part
    q_h = n_q(c_q) W_q,   [k_h | v_h] = n(c) W_kv  by head; without a query latent, c_q are the queries
    q_h, [k_h | r], v_h                            of r, and of the end of q_h, channels 2 j and 2 j + 1 are moved to
                                                   j and R / 2 + j where the checkpoint has them interleaved

The last step only moves numbers, into the order that transformers rotates and stores.
"""

from dataclasses import dataclass

import torch

from specdec.gpu.operations import Operations
from specdec.layers.gemm.linear import linear
from specdec.layers.gemm.product import Product, SplitK, finish
from specdec.layers.norm import Norm, norm
from specdec.layers.packed.packed_weight import Weight
from specdec.layers.rope_store import Heads


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentParts:
    """q [Hq D, C_q] and its norm, None if queries have no latent; kv [Hq (pass + DV), C] and its norm.

    rotated: channels of r, and rotating channels of a query. interleaved: neighbouring pairs rotate. q_cut,
    kv_split_k: cuts of the whole weights, if a rank has some of their rows (`layers/split`); None: each weight's own.
    """

    q: Weight | None
    q_norm: Norm | None
    kv: Weight
    kv_norm: Norm
    rotated: int
    interleaved: bool
    q_split_k: SplitK | None = None
    kv_split_k: SplitK | None = None


def expand_latent(product: Product, parts: LatentParts, heads: Heads, ops: Operations) -> Product:
    """product [T, C_q + C + rotated] -> [T, heads.width]."""
    value = ops(finish)(product)
    kv_width = parts.kv.shape[1]
    q, kv, rotary = value.split([value.shape[1] - kv_width - parts.rotated, kv_width, parts.rotated], dim=-1)
    if parts.q is not None:
        assert parts.q_norm is not None
        q = _normed_product(q, parts.q_norm, parts.q, parts.q_split_k, ops)
    kv = _normed_product(kv, parts.kv_norm, parts.kv, parts.kv_split_k, ops)
    kept = heads.head_dim - parts.rotated
    q_pass, q_rotary = q.unflatten(-1, (heads.num_q, -1)).split([kept, parts.rotated], -1)  # [T, heads, ..]
    k_pass, v = kv.unflatten(-1, (heads.num_kv, -1)).split([kept, heads.v_dim], -1)
    k_rotary = rotary[:, None].expand(-1, heads.num_kv, -1)
    if parts.interleaved:
        q_rotary, k_rotary = (x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in (q_rotary, k_rotary))
    rows = (q_pass, q_rotary), (k_pass, k_rotary), (v,)
    return Product.from_value(torch.cat([torch.cat(row, -1).flatten(1) for row in rows], -1))


def _normed_product(
    x: torch.Tensor, gain: Norm, weight: Weight, split_k: SplitK | None, ops: Operations
) -> torch.Tensor:
    normed = ops(norm)(Product.from_value(x.contiguous()), pre=gain)[1]
    return ops(finish)(ops(linear)(normed, weight, split_k=split_k))
