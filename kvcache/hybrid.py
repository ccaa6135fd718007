"""One allocator over the full pool and the SWA pool: the single authority on slots.

It is the only place that makes a `SwaLoc` from a `FullLoc`, the one object that never changes identity (every view is
resolved from it), and the holder of the FROZEN state. Paging is in lockstep: a full page has one SWA peer, or none
once it is evicted. Invariants (`check`):

    1. free + held = capacity, per pool; no page has two owners.
    2. full_to_swa[slot] is 0 when unmapped or evicted; non-zero entries are distinct and never free.
    4. alloc takes from both pools or from neither.
    5. free: read mapping, free SWA, clear mapping, free full; freeing twice raises.
    6. evict frees SWA slots only.        (3, windows stay mapped, needs lengths: `RequestTable.check`)
"""

import numpy as np
import torch

from specdec.errors import DoubleFreeError, FrozenKVError, OutOfSlotsError
from specdec.kvcache.mirror import IntArray, MirroredArray
from specdec.kvcache.paged import PagedAllocator
from specdec.kvcache.spaces import FullLoc, Space, SwaLoc


class HybridAllocator:
    """Slots of both spaces.

    `full_pages` and `swa_pages` are usable pages of `page_size` slots each, page 0 not counted; `swa_pages` is None for
    a model without sliding layers.
    """

    def __init__(self, *, full_pages: int, swa_pages: int | None, page_size: int, device: torch.device) -> None:
        self.page_size = page_size
        self.device = device
        self.full = PagedAllocator("full", full_pages)
        self.swa = None if swa_pages is None else PagedAllocator("swa", swa_pages)
        self.full_to_swa = MirroredArray(((full_pages + 1) * page_size,), device)
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
        """From now on nothing may change, for `worker` reads. Raises FrozenKVError when it already does."""
        if any(worker is other for other in self._frozen_for):
            raise FrozenKVError(f"{type(worker).__name__} already holds a frozen view; views do not nest on one worker")
        self._frozen_for.append(worker)

    def thaw(self, worker: object) -> None:
        """The end of `freeze`."""
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
        """Pages that `alloc` can give now: the minimum of what both pools have."""
        return min(self.full.free_pages, self.swa.free_pages) if self.swa is not None else self.full.free_pages

    def alloc(self, num_pages: int) -> FullLoc:
        """Take whole pages from both pools, or from neither.

        Returns their full slots [num_pages * page_size] int64 on the host, already mapped to SWA slots.
        Raises OutOfSlotsError, with nothing taken, when either pool has fewer.
        """
        self.require_unfrozen("alloc")
        assert num_pages >= 0, f"{num_pages=}"
        if num_pages > self.available_pages:
            swa = "" if self.swa is None else f", {self.swa.free_pages} of {self.swa.capacity} in the SWA pool"
            raise OutOfSlotsError(
                f"{num_pages} pages wanted; free: {self.full.free_pages} of {self.full.capacity} in the full pool{swa}"
            )
        slots = self._slots(self.full.alloc(num_pages))
        if self.swa is not None and num_pages:
            self.full_to_swa[slots] = self._slots(self.swa.alloc(num_pages))
        return FullLoc(torch.from_numpy(slots))

    def free(self, slots: FullLoc) -> None:
        """Give back whole pages, named by all their slots. Raises DoubleFreeError when one is not held."""
        self.require_unfrozen("free")
        pages = self._pages(slots, "free")
        self.full.require_held(pages)
        self._release_swa(pages)
        self.full.free(pages)

    def evict(self, slots: FullLoc) -> None:
        """Free the SWA peers of whole pages; their full slots stay held. Raises DoubleFreeError on an evicted page."""
        self.require_unfrozen("evict")
        pages = self._pages(slots, "evict")
        if self.swa is None:
            return
        self.full.require_held(pages)
        if (self.full_to_swa.host[pages * self.page_size] == 0).any():
            raise DoubleFreeError(f"SWA pool: pages {pages.tolist()} are not all mapped; some were evicted before")
        self._release_swa(pages)

    def translate(self, slots: FullLoc) -> SwaLoc:
        """The SWA slots of `slots` (any shape, on the allocator's device); 0, the null slot, where there is none."""
        return SwaLoc(self.full_to_swa.tensor[slots])

    def reset(self) -> None:
        """Forget every holder: all pages are free, nothing is mapped, nothing is frozen."""
        self.full.reset()
        if self.swa is not None:
            self.swa.reset()
        self.full_to_swa.clear()
        self._frozen_for = []

    def check(self) -> None:
        """Assert invariants 1, 2 and 5; cheap enough to call after every operation of a test."""
        self.full.check()
        mapping = self.full_to_swa.host.reshape(-1, self.page_size)  # [pages, page_size]
        heads = mapping[:, 0]
        assert (mapping[0] == 0).all(), "page 0 is mapped"
        offsets = np.arange(self.page_size)
        mapped = heads != 0
        assert (mapping[mapped] == heads[mapped, None] + offsets).all(), "a page's SWA slots are not one page"
        assert (mapping[~mapped] == 0).all(), "a page is mapped in part"
        if self.swa is None:
            assert not mapped.any(), "a mapping without an SWA pool"
            return
        self.swa.check()
        swa_pages = heads[mapped] // self.page_size
        assert len(np.unique(swa_pages)) == len(swa_pages), "an SWA page has two owners"
        assert self.swa.is_held(swa_pages).all(), "a mapped SWA page is free"
        assert len(swa_pages) == self.swa.held_pages, "an SWA page is held but not mapped"
        assert self.full.is_held(np.flatnonzero(mapped)).all(), "a free full page is mapped"

    def _slots(self, pages: IntArray) -> IntArray:
        return (pages[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1)

    def _pages(self, slots: FullLoc, operation: str) -> IntArray:
        """Page ids of whole pages, named slot by slot in any order."""
        ids = np.sort(slots.cpu().numpy())
        pages: IntArray = ids[:: self.page_size] // self.page_size
        whole = len(ids) % self.page_size == 0 and bool((np.sort(self._slots(pages)) == ids).all())
        if not whole:
            raise DoubleFreeError(f"{operation} takes whole pages of {self.page_size} slots, got slots {ids.tolist()}")
        return pages

    def _release_swa(self, pages: IntArray) -> None:
        """Free the SWA peers of those pages that still have one, and clear the mapping."""
        if self.swa is None:
            return
        heads = self.full_to_swa.host[pages * self.page_size]
        self.swa.free(heads[heads != 0] // self.page_size)
        self.full_to_swa[self._slots(pages)] = 0
