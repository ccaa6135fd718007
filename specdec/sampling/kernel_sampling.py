"""Sampling on the kernels of `specdec.layers.sampling`: the tokens of `SamplingBatch` without a sort of the vocabulary.

Every parameter is read by row on the device, so one captured round serves any mix of them.
"""

from dataclasses import dataclass

import torch

from specdec.sampling.fused_sample import Seen, best_tokens, sample
from specdec.sampling.sampling_table import Best, Past, SamplingBatch
from specdec.sampling.seen_tokens import mark_seen, path_tokens


@dataclass(frozen=True, slots=True)
class KernelSampling(SamplingBatch):
    """The same parameters, drawn with in a few launches; noise is made where it is added."""

    def ahead(self, first: torch.Tensor, count: int, vocab_size: int) -> "KernelSampling":
        return self

    def sample(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return sample(logits, positions, self.params)

    def draw(
        self, logits: torch.Tensor, positions: torch.Tensor, past: Past, softcap: float | None = None
    ) -> torch.Tensor:
        if self.uses.edits:  # more than the kernels do in passing
            return sample(self.edited(logits, past, softcap), positions, self.params)
        seen = _seen(past, logits.shape) if self.uses.penalty else None
        return sample(logits, positions, self.params, softcap, seen)

    def best(self, logits: torch.Tensor, positions: torch.Tensor, count: int) -> Best:
        return Best(*best_tokens(logits, positions, self.params, count))


def _seen(past: Past, shape: torch.Size) -> Seen:
    """Of logits [B, N, V]: a bit for each token of the histories, and the tokens on each node's own path."""
    batch, num_nodes, vocab_size = shape
    bits = past.seen
    if bits is None:
        bits = torch.zeros((batch, -(-vocab_size // 32)), dtype=torch.int32, device=past.history.device)
        mark_seen(bits, torch.arange(batch, device=bits.device), past.history, past.length)
    if past.tree is None:
        return Seen(bits, past.length.new_full((batch, num_nodes, 1), -1))
    return Seen(bits, path_tokens(past.tree.tokens, past.tree.ancestors))
