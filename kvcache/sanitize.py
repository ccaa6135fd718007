"""`SPECDEC_SANITIZE=1`: slots without an owner hold NaN, and locations are checked before a forward uses them.

    before every launch    `check`: slots in the table exist, are held, have peers, and no more owners than they may
    while planning         `note`: a plan differs from the table (`attention/checked_backend.py` compares the two)
    when a page is freed   its K/V become NaN in every store, so that a stale read shows

Page 0, which takes the writes of padding, stays finite: kernels read it where a table is empty. Faults of a plan are
found by tensor operations alone and written to a record on the device, so captured rounds are checked at every replay;
the host reads the record between rounds (`verdict`). It knows no plan and no request.
"""

import os
from collections.abc import Callable
from enum import Enum

import numpy as np
import torch

from specdec.errors import LocationError, name_row
from specdec.gpu.mirrored_array import IntArray, MirroredArray
from specdec.kvcache.index_spaces import Space
from specdec.kvcache.store import KVStore
from specdec.kvcache.table import RequestTable

SETTING = "SPECDEC_SANITIZE"
Capture = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], None], torch.Tensor]]
"""Records a program instead of running it, like `Capture` of `specdec.gpu.captures`."""
BLAME = f"(found by {SETTING}=1; this is a defect of specdec or of a drafter, no user's mistake)"


class Fault(Enum):
    """Faults of a plan; the text follows "row 3, position 17: "."""

    WRITE = "would write to {slot}, where the request table has {expected}"
    SHARED = "would write to {slot}, which has several owners"
    READ = "would read {slot}, where the request table has {expected}"
    COVER = "would not see {expected}: its page table does not cover the prefix, or not the window"
    LENGTH = "is planned after a prefix of {expected_number} tokens, while {number} are committed"
    POISON = "attends to a {space} slot that holds no key of its request: finite queries came out as NaN"


FAULTS = tuple((fault, space) for fault in Fault for space in Space)


def sanitize_requested() -> bool:
    """Is the environment variable set? Engines ask once, when they are made."""
    return os.environ.get(SETTING, "") not in ("", "0")


