"""Free pages of one pool: a stack, and who is held. It knows nothing of slots, requests or the other pool.

Page 0 takes the writes of padding: never free, never held. Invariant: free + held = capacity.
"""

from collections.abc import Callable

import numpy as np

from specdec.errors import DoubleFreeError, OutOfSlotsError
from specdec.kvcache.mirror import IntArray


class PagedAllocator:
    """Pages 1..capacity of one pool."""

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        self.capacity = capacity
        self.on_free: Callable[[IntArray], None] | None = None  # told of every page that nobody holds any more
        self.reset()

    def reset(self) -> None:
        """All pages are free."""
        self._stack: IntArray = np.arange(self.capacity, 0, -1, dtype=np.int64)  # the top: last of the first `_free`
        self._free = self.capacity
        self._held = np.zeros(self.capacity + 1, dtype=np.bool_)
        if self.on_free is not None:
            self.on_free(self._stack)

    @property
    def free_pages(self) -> int:
        return self._free

    @property
    def held_pages(self) -> int:
        return self.capacity - self._free

    def is_held(self, pages: IntArray) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        return self._held[pages]

    def owners(self, pages: IntArray) -> IntArray:
        """How many hold each of these pages."""
        return self._held[pages].astype(np.int64)

    def alloc(self, count: int) -> IntArray:
        """Take `count` pages, [count] int64. Raises OutOfSlotsError and takes none when there are fewer."""
        assert count >= 0, f"{count=}"
        if count > self._free:
            raise OutOfSlotsError(f"{self.name} pool: {count} pages wanted, {self._free} of {self.capacity} free")
        pages = self._stack[self._free - count : self._free][::-1].copy()
        self._free -= count
        self._held[pages] = True
        return pages

    def free(self, pages: IntArray) -> None:
        """Give `pages` back. Raises DoubleFreeError, and frees none, when one is not held or named twice."""
        self.require_held(pages)
        self._held[pages] = False
        self._stack[self._free : self._free + len(pages)] = pages[::-1]
        self._free += len(pages)
        if self.on_free is not None:
            self.on_free(pages)

    def require_held(self, pages: IntArray) -> None:
        """Raise DoubleFreeError unless all `pages` are held and none is named twice."""
        in_range = (pages >= 1) & (pages <= self.capacity)
        if not in_range.all() or not self._held[pages].all() or len(np.unique(pages)) != len(pages):
            bad = [int(p) for p in pages if not (1 <= p <= self.capacity) or not self._held[p]]
            raise DoubleFreeError(f"{self.name} pool: pages {bad or pages.tolist()} are not held, or named twice")

    def check(self) -> None:
        """free + held = capacity, and no page is both or twice."""
        free = self._stack[: self._free]
        assert len(np.unique(free)) == len(free), f"{self.name}: a page is free twice"
        assert not self._held[free].any(), f"{self.name}: a free page is held"
        assert not self._held[0], f"{self.name}: page 0 is held"
        assert int(self._held.sum()) + self._free == self.capacity, (
            f"{self.name}: held {int(self._held.sum())} + free {self._free} != {self.capacity}"
        )
