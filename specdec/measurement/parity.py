"""Checks the tokens of a timed run against a forward of transformers over the same text.

    gap of a token  = (best logit - its logit) / standard deviation of the row's logits

Two correct forwards in 16 bits differ from the first near-tie on, so comparing tokens would fail them. Gaps tell errors
from rounding: rounding gives small gaps, a wrong key or a lost token gaps of about four deviations.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from specdec.modules.private_copy import private_copy
from specdec.modules.transformers_names import cache_argument

TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-2}
LOW_PRECISION_TOLERANCE = 1.0
MAX_CHUNK = 256
"""Tokens of one forward over a prompt: a layer's attention scores are in memory for one chunk."""


@dataclass(frozen=True, slots=True)
class Parity:
    """Result of the check. tokens: number checked. exact: how many are the reference's best. worst: the largest gap."""

    passed: bool
    tokens: int
    exact: int
    worst: float
    tolerance: float

    @property
    def summary(self) -> str:
        return f"{self.exact} of {self.tokens}, {self.worst:.2g} (at most {self.tolerance:g})"


def check_parity(model: PreTrainedModel, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> Parity:
    """Check greedy outputs against the best tokens of `model`, one prompt after another."""
    tolerance = TOLERANCE.get(model.dtype, LOW_PRECISION_TOLERANCE)
    gaps = torch.cat([output_gaps(model, p, o) for p, o in zip(prompts, outputs, strict=True)])
    worst = float(gaps.nan_to_num(torch.inf).max())
    return Parity(worst <= tolerance, len(gaps), int((gaps == 0).sum()), worst, tolerance)


@torch.inference_mode()
def output_gaps(model: PreTrainedModel, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
    """The gap of each token of an output: [len(output)], on the CPU."""
    reference: Any = private_copy(model, "eager")
    ids = torch.tensor([*prompt, *output], device=model.device)
    first = len(prompt) - 1  # the row whose logits chose the first token
    cached = {"use_cache": True, **cache_argument(reference, DynamicCache(config=reference.config.get_text_config()))}
    for start in range(0, first, MAX_CHUNK):
        reference(ids[None, start : min(start + MAX_CHUNK, first)], logits_to_keep=1, **cached)
    logits = reference(ids[None, first:-1], **cached).logits[0].float()
    chosen = logits.gather(1, ids[first + 1 :, None])[:, 0]
    gaps: torch.Tensor = (logits.amax(dim=1) - chosen) / logits.std(dim=1)
    return gaps.cpu()
