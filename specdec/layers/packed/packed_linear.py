"""`nn.Linear` with a packed weight, for quantised checkpoints.

Without fused layers, and on a CPU, it dequantises its weight in each forward. Fused layers read `packed` and never call
it.
"""

import torch
from torch import nn

from specdec.layers.packed.packed_weight import PackedWeight, Weight, multiply


class PackedLinear(nn.Module):
    """x [.., K] -> [.., N]. Its tensors are buffers: nothing trains them, and `.to(dtype)` would round the scales."""

    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None

    def __init__(self, weight: PackedWeight, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        weight = weight.with_repeated_scales()
        self.code, self.group = weight.code, weight.group
        self.out_features, self.in_features = weight.shape
        self.register_buffer("words", weight.words)
        self.register_buffer("scales", weight.scales)
        self.register_buffer("zeros", weight.zeros)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def packed(self) -> PackedWeight:
        return PackedWeight(self.code, self.words, self.scales, self.zeros, self.group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return multiply(x, self.packed, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {self.code}, group={self.group}"


def weight_of(linear: nn.Module) -> Weight:
    """The weight of an `nn.Linear` or a `PackedLinear`."""
    weight: Weight = linear.packed if isinstance(linear, PackedLinear) else linear.weight  # type: ignore[assignment]
    return weight
