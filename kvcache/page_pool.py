"""Pages of one pool: a stack of free pages, and the claims on the other pages. It knows no slots and no other pool.

    free        without a claim                   alloc: held by one row
    held        by one row or more                share, free: one row more, one less
    cached      by the prefix cache as well       cache_pages, uncache_pages
    evictable   by the prefix cache alone

Page 0 takes the writes of padding and is never claimed. Invariant: free + held + evictable = capacity.
"""

from collections.abc import Callable

import numpy as np

from specdec.errors import DoubleFreeError
from specdec.gpu.mirrored_array import IntArray

BoolArray = np.ndarray[tuple[int], np.dtype[np.bool_]]


class PagePool:
    """Pages 1..capacity of one pool."""

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        self.capacity = capacity
        self.peak_pages = 0  # the most pages that rows held at one time
        self.on_free: Callable[[IntArray], None] | None = None  # called with pages that lost their last claim
        self.reset()

    def reset(self) -> None:
        self._stack: IntArray = np.arange(self.capacity, 0, -1, dtype=np.int64)  # free pages, top of the stack last
        self.free_pages = self.capacity
        self._held: IntArray = np.zeros(self.capacity + 1, dtype=np.int64)  # rows that hold each page
        self._cached = np.zeros(self.capacity + 1, dtype=np.bool_)  # is it claimed by the cache?
        self.evictable_pages = 0
        if self.on_free is not None:
            self.on_free(self._stack)

    @property
    def held_pages(self) -> int:
        return self.capacity - self.free_pages - self.evictable_pages

    @property
    def cached_pages(self) -> int:
        """Pages that the cache claims, held by rows or not."""
        return int(np.count_nonzero(self._cached))

    @property
    def available_pages(self) -> int:
        """Pages that no row holds: free pages, and those that only the cache claims."""
        return self.free_pages + self.evictable_pages

    def is_held(self, pages: IntArray) -> BoolArray:
        return self._held[pages] > 0

    def is_cached(self, pages: IntArray) -> BoolArray:
        return self._cached[pages]

    def row_refs(self, pages: IntArray) -> IntArray:
        return self._held[pages]

    def alloc(self, count: int) -> IntArray:
        """Take `count` pages, [count] int64, of those that are free."""
        assert 0 <= count <= self.free_pages, f"{self.name}: {count} of {self.free_pages} free pages"
        pages = self._stack[self.free_pages - count : self.free_pages][::-1].copy()
        self.free_pages -= count
        self._held[pages] = 1
        self.peak_pages = max(self.peak_pages, self.held_pages)
        return pages

    def share(self, pages: IntArray) -> None:
        """One more row holds `pages`, which have a claim already."""
        self._require(self.is_held(pages) | self._cached[pages], pages, "free")
        self.evictable_pages -= int(np.count_nonzero(self._held[pages] == 0))
        self._held[pages] += 1
        self.peak_pages = max(self.peak_pages, self.held_pages)

    def free(self, pages: IntArray) -> BoolArray:
        """Release one claim of rows per occurrence of a page in `pages`. Returns which of the pages are free now.

        If a page is named more often than rows hold it, raises DoubleFreeError and frees none.
        """
        distinct, times = self.require_claims(pages)
        self._held[distinct] -= times
        left, kept = self._held[distinct] == 0, self._cached[distinct]
        self.evictable_pages += int(np.count_nonzero(left & kept))
        self._push(distinct[left & ~kept])
        freed: BoolArray = (self._held[pages] == 0) & ~self._cached[pages]
        return freed

    def cache_pages(self, pages: IntArray) -> None:
        """Add the cache's claim on `pages`, which rows hold."""
        self.require_claims(pages, once=pages)
        self._require(~self._cached[pages], pages, "cached already")
        self._cached[pages] = True

    def uncache_pages(self, pages: IntArray) -> BoolArray:
        """Release the cache's claim on `pages`. Returns which of the pages are free now."""
        self._require(self._cached[pages], pages, "not cached")
        self._cached[pages] = False
        left: BoolArray = self._held[pages] == 0
        self.evictable_pages -= int(np.count_nonzero(left))
        self._push(pages[left])
        return left

    def require_claims(self, pages: IntArray, once: IntArray | None = None) -> tuple[IntArray, IntArray]:
        """Raise DoubleFreeError if a page is named more often than rows hold it.

        once: ids of claims, all of which must differ. Returns the distinct pages in order of first mention, and how
        often each is named.
        """
        distinct, times = pages, np.ones_like(pages)
        if _named_twice(pages):
            ordered, first, counts = np.unique(pages, return_index=True, return_counts=True)
            order = np.argsort(first)
            distinct, times = ordered[order], counts[order]
        in_range = (distinct >= 1) & (distinct <= self.capacity)
        holders = self._held[np.where(in_range, distinct, 0)]  # no row holds page 0
        if (holders < times).any() or (once is not None and _named_twice(once)):
            bad = distinct[holders == 0].tolist() or pages.tolist()
            raise DoubleFreeError(f"{self.name} pool: pages {bad} are not held, or named twice")
        return distinct, times

    def check(self) -> None:
        """Assert free + held + evictable = capacity, and that each page has exactly one of these states."""
        free = self._stack[: self.free_pages]
        assert len(np.unique(free)) == len(free), f"{self.name}: a page is free twice"
        assert not self._held[free].any(), f"{self.name}: a free page is held"
        assert not self._cached[free].any(), f"{self.name}: a free page is cached"
        assert not self._held[0] and not self._cached[0], f"{self.name}: page 0 is held"
        assert (self._held >= 0).all(), f"{self.name}: a page has a negative number of holders"
        held = int(np.count_nonzero(self._held))
        evictable, counted = int(np.count_nonzero(self._cached & (self._held == 0))), self.evictable_pages
        assert evictable == counted, f"{self.name}: {evictable} pages are the cache's alone, {counted} were counted"
        total = f"{self.name}: held {held} + evictable {evictable} + free {self.free_pages} != {self.capacity}"
        assert held + evictable + self.free_pages == self.capacity, total

    def _push(self, freed: IntArray) -> None:
        self._stack[self.free_pages : self.free_pages + len(freed)] = freed[::-1]
        self.free_pages += len(freed)
        if self.on_free is not None and len(freed):
            self.on_free(freed)

    def _require(self, fine: BoolArray, pages: IntArray, what: str) -> None:
        wrong = not fine.all() or _named_twice(pages)
        assert not wrong, f"{self.name} pool: of pages {pages.tolist()} some are {what}, or named twice"


def _named_twice(pages: IntArray) -> bool:
    rising = pages[1:] > pages[:-1]
    if rising.all() or (pages[1:] < pages[:-1]).all():  # usual: pages of a fresh pool, or of a prompt that ended
        return False
    ordered = np.sort(pages)
    return bool((ordered[1:] == ordered[:-1]).any())
