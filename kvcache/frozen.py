"""Views: the only way a worker touches KV, and the FROZEN_KV protocol that lends the target's pools to a drafter.

    state of the allocator     target's view          drafter's view (worker.view)
    LIVE                       reads and writes       None: a frozen drafter owns nothing
      -- enter frozen_kv -->
    FROZEN                     reads; write raises    reads the target's owner layers through its layer map
      -- leave, also by an exception -->
    LIVE                       reads and writes       None again; the lent view is closed and raises when used

While FROZEN, `alloc`, `free`, `evict`, `move`, `commit` and every write raise `FrozenKVError`. A view finds its tensors
through the allocator each time it is asked: there is nothing to go stale.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch

from specdec.errors import FrozenKVError, KVStateError
from specdec.kvcache.hybrid import HybridAllocator
from specdec.kvcache.spaces import FullLoc, Space, SwaLoc


class LayerKV(NamedTuple):
    """K and V rows of one layer, [slots, Hkv, D] each, and the space whose slots index them."""

    k: torch.Tensor
    v: torch.Tensor
    space: Space


class KVView:
    """Layer i of a worker -> its K/V rows. `layer_map[i]` is the target layer that owns them."""

    __slots__ = ("_allocator", "_open", "layer_map", "writable")

    def __init__(self, allocator: HybridAllocator, layer_map: Sequence[int], *, writable: bool) -> None:
        self._allocator = allocator
        self._open = True
        self.layer_map = tuple(layer_map)
        self.writable = writable

    @property
    def key(self) -> tuple[int, tuple[int, ...], bool]:
        """Identity of what this view resolves to. A captured graph is keyed by it; any other view is an error."""
        return (id(self._allocator), self.layer_map, self.writable)

    def layer(self, index: int) -> LayerKV:
        """K/V rows of worker layer `index`. Raises FrozenKVError once the view is closed."""
        if not self._open:
            raise FrozenKVError(f"layer {index} read through a view whose frozen_kv block has ended")
        owner = self.layer_map[index]
        space = self._allocator.layout.layers[owner].space
        pool = self._allocator.pools[space]
        return LayerKV(pool.k[owner], pool.v[owner], space)

    def owns(self, index: int) -> bool:
        """Does worker layer `index` store K/V of its own (False on kv-shared and on lent layers)?"""
        return self.writable and self.layer_map[index] == index

    def write(self, index: int, full: FullLoc, swa: SwaLoc | None, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k, v [T, Hkv, D] of worker layer `index` at this step's slots [T]. Raises FrozenKVError if frozen."""
        if not self.writable:
            raise FrozenKVError(f"write to layer {index} through a frozen view: a frozen drafter owns no KV")
        self._allocator.require_unfrozen(f"KV write to layer {index}")
        owner = self.layer_map[index]
        if self._allocator.layout.layers[owner].space is Space.FULL:
            self._allocator.pools[Space.FULL].write(owner, full, k, v)
        else:
            assert swa is not None, f"layer {owner} is sliding, but the plan holds no SWA locations"
            self._allocator.pools[Space.SWA].write(owner, swa, k, v)

    def close(self) -> None:
        self._open = False


class KVWorker(Protocol):
    """Anything that reads KV through a view: `None` while it is detached."""

    view: KVView | None


def target_view(allocator: HybridAllocator) -> KVView:
    """The target's own view: every layer reads its owner, owners are written."""
    return KVView(allocator, [spec.owner for spec in allocator.layout.layers], writable=True)


@contextmanager
def frozen_kv(allocator: HybridAllocator, worker: KVWorker, layer_map: Sequence[int]) -> Iterator[KVView]:
    """Lend the target's pools to `worker`, read-only, for the length of the block.

    `layer_map[i]` is the target layer that worker layer i reads; it must own its K/V. On exit, also by an exception,
    `worker.view` is what it was before and the lent view is closed.
    Raises FrozenKVError when the worker already holds a frozen view (views do not nest on one worker), KVStateError
    for a layer map that names a layer which stores nothing.
    """
    if any(worker is open_worker for open_worker in allocator._frozen_for):
        raise FrozenKVError(f"{type(worker).__name__} already holds a frozen view; views do not nest on one worker")
    layers = allocator.layout.layers
    for draft_layer, layer in enumerate(layer_map):
        if not 0 <= layer < len(layers):
            raise KVStateError(
                f"drafter layer {draft_layer} reads target layer {layer}, but the target has {len(layers)} layers"
            )
        if layers[layer].owner != layer:
            raise KVStateError(
                f"drafter layer {draft_layer} reads target layer {layer}, which stores no K/V of its own; "
                f"its owner is layer {layers[layer].owner}"
            )
    previous = worker.view
    view = KVView(allocator, layer_map, writable=False)
    allocator._frozen_for.append(worker)
    worker.view = view
    try:
        yield view
    finally:
        view.close()
        worker.view = previous
        allocator._frozen_for[:] = [w for w in allocator._frozen_for if w is not worker]
