"""Stand-ins for quantised modules while the checkpoint is read: their tensors as they are stored.

`replacement` then makes the packed module of them.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from specdec.errors import CheckpointError, UnsupportedModelError, about
from specdec.layers.moe.experts import Experts
from specdec.layers.packed.packed_experts import PackedExperts
from specdec.layers.packed.packed_linear import PackedLinear
from specdec.layers.packed.packed_weight import PackedWeight
from specdec.layers.packed.weight_slices import StackedWeights, place_weight
from specdec.models.quantised.weight_places import StoredWeight


class RawWeight(nn.Module):
    """The tensors of one weight, or of one for each expert, as buffers on the meta device. They were compared."""

    def __init__(self, weight: StoredWeight) -> None:
        super().__init__()
        place = weight.place
        assert place.shape is not None
        self.format, self.stem = weight.format, weight.stem
        self.shape, self.num_experts = place.shape, place.num_experts
        one_by_one = place.num_experts is not None and place.num_stacked is None
        for name, tensor in weight.tensors.items():
            self.register_buffer(name, tensor.on_meta(*((place.num_experts,) if one_by_one else ())))

    def packed(self, dtype: torch.dtype, expert: int | None = None) -> PackedWeight:
        """For products in `dtype`. Scales stay as the checkpoint has them, but float32 beside float32."""
        tensors = {name: tensor for name, tensor in self._buffers.items() if tensor is not None}
        if expert is not None:
            tensors = {name: tensor[expert] for name, tensor in tensors.items()}
        with about(self.stem):
            weight = self.format.repack(tensors, self.shape)
        if not weight.scales.float().isfinite().all():
            scales = ", ".join(name for name in tensors if "scale" in name)
            raise CheckpointError(f"{self.stem}: {scales} holds numbers that are not finite (NaN); the file is damaged")
        if dtype != torch.float32:
            return weight
        zeros = None if weight.zeros is None else weight.zeros.float()
        return replace(weight, scales=weight.scales.float(), zeros=zeros)


class RawLinear(RawWeight):
    """In the place of an `nn.Linear`, whose bias it keeps."""

    def __init__(self, weight: StoredWeight, linear: nn.Linear) -> None:
        super().__init__(weight)
        self.bias: nn.Parameter | None = linear.bias

    def replacement(self, dtype: torch.dtype) -> PackedLinear:
        return PackedLinear(self.packed(dtype), None if self.bias is None else self.bias.detach())


class RawExperts(nn.Module):
    """In the place of a family's experts, whose biases it keeps.

    weights: `down_proj`, and `gate_up_proj` or `gate_proj` and `up_proj`; each stands for all experts, whose tensors
    are stacked while they are read where the checkpoint does not have them so.
    """

    def __init__(self, weights: Mapping[str, StoredWeight], experts: Experts, act_fn: nn.Module | None) -> None:
        super().__init__()
        self.experts = experts
        if set(weights) not in ({"gate_up_proj", "down_proj"}, {"gate_proj", "up_proj", "down_proj"}):
            raise UnsupportedModelError(
                f"{next(iter(weights.values())).stem} is quantised, but not all weights of its experts are"
            )
        for name, weight in weights.items():
            self.add_module(name, RawWeight(weight))
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
        each = [[raw.packed(dtype, expert) for raw in raws] for expert in range(raws[0].num_experts)]
        for name in names:
            del self._modules[name]
        if len({(weight.code, weight.group, weight.zeros is None) for weights in each for weight in weights}) > 1:
            raise UnsupportedModelError(f"{raws[0].stem}: gate and up are in different formats, or in different groups")
        joined: list[Any] = [place_weight(StackedWeights(weights), torch.cat) for weights in each]
        words, scales = (torch.stack([getattr(weight, part) for weight in joined]) for part in ("words", "scales"))
        zeros = None if joined[0].zeros is None else torch.stack([weight.zeros for weight in joined])
        return PackedWeight(joined[0].code, words, scales, zeros, joined[0].group)
