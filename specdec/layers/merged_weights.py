"""Weights of several products as one, which a layer multiplies by at once: merged in place, or gathered for ranks."""

from collections.abc import Sequence
from typing import Any, cast

import torch

from specdec.layers.fusable import Unfusable
from specdec.layers.merge import is_merged, merge
from specdec.layers.packed.packed_linear import weight_of
from specdec.layers.packed.packed_weight import PackedWeight, Weight
from specdec.layers.packed.weight_slices import StackedWeights


class WeightGroups:
    """Parameters that are read together, as they are gathered. apart: they stay where they are, as `StackedWeights`
    weights, which only ranks take; otherwise they are merged in place."""

    def __init__(self, *, apart: bool) -> None:
        self.apart = apart
        self._merged: list[Sequence[torch.Tensor]] = []

    def rows(self, params: Sequence[torch.Tensor]) -> torch.Tensor:
        if self.apart:
            return cast(torch.Tensor, StackedWeights(params))
        self._merged.append(params)
        return merge(params)

    def linears(self, linears: Sequence[Any]) -> Weight:
        """The weights of some products as one. Raises Unfusable unless they are packed alike, or none is."""
        weights = [weight_of(linear) for linear in linears]
        packed = [weight for weight in weights if isinstance(weight, PackedWeight)]
        if not packed:
            return self.rows([linear.weight for linear in linears])
        if len(packed) < len(weights) or not are_alike(linears):
            raise Unfusable("products that run as one are packed in different forms, or only some of them are")
        if self.apart:
            return cast(PackedWeight, StackedWeights(packed))
        words = self.rows([linear.words for linear in linears])
        scales = merge([linear.scales for linear in linears], dim=-1)
        zeros = None if packed[0].zeros is None else merge([linear.zeros for linear in linears], dim=-1)
        return PackedWeight(packed[0].code, words, scales, zeros, packed[0].group)

    def are_merged(self) -> bool:
        """Still? A parameter that two groups hold is merged with one of them only."""
        return all(map(is_merged, self._merged))


def are_alike(linears: Sequence[Any]) -> bool:
    """Are they packed in one form, or are none of them packed?"""
    return len({_form_of(weight_of(linear)) for linear in linears}) == 1


def _form_of(weight: Weight) -> Any:
    if isinstance(weight, PackedWeight):
        return weight.code, weight.group, weight.scales.dtype, weight.zeros is None
    return None
