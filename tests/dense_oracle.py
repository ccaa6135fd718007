"""Oracles of kernels and of plain torch: attention by its definition, and the recurrent layers of one causal text."""

import torch
from torch.nn import functional as F
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule as delta_rule

from specdec.kvcache.layer_context import Recurrence


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


class OneText:
    """A context of recurrent layers over one causal text: torch's convolution, and transformers' recurrence."""

    def convolve(
        self, layer: int, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        padded = F.pad(inputs.T, (weight.shape[1] - 1, 0))
        return F.conv1d(padded, weight[:, None], bias, groups=len(weight)).T.contiguous()

    def recur(self, layer: int, rows: Recurrence) -> torch.Tensor:
        q, k, v, g, beta = (None if x is None else x[None].float() for x in rows)
        times = v.shape[2] // k.shape[2]
        q, k = (x.repeat_interleave(times, 2) for x in (q * q.shape[3] ** 0.5, k))  # which it divides by
        return delta_rule(q, k, v, g=g, beta=beta)[0][0].contiguous()
