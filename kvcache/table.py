"""The request table: which slots each running request owns, how many of them are committed, and commit itself.

One row, by position:

    0            evicted_len          S - retain           S                    S + lookahead      capacity
    |- peers freed -|-- page slack ------|-- window ----------|-- speculative ------|-- ahead, rounding-|
    |------------------ committed ----------------------------|------------ not committed -------------|

Committed slots hold the K/V of final tokens. The slots after them are the request's lookahead: the next verify writes
its tree nodes there, and a commit moves the accepted path to the front of the lookahead. With one slot per page, a
commit permutes the row's slot numbers and no K/V moves; with larger pages it moves the accepted K/V. A rejected draft
costs nothing: its slots are written again. Each windowed group has its own evicted_len and retain; the primary group
evicts nothing.

A tree over a window. Node n has the slot of cell S + n of its row, in every group, though its position is S + its
depth. In a group with a window, a verify by kernels reads

    committed keys   by page, through a table that begins at page_floor(S - retain) (`attention/kernels/page_table.py`)
    own keys         by slot, one list per path: the committed keys from the last multiple of 64 on, and the node's
                     ancestors, found by walking its parents (`attention/kernels/own_keys.py`)
    of both          those that the window reaches: key position > query position - window

The backend in plain torch gathers all keys of that page table and all nodes, and masks them by the same rules.

`evict_unseen` frees only peers before S - max_lag - retain, with S as the host has committed it. A round in flight
begins at that S or a later one, so its tables name no evicted page.

The device commits within a round (a kernel in `closing`, or `commit_on_device` in plain torch). The host applies the
same permutation when it settles the round (`commit_on_host`).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from specdec.errors import KVStateError, OutOfSlotsError, name_row
from specdec.gpu.mirrored_array import IntArray, MirroredArray, upload
from specdec.kvcache.allocator import HybridAllocator
from specdec.kvcache.layout import NULL_SLOT, ByGroup, PrimaryLoc

PREALLOC_SLOTS = 16
"""Extra slots that a row gets, and evictable peers that it may keep, while the pools have ample room. So most rounds
change neither the slots nor the maps on the host."""

PREALLOC_HEADROOM = 4
"""Room is ample if every pool has PREALLOC_HEADROOM times PREALLOC_SLOTS free slots for each row."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of the request table that take part in a forward: index [B] int64, on the device.

    max_committed_len: the host's upper bound on the rows' committed lengths. It sets the width of tables, never their
    contents.
    """

    index: torch.Tensor
    max_committed_len: int


class Move(NamedTuple):
    """K/V to copy from slot to slot, [M] each; pairs (0, 0) copy nothing."""

    source: PrimaryLoc
    destination: PrimaryLoc


def window_slots_held(retain: int, num_nodes: int, page_size: int) -> int:
    """Slots that a decoding request needs in a windowed group: retained keys, its lookahead, and rounding to pages at
    both ends."""
    return retain + num_nodes + 2 * page_size - 2


class RequestTable:
    """Rows of primary slots. A row has room for `max_len` tokens and a lookahead of `lookahead` slots. The last row is
    padding: it is never opened, and all its slots are null slots. `rows` arguments on the host are row numbers [B],
    int64; `commit_on_device` takes `Rows`.

    reread: the last `reread` tokens of adopted pages run again, because the drafter needs their states. Their K/V are
        not stored a second time.
    shared_len: position of each row's first own K/V, on host and device: the end of its adopted pages.
    extra_keys: committed keys that every windowed group keeps beyond its window, for a drafter that reads them.
    max_lag: [groups] upper bound on the committed tokens that a drafter has not read yet, or that follow the last copy
    of a recurrent state; None: 0 in each group.
    retain: [groups] how many of the newest committed keys a forward may read (in the primary group: all), on host and
        device. Eviction keeps this many before the oldest token of the lag.
    evicted_len: [groups, rows] number of first tokens whose peers are freed.
    """

    def __init__(
        self,
        allocator: HybridAllocator,
        *,
        max_requests: int,
        max_len: int,
        lookahead: int,
        extra_keys: int = 0,
        reread: int = 0,
        max_lag: ByGroup[int] | None = None,
    ) -> None:
        self.allocator = allocator
        self.lookahead = lookahead
        self.max_requests = self.padding_row = max_requests
        num_rows, page_size = max_requests + 1, allocator.page_size
        width = -(-(max_len + lookahead) // page_size) * page_size
        self.slots = MirroredArray((num_rows, width), allocator.device)
        self.committed_len = MirroredArray((num_rows,), allocator.device)
        assert reread <= extra_keys, f"{reread=} tokens need that many extra keys, {extra_keys=}"
        self.shared_len = MirroredArray((num_rows,), allocator.device)
        self.reread = reread
        self.capacity: IntArray = np.zeros(num_rows, dtype=np.int64)
        self.evicted_len: IntArray = np.zeros((len(allocator.pools), num_rows), dtype=np.int64)
        self._active = np.zeros(num_rows, dtype=np.bool_)
        self.extra_keys = extra_keys
        self.max_lag = allocator.pools.map(lambda pool: 0) if max_lag is None else max_lag
        windows = [kept.num_kept(lookahead) for kept in allocator.groups]
        retained = [width if window is None else window - 1 + extra_keys for window in windows]
        self.retain: IntArray = np.array(retained, dtype=np.int64)
        self.retain_on_device = upload(self.retain, allocator.device)

    @property
    def active_rows(self) -> IntArray:
        return np.flatnonzero(self._active)

    def rows(self, rows: IntArray) -> Rows:
        return Rows(upload(rows, self.allocator.device), int(self.committed_len.host[rows].max(initial=0)))

    def reset(self) -> None:
        """Forget every request, whatever the state of the table and its allocator: no row is open and no page is
        held."""
        self.allocator.reset()
        self.slots.clear()
        self.committed_len.clear()
        self.shared_len.clear()
        self.capacity[:] = self.evicted_len[:] = 0
        self._active[:] = False

    def open_row(self) -> int:
        """Take a free row. Raises KVStateError when there is none."""
        free = np.flatnonzero(~self._active[: self.max_requests])
        if len(free) == 0:
            raise KVStateError(f"all {self.max_requests} rows of the request table are in use")
        self._active[free[0]] = True
        return int(free[0])

    def close_rows(self, rows: IntArray | int) -> None:
        """Free rows and all their slots. The next allocation takes the slots of the last row first."""
        self.allocator.require_unfrozen("close")
        rows = np.atleast_1d(rows)
        self._require_active(rows)
        rows = rows[::-1]
        owners, starts, pages = self._pages_between(rows, np.zeros_like(rows), self.capacity[rows])
        self.allocator.free(pages, rows=owners, evicted=starts < self.evicted_len[:, owners])
        self.slots[row_cells(rows, np.zeros_like(rows), self.capacity[rows])] = 0
        self.shared_len[rows] = 0
        self.committed_len[rows] = 0
        self.capacity[rows] = self.evicted_len[:, rows] = 0
        self._active[rows] = False

    @property
    def has_ample_room(self) -> bool:
        pages = PREALLOC_HEADROOM * self.max_requests * -(-PREALLOC_SLOTS // self.allocator.page_size)
        return min(pool.free_pages for pool in self.allocator.pools) >= pages

    def adopt_pages(self, row: int, pages: IntArray) -> None:
        """Begin an empty row with `pages` that another row or the cache claims. They hold the K/V of the row's first
        tokens, which are committed now, except the last `reread`.

        In each windowed group the last `retain` of these tokens (or all, if there are fewer) must be mapped. Records
        are not adopted.
        """
        self._require_active(np.array([row]))
        assert self.capacity[row] == 0, f"{row=} owns slots already"
        length, evicted = len(pages) * self.allocator.page_size, self.num_evicted(len(pages))
        self.slots[row, :length] = self.allocator.share(pages, evicted)
        self.capacity[row], self.evicted_len[:, row] = length, evicted * self.allocator.page_size
        self.committed_len[row] = max(length - self.reread, 0)
        self.shared_len[row] = length

    def num_evicted(self, num_pages: int) -> IntArray:
        """How many first pages have no peer in a row that begins with `num_pages` adopted pages, [groups]."""
        page_size = self.allocator.page_size
        cached = np.array([retention.cached for retention in self.allocator.groups])
        retained = np.where(cached, self.retain, 0)  # records: none are kept
        evicted: IntArray = np.maximum(0, num_pages * page_size - retained) // page_size
        return evicted

    def pages(self, row: int, num_pages: int) -> IntArray:
        """The first pages that a row owns, in order."""
        page_size = self.allocator.page_size
        return self.slots.host[row, : num_pages * page_size : page_size] // page_size

    def _pages_between(self, rows: IntArray, start: IntArray, end: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Pages from position `start` to `end` [R] of each row: row, first position and page, [M] each."""
        page_size = self.allocator.page_size
        owners, numbers = row_cells(rows, start // page_size, end // page_size)
        return owners, numbers * page_size, self.slots.host[owners, numbers * page_size] // page_size

    def pages_needed(self, rows: IntArray, length: IntArray) -> IntArray:
        """Pages [B] that `ensure_slots(rows, length)` would allocate for each."""
        needed: IntArray = np.maximum(-(-(length - self.capacity[rows]) // self.allocator.page_size), 0)
        return needed

    def ensure_slots(self, rows: IntArray | int, length: IntArray | int, *, ahead: bool = False) -> None:
        """Give each row at least `length` [B] slots. If a pool is too short, raises OutOfSlotsError and takes nothing.

        ahead: with ample room, PREALLOC_SLOTS more for each row if any of them lacks a slot.
        """
        rows, length = np.atleast_1d(rows), np.atleast_1d(length)
        self._require_active(rows)
        width = self.slots.host.shape[1]
        if (length > width).any():
            widest = int(length.argmax())
            message = f"row {rows[widest]}: {length[widest]} slots needed, a row has {width}"
            raise name_row(OutOfSlotsError(message), rows[widest])
        needed = self.pages_needed(rows, length)
        if not needed.any():
            return
        if ahead and self.has_ample_room:
            more = self.pages_needed(rows, np.minimum(length + PREALLOC_SLOTS, width))
            needed = more if more.sum() <= self.allocator.available_pages else needed
        end = self.capacity[rows] + needed * self.allocator.page_size
        self.slots[row_cells(rows, self.capacity[rows], end)] = self.allocator.alloc(int(needed.sum()))
        self.capacity[rows] = end

    def commit_on_device(self, rows: Rows, length: torch.Tensor, path: torch.Tensor | None) -> Move | None:
        """Commit accepted paths on the device; reads no value on the host. `commit_on_host` must follow.

        The first `length` [B] entries of path [B, N] are node numbers, in order, root first; node n was written to the
        slot at position S + n. path None: the drafts are chains, whose nodes are in place already. With pages of more
        than one slot, returns the K/V to move.
        """
        self.allocator.require_unfrozen("commit")
        length = length * (rows.index != self.padding_row)
        move = None if path is None else self._move_path_forward(rows.index, length, path)
        self.committed_len.tensor.index_add_(0, rows.index, length)
        return move

    def _move_path_forward(self, rows: torch.Tensor, length: torch.Tensor, path: torch.Tensor) -> Move | None:
        """Put the path's slots right after the committed ones; with larger pages, return the K/V to move there
        instead."""
        columns = torch.arange(path.shape[1], device=path.device)
        taken = columns < length[:, None]  # [B, N]
        cells = rows[:, None], self.committed_len.tensor[rows][:, None] + columns
        window = self.slots.tensor[cells]  # [B, N]
        if self.allocator.page_size == 1:
            self.slots.tensor[cells] = window.gather(1, path_order(path, taken))
            return None
        displaced = taken & (path != columns)
        source = torch.where(displaced, window.gather(1, path), NULL_SLOT)
        destination = torch.where(displaced, window, NULL_SLOT)
        return Move(PrimaryLoc(source.reshape(-1)), PrimaryLoc(destination.reshape(-1)))

    def commit_on_host(self, rows: IntArray, length: IntArray, path: IntArray) -> None:
        """Repeat `commit_on_device` on the host, with the same arguments: length [B], path [B, N]."""
        self.require_committable(rows, length, path)
        start = self.committed_len.host[rows]
        columns = np.arange(path.shape[1])
        taken = columns < length[:, None]  # [B, N]
        if self.allocator.page_size == 1 and (taken & (path != columns)).any():  # otherwise all nodes are in place
            order = path_order(torch.from_numpy(path), torch.from_numpy(taken)).numpy()
            cells = rows[:, None], start[:, None] + columns
            self.slots.adopt(cells, np.take_along_axis(self.slots.host[cells], order, axis=1))
        self.committed_len.adopt(rows, start + length)

    def commit_chunk_on_host(self, rows: IntArray, length: IntArray) -> None:
        """Commit the next `length` [B] tokens of each row in the order in which they were written: a chunk of a
        prompt."""
        self.require_committable(rows, length, np.zeros((len(rows), 0), dtype=np.int64))
        self.committed_len[rows] = self.committed_len.host[rows] + length

    def require_committable(self, rows: IntArray, length: IntArray, path: IntArray) -> None:
        """Raise KVStateError for a commit past the slots that a row owns, FrozenKVError while frozen."""
        self.allocator.require_unfrozen("commit")
        start, capacity = self.committed_len.host[rows], self.capacity[rows]
        if (past := start + length > capacity).any():
            message = f"rows {rows.tolist()}: commit of {length.tolist()} goes past the slots they own"
            raise name_row(KVStateError(message), rows[past][0])
        taken = np.arange(path.shape[1]) < length[:, None]
        if (astray := (taken & ((path < 0) | (start[:, None] + path >= capacity[:, None]))).any(axis=1)).any():
            message = f"rows {rows.tolist()}: a path names nodes past the slots they own: {path.tolist()}"
            raise name_row(KVStateError(message), rows[astray][0])

    def evict_unseen(self, rows: IntArray, *, slack_pages: int = 1, lazily: bool = False) -> int:
        """In each windowed group, free the peers of tokens that no later query can see; returns the number of pages. A
        chunk in flight may still read freed pages: the device runs launches in order, so only a later launch can
        overwrite them (`runtime/launches.py`).

        `slack_pages` pages before the window are kept as well: usually 1, and 0 when the pool is short. lazily: with
        ample room nothing is freed in a group until a row has PREALLOC_SLOTS such tokens.
        """
        self.allocator.require_unfrozen("evict")
        page_size, freed = self.allocator.page_size, 0
        least = PREALLOC_SLOTS if lazily and self.has_ample_room else 1
        for group in self.allocator.windowed:
            start = self.evicted_len[group, rows]
            read_len = self.committed_len.host[rows] - self.max_lag[group]
            unseen = ((read_len - self.retain[group]) // page_size - slack_pages) * page_size
            end = np.maximum(unseen, start)
            if (end - start).max(initial=0) < least:
                continue
            *_, pages = self._pages_between(rows, start, end)  # a page that several rows share is named once for each
            self.allocator.evict(group, pages)
            self.evicted_len[group, rows] = end
            freed += len(pages)
        return freed

    def check(self) -> None:
        """Assert the allocator's invariants, invariant 6 (windows mapped), that rows account for all its claims, and
        that the device's arrays are equal."""
        self.check_host()
        for mirrored in (self.slots, self.committed_len, self.allocator.maps):
            mirrored.check()

    def check_host(self) -> None:
        """`check` without the device's arrays. Rounds in flight only reorder slots within a row, so it holds during
        them."""
        self.allocator.check()
        page_size, lengths = self.allocator.page_size, self.committed_len.host
        for row, slots in enumerate(self.slots.host):
            capacity, length, evicted = int(self.capacity[row]), int(lengths[row]), self.evicted_len[:, row]
            assert (slots[capacity:] == 0).all(), f"{row=}: slots past its capacity"
            assert self._active[row] or capacity == length == 0, f"{row=} is closed but owns something"
            assert evicted.max() <= length <= capacity, f"{row=}: {evicted=} {length=} {capacity=}"
            adopted = self.num_evicted(self.shared_len.host[row] // page_size) * page_size
            starts = np.maximum(adopted, length - self.retain)
            assert (evicted <= starts).all(), f"{row=}: evicted {evicted}, but the windows start at {starts}"
        rows, first, pages = self._pages_between(np.arange(len(lengths)), np.zeros_like(lengths), self.capacity)
        positions = first[:, None] + np.arange(page_size)
        slots = self.slots.host[rows[:, None], positions]  # [pages, page_size]
        wrong = slots != self.allocator.slots_of(pages).reshape(slots.shape)
        where = f"rows {rows[wrong.any(1)]}, positions {positions[wrong]}, slots {slots[wrong]}"
        assert not wrong.any(), f"{where}: not whole pages in order"
        wrong = pages > self.allocator.primary.capacity
        assert not wrong.any(), f"rows {rows[wrong]}, positions {first[wrong]}: pages {pages[wrong]} do not exist"
        assert len(set(zip(rows.tolist(), pages.tolist(), strict=True))) == len(pages), "a row owns a page twice"
        for group, pool in self.allocator.pools.items():
            seen = first >= self.evicted_len[group, rows]
            wrong = seen & ~self.allocator.is_mapped(group, pages)
            where = f"rows {rows[wrong]}, positions {first[wrong]}"
            assert not wrong.any(), f"{where}: a token in the window of group {group} is unmapped"
            owners = np.bincount(pages[seen], minlength=self.allocator.primary.capacity + 1)  # rows, by primary page
            claims = self.allocator.row_refs(group, np.arange(len(owners)))
            wrong = np.flatnonzero(owners != claims)
            message = f"{pool.name}: {owners[wrong]} rows own pages {wrong}, with {claims[wrong]} claims"
            assert not len(wrong), message

    def _require_active(self, rows: IntArray) -> None:
        closed = ~self._active[rows.clip(-1, self.padding_row)]  # the padding row is the last one and is never open
        if closed.any():
            raise name_row(KVStateError(f"row {rows[closed][0]} is not open"), rows[closed][0])


def row_cells(rows: IntArray, start: IntArray, end: IntArray) -> tuple[IntArray, IntArray]:
    """List the positions from `start` [R] to `end` [R] of each row [R], row after row: rows [M] and positions [M].

    rows 4 7, from 0 5 to 2 6     ->     rows 4 4 7, positions 0 1 5
    """
    count = end - start
    before = np.cumsum(count) - count  # [R] cells of the rows before each
    return np.repeat(rows, count), np.arange(count.sum()) + np.repeat(start - before, count)


def path_order(path: torch.Tensor, taken: torch.Tensor) -> torch.Tensor:
    """Order of the nodes that puts the `taken` [B, N] entries of path [B, N] first: the node at each place, [B, N].

    The other nodes follow in their old order:   path 0 2, of 4 nodes   ->   0 2 1 3
    """
    batch, width = path.shape
    columns = torch.arange(width, device=path.device)
    rank = torch.arange(width, 2 * width + 1, device=path.device).repeat(batch, 1)
    rank = rank.scatter(1, torch.where(taken, path, width), columns.expand(batch, width))  # last: unused entries
    return rank[:, :width].argsort(dim=1, stable=True)
