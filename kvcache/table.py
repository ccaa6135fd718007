"""The request table: which slots each running request owns, how many of them are committed, and commit itself.

One row, by position:

    0            evicted_len          S - retain           S                    S + reserve        capacity
    |-- SWA freed --|-- page slack ------|-- SWA window ------|-- speculative ------|-- page rounding --|
    |------------------ committed ----------------------------|------------ not committed -------------|

Committed slots hold the K/V of tokens that are final. The slots behind them are the request's reserve: the next
verify writes its tree nodes there, and `commit` brings the accepted path to the front of it. With one slot a page the
row is permuted and no K/V moves; with larger pages the accepted rows move instead. Rejection costs nothing.
"""

import numpy as np
import torch

from specdec.errors import KVStateError, OutOfSlotsError
from specdec.kvcache.hybrid import HybridAllocator
from specdec.kvcache.mirror import IntArray, MirroredArray
from specdec.kvcache.spaces import FullLoc

FROZEN_EXTRA_KEYS = 2
"""What a frozen drafter reads beyond the target's need (window - 1 committed keys): it sees the window + 1 newest."""


def swa_slots_held(retain: int, num_nodes: int, page_size: int) -> int:
    """Fewest SWA slots a decoding request can do with: retained keys, its reserve, rounding to pages at both ends."""
    return retain + num_nodes + 2 * page_size - 2


