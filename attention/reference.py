r"""Attention of a block of queries over a paged prefix and the block itself, in plain torch.

For request b, query row i at position q_i and key at position p, on a layer with window w (None: unbounded):

    visible(i, p) = p < S_b               and q_i - p < w     for a key of the committed prefix
                  = ancestor_or_self(i,j) and q_i - q_j < w   for row j of the block
    out_i = sum_j softmax_j( cap(scaling * q_i . k_j) ) v_j,  cap(x) = c tanh(x / c)

with one learnt sink logit per head in the softmax's denominator where the model has them. Windows go by position (so by
depth in a tree), never by row index. This is the CPU path and the oracle for every kernel.

The block's own K/V are read back from the slots that this forward has just written, so one gather serves both. A masked
column gathers a key of its own request: a stale row of another one, however broken, cannot leak through a zero weight.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from specdec.attention.plan import KVPlan
from specdec.kvcache.spaces import NULL_SLOT, FullLoc, SlotTable, SwaLoc


@dataclass(frozen=True, slots=True)
class VisibleKeys:
    """What the queries of one forward see on all layers with one window.

    `slots`: [B, L] in the space of those layers, prefix columns first, then the N rows of the block if it has keys.
    `bias`: [B, 1, N, L] 0 or -inf, in the dtype of the scores, broadcast over heads.
    """

    slots: torch.Tensor
    bias: torch.Tensor

    @classmethod
    def of(cls, plan: KVPlan, window: int | None, dtype: torch.dtype) -> "VisibleKeys":
        """The keys that layers with this window (None: full attention) see under `plan`."""
        if window is None:
            table: SlotTable[FullLoc] | SlotTable[SwaLoc] | None = plan.prefix_full
            write: torch.Tensor | None = plan.write_full
        else:
            assert plan.prefix_swa is not None, "a sliding layer, but the plan has no SWA page table"
            table, write = plan.prefix_swa, plan.write_swa
            window += plan.window_shift
        assert table is not None, "a plan of page tables holds no slots"
        batch, num_rows = plan.positions.shape
        key_pos = table.positions()  # [B, L]
        committed = key_pos < plan.committed_len[:, None]
        query_pos = plan.positions[:, :, None]  # [B, N, 1]
        visible = committed[:, None, :].expand(batch, num_rows, -1)  # [B, N, L]
        if window is not None:
            visible = visible & (query_pos - key_pos[:, None, :] < window)
        slots: torch.Tensor = table.slots
        if plan.ancestors is None:
            slots = torch.where(committed, slots, slots[:, :1])
        else:
            assert write is not None, "a plan with a block but nowhere to write it"
            block = plan.ancestors  # [B, N, N]
            if window is not None:
                block = block & (query_pos - plan.positions[:, None, :] < window)
            visible = torch.cat([visible, block], dim=-1)
            block_slots = write.view(batch, num_rows)
            block_slots = torch.where(block_slots == NULL_SLOT, block_slots[:, :1], block_slots)  # padded rows
            slots = torch.cat([torch.where(committed, slots, block_slots[:, :1]), block_slots], dim=1)
        bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)
        return cls(slots, bias[:, None])

    def attend(
        self, query: torch.Tensor, _k: object, _v: object, pool_k: torch.Tensor, pool_v: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """`Attend` of `backend.py`: the block, _k and _v, is read back from the pools."""
        return reference_attention(query, pool_k, pool_v, self, **options)


def reference_attention(
    query: torch.Tensor,
    pool_k: torch.Tensor,
    pool_v: torch.Tensor,
    keys: VisibleKeys,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend: query [B, Hq, N, D], pools [slots, Hkv, D], sinks [Hq] -> [B, N, Hq, D] in the query's dtype."""
    batch, length = keys.slots.shape
    flat = keys.slots.reshape(-1)
    k = pool_k.index_select(0, flat).view(batch, length, *pool_k.shape[1:]).transpose(1, 2)  # [B, Hkv, L, D]
    v = pool_v.index_select(0, flat).view(batch, length, *pool_v.shape[1:]).transpose(1, 2)
    if softcap is None and sinks is None:
        bias = keys.bias
        if query.device.type == "cpu":  # its fused operator is several times slower in 16 bits than in 32
            query, k, v, bias = (x.float() for x in (query, k, v, bias))
        out = F.scaled_dot_product_attention(query, k, v, attn_mask=bias, scale=scaling, enable_gqa=True).to(
            pool_v.dtype
        )
    else:
        out = _attention_with_extras(query, k, v, keys.bias, scaling, softcap, sinks)
    return out.transpose(1, 2)


def _attention_with_extras(
    query: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """What the fused operator lacks: k, v [B, Hkv, L, D], bias [B, 1, N, L] -> [B, Hq, N, D]."""
    batch, num_heads, num_rows, head_dim = query.shape
    num_kv_heads = k.shape[1]
    grouped = query.reshape(batch, num_kv_heads, num_heads // num_kv_heads, num_rows, head_dim)
    scores = torch.matmul(grouped, k[:, :, None].transpose(-1, -2)) * scaling  # [B, Hkv, G, N, L]
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.float() + bias[:, :, None]
    if sinks is None:
        weights = scores.softmax(dim=-1)
    else:
        sink = sinks.float().view(1, num_kv_heads, -1, 1, 1).expand(batch, -1, -1, num_rows, 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    out = torch.matmul(weights.to(v.dtype), v[:, :, None])  # [B, Hkv, G, N, D]
    return out.view(batch, num_heads, num_rows, head_dim)
