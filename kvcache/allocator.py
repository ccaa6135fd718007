"""One allocator over the pools of all groups. Only it allocates and frees slots, and it holds the FROZEN state.

Only it changes the maps from a `PrimaryLoc` to a `GroupLoc`. Pools are paged in lockstep: a primary page has one peer
page in each windowed group, until that peer is evicted. Invariants (`check`):

    1. free + held + evictable = capacity, per pool; the claims on a page are counted exactly (`PagePool`).
    2. a group's map is 0 where the peer is not claimed; non-zero entries are distinct and never free.
    3. alloc takes from all pools or from none.
    4. free: read maps, free peers, clear maps, free primary; freeing twice raises.
    5. evict frees peers of one group only.
    6. windows stay mapped; this needs lengths, so `RequestTable.check` asserts it.

Several rows and the prefix cache may claim one page; its peers have claims of their own. Each claimant releases its own
claim, and a page without claims is free. A page that only the cache claims counts as available: `alloc` reclaims it.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from specdec.errors import DoubleFreeError, FrozenKVError, OutOfSlotsError
from specdec.gpu.mirrored_array import IntArray, MirroredArray
from specdec.kvcache.layout import PRIMARY, ByGroup, GroupId, GroupLoc, PrimaryLoc, Retention
from specdec.kvcache.page_pool import BoolArray, PagePool


class PageCache(Protocol):
    """A cache of pages. They outlive the rows that filled them, until a pool needs them (`PrefixCache`)."""

    def evict(self, pages: ByGroup[int]) -> None:
        """Free this many more pages in each pool, as far as only the cache claims them."""

    def reset(self) -> None:
        """Forget all pages, after the pools were reset."""

    def check(self) -> None:
        """Assert that its claims agree with the pools."""


class HybridAllocator:
    """Slots of all groups: `pages` of each group's pool, page 0 not counted, of `page_size` slots.

    maps: [groups, primary slots], for each primary slot the peer's slot in a windowed group, or 0 if it has none. The
    line of the primary group is unused: its slots are the primary slots.
    """

    def __init__(
        self, groups: ByGroup[Retention], pages: Sequence[int], *, page_size: int, device: torch.device
    ) -> None:
        assert len(pages) == len(groups), f"{pages=} {groups=}"
        self.groups = groups
        self.page_size = page_size
        self.device = device
        pools = [PagePool(retention.name, count) for retention, count in zip(groups, pages, strict=True)]
        self.pools = ByGroup(tuple(pools))
        self.primary = self.pools[PRIMARY]
        self.windowed = tuple(group for group, _ in groups.items() if group != PRIMARY)
        self.cached_windows = tuple(group for group in self.windowed if groups[group].cached)
        self.maps = MirroredArray((len(pages), (pages[0] + 1) * page_size), device)
        self.cache: PageCache | None = None
        self._frozen_for: list[object] = []  # workers with an open frozen view

    def num_slots(self, group: GroupId) -> int:
        """Slots of one pool, page 0 included. It is the first dimension of every tensor of the group."""
        return (self.pools[group].capacity + 1) * self.page_size

    @property
    def frozen(self) -> bool:
        return bool(self._frozen_for)

    def freeze(self, worker: object) -> None:
        """Forbid changes from now on, since `worker` reads. Raises FrozenKVError if `worker` already holds a view."""
        if any(worker is other for other in self._frozen_for):
            raise FrozenKVError(f"{type(worker).__name__} already holds a frozen view; views do not nest on one worker")
        self._frozen_for.append(worker)

    def thaw(self, worker: object) -> None:
        self._frozen_for = [other for other in self._frozen_for if other is not worker]

    def require_unfrozen(self, operation: str) -> None:
        """Raise FrozenKVError while a frozen view is open."""
        if self._frozen_for:
            names = ", ".join(type(w).__name__ for w in self._frozen_for)
            raise FrozenKVError(
                f"{operation} while the KV cache is frozen for {names}: a frozen drafter must see exactly the "
                "committed prefix; leave the frozen_kv block first"
            )

    @property
    def available_pages(self) -> int:
        """Pages that `alloc` can give now: the minimum over the pools."""
        return min(pool.available_pages for pool in self.pools)

    def alloc(self, num_pages: int) -> IntArray:
        """Take whole pages from all pools, or from none; if too few are free, the cache releases pages.

        Returns their primary slots [num_pages * page_size], already mapped to a peer in every group.
        Raises OutOfSlotsError, with nothing taken, when a pool has fewer.
        """
        self.require_unfrozen("alloc")
        assert num_pages >= 0, f"{num_pages=}"
        if num_pages > self.available_pages:
            available = (f"{pool.available_pages} of {pool.capacity} in the {pool.name} pool" for pool in self.pools)
            raise OutOfSlotsError(f"{num_pages} pages needed; free: {', '.join(available)}")
        short = self.pools.map(lambda pool: max(num_pages - pool.free_pages, 0))
        if self.cache is not None and any(short):
            self.cache.evict(short)
        slots = self.slots_of(self.primary.alloc(num_pages))
        if num_pages:
            for group in self.windowed:
                self.maps[group, slots] = self.slots_of(self.pools[group].alloc(num_pages))
        return slots

    def share(self, pages: IntArray, num_evicted: IntArray) -> IntArray:
        """Add a row's claims on `pages`, and on their peers except the first `num_evicted` [groups]. Returns the pages'
        primary slots."""
        self.require_unfrozen("share")
        self.primary.share(pages)
        for group in self.windowed:
            self.pools[group].share(self._peers(group, pages[num_evicted[group] :]))
        return self.slots_of(pages)

    def free(self, pages: IntArray, *, rows: IntArray | int = 0, evicted: BoolArray | None = None) -> None:
        """Release the claims of rows on `pages` [M], each named once for each row that frees it.

        rows: [M] the row that frees each page, or one row for all. evicted: [groups, M], whether that row has already
        released its claim on the peer; None: it has released none. If a page is not held, or one row frees it twice,
        raises DoubleFreeError and changes nothing.
        """
        self.require_unfrozen("free")
        self.primary.require_claims(pages, once=rows * (self.primary.capacity + 1) + pages)
        for group in self.windowed:
            seen = pages if evicted is None else pages[~evicted[group]]
            self._release_peers(group, seen[self.is_mapped(group, seen)])
        self.primary.free(pages)

    def evict(self, group: GroupId, pages: IntArray) -> None:
        """Release the claims of rows on the peers of `pages` in one windowed group. A page is named once for each row,
        and stays held itself. If a peer is evicted already, raises DoubleFreeError and changes nothing."""
        self.require_unfrozen("evict")
        assert group != PRIMARY, "the primary group evicts nothing: its slots name the tokens"
        self.primary.require_claims(pages)
        if not self.is_mapped(group, pages).all():
            name = self.pools[group].name
            raise DoubleFreeError(f"{name} pool: pages {pages.tolist()} are not all mapped; some were evicted before")
        self._release_peers(group, pages)

    def cache_pages(self, group: GroupId, pages: IntArray) -> None:
        """Add the cache's claims on `pages` of the primary group, or on their peers in another; rows hold them."""
        self.require_unfrozen("cache_pages")
        self.pools[group].cache_pages(self._peers(group, pages))

    def uncache_pages(self, pages: IntArray) -> None:
        """Release the cache's claims on `pages` and on those of their peers that it claims."""
        self.require_unfrozen("uncache")
        for group in self.windowed:
            self.uncache_peers(group, pages[self.is_cached(group, pages)])
        self.primary.uncache_pages(pages)

    def uncache_peers(self, group: GroupId, pages: IntArray) -> None:
        """Release the cache's claims on the peers of `pages` in one group."""
        self.require_unfrozen("uncache")
        freed = pages[self.pools[group].uncache_pages(self._peers(group, pages))]
        self.maps[group, self.slots_of(freed)] = 0

    def is_mapped(self, group: GroupId, pages: IntArray) -> BoolArray:
        """Mask of `pages` that have a peer in a group."""
        mapped: BoolArray = self._peers(group, pages) != 0
        return mapped

    def is_cached(self, group: GroupId, pages: IntArray) -> BoolArray:
        """Whether the cache claims the peer of each page in a group."""
        return self.pools[group].is_cached(self._peers(group, pages))

    def row_refs(self, group: GroupId, pages: IntArray) -> IntArray:
        """How many rows claim the peer of each page in a group."""
        return self.pools[group].row_refs(self._peers(group, pages))

    def is_idle(self, group: GroupId, pages: IntArray) -> BoolArray:
        """Whether the cache alone claims the peer of each page in a group."""
        peers, pool = self._peers(group, pages), self.pools[group]
        return pool.is_cached(peers) & ~pool.is_held(peers)

    def translate(self, group: GroupId, slots: PrimaryLoc) -> GroupLoc:
        """Map primary `slots` (any shape, on the allocator's device) to slots of a group; 0, the null slot, if there is
        no peer."""
        return GroupLoc(slots if group == PRIMARY else self.maps.tensor[group][slots])

    def located(self, slots: PrimaryLoc) -> ByGroup[GroupLoc]:
        """`translate` for every group."""
        return ByGroup(tuple(self.translate(group, slots) for group, _ in self.pools.items()))

    def peer_slots(self, group: GroupId, slots: IntArray) -> IntArray:
        """`translate` on the host."""
        return slots if group == PRIMARY else self.maps.host[group, slots]

    def reset(self) -> None:
        """Drop every claim, the cache's too: all pages are free, nothing is mapped, nothing is frozen."""
        if self.cache is not None:
            self.cache.reset()
        for pool in self.pools:
            pool.reset()
        self.maps.clear()
        self._frozen_for = []

    def check(self) -> None:
        """Assert invariants 1 and 2, and that no freed page is mapped; cheap enough to call after every operation of a
        test."""
        self.primary.check()
        if self.cache is not None:
            self.cache.check()
        for group in self.windowed:
            pool, name = self.pools[group], self.pools[group].name
            pool.check()
            mapping = self.maps.host[group].reshape(-1, self.page_size)  # [pages, page_size]
            heads = mapping[:, 0]
            mapped = heads != 0
            assert (mapping[0] == 0).all(), f"{name}: page 0 is mapped"
            own = heads[mapped, None] + np.arange(self.page_size)
            assert (mapping[mapped] == own).all(), f"{name}: the peer of a page is not one page"
            assert (mapping[~mapped] == 0).all(), f"{name}: a page is mapped in part"
            peers, pages = heads[mapped] // self.page_size, np.flatnonzero(mapped)
            assert len(np.unique(peers)) == len(peers), f"{name}: a page has two owners"
            assert (pool.is_held(peers) | pool.is_cached(peers)).all(), f"{name}: a mapped page is free"
            assert len(peers) == pool.capacity - pool.free_pages, f"{name}: a page is held but not mapped"
            full = self.primary.is_held(pages) | self.primary.is_cached(pages)
            assert full.all(), f"{name}: a free page is mapped"
            kept = self.primary.is_cached(pages[pool.is_cached(peers)])
            assert kept.all(), f"{name}: the cache claims the peer of a page that it does not claim"

    def slots_of(self, pages: IntArray) -> IntArray:
        """All slots of these pages, in order."""
        return (pages[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1)

    def _peers(self, group: GroupId, pages: IntArray) -> IntArray:
        """The page of each primary page in a group, 0 where there is none."""
        return pages if group == PRIMARY else self.maps.host[group, pages * self.page_size] // self.page_size

    def _release_peers(self, group: GroupId, pages: IntArray) -> None:
        """Rows give up the peers of `pages`."""
        freed = pages[self.pools[group].free(self._peers(group, pages))]
        self.maps[group, self.slots_of(freed)] = 0
