"""Merges weights that are read together into one tensor; for the owner of the weights nothing changes.

    merged [N_0 + N_1 + .., K]    one storage
    |param 0      |param 1 |..    the parameters of the Hugging Face module, views of it from now on

Parameters stay the same objects: `state_dict()`, checkpoints and in-place updates work as before, and memory holds each
weight once. Re-pointing a parameter (`model.to(...)`, `load_state_dict(assign=True)`, `param.data = ...`) ends the
merge and makes stored addresses stale: a `StorageWatch` notices it. For ranks, which copy slices, nothing is merged.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from specdec.layers.description.decoder_parts import Unfusable
from specdec.layers.packed.packed_modules import weight_of
from specdec.layers.packed.packed_weight import PackedWeight, Weight, join_weights
from specdec.layers.packed.weight_slices import StackedWeights
from specdec.modules.weight_watch import holding, moving_split_weights

_LOCK = threading.Lock()
"""Held while weights are merged: models are shared by the engines of a process."""


@contextmanager
def merging() -> Iterator[None]:
    """Within the block, which one thread at a time enters, weights may be merged."""
    # in inference mode a parameter's data cannot be replaced
    with holding(_LOCK), moving_split_weights(), torch.inference_mode(False), torch.no_grad():
        yield


def merge(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Merge `tensors`, which may differ only in size along `dim` (0: rows, -1: columns): they become views of the
    returned tensor.

    Tensors that are already consecutive parts of one tensor, because another engine merged them, are not changed.
    """
    sizes = [tensor.shape[dim] for tensor in tensors]
    if is_merged(tensors, dim):
        first = tensors[0].detach()
        shape = list(first.shape)
        shape[dim] = sum(sizes)
        return first.as_strided(shape, first.stride())
    merged = torch.cat([tensor.detach() for tensor in tensors], dim)
    for tensor, part in zip(tensors, merged.split(sizes, dim), strict=True):
        tensor.data = part
    return merged


def is_merged(tensors: Sequence[torch.Tensor], dim: int = 0) -> bool:
    """Are these consecutive rows (or columns) of one tensor?"""
    first, end = tensors[0], tensors[0].data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != end or tensor.stride() != first.stride():
            return False
        if tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return False
        end += tensor.shape[dim] * tensor.stride(dim) * tensor.element_size()
    return first.is_contiguous() if dim == 0 else first.stride(-1) == 1


def held_storages(module: nn.Module) -> list[torch.Tensor]:
    """Storages that other threads may be reading while `module`'s weights are merged. Keep them alive for a while.

    Empty on a GPU: there the stream orders the reuse of memory.
    """
    return [param.detach() for param in module.parameters() if param.device.type == "cpu"]


class WeightGroups:
    """Collects groups of parameters that are read together. unmerged: they are not moved and become `StackedWeights`
    weights, for ranks; otherwise they are merged in place."""

    def __init__(self, *, unmerged: bool) -> None:
        self.unmerged = unmerged
        self._merged: list[tuple[Sequence[torch.Tensor], int]] = []

    def join(self, params: Sequence[Any], dim: int = 0) -> torch.Tensor:
        if self.unmerged:
            return cast(torch.Tensor, StackedWeights(params))
        self._merged.append((params, dim))
        return merge(params, dim)

    def linears(self, linears: Sequence[Any]) -> Weight:
        """The weights of several products as one. Raises Unfusable unless all are packed alike or none is."""
        if not are_alike(linears):
            raise Unfusable("products that run as one are packed in different forms, or only some of them are")
        weights = [weight_of(linear) for linear in linears]
        return self.join(weights) if self.unmerged else join_weights(weights, self.join)

    def are_merged(self) -> bool:
        """Are all groups still merged? A parameter in two groups is merged with only one of them."""
        return all(is_merged(params, dim) for params, dim in self._merged)


def are_alike(linears: Sequence[Any]) -> bool:
    """Are all packed in the same form, or none?"""
    packed = [weight for linear in linears if isinstance(weight := weight_of(linear), PackedWeight)]
    forms = {(weight.code, weight.group, weight.scales.dtype, weight.zeros is None) for weight in packed}
    return not packed or (len(packed) == len(linears) and len(forms) == 1)