class Sanitizer:
    """Watches one table, its allocator and the stores that its slots index."""

    def __init__(self, table: RequestTable) -> None:
        self.table = table
        self.allocator = table.allocator
        self.stores: list[KVStore] = []
        pages = self.allocator.full.capacity + 1
        self.owners = MirroredArray((pages,), self.allocator.device)  # of each full page, at the last `check`
        self._record = torch.zeros(5, dtype=torch.int64, device=self.allocator.device)  # the first fault: see `note`
        self._capturing = False
        self.allocator.full.on_free = lambda freed: self._poison(Space.FULL, freed)
        if self.allocator.swa is not None:
            self.allocator.swa.on_free = lambda freed: self._poison(Space.SWA, freed)

    def watch(self, store: KVStore) -> None:
        """One more store: nothing has been written to it, so all of it is poison but page 0."""
        self.stores.append(store)
        for layer in store.layers.values():
            for tensor in (layer.k, layer.v):
                tensor[self.allocator.page_size :] = torch.nan

    def blind(self, capture: Capture) -> Capture:
        """Wraps `capture` so that nothing is read back within it: faults stay in the record until `verdict` is
        called."""

        def captured(program: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
            self._capturing = True
            try:
                return capture(program)
            finally:
                self._capturing = False

        return captured

    def note(
        self,
        fault: Fault,
        space: Space,
        found: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        expected: torch.Tensor,
    ) -> None:
        """Report the first place where `found` [B, M], if any: its row [B], position, slot and expected slot [B, M]."""
        if found.numel() == 0:
            return
        flat = found.reshape(-1)
        first = flat.long().argmax()[None]
        code = torch.full_like(first, 1 + FAULTS.index((fault, space)))
        of_row = rows[:, None].expand_as(found)
        values = [x.expand_as(found).reshape(-1).index_select(0, first) for x in (of_row, positions, slots, expected)]
        fresh = torch.cat([code, *(value.long() for value in values)])
        self._record.copy_(torch.where(flat.any() & (self._record[0] == 0), fresh, self._record))
        if not self._capturing:
            self.verdict()

    def verdict(self) -> None:
        """Raise LocationError for the first fault in the record. Waits for the device."""
        code, row, position, slot, expected = self._record.tolist()
        if code == 0:
            return
        self._record.zero_()
        fault, space = FAULTS[code - 1]
        words = {"space": space.value, "slot": self._slot(space, slot), "expected": self._slot(space, expected)}
        text = fault.value.format(**words, number=slot, expected_number=expected)
        raise name_row(LocationError(f"row {row}, position {position}: {text} {BLAME}"), row)

    def check(self) -> None:
        """Assert, on the host alone, that each row of the table owns the slots it names.

        Rounds under way reorder slots within a row and change nothing of this. Raises LocationError.
        """
        allocator, table, page_size = self.allocator, self.table, self.allocator.page_size
        mapping = allocator.full_to_swa.host
        count = np.zeros(allocator.full.capacity + 1, dtype=np.int64)
        for row in table.active_rows.tolist():
            capacity, committed = int(table.capacity[row]), int(table.committed_len.host[row])
            slots = table.slots.host[row, :capacity]
            positions = np.arange(capacity)
            where = (row, positions, slots, Space.FULL)
            in_bounds = (slots >= page_size) & (slots < allocator.num_slots(Space.FULL))
            self._require(in_bounds, *where, "is outside of the pool")
            pages = slots // page_size
            self._require(allocator.full.is_held(pages), *where, "has been freed")
            self._require(slots % page_size == positions % page_size, *where, "is out of its place in the page")
            if committed > capacity:
                said = f"row {row}: {committed} tokens are committed, but it owns {capacity} slots {BLAME}"
                raise name_row(LocationError(said), row)
            count[pages[::page_size]] += 1
            if allocator.swa is None:
                continue
            kept = positions[int(table.evicted_len[row]) :]
            peers = mapping[slots[kept]]
            where = (row, kept, peers, Space.SWA)
            mapped = (peers >= page_size) & (peers < allocator.num_slots(Space.SWA))
            self._require(mapped, *where, f"is no peer of full slots {_few(slots[kept][~mapped])}")
            self._require(allocator.swa.is_held(peers // page_size), *where, "has been freed")
        times = np.bincount(mapping, minlength=2)
        times[0] = 0
        if (times > 1).any():
            peer = int(times.argmax())
            both = _few(np.flatnonzero(mapping == peer))
            raise LocationError(f"full slots {both} have the same peer, swa slot {peer} {BLAME}")
        self._check_owners(count)

    def _check_owners(self, count: IntArray) -> None:
        """No full page is in more rows than it has owners; `owners` follows."""
        full, pages = self.allocator.full, np.arange(len(count))
        owners, holders = full.owners(pages), full.num_holders(pages)
        if (count > holders).any():
            page = int((count > holders).argmax())
            slot = self._slot(Space.FULL, page * self.allocator.page_size)
            raise LocationError(f"{slot} is in {count[page]} rows and has {holders[page]} owners {BLAME}")
        changed = np.flatnonzero(owners != self.owners.host)
        self.owners[changed] = owners[changed]

    def _require(
        self, right: np.ndarray, row: int, positions: IntArray, slots: IntArray, space: Space, text: str
    ) -> None:
        if not right.all():
            first = int(np.argmin(right))
            slot = self._slot(space, int(slots[first]))
            raise name_row(LocationError(f"row {row}, position {positions[first]}: {slot} {text} {BLAME}"), row)

    def _slot(self, space: Space, slot: int) -> str:
        """A slot and its owners, in words."""
        name = f"{space.value} slot {slot}"
        if slot < self.allocator.page_size:
            return f"{name} (padding)"
        rows = []
        for row in self.table.active_rows.tolist():
            slots = self.table.slots.host[row, : int(self.table.capacity[row])]
            if slot in (slots if space is Space.FULL else self.allocator.full_to_swa.host[slots]):
                rows.append(str(row))
        if rows:
            return f"{name} (of row {' and '.join(rows)})"
        pool = self.allocator.full if space is Space.FULL else self.allocator.swa
        page = slot // self.allocator.page_size
        free = pool is None or page > pool.capacity or not pool.is_held(np.array([page]))[0]
        return f"{name} ({'free' if free else 'of no row'})"

    def _poison(self, space: Space, pages: IntArray) -> None:
        page_size = self.allocator.page_size
        slots = torch.from_numpy((pages[:, None] * page_size + np.arange(page_size)).reshape(-1))
        slots = slots.to(self.allocator.device)
        for tensor in (tensor for store in self.stores for tensor in store.tensors(space)):
            tensor.index_fill_(0, slots, torch.nan)


def _few(slots: IntArray) -> str:
    return ", ".join(map(str, slots[:4].tolist())) + (", ..." if len(slots) > 4 else "")
