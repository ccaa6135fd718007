"""Gemma 4's RMSNorm as one operator instead of seven, for the length of a forward.

transformers writes the norm out (float, pow, mean, pow, mul, mul, cast), seven times a layer. The arithmetic here is
the same, in the same order and in float32:  y = x * (mean(x^2) + eps)^(-1/2) * w,  cast back to the input's dtype.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.gemma4_unified.modeling_gemma4_unified import Gemma4UnifiedRMSNorm

DECOMPOSED_NORMS: tuple[type[nn.Module], ...] = (Gemma4RMSNorm, Gemma4UnifiedRMSNorm)
"""Classes that hold `eps`, `with_scale` and, with it, `weight`."""


def fused_rms_norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """`forward` of the classes above: hidden_states [..., D], normalised over D."""
    weight = self.weight.float() if self.with_scale else None
    normed = F.rms_norm(hidden_states.float(), hidden_states.shape[-1:], weight, self.eps)
    return normed.type_as(hidden_states)
