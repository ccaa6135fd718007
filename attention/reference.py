r"""Attention of a block of queries over a paged prefix and the block itself, in plain torch.

For request b, query row i at position q_i and key at position p, on a layer with window w (None: unbounded):

    visible(i, p) = p < S_b               and q_i - p < w     for a key of the committed prefix
                  = ancestor_or_self(i,j) and q_i - q_j < w   for row j of the block
    out_i = sum_j softmax_j( cap(scaling * q_i . k_j) ) v_j,  cap(x) = c tanh(x / c)

with one learnt sink logit per head in the softmax's denominator where the model has them. Windows go by position (so by
depth in a tree), never by row index. This is the CPU path and the oracle for every kernel.
"""

from dataclasses import dataclass

import torch

from specdec.attention.plan import KVPlan


@dataclass(frozen=True, slots=True)
class VisibleKeys:
    """What the queries of one forward see on all layers with one window.

    `slots`: [B, L] prefix slots, in the space of those layers. `bias`: [B, 1, 1, N, L + M] 0 or -inf (M = N rows of
    the block, or 0), broadcast over kv heads and query groups.
    """

    slots: torch.Tensor
    bias: torch.Tensor

    @classmethod
    def of(cls, plan: KVPlan, window: int | None) -> "VisibleKeys":
        """The keys that layers with this window (None: full attention) see under `plan`."""
        if window is None:
            table_slots, key_pos = plan.prefix_full.slots, plan.prefix_full.positions()
        else:
            assert plan.prefix_swa is not None, "a sliding layer, but the plan has no SWA page table"
            table_slots, key_pos = plan.prefix_swa.slots, plan.prefix_swa.positions()
            window += plan.window_shift
        query_pos = plan.positions[:, :, None]  # [B, N, 1]
        visible = (key_pos < plan.committed_len[:, None])[:, None, :].expand(-1, query_pos.shape[1], -1)  # [B, N, L]
        if window is not None:
            visible = visible & (query_pos - key_pos[:, None, :] < window)
        if plan.ancestors is not None:
            block = plan.ancestors  # [B, N, N]
            if window is not None:
                block = block & (query_pos - plan.positions[:, None, :] < window)
            visible = torch.cat([visible, block], dim=-1)
        bias = torch.zeros(visible.shape, device=visible.device).masked_fill_(~visible, -torch.inf)
        return cls(table_slots, bias[:, None, None])


def reference_attention(
    query: torch.Tensor,
    block_k: torch.Tensor | None,
    block_v: torch.Tensor | None,
    pool_k: torch.Tensor,
    pool_v: torch.Tensor,
    keys: VisibleKeys,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend: query [B, N, Hq, D], block_k and block_v [B, N, Hkv, D] or None, pools [slots, Hkv, D], sinks [Hq].

    Returns [B, N, Hq, D] in the query's dtype. Scores are in the query's dtype, the softmax in float32, as in the
    eager attention of transformers.
    """
    batch, num_rows, num_heads, head_dim = query.shape
    num_kv_heads = pool_k.shape[1]
    group = num_heads // num_kv_heads
    k, v = pool_k[keys.slots], pool_v[keys.slots]  # [B, L, Hkv, D]
    if block_k is not None and block_v is not None:
        k, v = torch.cat([k, block_k], dim=1), torch.cat([v, block_v], dim=1)  # [B, L+N, Hkv, D]
    num_keys = k.shape[1]
    # pack the query heads of one kv head with the rows, so that each key is read once per kv head
    packed = query.view(batch, num_rows, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    packed = packed.reshape(batch, num_kv_heads, group * num_rows, head_dim)
    scores = torch.matmul(packed, k.permute(0, 2, 3, 1)) * scaling  # [B, Hkv, G*N, L+N]
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.view(batch, num_kv_heads, group, num_rows, num_keys).float() + keys.bias
    if sinks is None:
        weights = scores.softmax(dim=-1)
    else:
        sink = sinks.float().view(1, num_kv_heads, group, 1, 1).expand(batch, -1, -1, num_rows, 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
    weights = weights.view(batch, num_kv_heads, group * num_rows, num_keys).to(v.dtype)
    out = torch.matmul(weights, v.permute(0, 2, 1, 3))  # [B, Hkv, G*N, D]
    out = out.view(batch, num_kv_heads, group, num_rows, head_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(batch, num_rows, num_heads, head_dim)
