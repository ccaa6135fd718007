r"""Multi-head latent attention (DeepSeek-V3), expanded: turns one narrow product into the QKV product of other
families.

    [c_q | c | r] = x W_down                       latents of queries and of keys and values, and the key's rotary part
    q_h = n_q(c_q) W_q,   [k_h | v_h] = n(c) W_kv  by head; without a query latent, c_q are the queries
    q_h, [k_h | r], v_h                            of r, and of the end of q_h, channels 2 j and 2 j + 1 are moved to
                                                   j and R / 2 + j where the checkpoint has them interleaved

The last step only moves numbers, into the order that transformers rotates and stores.
"""

from typing import NamedTuple

import torch

from specdec.gpu.operations import Operations
from specdec.layers.gemm.linear import linear
from specdec.layers.gemm.product import Product, SplitK, finish
from specdec.layers.norm import Norm, norm
from specdec.layers.packed.packed_weight import Weight
from specdec.layers.rope_store import Heads


class LatentProduct(NamedTuple):
    """The norm of a latent [C], and the weight [N, C] after it. split_k: the cut of the whole weight, if a rank has
    some of its rows (`layers/split`); None: the weight's own."""

    gain: Norm
    weight: Weight
    split_k: SplitK | None = None

    def run(self, latent: torch.Tensor, ops: Operations) -> torch.Tensor:
        normed = ops(norm)(Product.from_value(latent.contiguous()), pre=self.gain)[1]
        return ops(finish)(ops(linear)(normed, self.weight, split_k=self.split_k))


class LatentParts(NamedTuple):
    """Latents of a layer. q: N = Hq D, None if queries have no latent; kv: N = Hq (pass + DV).

    rotated: channels of r, and rotating channels of a query. interleaved: neighbouring pairs rotate.
    """

    q: LatentProduct | None
    kv: LatentProduct
    rotated: int
    interleaved: bool


def expand_latent(product: Product, parts: LatentParts, heads: Heads, ops: Operations) -> Product:
    """Expand latents to a QKV product: product [T, C_q + C + rotated] -> [T, heads.width]."""
    value = ops(finish)(product)
    kv_width = parts.kv.weight.shape[1]
    q, kv, rotary = value.split([value.shape[1] - kv_width - parts.rotated, kv_width, parts.rotated], dim=-1)
    q, kv = q if parts.q is None else parts.q.run(q, ops), parts.kv.run(kv, ops)
    kept = heads.head_dim - parts.rotated
    q_pass, q_rotary = q.unflatten(-1, (heads.num_q, -1)).split([kept, parts.rotated], -1)  # [T, heads, ..]
    k_pass, v = kv.unflatten(-1, (heads.num_kv, -1)).split([kept, heads.v_dim], -1)
    k_rotary = rotary[:, None].expand(-1, heads.num_kv, -1)
    if parts.interleaved:
        q_rotary, k_rotary = (x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in (q_rotary, k_rotary))
    rows = (q_pass, q_rotary), (k_pass, k_rotary), (v,)
    return Product.from_value(torch.cat([torch.cat(row, -1).flatten(1) for row in rows], -1))
