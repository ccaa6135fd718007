"""`SPECDEC_SANITIZE=1`: slots without an owner hold NaN, and every slot number is checked before a forward uses it.

    before every launch    `check`: slots in the table exist, are held, have peers, and are in as many rows as claims
    while planning         `record_fault`: a plan differs from the table (`attention/checked_backend.py` compares)
    when a page is freed   its K/V become NaN in every store, so that a stale read shows

Page 0 takes the writes of padding and stays finite: kernels read it where a table is empty. Plans are compared by
tensor operations only, and the first fault is written to a record on the device. So captured rounds are checked at
every replay, and the host reads the record between rounds (`raise_fault`). It knows no plan and no request.
"""

from collections.abc import Iterable, Sequence
from enum import Enum
from functools import partial

import numpy as np
import torch

from specdec.errors import LocationError, name_row
from specdec.gpu.captures import Capture, Program, Replay
from specdec.gpu.mirrored_array import IntArray, MirroredArray
from specdec.kvcache.layout import GroupId
from specdec.kvcache.store import KVStore
from specdec.kvcache.table import RequestTable

SETTING = "SPECDEC_SANITIZE"
BLAME = f"(found by {SETTING}=1; this is a defect of specdec or of a drafter, not a user's mistake)"


class Fault(Enum):
    """Faults of a plan; the text follows "row 3, position 17: "."""

    WRITE = "would write to {slot}, where the request table has {expected}"
    SHARED = "would write to {slot}, which has several owners"
    READ = "would read {slot}, where the request table has {expected}"
    COVER = "would not see {expected}: its page table does not cover the prefix, or not the window"
    LENGTH = "is planned after a prefix of {expected_number} tokens, while {number} are committed"
    POISON = "attends to a {group} slot that holds no key of its request: finite queries came out as NaN"


FAULTS = tuple(Fault)


class Sanitizer:
    """Watches one table, its allocator and the `stores` that its slots index."""

    def __init__(self, table: RequestTable, stores: Sequence[KVStore]) -> None:
        self.table = table
        self.allocator = table.allocator
        self.stores = stores
        pages = self.allocator.primary.capacity + 1
        self.owners = MirroredArray((pages,), self.allocator.device)  # per primary page, at the last `check`
        # the first fault: see `record_fault`
        self._record = torch.zeros(5, dtype=torch.int64, device=self.allocator.device)
        self._capturing = False
        for group, pool in self.allocator.pools.items():
            pool.on_free = partial(self._poison, group)

    def poison_store(self, store: KVStore) -> None:
        """Fill a new store with NaN, all but page 0: nothing has been written to it yet."""
        for group, _ in self.allocator.pools.items():
            for tensor in floating(store.tensors(group)):
                tensor[self.allocator.page_size :] = torch.nan

    def deferring(self, capture: Capture) -> Capture:
        """Wrap `capture` so that the host reads nothing within it: faults stay in the record until `raise_fault` is
        called."""

        def captured(program: Program) -> tuple[Replay, torch.Tensor]:
            self._capturing = True
            try:
                return capture(program)
            finally:
                self._capturing = False

        return captured

    def record_fault(
        self,
        fault: Fault,
        group: GroupId,
        found: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        expected: torch.Tensor,
    ) -> None:
        """Record the first place where `found` [B, M] is true, if any: its row, position, slot and expected slot, which
        are [B, M] or expand to it."""
        if found.numel() == 0:
            return
        flat = found.reshape(-1)
        first = flat.long().argmax()[None]
        code = torch.full_like(first, 1 + FAULTS.index(fault) + group * len(FAULTS))
        values = [x.expand_as(found).reshape(-1).index_select(0, first) for x in (rows, positions, slots, expected)]
        fresh = torch.cat([code, *(value.long() for value in values)])
        self._record.copy_(torch.where(flat.any() & (self._record[0] == 0), fresh, self._record))
        if not self._capturing:
            self.raise_fault()

    def raise_fault(self) -> None:
        """Raise LocationError for the first fault in the record. Waits for the device."""
        code, row, position, slot, expected = self._record.tolist()
        if code == 0:
            return
        self._record.zero_()
        fault, group = FAULTS[(code - 1) % len(FAULTS)], GroupId((code - 1) // len(FAULTS))
        name = self.allocator.pools[group].name
        words = {"group": name, "slot": self._slot(group, slot), "expected": self._slot(group, expected)}
        text = fault.value.format(**words, number=slot, expected_number=expected)
        raise name_row(LocationError(f"row {row}, position {position}: {text} {BLAME}"), row)

    def check(self) -> None:
        """Check on the host that the table and its pools agree. Raises LocationError."""
        try:
            self.table.check_host()
        except AssertionError as wrong:
            raise LocationError(f"{wrong} {BLAME}") from wrong
        full, pages = self.allocator.primary, np.arange(self.allocator.primary.capacity + 1)
        owners = full.row_refs(pages) + full.is_cached(pages)  # no row may write to a page with more than one
        changed = np.flatnonzero(owners != self.owners.host)
        self.owners[changed] = owners[changed]

    def _slot(self, group: GroupId, slot: int) -> str:
        """Describe a slot and its owners for an error message."""
        pool = self.allocator.pools[group]
        name = f"{pool.name} slot {slot}"
        if slot < self.allocator.page_size:
            return f"{name} (padding)"
        owned = ((row, self.table.slots.host[row, : self.table.capacity[row]]) for row in self.table.active_rows)
        rows = [str(row) for row, slots in owned if slot in self.allocator.peer_slots(group, slots)]
        if rows:
            return f"{name} (of row {' and '.join(rows)})"
        page = slot // self.allocator.page_size
        free = page > pool.capacity or not pool.is_held(np.array([page]))[0]
        return f"{name} ({'free' if free else 'of no row'})"

    def _poison(self, group: GroupId, pages: IntArray) -> None:
        slots = torch.from_numpy(self.allocator.slots_of(pages))
        for tensor in floating(tensor for store in self.stores for tensor in store.tensors(group)):
            tensor.index_fill_(0, slots.to(tensor.device), torch.nan)  # a rank's store lies on its own device


def floating(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that can hold NaN; for a rounded pool these are the scales."""
    return [tensor for tensor in tensors if tensor.is_floating_point()]
