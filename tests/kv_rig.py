"""K/V caches small enough to inspect, and an engine's operations on them. Tests import names of kvcache/ from here."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from specdec.attention.backend import Backend, TorchBackend
from specdec.attention.plan import KVPlan, plan_chunk, plan_frozen, plan_verify
from specdec.attention.trees.tree import DraftTree
from specdec.gpu.mirrored_array import IntArray, MirroredArray
from specdec.kvcache.allocator import HybridAllocator
from specdec.kvcache.cache import KVCache
from specdec.kvcache.frozen import KVView, KVWorker, frozen_kv, own_view
from specdec.kvcache.layer_context import Destination
from specdec.kvcache.layout import (
    FULL_ATTENTION,
    KEEP_ALL,
    PRIMARY,
    SLIDING_ATTENTION,
    ByGroup,
    GroupId,
    GroupLoc,
    KVLayout,
    LayerSpec,
    PrimaryLoc,
    Retention,
    attention_fields,
    cache_groups,
    layout_from_config,
)
from specdec.kvcache.page_pool import PagePool
from specdec.kvcache.prefix_cache import PrefixCache
from specdec.kvcache.table import Move, RequestTable


def ints(*values: int) -> IntArray:
    return np.array(values, dtype=np.int64)


def layer_spec(
    layer: int, window: int | None, owner: int | None = None, head_dim: int = 1, heads: int = 1
) -> LayerSpec:
    """Build the spec of a layer that keeps K and V. window None: full attention. owner: by default the layer itself."""
    kind, retention = (FULL_ATTENTION if window is None else SLIDING_ATTENTION), Retention(window)
    owner = layer if owner is None else owner
    return LayerSpec(layer, owner, kind, attention_fields(heads, head_dim), retention)


SWA = GroupId(1)
"""The windowed group of a model with one window."""

FROZEN_EXTRA_KEYS = 2
"""Keys that a frozen drafter reads beyond the target's: the newest window + 1, not window - 1 before its own token."""


class Worker:
    """A worker that borrows views of a cache."""

    view: KVView | None = None


def make_allocator(
    pages: int,
    windows: Sequence[int] = (),
    window_pages: int | Sequence[int] | None = None,
    *,
    page_size: int = 1,
    device: torch.device | str = "cpu",
) -> HybridAllocator:
    """Build pools of a primary group and of one group for each window. window_pages: pages of each of these, or of all;
    None: `pages`."""
    layout = KVLayout(tuple(layer_spec(i, window) for i, window in enumerate(windows)))
    return make_pools([layout], pages, window_pages, page_size=page_size, device=device)


def make_pools(
    layouts: Sequence[KVLayout],
    pages: int,
    other_pages: int | Sequence[int] | None = None,
    *,
    page_size: int = 1,
    device: torch.device | str = "cpu",
) -> HybridAllocator:
    """Build the pools of these models. other_pages: pages of each group after the primary one, or of all; None:
    `pages`."""
    groups = cache_groups(layouts)
    more = pages if other_pages is None else other_pages
    each = [more] * (len(groups) - 1) if isinstance(more, int) else more
    return HybridAllocator(groups, [pages, *each], page_size=page_size, device=torch.device(device))


def replaced(values: ByGroup[Any], group: GroupId, value: Any) -> ByGroup[Any]:
    """Return `values` with the value of one group replaced."""
    return ByGroup(tuple(value if other == group else old for other, old in values.items()))


