"""Merges weights that are read together into one tensor; for the owner of the weights nothing changes.

    merged [N_0 + N_1 + .., K]    one storage
    |param 0      |param 1 |..    the parameters of the Hugging Face module, views of it from now on

Parameters stay the same objects: `state_dict()`, checkpoints and in-place updates work as before, and memory holds each
weight once. Re-pointing a parameter (`model.to(...)`, `load_state_dict(assign=True)`, `param.data = ...`) ends the
merge and makes stored addresses stale: a `StorageWatch` notices it.
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


class StorageWatch:
    """Notices if parameters or buffers of some modules become other tensors or move in memory.

    In-place updates move nothing. A check costs the host about 0.3 us per tensor, and the device nothing. A new tensor
    may have the address of freed memory, so storages are remembered too, by weak references.
    """

    def __init__(self, *roots: nn.Module) -> None:
        modules = {id(module): module for root in roots for module in root.modules()}.values()
        self._holders: list[dict[str, Any]] = [
            tensors for m in modules for tensors in (m._parameters, m._buffers) if tensors
        ]
        self._note()

    def moved(self) -> bool:
        """Has any tensor moved since the last call, or since the watch began?"""
        held, now = self._held, self._held_now()
        same = len(now) == len(held) and all(map(is_, now, held)) and self._addresses == _addresses(self._tensors)
        if same and not any(map(torch.UntypedStorage._expired, self._weak)):
            return False
        self._note()
        return True

    def versions(self) -> int:
        """A number that grows with every in-place update of the tensors that the last `moved` found, except updates
        through `.data` and of inference tensors."""
        return sum(map(_VERSION, self._counted))

    def counts_updates(self) -> bool:
        """Does each tensor have a version counter? Inference tensors have none."""
        return len(self._counted) == len(self._tensors)

    def _note(self) -> None:
        self._held = self._held_now()
        self._tensors = [tensor for tensor in self._held if tensor is not None]
        self._counted = [tensor for tensor in self._tensors if not tensor.is_inference()]
        self._addresses = _addresses(self._tensors)
        storages = (StorageWeakRef(tensor.untyped_storage()) for tensor in self._tensors)
        self._storages = {storage.cdata: storage for storage in storages}  # some tensors share one
        self._weak = list(self._storages)

    def _held_now(self) -> list[torch.Tensor | None]:
        return list(chain.from_iterable(map(dict.values, self._holders)))


def _addresses(tensors: list[torch.Tensor]) -> list[int]:
    return list(map(torch.Tensor.data_ptr, tensors))
