"""A mixed-precision optimiser for small models, its schedule, and averaging over processes.

The weights in use are in the model's own dtype, as they will be saved; the optimiser keeps a float32 master of each, so
that what is measured during training is what is shipped. It knows nothing of data or losses.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from torch import nn


def orthogonalise(g: torch.Tensor) -> torch.Tensor:
    """Newton-Schulz iteration of Muon on a stack of matrices [N, R, C]: all singular values towards 1."""
    x = g.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    y: torch.Tensor = x.mT if tall else x
    return y.float()


class MixedOptimizer:
    """Muon on the matrices of layers, stacked by shape; AdamW on tables, heads and norms; masters in float32."""

    def __init__(self, model: nn.Module, lr: float, muon_lr: float, muon: bool = True) -> None:
        by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        decayed: list[nn.Parameter] = []
        plain: list[nn.Parameter] = []
        for name, weight in model.named_parameters():
            matrix = weight.ndim == 2 and "embed" not in name and "lm_head" not in name
            group = plain if not matrix else by_shape[weight.shape] if muon else decayed
            group.append(weight)
        self.lr, self.muon_lr = lr, muon_lr
        self.stacks = [(ws, torch.stack([w.detach().float() for w in ws])) for ws in by_shape.values()]
        self.momenta = [torch.zeros_like(master) for _, master in self.stacks]
        self.weights = [*decayed, *plain]
        self.masters = [nn.Parameter(w.detach().float()) for w in self.weights]
        parts = ((self.masters[: len(decayed)], 0.1), (self.masters[len(decayed) :], 0.0))
        groups = [{"params": masters, "weight_decay": decay} for masters, decay in parts if masters]
        self.adam = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-10, fused=self.weights[0].is_cuda)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [*self.weights, *(w for ws, _ in self.stacks for w in ws)]

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update at `scale` times the peak rates; clears the gradients."""
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = _grad(weight).float()
        nn.utils.clip_grad_norm_(self.masters, 1.0)
        for group in self.adam.param_groups:
            group["lr"] = self.lr * scale
        self.adam.step()
        for (weights, stack), momentum in zip(self.stacks, self.momenta, strict=True):
            grad = torch.stack([_grad(w) for w in weights]).float()
            momentum.lerp_(grad, 0.05)
            update = orthogonalise(grad.lerp(momentum, 0.95))
            rate = self.muon_lr * scale
            stack.mul_(1 - 0.05 * rate).add_(update, alpha=-rate * max(1.0, stack.shape[1] / stack.shape[2]) ** 0.5)
        self._write_weights()
        for weight in self.parameters:
            weight.grad = None

    @torch.no_grad()
    def _write_weights(self) -> None:
        torch._foreach_copy_(list[torch.Tensor](self.weights), list[torch.Tensor](self.masters))
        for weights, master in self.stacks:
            torch._foreach_copy_(list[torch.Tensor](weights), list(master.unbind(0)))

    def state_dict(self) -> dict[str, Any]:
        stacks = [master for _, master in self.stacks]
        return {"masters": self.masters, "stacks": stacks, "momenta": self.momenta, "adam": self.adam.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`, which holds the weights too."""
        ours = [*self.masters, *(master for _, master in self.stacks), *self.momenta]
        theirs = [*state["masters"], *state["stacks"], *state["momenta"]]
        for mine, saved in zip(ours, theirs, strict=True):
            mine.copy_(saved)
        self.adam.load_state_dict(state["adam"])
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
    """Over the processes that `accelerate launch` started."""
    if PartialState().num_processes > 1:
        mean = reduce(torch.cat([_grad(weight).flatten().float() for weight in weights]), "mean")
        for weight, part in zip(weights, mean.split([weight.numel() for weight in weights]), strict=True):
            _grad(weight).copy_(part.view_as(weight))
