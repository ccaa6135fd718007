"""Attention by its definition: one query, its keys, one softmax. The oracle of kernels and of plain torch."""

import torch


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with query [Hq, D] to keys and values [L, Hkv, D] -> [Hq, D] in float64. Without a key it is zero."""
    group = query.shape[0] // keys.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("hd,lhd->hl", query.double(), k) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None]], dim=1)
    return torch.einsum("hl,lhd->hd", scores.softmax(dim=1)[:, : len(keys)], v)
