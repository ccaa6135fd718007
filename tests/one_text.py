"""An oracle for recurrent layers over one causal text: torch's convolution and transformers' recurrence."""

import torch
from torch.nn import functional as F
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule as delta_rule

from specdec.kvcache.layer_context import Recurrence


class OneText:
    """A context that recurrent layers call."""

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
