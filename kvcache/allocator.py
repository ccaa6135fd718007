"""One allocator over the full pool and the SWA pool: the single authority on slots, and the holder of the FROZEN state.

It is the only place that makes a `SwaLoc` from a `FullLoc`. Paging is in lockstep: a full page has one SWA peer, or
none once it is evicted. Invariants (`check`):

    1. free + held + cached = capacity, per pool; the claims on a page are counted exactly (`PagedAllocator`).
    2. full_to_swa[slot] is 0 where the SWA peer is not claimed; non-zero entries are distinct and never free.
    3. alloc takes from both pools or from neither.
    4. free: read mapping, free SWA, clear mapping, free full; freeing twice raises.
    5. evict frees SWA slots only.
    6. windows stay mapped; this needs lengths, so `RequestTable.check` asserts it.

A page may be held by several rows and kept by the prefix cache, its SWA peer by some of them. Each releases its own
claim, and a page without claims is free. Pages that only the cache claims are available: alloc reclaims them.
"""

from typing import Protocol

import numpy as np
import torch

from specdec.errors import DoubleFreeError, FrozenKVError, OutOfSlotsError
from specdec.gpu.mirrored_array import IntArray, MirroredArray
from specdec.kvcache.index_spaces import FullLoc, Space, SwaLoc
from specdec.kvcache.page_pool import BoolArray, PagedAllocator


class PageCache(Protocol):
    """Keeps pages that rows have given back, until they are needed elsewhere (`PrefixCache`)."""

    def release(self, full_pages: int, swa_pages: int) -> None:
        """Free this many more pages of each pool, or all that only the cache claims."""

    def reset(self) -> None:
        """Forget everything: the pools have."""

    def check(self) -> None:
        """Assert that its claims agree with the pools."""