class RequestTable:
    """Rows of full slots, `max_len` tokens and a reserve of `reserve` slots each.

    `extra_keys`: committed keys to keep in SWA beyond the target's own window, for a drafter that reads them.
    `rows` arguments are int64 arrays of row numbers; `slots` has one extra row (the last), all sink slots, for padding.
    """

    def __init__(
        self,
        allocator: HybridAllocator,
        *,
        max_requests: int,
        max_len: int,
        reserve: int,
        extra_keys: int = FROZEN_EXTRA_KEYS,
    ) -> None:
        self.allocator = allocator
        self.reserve = reserve
        self.max_requests = max_requests
        page_size = allocator.page_size
        width = -(-(max_len + reserve) // page_size) * page_size
        self.slots = MirroredArray((max_requests + 1, width), allocator.device)
        self.committed_len: IntArray = np.zeros(max_requests + 1, dtype=np.int64)
        self.capacity: IntArray = np.zeros(max_requests + 1, dtype=np.int64)
        self.evicted_len: IntArray = np.zeros(max_requests + 1, dtype=np.int64)
        self._active = np.zeros(max_requests + 1, dtype=np.bool_)
        window = allocator.layout.window
        self.extra_keys = extra_keys
        self.retain = None if window is None else window - 1 + extra_keys

    @property
    def padding_row(self) -> int:
        """A row that is never opened: all its slots are the sink."""
        return self.max_requests

    @property
    def active_rows(self) -> IntArray:
        return np.flatnonzero(self._active)

    def open(self) -> int:
        """Take a free row. Raises KVStateError when there is none."""
        free = np.flatnonzero(~self._active[: self.max_requests])
        if len(free) == 0:
            raise KVStateError(f"all {self.max_requests} rows of the request table are in use")
        row = int(free[0])
        self._active[row] = True
        return row

    def close(self, row: int) -> None:
        """Free everything the row owns."""
        self.allocator.require_unfrozen("close")
        self._require_active(row)
        self.allocator.free(self._owned(row, 0, int(self.capacity[row])))
        self.slots[row] = 0
        self.committed_len[row] = self.capacity[row] = self.evicted_len[row] = 0
        self._active[row] = False

    def pages_needed(self, row: int, length: int) -> int:
        """Pages that `ensure(row, length)` would allocate."""
        page_size = self.allocator.page_size
        return max(0, -(-(length - int(self.capacity[row])) // page_size))

    def ensure(self, row: int, length: int) -> None:
        """Own at least `length` slots. Raises OutOfSlotsError, with nothing taken, when a pool cannot give them."""
        self._require_active(row)
        width = self.slots.host.shape[1]
        if length > width:
            raise OutOfSlotsError(f"row {row}: {length} slots wanted, a row has {width}")
        num_pages = self.pages_needed(row, length)
        if num_pages == 0:
            return
        start = int(self.capacity[row])
        fresh = self.allocator.alloc(num_pages)
        self.slots[row, start : start + len(fresh)] = fresh.numpy()
        self.capacity[row] += len(fresh)

    def commit(self, rows: IntArray, lengths: IntArray, path: IntArray | None = None) -> None:
        """Make the K/V of an accepted path final.

        `path` [B, D]: node numbers, in order, of the path accepted for each row; node n was written to the slot at
        position committed_len + n. None: nodes 0..length-1 (a prefill chunk). `lengths` [B]: how many of them to
        commit, shorter than the path when a stop condition cut it. Afterwards committed_len has grown by `lengths`.
        """
        self.allocator.require_unfrozen("commit")
        start = self.committed_len[rows]
        if (start + lengths > self.capacity[rows]).any():
            raise KVStateError(f"rows {rows.tolist()}: commit of {lengths.tolist()} goes past the slots they own")
        if path is not None:
            columns = np.arange(path.shape[1])
            taken = columns < lengths[:, None]  # [B, D]
            if (taken & ((path < 0) | (start[:, None] + path >= self.capacity[rows][:, None]))).any():
                raise KVStateError(f"rows {rows.tolist()}: a path names nodes past the slots they own: {path.tolist()}")
            displaced = taken & (path != columns)
            if displaced.any():
                self._bring_forward(rows, start, path, taken, displaced)
        self.committed_len[rows] = start + lengths

    def truncate(self, row: int, length: int) -> None:
        """Forget committed tokens past `length`; pages beyond its reserve are freed.

        Raises KVStateError when the SWA keys that position `length` needs were evicted already.
        """
        self.allocator.require_unfrozen("truncate")
        self._require_active(row)
        if not 0 <= length <= self.committed_len[row]:
            raise KVStateError(f"row {row}: truncate to {length}, committed {int(self.committed_len[row])}")
        if self.retain is not None and self.evicted_len[row] > max(0, length - self.retain):
            raise KVStateError(
                f"row {row}: truncate to {length} needs SWA keys from {max(0, length - self.retain)}, "
                f"evicted up to {int(self.evicted_len[row])}"
            )
        self.committed_len[row] = length
        page_size = self.allocator.page_size
        keep = min(int(self.capacity[row]), -(-(length + self.reserve) // page_size) * page_size)
        if keep < self.capacity[row]:
            self.allocator.free(self._owned(row, keep, int(self.capacity[row])))
            self.slots[row, keep : int(self.capacity[row])] = 0
            self.capacity[row] = keep

    def evict(self, rows: IntArray, *, slack_pages: int = 1) -> int:
        """Free the SWA slots of tokens that no future query can see; returns how many pages that were.

        `slack_pages` pages behind the window stay: one in the usual course, none when the pool is short.
        """
        self.allocator.require_unfrozen("evict")
        if self.retain is None:
            return 0
        page_size = self.allocator.page_size
        target = ((self.committed_len[rows] - self.retain) // page_size - slack_pages) * page_size
        behind = target > self.evicted_len[rows]
        before = self.evicted_len[rows].sum()
        for row, end in zip(rows[behind].tolist(), target[behind].tolist(), strict=True):
            self.allocator.evict(self._owned(row, int(self.evicted_len[row]), end))
            self.evicted_len[row] = end
        return int(self.evicted_len[rows].sum() - before) // page_size

    def check(self) -> None:
        """Assert the allocator's invariants, that rows own disjoint held pages, and invariant 3 (windows mapped)."""
        self.allocator.check()
        page_size = self.allocator.page_size
        mapping = self.allocator.full_to_swa.host
        owned: list[int] = []
        for row in range(self.max_requests + 1):
            slots = self.slots.host[row]
            capacity, length, evicted = (int(x[row]) for x in (self.capacity, self.committed_len, self.evicted_len))
            assert (slots[capacity:] == 0).all(), f"{row=}: slots behind its capacity"
            if not self._active[row]:
                assert capacity == length == evicted == 0, f"{row=} is closed but owns something"
                continue
            assert evicted <= length <= capacity, f"{row=}: {evicted=} {length=} {capacity=}"
            by_page = slots[:capacity].reshape(-1, page_size)  # [pages, page_size]
            in_order = by_page == by_page[:, :1] + np.arange(page_size)
            assert in_order.all() and (by_page[:, 0] % page_size == 0).all(), f"{row=}: not whole pages in order"
            pages = by_page[:, 0] // page_size
            assert 0 not in pages, f"{row=}: owns the sink"
            owned.extend(pages.tolist())
            if self.retain is not None:
                window_start = max(0, length - self.retain)
                assert evicted <= window_start, f"{row=}: evicted {evicted}, but the window starts at {window_start}"
                assert (mapping[slots[:evicted]] == 0).all(), f"{row=}: an evicted token is mapped"
                assert (mapping[slots[evicted:capacity]] != 0).all(), f"{row=}: a token in the window is unmapped"
        assert len(set(owned)) == len(owned), "a page is owned by two rows"
        assert self.allocator.full.is_held(np.array(owned, dtype=np.int64)).all(), "a row owns a free page"
        assert len(owned) == self.allocator.full.held_pages, "a held page belongs to no row"

    def _bring_forward(
        self,
        rows: IntArray,
        start: IntArray,
        path: IntArray,
        taken: np.ndarray[tuple[int, ...], np.dtype[np.bool_]],
        displaced: np.ndarray[tuple[int, ...], np.dtype[np.bool_]],
    ) -> None:
        """Put the K/V of path node i at position start + i, for every i taken."""
        if self.allocator.page_size == 1:
            width = int(np.where(taken, path, 0).max()) + 1
            rank = np.tile(np.arange(width) + width, (len(rows), 1))  # nodes off the path keep their order, behind it
            i_row, i_step = np.nonzero(taken)
            rank[i_row, path[i_row, i_step]] = i_step
            order = np.argsort(rank, axis=1, kind="stable")  # [B, width]
            columns = np.minimum(start[:, None] + np.arange(width), self.slots.host.shape[1] - 1)
            window = self.slots.host[rows[:, None], columns]
            self.slots[rows[:, None], columns] = np.take_along_axis(window, order, axis=1)
        else:
            i_row, i_step = np.nonzero(displaced)
            source = self.slots.host[rows[i_row], start[i_row] + path[i_row, i_step]]
            destination = self.slots.host[rows[i_row], start[i_row] + i_step]
            device = self.allocator.device
            self.allocator.move(
                FullLoc(torch.from_numpy(source).to(device)), FullLoc(torch.from_numpy(destination).to(device))
            )

    def _owned(self, row: int, start: int, end: int) -> FullLoc:
        return FullLoc(torch.from_numpy(self.slots.host[row, start:end].copy()))

    def _require_active(self, row: int) -> None:
        if not 0 <= row < self.max_requests or not self._active[row]:
            raise KVStateError(f"row {row} is not open")
