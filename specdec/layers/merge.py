"""Weights that are read together become rows of one tensor, without the owner of the weights noticing.

    merged [N_0 + N_1 + .., K]    one storage
    |param 0      |param 1 |..    the parameters of the Hugging Face module, views of it from now on

Parameters stay the objects they are: `state_dict()`, checkpoints and in-place updates are as before, and memory holds
each weight once. What re-points a parameter (`model.to(...)`, `load_state_dict(assign=True)`, `param.data = ...`) ends
the merge, and makes stale whatever else holds an address: a `StorageWatch` tells.
"""

import threading
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

_VERSION = attrgetter("_version")

MERGING = threading.Lock()
"""Held while weights are described and merged: models are shared by the engines of a process."""


def merge(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """The tensor that `tensors`, equal but for their size along `dim` (0: rows, -1: columns), become views of.

    Tensors that are one tensor's consecutive parts already, as when another engine merged them, are left as they are.
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
    """Are these the consecutive rows of one tensor, or its columns?"""
    first, end = tensors[0], tensors[0].data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != end or tensor.stride() != first.stride():
            return False
        if tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return False
        end += tensor.shape[dim] * tensor.stride(dim) * tensor.element_size()
    return first.is_contiguous() if dim == 0 else first.stride(-1) == 1


def held_storages(module: nn.Module) -> list[torch.Tensor]:
    """What operations of other threads may be reading while `module`'s weights are merged: to be kept for a while.

    Nothing off the CPU: there memory changes hands in the order of the stream.
    """
    return [param.detach() for param in module.parameters() if param.device.type == "cpu"]


class StorageWatch:
    """Are the parameters and buffers of some modules the tensors that they were, in the memory that they had?

    An update in place moves nothing. A look costs the host about 0.3 us a tensor, and the device nothing. Memory that
    was freed may be another tensor's now, at the same address, so storages are remembered too, by weak references.
    """

    def __init__(self, *roots: nn.Module) -> None:
        modules = {id(module): module for root in roots for module in root.modules()}.values()
        self._holders: list[dict[str, Any]] = [
            tensors for m in modules for tensors in (m._parameters, m._buffers) if tensors
        ]
        self._note()

    def moved(self) -> bool:
        """Has any of them moved since the last call, or since the watch began?"""
        held, now = self._held, self._held_now()
        same = len(now) == len(held) and all(map(is_, now, held)) and self._addresses == _addresses(self._tensors)
        if same and not any(map(torch.UntypedStorage._expired, self._weak)):
            return False
        self._note()
        return True

    def versions(self) -> int:
        """Grows with every update in place, but for those that go through `.data`, and of inference tensors. Of the
        tensors that the last call of `moved` found."""
        return sum(map(_VERSION, self._counted))

    def counts_updates(self) -> bool:
        """Has each of them a version counter? Inference tensors have none."""
        return len(self._counted) == len(self._tensors)

    def _note(self) -> None:
        self._held = self._held_now()
        self._tensors = [tensor for tensor in self._held if tensor is not None]
        self._counted = [tensor for tensor in self._tensors if not tensor.is_inference()]
        self._addresses = _addresses(self._tensors)
        storages = (StorageWeakRef(tensor.untyped_storage()) for tensor in self._tensors)
        self._storages = {storage.cdata: storage for storage in storages}  # some share one
        self._weak = list(self._storages)

    def _held_now(self) -> list[torch.Tensor | None]:
        return list(chain.from_iterable(map(dict.values, self._holders)))


def _addresses(tensors: list[torch.Tensor]) -> list[int]:
    return list(map(torch.Tensor.data_ptr, tensors))
