r"""Attention of a block of queries over a paged prefix and the block itself, in plain torch.

Over the keys j that query i sees (`visibility.py`: the committed prefix, and of the block its ancestors and itself):

    out_i = sum_j softmax_j( cap(scaling * q_i . k_j) ) v_j,  cap(x) = c tanh(x / c)

with one learnt sink logit per head in the softmax's denominator where the model has them. This is the CPU path and the
oracle for every kernel.

The block's own K/V are read back from the slots that this forward has just written, so one gather serves both. A masked
column gathers a key of its own request: a stale key of another one, however broken, cannot leak through a zero weight.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from specdec.attention.plan import KVPlan
from specdec.attention.visibility import bias_of, visible
from specdec.kvcache.index_spaces import NULL_SLOT, FullLoc, SlotTable, Space, SwaLoc


@dataclass(frozen=True, slots=True)
class VisibleKeys:
    """What the queries of one forward see on all layers with one window.

    `slots`: [B, L] in the space of those layers, prefix columns first, then the N tokens of the block if it has keys.
    `bias`: [B, 1, N, L] float32, 0 or -inf, broadcast over heads.
    """

    slots: torch.Tensor
    bias: torch.Tensor

    @classmethod
    def of(
        cls, plan: KVPlan, table: SlotTable[FullLoc] | SlotTable[SwaLoc], space: Space, window: int | None
    ) -> "VisibleKeys":
        """The keys that layers of one space, with this window (None: full attention), see under `plan`."""
        if window is not None:
            window += plan.window_shift
        slots: torch.Tensor = table.slots
        start = table.start
        if window is not None and space is Space.FULL:
            slots, start = newest(slots, plan.committed_len, window)
        key_pos = start[:, None] + torch.arange(slots.shape[1], device=slots.device)  # [B, L]
        committed = key_pos < plan.committed_len[:, None]
        seen = visible(plan.positions, key_pos, committed, window)  # [B, N, L]
        if plan.write_full is None:
            slots = torch.where(committed, slots, slots[:, :1])
        else:
            batch, num_queries = plan.positions.shape
            own = visible(plan.positions, plan.positions, own_keys(plan), window)
            seen = torch.cat([seen, own], dim=-1)
            own_slots = plan.write_slots(space).view(batch, num_queries)
            own_slots = torch.where(own_slots == NULL_SLOT, own_slots[:, :1], own_slots)  # padding
            slots = torch.cat([torch.where(committed, slots, own_slots[:, :1]), own_slots], dim=1)
        return cls(slots, bias_of(seen))

    def attend(
        self, query: torch.Tensor, _k: object, _v: object, pool_k: torch.Tensor, pool_v: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """`Attend` of `plan.py`: the block, _k and _v, is read back from the store."""
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
        if query.device.type == "cpu":  # its fused operator is several times slower in 16 bits than in 32
            query, k, v = (x.float() for x in (query, k, v))
        bias = keys.bias.to(query.dtype)
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


def own_keys(plan: KVPlan) -> torch.Tensor:
    """[B, N, N] bool: which of the forward's own tokens exist for each query, by a tree or in order."""
    if plan.tree is not None:
        return plan.tree.ancestors
    batch, num_queries = plan.positions.shape
    steps = torch.arange(num_queries, device=plan.positions.device)
    return (steps[:, None] >= steps[None, :]).expand(batch, num_queries, num_queries)


def newest(slots: torch.Tensor, committed_len: torch.Tensor, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of slots [B, L] from position 0 on, those that a query behind the prefix sees through `window`.

    O(window) wide: slots [B, W], and the position [B] of the first.
    """
    first = (committed_len - (window - 1)).clamp(min=0)
    width = min(slots.shape[1], max(window - 1, 1))
    columns = first[:, None] + torch.arange(width, device=first.device)
    return slots.gather(1, columns.clamp(max=max(slots.shape[1] - 1, 0))), first
