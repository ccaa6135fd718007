"""What stands in the place of a quantised module while the checkpoint is read: its tensors as they are stored.

`replacement` then makes the packed module of them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from specdec.errors import CheckpointError, UnsupportedModelError
from specdec.layers.moe.experts import Experts
from specdec.layers.packed.packed_experts import PackedExperts
from specdec.layers.packed.packed_linear import PackedLinear
from specdec.layers.packed.packed_weight import PackedWeight
from specdec.models.quantised.formats import SCALE_TYPES
from specdec.models.quantised.weight_places import StoredWeight


@contextmanager
def about(name: str) -> Iterator[None]:
    """A reason in the block becomes a sentence about `name`."""
    try:
        yield
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{name}: {error}") from error


class RawWeight(nn.Module):
    """The tensors of one weight of `shape` [N, K], or of one for each expert, as buffers on the meta device."""

    def __init__(self, weight: StoredWeight, shape: torch.Size, num_experts: int | None = None) -> None:
        super().__init__()
        self.format, self.shape, self.stem = weight.format, shape, weight.stem
        self.expected = {name: tensor.shape for name, tensor in weight.tensors.items()}
        self.num_experts = num_experts
        with about(weight.stem):
            self.group = _checked_group(weight, shape)
        for name, tensor in weight.tensors.items():
            self.register_buffer(name, tensor.on_meta(*(() if num_experts is None else (num_experts,))))

    def packed(self, dtype: torch.dtype, expert: int | None = None) -> PackedWeight:
        """For products in `dtype`. Scales stay as the checkpoint has them, but float32 beside float32."""
        tensors = {name: tensor for name, tensor in self._buffers.items() if tensor is not None}
        for name, tensor in tensors.items():
            leading = () if self.num_experts is None else (self.num_experts,)
            if tuple(tensor.shape) != (*leading, *self.expected[name]):
                raise CheckpointError(
                    f"{self.stem}: {name} is {list(tensor.shape)}, expected {[*leading, *self.expected[name]]}"
                )
        if expert is not None:
            tensors = {name: tensor[expert] for name, tensor in tensors.items()}
        with about(self.stem):
            weight = self.format.repack(tensors, self.shape, self.group)
        if not weight.scales.float().isfinite().all():
            scales = ", ".join(name for name in tensors if "scale" in name)
            raise CheckpointError(f"{self.stem}: {scales} holds numbers that are not finite (NaN); the file is damaged")
        if dtype != torch.float32:
            return weight
        zeros = None if weight.zeros is None else weight.zeros.float()
        return replace(weight, scales=weight.scales.float(), zeros=zeros)


def _checked_group(weight: StoredWeight, shape: torch.Size) -> int:
    for name, tensor in weight.tensors.items():
        if "scale" in name and tensor.dtype not in (*SCALE_TYPES, weight.format.dtype):
            raise UnsupportedModelError(f"{name} is {tensor.dtype}, expected bfloat16, float16 or float32")
    if shape[1] % weight.format.columns:
        raise UnsupportedModelError(
            f"{shape[1]} columns, and weights in {weight.format.title} are read in multiples of {weight.format.columns}"
        )
    return weight.format.group({name: tensor.on_meta() for name, tensor in weight.tensors.items()}, shape)


class RawLinear(RawWeight):
    """In the place of an `nn.Linear`, whose bias it keeps."""

    def __init__(self, weight: StoredWeight, linear: nn.Linear) -> None:
        super().__init__(weight, torch.Size((linear.out_features, linear.in_features)))
        self.bias: nn.Parameter | None = linear.bias

    def replacement(self, dtype: torch.dtype) -> PackedLinear:
        return PackedLinear(self.packed(dtype), None if self.bias is None else self.bias.detach())


class RawExperts(nn.Module):
    """In the place of a family's experts, whose biases it keeps.

    weights: `down_proj`, and `gate_up_proj` or `gate_proj` and `up_proj`; each stands for all experts.
    stacked: each tensor is that of all experts; otherwise it is that of one, and they are stacked while they are read.
    """

    def __init__(
        self, weights: Mapping[str, StoredWeight], experts: Experts, act_fn: nn.Module | None, stacked: bool
    ) -> None:
        super().__init__()
        self.experts = experts
        num_experts, two_width, hidden = experts.gate_up.shape
        sizes = {"gate_up_proj": (two_width, hidden), "down_proj": (hidden, two_width // 2)}
        sizes["gate_proj"] = sizes["up_proj"] = two_width // 2, hidden
        if set(weights) not in ({"gate_up_proj", "down_proj"}, {"gate_proj", "up_proj", "down_proj"}):
            raise UnsupportedModelError(
                f"{next(iter(weights.values())).stem} is quantised, but not all weights of its experts are"
            )
        for name, weight in weights.items():
            if stacked:
                tensors = {n: replace(tensor, shape=tensor.shape[1:]) for n, tensor in weight.tensors.items()}
                weight = replace(weight, tensors=tensors)  # of one expert
            self.add_module(name, RawWeight(weight, torch.Size(sizes[name]), num_experts))
        self.act_fn = act_fn
        self.gate_up_proj_bias = experts.gate_up_bias
        self.down_proj_bias = experts.down_bias

    def replacement(self, dtype: torch.dtype) -> PackedExperts:
        names = ("gate_up_proj",) if "gate_up_proj" in self._modules else ("gate_proj", "up_proj")
        gate_up, down = self._stacked(names, dtype), self._stacked(("down_proj",), dtype)
        experts = self.experts._replace(
            gate_up=gate_up, down=down, gate_up_bias=self.gate_up_proj_bias, down_bias=self.down_proj_bias
        )
        return PackedExperts(experts, self.act_fn)

    def _stacked(self, names: tuple[str, ...], dtype: torch.dtype) -> PackedWeight:
        """The rows of `names` one after the other, of all experts; the tensors of the checkpoint are let go."""
        raws: list[Any] = [self._modules[name] for name in names]
        each: list[list[PackedWeight]] = []
        for expert in range(raws[0].num_experts):
            each.append([raw.packed(dtype, expert) for raw in raws])
        for name in names:
            del self._modules[name]
        first = each[0][0]
        if any(weight.group != first.group for weights in each for weight in weights):
            raise UnsupportedModelError(f"{raws[0].stem}: gate and up have groups of different sizes")
        has_zeros = any(weight.zeros is not None for weights in each for weight in weights)
        words = torch.stack([torch.cat([weight.words for weight in weights]) for weights in each])
        scales = torch.stack([torch.cat([weight.scales for weight in weights], dim=1) for weights in each])
        zeros = None
        if has_zeros:
            zeros = torch.stack([torch.cat([_zeros_of(weight) for weight in weights], dim=1) for weights in each])
        return PackedWeight(first.code, words, scales, zeros, first.group)


def _zeros_of(weight: PackedWeight) -> torch.Tensor:
    return torch.full_like(weight.scales, 8) if weight.zeros is None else weight.zeros
