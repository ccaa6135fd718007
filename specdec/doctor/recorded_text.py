"""One text through the target, densely: its final states, those that enter each layer, and every layer's K and V.

What drafters read is all in here, so each of them, changed or not, is tried on the text without the target. It is the
proof's own context (`ProbeContext`): one torch attention, no pages, no plan. Invariant: row i is position i.
"""

from dataclasses import dataclass, field

import torch

from specdec.models.probe import ProbeContext
from specdec.models.target import TargetModel


@dataclass(slots=True)
class RecordingContext(ProbeContext):
    """Also the states that enter the layers which `states` has as keys."""

    states: dict[int, torch.Tensor | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RecordedText:
    """tokens [T]; prompt_len: the first of them that are the prompt. hidden [T, H] after the final norm; `context` has
    K and V of each layer [T, heads, D] after RoPE, and the states."""

    tokens: torch.Tensor
    prompt_len: int
    hidden: torch.Tensor
    context: RecordingContext

    @property
    def positions(self) -> torch.Tensor:
        """[T]."""
        return torch.arange(len(self.tokens), device=self.tokens.device)

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V that a target layer attends to, its own or another's: [T, heads, D]."""
        _, k, v = self.context.rows[self.context.layout.layers[layer].owner]
        return k, v

    def aux_states(self, layers: tuple[int, ...]) -> torch.Tensor:
        """[T, A * H], side by side; no layers: the final states."""
        if not layers:
            return self.hidden
        found = [state for layer in layers if (state := self.context.states[layer]) is not None]
        return torch.cat(found, dim=-1).view(len(self.tokens), -1)  # [1, T, H] each, of fused layers [T, H]


@torch.inference_mode()
def record(target: TargetModel, prompt: list[int], answer: list[int]) -> RecordedText:
    """Run prompt and answer through the target once."""
    tokens = torch.tensor([*prompt, *answer], device=target.device)
    steps = torch.arange(len(tokens), device=target.device)
    states: dict[int, torch.Tensor | None] = dict.fromkeys(range(len(target.layout.layers) + 1))
    context = RecordingContext(target.layout, torch.zeros_like(steps), steps, states=states)
    hidden = target.run(tokens[None], steps[None], context)[0]
    return RecordedText(tokens, len(prompt), hidden, context)