class KVRig(KVCache):
    """A cache with one store in plain torch, which also has the attributes of its request table:
    `rig.ensure_slots(row, 5)` is `rig.table.ensure_slots(row, 5)`.

    drafts: layers of a drafter that will add a store.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        pages: int,
        window_pages: int | Sequence[int] | None = None,
        page_size: int,
        max_requests: int,
        max_len: int,
        lookahead: int,
        extra_keys: int = FROZEN_EXTRA_KEYS,
        drafts: KVLayout | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        backend: Backend | None = None,
    ) -> None:
        layouts = [layout] if drafts is None else [layout, drafts]
        allocator = make_pools(layouts, pages, window_pages, page_size=page_size, device=device)
        table = RequestTable(
            allocator, max_requests=max_requests, max_len=max_len, lookahead=lookahead, extra_keys=extra_keys
        )
        self.backend: Backend = TorchBackend() if backend is None else backend
        super().__init__(allocator, table, self.backend)
        self.store = self.add_store(layout, dtype)
        self.view: KVView = own_view(allocator, self.store)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["table"], name)

    def commit(self, rows: IntArray, length: IntArray, path: IntArray | None = None) -> None:
        """Commit on host and device: `length` [B] nodes of path [B, D], without a path the first ones written.

        Raises KVStateError, with nothing changed, for nodes past the slots that a row owns.
        """
        if path is None:
            self.table.commit_chunk_on_host(rows, length)
            return
        self.table.require_committable(rows, length, path)
        num_nodes = max(path.shape[1], int(path.max(initial=0)) + 1)
        path = np.pad(path, ((0, 0), (0, num_nodes - path.shape[1])))
        device = self.allocator.device
        index = self.table.rows(rows)
        there = (torch.from_numpy(np.ascontiguousarray(x)).to(device) for x in (length, path))
        move = self.table.commit_on_device(index, *there)
        if move is not None:
            self.move(move)
        self.table.commit_on_host(rows, length, path)

    def write(
        self, layer: int, slots: ByGroup[GroupLoc], k: torch.Tensor, v: torch.Tensor, view: KVView | None = None
    ) -> None:
        """Store k, v [T, Hkv, D] of one layer at slots [T] of its group, through a view."""
        kept = (self.view if view is None else view).writable_layer(layer)
        self.backend.store(Destination(kept.k, kept.v, slots[kept.group]), k, v)

    def chunk(self, rows: IntArray, lengths: IntArray) -> KVPlan:
        device = self.allocator.device
        length = torch.from_numpy(np.ascontiguousarray(lengths)).to(device)
        index = self.table.rows(rows)
        start = self.table.committed_len.tensor[index.index]
        return plan_chunk(self.backend, self.table, index, start, length, int(lengths.max()))

    def verify(self, rows: IntArray, tree: DraftTree) -> KVPlan:
        return plan_verify(self.backend, self.table, self.table.rows(rows), tree)

    def frozen(self, rows: IntArray, **options: Any) -> KVPlan:
        return plan_frozen(self.backend, self.table, self.table.rows(rows), **options)

    @contextmanager
    def lend(self, worker: KVWorker, layer_map: Sequence[int]) -> Iterator[KVView]:
        with frozen_kv(self.allocator, self.store, worker, layer_map) as view:
            yield view


class PrefixRig:
    """A request table with a prefix cache and no K/V, to run whole requests and to evict peers."""

    def __init__(
        self,
        page_size: int = 1,
        *,
        windows: Sequence[int] = (),
        pairs: bool = False,
        pages: int = 64,
        window_pages: int | Sequence[int] | None = None,
        max_len: int = 64,
        lookahead: int = 2,
        extra_keys: int = FROZEN_EXTRA_KEYS,
    ) -> None:
        self.allocator = make_allocator(pages, windows, window_pages, page_size=page_size)
        self.table = RequestTable(
            self.allocator, max_requests=4, max_len=max_len, lookahead=lookahead, extra_keys=extra_keys
        )
        self.cache = PrefixCache(self.table, needs_next_token=pairs)

    def begin(self, text: Sequence[int]) -> tuple[int, int]:
        """Open a request with this prompt. Returns (row, slots adopted)."""
        row = self.table.open_row()
        adopted = self.cache.adopt(row, self.cache.key(text)[: len(text) - 1])
        self.table.check()
        return row, adopted

    def fill(self, row: int, length: int) -> None:
        """Allocate and commit the rest of the row's first `length` slots."""
        self.table.ensure_slots(row, length)
        self.table.commit_chunk_on_host(ints(row), ints(length) - self.table.committed_len.host[row])
        self.table.check()

    def keep(self, row: int, text: Sequence[int]) -> None:
        self.cache.insert([row], [self.cache.key(text)])
        self.table.check()

    def close(self, row: int) -> None:
        self.table.close_rows(row)
        self.table.check()

    def serve(self, text: Sequence[int], *, evict: bool = False) -> int:
        """Run a whole request and cache it; its newest token has no K/V. Returns how many slots it adopted."""
        row, adopted = self.begin(text)
        self.fill(row, len(text) - 1)
        if evict:
            self.table.evict_unseen(ints(row))
        self.keep(row, text)
        self.close(row)
        return adopted

    def found(self, text: Sequence[int]) -> int:
        """Number of slots that a request with this prompt would adopt."""
        return len(self.cache.match_prefix(self.cache.key(text)[: len(text) - 1])) * self.allocator.page_size

    def lose_peers(self, group: GroupId, pages: IntArray) -> None:
        """Evict cached peers, as the pool of a windowed group does when it runs short."""
        self.allocator.uncache_peers(group, pages)
        for node in self.cache._by_age:
            node.num_peers = self.cache._count_peers(node.pages)
        self.table.check()

    def row_slots(self, row: int) -> list[int]:
        return self.table.slots.host[row, : self.table.capacity[row]].tolist()

    @property
    def counts(self) -> tuple[int, int, int]:
        """Pages of the primary pool: (free, held, cached)."""
        pool = self.allocator.primary
        return pool.free_pages, pool.held_pages, pool.evictable_pages
