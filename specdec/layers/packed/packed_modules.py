"""Modules with packed weights, for quantised checkpoints: they replace `nn.Linear` and the experts of a mixture.

Without fused layers, and on a CPU, they dequantise their weights in each forward, experts one after the other. Fused
layers read `packed` or `experts` and never call them.
"""

import torch
from torch import nn

from specdec.layers.moe.experts import Experts
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


class PackedExperts(nn.Module):
    """x [T, H], the experts of each row [T, k] and their weights [T, k] -> [T, H]. Weights are buffers, as in
    `PackedLinear`.

    experts: the description, with `PackedWeight`s. act_fn: the family's activation; None for `swiglu_clamped`.
    """

    def __init__(self, experts: Experts, act_fn: nn.Module | None = None) -> None:
        super().__init__()
        self.act_fn = act_fn
        gate_up, down = (weight.with_repeated_scales() for weight in _packed(experts))
        self.num_experts = len(gate_up)
        self.codes = {"gate_up": (gate_up.code, gate_up.group), "down": (down.code, down.group)}
        nothing = torch.empty(0)
        self.described = experts._replace(gate_up=nothing, down=nothing, gate_up_bias=None, down_bias=None)
        for name, weight in (("gate_up", gate_up), ("down", down)):
            self.register_buffer(f"{name}_words", weight.words)
            self.register_buffer(f"{name}_scales", weight.scales)
            self.register_buffer(f"{name}_zeros", weight.zeros)
        for name, bias in (("gate_up", experts.gate_up_bias), ("down", experts.down_bias)):
            parameter = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
            self.register_parameter(f"{name}_proj_bias", parameter)

    def packed(self, name: str) -> PackedWeight:
        """`gate_up` [E, 2 I, H] or `down` [E, H, I]."""
        words, scales, zeros = (self._buffers[f"{name}_{part}"] for part in ("words", "scales", "zeros"))
        assert words is not None and scales is not None, f"{name=}"
        code, group = self.codes[name]
        return PackedWeight(code, words, scales, zeros, group)

    @property
    def experts(self) -> Experts:
        biases = self._parameters["gate_up_proj_bias"], self._parameters["down_proj_bias"]
        return self.described._replace(
            gate_up=self.packed("gate_up"), down=self.packed("down"), gate_up_bias=biases[0], down_bias=biases[1]
        )

    def forward(self, hidden_states: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gate_up, down = self.packed("gate_up"), self.packed("down")
        biases = self._parameters["gate_up_proj_bias"], self._parameters["down_proj_bias"]
        out = torch.zeros_like(hidden_states)
        for expert in indices.unique().tolist():
            rank, row = torch.where((indices == expert).T)  # transformers' order, for the same bits
            up_bias, down_bias = (None if bias is None else bias[expert] for bias in biases)
            hidden = self._gate(multiply(hidden_states[row], gate_up[expert], up_bias))
            hidden = multiply(hidden, down[expert], down_bias) * weights[row, rank, None]
            out.index_add_(0, row, hidden.to(out.dtype))
        return out

    def _gate(self, hidden: torch.Tensor) -> torch.Tensor:
        how = self.described
        gate, up = (hidden[..., ::2], hidden[..., 1::2]) if how.interleaved else hidden.chunk(2, dim=-1)
        if how.activation == "silu_clamped":
            assert self.act_fn is not None
            return self.act_fn(gate).clamp(max=how.limit) * up.clamp(-how.limit, how.limit)  # type: ignore[no-any-return]
        if self.act_fn is not None:
            return self.act_fn(gate) * up  # type: ignore[no-any-return]
        gate, up = gate.clamp(max=how.limit), up.clamp(min=-how.limit, max=how.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * how.alpha))

    def extra_repr(self) -> str:
        parts = (f"{name}={list(self.packed(name).shape)} {code} group={g}" for name, (code, g) in self.codes.items())
        return ", ".join(parts)


def _packed(experts: Experts) -> tuple[PackedWeight, PackedWeight]:
    assert isinstance(experts.gate_up, PackedWeight) and isinstance(experts.down, PackedWeight)
    return experts.gate_up, experts.down


def packed_of(module: nn.Module) -> list[PackedWeight]:
    """The packed weights of a module itself, without those of its children."""
    if isinstance(module, PackedLinear):
        return [module.packed]
    return [module.packed("gate_up"), module.packed("down")] if isinstance(module, PackedExperts) else []
