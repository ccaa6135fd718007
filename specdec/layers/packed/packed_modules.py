"""Modules with packed weights, for quantised checkpoints: they replace `nn.Linear` and the experts of a mixture.

Without fused layers, and on a CPU, they dequantise their weights in each forward, experts one after the other. Fused
layers read `packed` or `experts` and never call them.
"""

import torch
from torch import nn

from specdec.layers.moe.experts import Experts, reference_gate
from specdec.layers.packed.packed_weight import PackedWeight, Weight, dequantised, multiply


class PackedTensors(nn.Module):
    """A packed weight. Its tensors are buffers: nothing trains them, and `.to(dtype)` would round the scales."""

    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None

    def __init__(self, weight: Weight) -> None:
        super().__init__()
        assert isinstance(weight, PackedWeight)
        weight = weight.with_repeated_scales()
        self.code, self.group = weight.code, weight.group
        self.register_buffer("words", weight.words)
        self.register_buffer("scales", weight.scales)
        self.register_buffer("zeros", weight.zeros)

    @property
    def packed(self) -> PackedWeight:
        return PackedWeight(self.code, self.words, self.scales, self.zeros, self.group)

    def extra_repr(self) -> str:
        return f"{list(self.packed.shape)}, {self.code}, group={self.group}"


class PackedLinear(PackedTensors):
    """A linear layer with a packed weight: x [.., K] -> [.., N]."""

    def __init__(self, weight: PackedWeight, bias: torch.Tensor | None = None) -> None:
        super().__init__(weight)
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def weight(self) -> torch.Tensor:
        """A dequantised copy [N, K], for classes that read the weight of a router or a head themselves."""
        return dequantised(self.packed, self.scales.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return multiply(x, self.packed, self.bias)


class PackedExperts(nn.Module):
    """Experts with packed weights: x [T, H], experts of each row [T, k] and their weights [T, k] -> [T, H], as in
    transformers."""

    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.num_experts = len(experts.gate_up)
        self.gate_up, self.down = PackedTensors(experts.gate_up), PackedTensors(experts.down)
        for name, bias in (("gate_up_bias", experts.gate_up_bias), ("down_bias", experts.down_bias)):
            parameter = None if bias is None else nn.Parameter(bias, requires_grad=False)
            self.register_parameter(name, parameter)
        nothing = torch.empty(0, device="cpu")
        self._described = experts._replace(gate_up=nothing, down=nothing, gate_up_bias=None, down_bias=None)

    @property
    def experts(self) -> Experts:
        """The description, with `PackedWeight`s."""
        described = self._described._replace(gate_up=self.gate_up.packed, down=self.down.packed)
        return described._replace(gate_up_bias=self.gate_up_bias, down_bias=self.down_bias)

    def forward(self, hidden_states: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gate_up, down, biases = self.gate_up.packed, self.down.packed, (self.gate_up_bias, self.down_bias)
        out = torch.zeros_like(hidden_states)
        for expert in indices.unique().tolist():
            rank, row = torch.where((indices == expert).T)  # transformers' order, for the same bits
            up_bias, down_bias = (None if b is None else b[expert] for b in biases)
            hidden = self._gate(multiply(hidden_states[row], gate_up[expert], up_bias))
            hidden = multiply(hidden, down[expert], down_bias) * weights[row, rank, None]
            out.index_add_(0, row, hidden.to(out.dtype))
        return out

    def _gate(self, hidden: torch.Tensor) -> torch.Tensor:
        how = self._described
        if how.activation == "relu2":
            return hidden.relu().square()
        gate, up = (hidden[..., ::2], hidden[..., 1::2]) if how.interleaved else hidden.chunk(2, dim=-1)
        if how.activation != "swiglu_clamped":
            return reference_gate(gate, up, how)
        gate, up = gate.clamp(max=how.limit), up.clamp(min=-how.limit, max=how.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * how.alpha))  # transformers' order, for the same bits


def weight_of(linear: nn.Module) -> Weight:
    """The weight of an `nn.Linear` or a `PackedLinear`."""
    weight: Weight = linear.packed if isinstance(linear, PackedLinear) else linear.weight  # type: ignore[assignment]
    return weight


def packed_of(module: nn.Module) -> list[PackedWeight]:
    """The packed weights of a linear or of experts; none of another module."""
    if isinstance(module, PackedLinear):
        return [module.packed]
    return [module.gate_up.packed, module.down.packed] if isinstance(module, PackedExperts) else []
