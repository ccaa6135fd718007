"""Views: the only way to the K/V of another model, and the FROZEN_KV protocol that lends the target's to a drafter.

    state of the allocator     target's view          drafter's view (worker.view)
    LIVE                       reads and writes       None: a frozen drafter owns nothing
      -- enter frozen_kv -->
    FROZEN                     reads; write raises    reads the target's owner layers through its layer map
      -- leave, also by an exception -->
    LIVE                       reads and writes       None again; the lent view is closed and raises when used

A drafter cannot read a pool with slot numbers of another pool, or slots that are changing:

    group       attention takes the group of a layer and its pools from one `LayerKV` (`_attend_own` in
                `attention/bridge.py`), and the page table from the plan by that group: table and pool belong together
    slots       only the allocator and `attention/kernels/page_table.py` (the kernel and its reference) turn a
                `PrimaryLoc` into a `GroupLoc`, before the drafter runs; a drafter's code converts none
    lifetime    a view gives out no layer once its block has ended: `FrozenKVError`
    changes     while FROZEN, every allocation, eviction, move and commit raises `FrozenKVError`, and so does a forward
                that would write, since a view gives out no layer to write to

Which layer a drafter's layer reads is the drafter's choice; `frozen_kv` checks that this layer stores K/V. The checks
run in Python, so a round is checked when it is captured, and a replay repeats only launches that passed. A view holds
no tensor: it looks each one up in the store when it is asked, so nothing goes stale.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from specdec.errors import FrozenKVError, KVStateError, counted
from specdec.gpu.ranks import Ranks
from specdec.kvcache.allocator import HybridAllocator
from specdec.kvcache.layout import LayerSpec
from specdec.kvcache.store import KVStore, LayerKV, RecurrentLayers


class KVView:
    """Maps layer i of a worker to the K/V that it reads. `layer_map[i]` is the layer of the store that owns them.

    ranks, other_ranks: the devices of the store, and the views of the ranks after the first, each with its rank's
    heads.
    """

    __slots__ = ("_allocator", "_open", "_store", "layer_map", "other_ranks", "ranks", "writable")

    def __init__(self, allocator: HybridAllocator, store: KVStore, layer_map: Sequence[int], *, writable: bool) -> None:
        self._allocator = allocator
        self._store = store
        self._open = True
        self.layer_map = tuple(layer_map)
        self.writable = writable
        self.ranks: Ranks = store.ranks
        self.other_ranks = tuple(KVView(allocator, each, layer_map, writable=writable) for each in store.other_ranks)

    @property
    def key(self) -> tuple[int, tuple[int, ...], bool]:
        """Identity of this view's tensors and layers. A capture stores the key of its view; a replay under a view with
        another key raises FrozenKVError."""
        return (id(self._store), self.layer_map, self.writable)

    def layer(self, index: int) -> LayerKV:
        """K/V of worker layer `index`. Raises FrozenKVError once the view is closed."""
        self._require_open(f"layer {index}")
        return self._store.layers[self.layer_map[index]]

    def spec(self, index: int) -> LayerSpec:
        """What worker layer `index` reads, as the store's layout describes it."""
        return self._store.layout.layers[self.layer_map[index]]

    @property
    def recurrent(self) -> tuple[RecurrentLayers, ...]:
        """All recurrent layers of the store, by shape. Raises FrozenKVError once the view is closed."""
        self._require_open("recurrent layers")
        return self._store.recurrent

    def owns(self, index: int) -> bool:
        """Does worker layer `index` store its own K/V? False for kv-shared and for lent layers."""
        return self.writable and self.layer_map[index] == index

    def writable_layer(self, index: int) -> LayerKV:
        """K/V of worker layer `index`, for writing. Raises FrozenKVError if the view or the cache is frozen."""
        if not self.writable:
            raise FrozenKVError(f"write to layer {index} through a frozen view: a frozen drafter owns no KV")
        self._allocator.require_unfrozen(f"KV write to layer {index}")
        return self.layer(index)

    def _require_open(self, what: str) -> None:
        if not self._open:
            raise FrozenKVError(f"{what} read through a view whose frozen_kv block has ended")

    def close(self) -> None:
        self._open = False
        for view in self.other_ranks:
            view.close()


class KVWorker(Protocol):
    """A model or drafter that reads KV through a view. `view` is None while it has none."""

    view: KVView | None


def own_view(allocator: HybridAllocator, store: KVStore) -> KVView:
    """A model's view of its own store: each layer reads the K/V of its owner, and owners are writable."""
    return KVView(allocator, store, [spec.owner for spec in store.layout.layers], writable=True)


@contextmanager
def frozen_kv(
    allocator: HybridAllocator, store: KVStore, worker: KVWorker, layer_map: Sequence[int]
) -> Iterator[KVView]:
    """Lend the target's `store` to `worker`, read-only, for the length of the block.

    `layer_map[i]` is the target layer that worker layer i reads. On exit, also by an exception, `worker.view` is what
    it was before, and the lent view is closed. Raises FrozenKVError if the worker already holds a frozen view, and
    KVStateError if the layer map names a layer that stores nothing.
    """
    layers = store.layout.layers
    for draft_layer, layer in enumerate(layer_map):
        reads = f"drafter layer {draft_layer} reads target layer {layer}"
        if not 0 <= layer < len(layers):
            raise KVStateError(f"{reads}, but the target has {counted(len(layers), 'layer')}")
        if (owner := layers[layer].owner) != layer:
            raise KVStateError(f"{reads}, which stores no K/V of its own; its owner is layer {owner}")
    allocator.freeze(worker)
    previous = worker.view
    view = KVView(allocator, store, layer_map, writable=False)
    try:
        worker.view = view
        yield view
    finally:
        view.close()
        worker.view = previous
        allocator.thaw(worker)
