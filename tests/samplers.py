"""A sampler without an engine, and edits of logits to try on it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from specdec import SamplingParams
from specdec.sampling.reference_sampler import ReferenceSampler
from specdec.sampling.sampling_table import SamplerFeatures, SamplingTable

CPU = torch.device("cpu")

EDITS: dict[str, dict[str, Any]] = {
    "bias": {"logit_bias": {3: -100, 5: 2.5, 90: 100 / 16}},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "wanted again": {"presence_penalty": -0.5, "frequency_penalty": -0.05},
    "every edit": {
        "presence_penalty": 0.4,
        "frequency_penalty": 0.9,
        "logit_bias": dict.fromkeys(range(40), -1.25),
        "repetition_penalty": 1.2,
    },
    "sampled": {"temperature": 0.9, "top_k": 30, "frequency_penalty": 0.5, "logit_bias": {7: 3}, "seed": 5},
}
"""Edits of logits, by name, as parameters of a request."""


def sampler_of(
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    device: torch.device = CPU,
    kind: type[ReferenceSampler] = ReferenceSampler,
) -> ReferenceSampler:
    """Build a sampler through the table, as a round does."""
    rows, features = np.arange(len(params)), SamplerFeatures.from_params(params)
    table = SamplingTable(len(params), device)
    table.load(rows, list(zip(params, seeds, strict=True)))
    table.load_biases(rows, params, features)
    return kind(*table.row_params(torch.arange(len(params), device=device), features))
