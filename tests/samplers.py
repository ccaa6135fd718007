"""A sampler for some parameters, without an engine."""

from collections.abc import Sequence

import numpy as np
import torch

from specdec import SamplingParams
from specdec.sampling.reference_sampler import ReferenceSampler
from specdec.sampling.sampling_table import SamplingTable, Uses

CPU = torch.device("cpu")


def sampler_of(
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    device: torch.device = CPU,
    kind: type[ReferenceSampler] = ReferenceSampler,
) -> ReferenceSampler:
    """Through the table, as a round makes it."""
    rows, uses = np.arange(len(params)), Uses.of(params)
    table = SamplingTable(len(params), device)
    table.load(rows, list(zip(params, seeds, strict=True)))
    table.load_biases(rows, params, uses)
    return kind(*table.at(torch.arange(len(params), device=device), uses))
