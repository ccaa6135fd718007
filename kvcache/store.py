"""The K/V of one model: a pair of tensors per layer that stores any, [slots, kv heads, head_dim].

A store owns tensors and nothing else: no slots, no per-step state, no translation, no idea of requests. Every model of
an engine that keeps K/V has one, made from its layout, and all of them are indexed by the slots of one allocator.
Layers differ in head count and size, so each has its own tensors. Page 0 of each space takes the writes of padding.
"""

from typing import NamedTuple

import torch

from specdec.kvcache.allocator import HybridAllocator
from specdec.kvcache.index_spaces import Space
from specdec.kvcache.layout import KVLayout
from specdec.kvcache.move_kv import StoreAddresses


class LayerKV(NamedTuple):
    """K and V of one layer, [slots, Hkv, D] each, and the space whose slots index them."""

    k: torch.Tensor
    v: torch.Tensor
    space: Space


class KVStore:
    """K and V of all layers of a layout that own theirs, for every slot of an allocator."""

    def __init__(self, layout: KVLayout, allocator: HybridAllocator, dtype: torch.dtype) -> None:
        self.layout = layout
        self.dtype = dtype
        self.layers: dict[int, LayerKV] = {}
        with torch.inference_mode(False):  # ordinary tensors, whoever makes the store
            for spec in layout.layers:
                if spec.owner == spec.layer:
                    shape = (allocator.num_slots(spec.space), spec.num_kv_heads, spec.head_dim)  # [slots, Hkv, D]
                    k, v = (torch.zeros(shape, dtype=dtype, device=allocator.device) for _ in range(2))
                    self.layers[spec.layer] = LayerKV(k, v, spec.space)
            self.addresses = {space: StoreAddresses.of(tensors) for space in Space if (tensors := self.tensors(space))}

    def tensors(self, space: Space) -> tuple[torch.Tensor, ...]:
        """All K and V tensors that the slots of one space index."""
        return tuple(tensor for layer in self.layers.values() if layer.space is space for tensor in (layer.k, layer.v))

    def clear(self) -> None:
        """Let go of the tensors."""
        self.layers.clear()
        self.addresses.clear()
