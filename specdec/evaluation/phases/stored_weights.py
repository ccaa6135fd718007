"""What the weights of a model take in memory. Packed ones are buffers, so `parameters()` leaves them out."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from specdec.layers.packed.packed_experts import PackedExperts
from specdec.layers.packed.packed_linear import PackedLinear
from specdec.layers.packed.packed_weight import PackedWeight


class StoredWeights(NamedTuple):
    """numbers: however many bits each has. form: of the packed ones, with the columns that share a stored scale; empty
    where there are none."""

    numbers: int
    bytes: int
    form: str

    def words(self, dtype: torch.dtype) -> str:
        """How they are stored, `dtype` being that of those that are not packed."""
        plain = str(dtype).removeprefix("torch.")
        return f"{self.form}, the rest {plain}" if self.form else plain


def packed_of(module: nn.Module) -> list[PackedWeight]:
    """The packed weights that a module holds itself, not those of its children."""
    if isinstance(module, PackedLinear):
        return [module.packed]
    return [module.packed(name) for name in ("gate_up", "down")] if isinstance(module, PackedExperts) else []


def stored_weights(*models: nn.Module) -> StoredWeights:
    """Of several models together: what two of them share is counted once."""
    parameters = {weight for model in models for weight in model.parameters()}
    packed = {id(weight.words): weight for weight in _all_packed(models)}.values()
    return StoredWeights(
        sum(weight.numel() for weight in parameters) + sum(weight.shape.numel() for weight in packed),
        sum(weight.nbytes for weight in parameters) + sum(weight.nbytes for weight in packed),
        " and ".join(sorted({_form(weight) for weight in packed})),
    )


def _all_packed(models: tuple[nn.Module, ...]) -> Iterator[PackedWeight]:
    for model in models:
        for module in model.modules():
            yield from packed_of(module)


def _form(weight: PackedWeight) -> str:
    if weight.code == "e2m1":
        return "mxfp4"
    if weight.code == "e4m3":
        return "fp8" if weight.has_row_scales else f"fp8-g{weight.group}"
    return f"int4-g{weight.group}"