class HybridAllocator:
    """Slots of both spaces: `full_pages` and `swa_pages` pages of `page_size` slots, page 0 not counted. `swa_pages` is
    None for a model without sliding layers."""

    def __init__(self, *, full_pages: int, swa_pages: int | None, page_size: int, device: torch.device) -> None:
        self.page_size = page_size
        self.device = device
        self.full = PagedAllocator("full", full_pages)
        self.swa = None if swa_pages is None else PagedAllocator("SWA", swa_pages)
        self.full_to_swa = MirroredArray(((full_pages + 1) * page_size,), device)
        self.cache: PageCache | None = None
        self._frozen_for: list[object] = []  # workers with an open frozen view

    def num_slots(self, space: Space) -> int:
        """Slots of one space, page 0 included: the first size of every K/V tensor in it."""
        pool = self.full if space is Space.FULL else self.swa
        assert pool is not None, "no SWA space"
        return (pool.capacity + 1) * self.page_size

    @property
    def frozen(self) -> bool:
        return bool(self._frozen_for)

    def freeze(self, worker: object) -> None:
        """No change is allowed from now on, since `worker` reads. Raises FrozenKVError when it already does."""
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
    def pools(self) -> list[PagedAllocator]:
        return [self.full] if self.swa is None else [self.full, self.swa]

    @property
    def available_pages(self) -> int:
        """Pages that `alloc` can give now: the smaller number of the two pools."""
        return min(pool.available_pages for pool in self.pools)

    def alloc(self, num_pages: int) -> FullLoc:
        """Take whole pages from both pools, or from neither; if too few are free, the cache releases pages.

        Returns their full slots [num_pages * page_size] int64 on the host, already mapped to SWA slots.
        Raises OutOfSlotsError, with nothing taken, when either pool has fewer.
        """
        self.require_unfrozen("alloc")
        assert num_pages >= 0, f"{num_pages=}"
        if num_pages > self.available_pages:
            there = (f"{pool.available_pages} of {pool.capacity} in the {pool.name} pool" for pool in self.pools)
            raise OutOfSlotsError(f"{num_pages} pages needed; free: {', '.join(there)}")
        full_short = num_pages - self.full.free_pages
        swa_short = 0 if self.swa is None else num_pages - self.swa.free_pages
        if self.cache is not None and (full_short > 0 or swa_short > 0):
            self.cache.release(max(full_short, 0), max(swa_short, 0))
        slots = self._slots(self.full.alloc(num_pages))
        if self.swa is not None and num_pages:
            self.full_to_swa[slots] = self._slots(self.swa.alloc(num_pages))
        return FullLoc(torch.from_numpy(slots))

    def share(self, pages: IntArray, num_evicted: int) -> FullLoc:
        """One more row holds `pages`, and the SWA peers of all but the first `num_evicted`; their full slots."""
        self.require_unfrozen("share")
        self.full.share(pages)
        if self.swa is not None:
            self.swa.share(self._swa_peers(pages[num_evicted:]))
        return FullLoc(torch.from_numpy(self._slots(pages)))

    def free(self, slots: FullLoc, *, rows: IntArray | int = 0, evicted: BoolArray | bool = False) -> None:
        """Release the claims of rows on whole pages. slots [M]: all slots of each page, once for each row that frees
        it.

        rows: [M] the row that frees each slot, or one for all. evicted: [M] whether that row's claim on the SWA peer
        was released before. Raises DoubleFreeError, with nothing changed, for a page that is not held, or freed twice
        by a row.
        """
        self.require_unfrozen("free")
        pages, heads = self._pages(slots, "free")
        claims = pages if isinstance(rows, int) else rows[heads] * (self.full.capacity + 1) + pages
        self.full.require_claims(pages, once=claims)
        if self.swa is not None:
            seen = pages[~np.broadcast_to(evicted, slots.shape)[heads]]
            self._release_swa(seen[self.is_mapped(seen)])
        self.full.free(pages)

    def evict(self, slots: FullLoc) -> None:
        """Release the claims of rows on the SWA peers of whole pages, named once for each row; their full slots stay
        held. Raises DoubleFreeError, with nothing changed, on an evicted page."""
        self.require_unfrozen("evict")
        pages, _ = self._pages(slots, "evict")
        if self.swa is None:
            return
        self.full.require_claims(pages)
        if not self.is_mapped(pages).all():
            raise DoubleFreeError(f"SWA pool: pages {pages.tolist()} are not all mapped; some were evicted before")
        self._release_swa(pages)

    def keep(self, pages: IntArray, num_evicted: int) -> None:
        """The cache claims `pages` that rows hold, and the SWA peers of all but the first `num_evicted`."""
        self.require_unfrozen("keep")
        self.full.keep(pages)
        self.keep_swa(pages[num_evicted:])

    def keep_swa(self, pages: IntArray) -> None:
        """The cache claims the SWA peers of `pages`, which rows hold."""
        self.require_unfrozen("keep")
        if self.swa is not None:
            self.swa.keep(self._swa_peers(pages))

    def forget(self, pages: IntArray) -> None:
        """Release the cache's claims on `pages` and on their SWA peers, as far as it has them."""
        self.require_unfrozen("forget")
        self.forget_swa(pages[self.is_kept_in_swa(pages)])
        self.full.forget(pages)

    def forget_swa(self, pages: IntArray) -> None:
        """The cache gives up the SWA peers of `pages`."""
        self.require_unfrozen("forget")
        if self.swa is not None:
            self._unmap(pages[self.swa.forget(self._swa_peers(pages))])

    def is_mapped(self, pages: IntArray) -> BoolArray:
        """Mask of `pages` that have an SWA peer."""
        mapped: BoolArray = self._swa_peers(pages) != 0
        return mapped

    def is_kept_in_swa(self, pages: IntArray) -> BoolArray:
        """Whether the cache claims the SWA peer of each page."""
        return np.zeros(len(pages), dtype=np.bool_) if self.swa is None else self.swa.is_kept(self._swa_peers(pages))

    def is_idle_in_swa(self, pages: IntArray) -> BoolArray:
        """Whether the cache alone claims the SWA peer of each page."""
        kept = self.is_kept_in_swa(pages)
        return kept if self.swa is None else kept & ~self.swa.is_held(self._swa_peers(pages))

    def translate(self, slots: FullLoc) -> SwaLoc:
        """The SWA slots of `slots` (any shape, on the allocator's device); 0, the null slot, where there is none."""
        return SwaLoc(self.full_to_swa.tensor[slots])

    def reset(self) -> None:
        """Forget every holder, the cache too: all pages are free, nothing is mapped, nothing is frozen."""
        if self.cache is not None:
            self.cache.reset()
        for pool in self.pools:
            pool.reset()
        self.full_to_swa.clear()
        self._frozen_for = []

    def check(self) -> None:
        """Assert invariants 1, 2 and 4; cheap enough to call after every operation of a test."""
        self.full.check()
        if self.cache is not None:
            self.cache.check()
        mapping = self.full_to_swa.host.reshape(-1, self.page_size)  # [pages, page_size]
        heads = mapping[:, 0]
        mapped = heads != 0
        assert (mapping[0] == 0).all(), "page 0 is mapped"
        own = heads[mapped, None] + np.arange(self.page_size)
        assert (mapping[mapped] == own).all(), "a page's SWA slots are not one page"
        assert (mapping[~mapped] == 0).all(), "a page is mapped in part"
        if self.swa is None:
            assert not mapped.any(), "a mapping without an SWA pool"
            return
        self.swa.check()
        swa_pages = heads[mapped] // self.page_size
        assert len(np.unique(swa_pages)) == len(swa_pages), "an SWA page has two owners"
        assert (self.swa.is_held(swa_pages) | self.swa.is_kept(swa_pages)).all(), "a mapped SWA page is free"
        assert len(swa_pages) == self.swa.capacity - self.swa.free_pages, "an SWA page is held but not mapped"
        pages = np.flatnonzero(mapped)
        assert (self.full.is_held(pages) | self.full.is_kept(pages)).all(), "a free full page is mapped"
        more = self.swa.num_holders(swa_pages) > self.full.num_holders(pages)
        assert not more.any(), f"pages {pages[more].tolist()}: more rows hold the SWA peer than the page"
        kept = self.full.is_kept(pages[self.swa.is_kept(swa_pages)])
        assert kept.all(), "the cache keeps the peer of a page that it does not"

    def _slots(self, pages: IntArray) -> IntArray:
        return (pages[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1)

    def _pages(self, slots: FullLoc, operation: str) -> tuple[IntArray, IntArray]:
        """Page ids of whole pages, named slot by slot in any order, and where the first slot of each is."""
        ids = slots.cpu().numpy()
        heads = np.flatnonzero(ids % self.page_size == 0)
        pages: IntArray = ids[heads] // self.page_size
        whole = len(ids) == len(pages) * self.page_size and bool((np.sort(self._slots(pages)) == np.sort(ids)).all())
        if not whole:
            raise DoubleFreeError(f"{operation} takes whole pages of {self.page_size} slots, got slots {ids.tolist()}")
        return pages, heads

    def _swa_peers(self, pages: IntArray) -> IntArray:
        """The SWA page of each full page, 0 where there is none."""
        return self.full_to_swa.host[pages * self.page_size] // self.page_size

    def _release_swa(self, pages: IntArray) -> None:
        """Rows give up the SWA peers of `pages`."""
        assert self.swa is not None
        self._unmap(pages[self.swa.free(self._swa_peers(pages))])

    def _unmap(self, pages: IntArray) -> None:
        """The SWA peers of `pages` are free."""
        self.full_to_swa[self._slots(pages)] = 0
