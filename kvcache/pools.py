"""The K/V storage of both spaces: one pair of tensors per owner layer, [slots, kv heads, head_dim].

A pool holds rows and nothing else: no per-step state, no translation, no idea of requests. Layers differ in head
count and size, so each owner layer has its own tensors. Rows of page 0 are the padding sink.
"""

import torch

from specdec.kvcache.layout import KVLayout
from specdec.kvcache.move_kv import PoolRows, move_kv, reference_move_kv
from specdec.kvcache.spaces import FullLoc, Space, SwaLoc
from specdec.kvcache.store_kv import reference_store_kv, store_kv


class KVPool:
    """K and V rows of all owner layers of one space."""

    def __init__(
        self, layout: KVLayout, space: Space, num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.space = space
        self.num_slots = num_slots
        self.k: dict[int, torch.Tensor] = {}
        self.v: dict[int, torch.Tensor] = {}
        self.kernels = False
        self._rows: PoolRows | None = None  # where kernels find them
        for spec in layout.owners(space):
            shape = (num_slots, spec.num_kv_heads, spec.head_dim)  # [slots, Hkv, D]
            self.k[spec.layer] = torch.zeros(shape, dtype=dtype, device=device)
            self.v[spec.layer] = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.k.values(), *self.v.values()))

    def use_kernels(self) -> None:
        """From now on Triton kernels store and move the rows, and whoever plans for this pool plans for them."""
        self.kernels = True
        self._rows = PoolRows.of((*self.k.values(), *self.v.values())) if self.k else None

    def write(self, layer: int, slots: FullLoc | SwaLoc, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k, v [T, Hkv, D] at `slots` [T]."""
        store = store_kv if self.kernels else reference_store_kv
        store(k, v, slots, self.k[layer], self.v[layer])

    def move(self, source: FullLoc | SwaLoc, destination: FullLoc | SwaLoc) -> None:
        """Copy rows `source` [M] to `destination` [M] in every layer: gather all, then scatter, so overlap is safe."""
        if self._rows is None:
            reference_move_kv((*self.k.values(), *self.v.values()), source, destination)
        else:
            move_kv(self._rows, source, destination)
