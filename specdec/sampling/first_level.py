"""What a drafter draws with where grammars have a say: of the first level the host knows what is allowed."""

from typing import NamedTuple, Protocol

import torch

from specdec.sampling.sampling_table import Best, SamplingBatch, masked


class Draws(Protocol):
    """What a drafter draws with."""

    def sample(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor: ...
    def best(self, logits: torch.Tensor, positions: torch.Tensor, count: int) -> Best: ...


class FirstLevel(NamedTuple):
    """The same draws, but behind the root only what the grammar allows there: allowed [B, V / 32], first [B] the
    position of a token there. Behind drafts nothing is known before they are."""

    sampling: SamplingBatch
    first: torch.Tensor
    allowed: torch.Tensor

    def sample(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.sampling.sample(self._masked(logits, positions), positions)

    def best(self, logits: torch.Tensor, positions: torch.Tensor, count: int) -> Best:
        return self.sampling.best(self._masked(logits, positions), positions, count)

    def _masked(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        is_first = (positions == self.first[:, None])[:, :, None]
        return torch.where(is_first, masked(logits, self.allowed[:, None]), logits)
