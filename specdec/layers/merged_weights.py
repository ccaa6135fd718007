"""Weights of several products that a layer multiplies by as one: merged in place, or gathered for ranks."""

from collections.abc import Sequence
from typing import Any, cast

import torch

from specdec.layers.fusable import Unfusable
from specdec.layers.merge import is_merged, merge
from specdec.layers.packed.packed_linear import weight_of
from specdec.layers.packed.packed_weight import PackedWeight, Weight
from specdec.layers.packed.weight_slices import StackedWeights


class WeightGroups:
    """Collects groups of parameters that are read together. unmerged: they are not moved and become `StackedWeights`
    weights, for ranks; otherwise they are merged in place."""

    def __init__(self, *, unmerged: bool) -> None:
        self.unmerged = unmerged
        self._merged: list[Sequence[torch.Tensor]] = []

    def rows(self, params: Sequence[torch.Tensor]) -> torch.Tensor:
        if self.unmerged:
            return cast(torch.Tensor, StackedWeights(params))
        self._merged.append(params)
        return merge(params)

    def linears(self, linears: Sequence[Any]) -> Weight:
        """The weights of several products as one. Raises Unfusable unless all are packed alike or none is."""
        weights = [weight_of(linear) for linear in linears]
        packed = [weight for weight in weights if isinstance(weight, PackedWeight)]
        if not packed:
            return self.rows([linear.weight for linear in linears])
        if len(packed) < len(weights) or not are_alike(linears):
            raise Unfusable("products that run as one are packed in different forms, or only some of them are")
        if self.unmerged:
            return cast(PackedWeight, StackedWeights(packed))
        words = self.rows([linear.words for linear in linears])
        scales = merge([linear.scales for linear in linears], dim=-1)
        zeros = None if packed[0].zeros is None else merge([linear.zeros for linear in linears], dim=-1)
        return PackedWeight(packed[0].code, words, scales, zeros, packed[0].group)

    def are_merged(self) -> bool:
        """Are all groups still merged? A parameter in two groups is merged with only one of them."""
        return all(map(is_merged, self._merged))


def are_alike(linears: Sequence[Any]) -> bool:
    """Are all packed in the same form, or none?"""
    return len({_form_of(weight_of(linear)) for linear in linears}) == 1


def _form_of(weight: Weight) -> Any:
    if isinstance(weight, PackedWeight):
        return weight.code, weight.group, weight.scales.dtype, weight.zeros is None
    return None
