"""Packs the quantised weights of a checkpoint."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from specdec.errors import CheckpointError, UnsupportedModelError, about
from specdec.layers.moe.experts import Experts
from specdec.layers.packed.packed_weight import PackedWeight
from specdec.layers.packed.weight_slices import StackedWeights, place_weight
from specdec.models.quantised.weight_places import StoredWeight


class OnlyBiases(nn.Module):
    """Replaces a quantised module while transformers loads the rest of the model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for name, parameter in module._parameters.items():
            if name.endswith("bias"):
                self.register_parameter(name, parameter)

    def kept(self, name: str) -> torch.Tensor | None:
        bias = self._parameters.get(name)
        return None if bias is None else bias.detach()


def packed_weights(stored: StoredWeight, dtype: torch.dtype, device: torch.device) -> Iterator[PackedWeight]:
    """Yield the packed weight, or one per expert if its tensors hold several, for products in `dtype`. Scales keep the
    checkpoint's dtype, except that they are float32 for products in float32."""
    tensors = {name: tensor.read().to(device) for name, tensor in stored.tensors.items()}
    count, shape = stored.place.num_stacked, stored.place.shape
    assert shape is not None, f"{stored.stem=}"
    for expert in range(count or 1):
        own = tensors if count is None else {name: tensor[expert] for name, tensor in tensors.items()}
        with about(stored.stem):
            weight = stored.format.repack(own, shape)
        if not weight.scales.float().isfinite().all():
            scales = ", ".join(name for name in own if "scale" in name)
            raise CheckpointError(
                f"{stored.stem}: {scales} holds numbers that are not finite (NaN); the file is damaged"
            )
        if dtype == torch.float32:
            zeros = None if weight.zeros is None else weight.zeros.float()
            weight = replace(weight, scales=weight.scales.float(), zeros=zeros)
        yield weight


def packed_experts(
    weights: Mapping[str, Sequence[StoredWeight]], experts: Experts, dtype: torch.dtype, device: torch.device
) -> Experts:
    """The description with packed weights. weights: by projection, one for all experts or one per expert."""
    names = ("gate_up_proj",) if "gate_up_proj" in weights else ("gate_proj", "up_proj")
    gate_up = _stacked([weights[name] for name in names], dtype, device)
    return experts._replace(gate_up=gate_up, down=_stacked([weights["down_proj"]], dtype, device))


def _stacked(projections: Sequence[Sequence[StoredWeight]], dtype: torch.dtype, device: torch.device) -> PackedWeight:
    """Concatenate the rows of the projections, expert by expert, and stack the experts."""
    in_order = (sorted(each, key=lambda stored: stored.place.number or 0) for each in projections)
    by_projection = [
        [weight for stored in each for weight in packed_weights(stored, dtype, device)] for each in in_order
    ]
    if len({(weight.code, weight.group, weight.zeros is None) for each in by_projection for weight in each}) > 1:
        stem = projections[0][0].stem
        raise UnsupportedModelError(f"{stem}: gate and up are in different formats, or in different groups")
    joined: list[Any] = [
        place_weight(StackedWeights(weights), torch.cat) for weights in zip(*by_projection, strict=True)
    ]
    words, scales = (torch.stack([getattr(weight, part) for weight in joined]) for part in ("words", "scales"))
    zeros = None if joined[0].zeros is None else torch.stack([weight.zeros for weight in joined])
    return PackedWeight(joined[0].code, words, scales, zeros, joined[0].group)
