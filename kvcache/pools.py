"""The K/V storage of both spaces: one pair of tensors per owner layer, [slots, kv heads, head_dim].

A pool holds rows and nothing else: no per-step state, no translation, no idea of requests. Layers differ in head
count and size, so each owner layer has its own tensors. Rows of page 0 are the padding sink.
"""

import torch

from specdec.kvcache.layout import KVLayout
from specdec.kvcache.spaces import Space


class KVPool:
    """K and V rows of all owner layers of one space."""

    def __init__(
        self, layout: KVLayout, space: Space, num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.space = space
        self.num_slots = num_slots
        self.k: dict[int, torch.Tensor] = {}
        self.v: dict[int, torch.Tensor] = {}
        for spec in layout.owners(space):
            shape = (num_slots, spec.num_kv_heads, spec.head_dim)  # [slots, Hkv, D]
            self.k[spec.layer] = torch.zeros(shape, dtype=dtype, device=device)
            self.v[spec.layer] = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.k.values(), *self.v.values()))

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k, v [T, Hkv, D] at `slots` [T]."""
        self.k[layer].index_copy_(0, slots, k)
        self.v[layer].index_copy_(0, slots, v)

    def move(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy rows `source` [M] to `destination` [M] in every layer: gather all, then scatter, so overlap is safe."""
        for rows in (*self.k.values(), *self.v.values()):
            rows.index_copy_(0, destination, rows.index_select(0, source))
