"""A mixed-precision optimiser for small models, its schedule, and averaging over processes.

The model's weights have the dtype in which they are saved, so training measures the weights that are shipped; the
optimiser keeps a float32 master of each. It knows nothing of data or losses.
"""

import math
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from torch import nn


class MixedOptimizer:
    """Muon on the matrices of layers; AdamW on tables, heads and norms; masters in float32."""

    def __init__(self, model: nn.Module, lr: float, muon_lr: float, muon: bool = True) -> None:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, weight in model.named_parameters():
            is_matrix = weight.ndim == 2 and "embed" not in name and "lm_head" not in name
            (matrices if is_matrix else others).append(weight)
        self.parameters = [*matrices, *others]
        self.masters = [nn.Parameter(weight.detach().float()) for weight in self.parameters]
        inner, outer = self.masters[: len(matrices)], self.masters[len(matrices) :]
        self.clipped = outer if muon else self.masters
        groups = [{"params": inner, "weight_decay": 0.1}] if inner and not muon else []
        groups.append({"params": outer, "weight_decay": 0.0})
        fused = self.parameters[0].is_cuda
        self.optimizers: list[tuple[torch.optim.Optimizer, float]] = [  # with their peak rates
            (torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-10, fused=fused), lr)
        ]
        if inner and muon:
            self.optimizers.append((torch.optim.Muon(inner, lr=muon_lr, weight_decay=0.05), muon_lr))

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update at `scale` times the peak rates; clears the gradients."""
        for weight, master in zip(self.parameters, self.masters, strict=True):
            master.grad, weight.grad = _grad(weight).float(), None
        nn.utils.clip_grad_norm_(self.clipped, 1.0)
        for optimizer, peak in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak * scale
            optimizer.step()
        self._write_weights()

    @torch.no_grad()
    def _write_weights(self) -> None:
        torch._foreach_copy_(list[torch.Tensor](self.parameters), list[torch.Tensor](self.masters))

    def state_dict(self) -> dict[str, Any]:
        return {"masters": self.masters, "optimizers": [each.state_dict() for each, _ in self.optimizers]}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`, which holds the weights too."""
        for mine, saved in zip(self.masters, state["masters"], strict=True):
            mine.copy_(saved)
        for (optimizer, _), saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self._write_weights()


def _grad(weight: nn.Parameter) -> torch.Tensor:
    assert weight.grad is not None, "every weight of a drafter takes part in its loss"
    return weight.grad


def schedule(fraction: float) -> float:
    """Warm-up over the first 2 %, then half a cosine down to 0."""
    if fraction < 0.02:
        return 0.05 + 0.95 * fraction / 0.02
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (fraction - 0.02) / 0.98)))


def average_gradients(weights: list[nn.Parameter]) -> None:
    """Average over the processes of `accelerate launch`."""
    if PartialState().num_processes > 1:
        mean = reduce(torch.cat([_grad(weight).flatten().float() for weight in weights]), "mean")
        for weight, part in zip(weights, mean.split([weight.numel() for weight in weights]), strict=True):
            _grad(weight).copy_(part.view_as(weight))
