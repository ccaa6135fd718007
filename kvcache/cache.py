"""The KV cache of one engine: which request owns which slots, and the tensors of every model at those slots.

    allocator   slots of all groups             table    which request owns which, and how many are committed
    stores      of each model that keeps K/V    move     visits every store, so that no model's K/V is left out

It computes nothing itself: the backend stores and moves K/V.
"""

from typing import Protocol

import torch

from specdec.gpu.mirrored_array import MirroredArray, flush
from specdec.gpu.ranks import Ranks
from specdec.kvcache.allocator import HybridAllocator
from specdec.kvcache.layer_context import Destination
from specdec.kvcache.layout import GroupId, GroupLoc, KVLayout
from specdec.kvcache.recurrent_state import FOLD, RecurrentState, StateCache
from specdec.kvcache.sanitize import Sanitizer
from specdec.kvcache.store import KVStore
from specdec.kvcache.table import Move, RequestTable

CHECKPOINTS = 3
"""Copies of states that the prefix cache may keep, per request of a full batch."""


def num_state_slots(max_requests: int) -> int:
    """Number of states of each recurrent layer: one per request, one for padding, and the copies."""
    return max_requests + 1 + CHECKPOINTS * max_requests


class KVOperations(Protocol):
    """Operations on the tensors of a store. A backend of `specdec.attention` has them."""

    def store(self, destination: Destination, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k, v [T, Hkv, D] to a destination."""

    def move(self, store: KVStore, group: GroupId, source: GroupLoc, destination: GroupLoc) -> None:
        """Copy K/V of slots [M] in every layer of the group. All sources are read before any slot is written."""

    def fold(self, table: RequestTable, store: KVStore, row: int, length: int) -> None:
        """Fold the states of a row, on all ranks of a store, up to its first `length` tokens. `length` is a multiple of
        FOLD and the tokens are committed. The caller must not evict their records before this call."""


class KVCache:
    """Slots, requests and stores of one engine. fp8: all K/V are kept in 8 bits (`fp8_pool.py`)."""

    def __init__(
        self, allocator: HybridAllocator, table: RequestTable, operations: KVOperations, *, fp8: bool = False
    ) -> None:
        self.allocator = allocator
        self.table = table
        self.operations = operations
        self.fp8 = fp8
        self.stores: list[KVStore] = []
        self.ranks = Ranks([allocator.device])
        self.sanitizer: Sanitizer | None = None

    @property
    def models(self) -> list[KVStore]:
        """One store per model; for a model on several devices, rank 0's."""
        return [store for store in self.stores if store.rank == 0]

    @property
    def _states(self) -> list[RecurrentState]:
        """States of all recurrent layers, on all ranks."""
        return [kept.state for store in self.stores for kept in store.layers.values() if kept.state is not None]

    def state_cache(self) -> StateCache | None:
        """Copies of the states of all recurrent layers, for the prefix cache; None: there are no such layers."""
        layers = self._states
        if not layers:
            return None

        def fold(row: int, length: int) -> None:
            for store in self.models:
                self.operations.fold(self.table, store, row, length)

        return StateCache(layers, self.table.max_requests + 1, fold)

    def pad_states(self, length: int) -> None:
        """Mark the padding row's states as folded up to `length` tokens. A later forward then folds none of these
        tokens; they have no records, since their slots are null slots."""
        for store in self.stores:
            for layers in store.recurrent:
                layers.sample.folded_len[self.table.padding_row] = length // FOLD * FOLD

    def add_store(self, layout: KVLayout, dtype: torch.dtype, ranks: Ranks | None = None) -> KVStore:
        """Make the store of one more model. From then on `move` visits it too.

        ranks: devices that share the model; `layout` is one rank's share. Each rank gets a store. Returns that of rank
        0, which knows the others.
        """
        layout = layout.in_fp8() if self.fp8 else layout
        if ranks is None:
            ranks = Ranks([self.allocator.device])
        else:
            self.ranks = ranks
        num_states = num_state_slots(self.table.max_requests)
        store = KVStore(layout, self.allocator, dtype, ranks, num_states=num_states)
        self.stores += store.by_rank
        if self.sanitizer is not None:
            for each in store.by_rank:
                self.sanitizer.poison_store(each)
        return store

    def flush(self, *more: MirroredArray) -> None:
        """Upload in one copy all changes of the host's arrays since the last call. `more`: arrays to upload with the
        table's."""
        if self.sanitizer is not None:
            self.sanitizer.check()
            more = (*more, self.sanitizer.owners)
        flush([self.table.slots, self.table.committed_len, self.table.shared_len, self.allocator.maps, *more])

    def move(self, move: Move) -> None:
        """Copy K/V from slot to slot, in all groups of every store."""
        self.allocator.require_unfrozen("move")
        self.ranks.begin()
        for rank, (source, destination) in enumerate(self.ranks.send(tuple(map(self.allocator.located, move)))):
            with self.ranks.on(rank):
                for store in self.stores:
                    if store.rank == rank:
                        for group, slots in source.items():
                            self.operations.move(store, group, slots, destination[group])
        self.ranks.join()

    def bytes_by_group(self) -> dict[str, int]:
        """Bytes of all tensors of each group, by the group's name. Recurrent layers add an entry "states"."""
        sizes = {
            kept.name: sum(tensor.nbytes for store in self.stores for tensor in store.tensors(group))
            for group, kept in self.allocator.groups.items()
        }
        states = sum(tensor.nbytes for state in self._states for tensor in state)
        return {**sizes, "states": states} if states else sizes

    def clear(self) -> None:
        for store in self.stores:
            store.clear()
