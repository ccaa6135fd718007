"""A backend that compares every plan with the request table before a forward uses it: see `kvcache/sanitize.py`.

It wraps another backend and changes none of its results. It checks, for B rows with S tokens committed:

    write[b, n]   the slot of position S + n of the row in its group, with one owner; the null slot on padding
    pages[b, j]   the page of position start + j * page_size of the row, if that is below S;
                  for a draft in progress, the slot of each such position
    all pages     cover [0, S) in the primary group, and in a windowed one the part that some query sees
    attention     is finite for a finite query: freed slots and unwritten slots hold NaN

All checks are tensor operations that read nothing back, so a captured round repeats them at every replay.
"""

import os
from typing import Unpack

import torch

from specdec.attention.backend import Backend
from specdec.attention.draft_block import DraftBlock, DraftPlan
from specdec.attention.kernels.page_table import PageTable
from specdec.attention.plan import Attend, KVPlan, PackTables
from specdec.gpu.captures import Capture
from specdec.kvcache.cache import KVCache
from specdec.kvcache.layer_context import ScoreOptions
from specdec.kvcache.layout import NULL_SLOT, PRIMARY, GroupId, GroupLoc, PrimaryLoc
from specdec.kvcache.sanitize import SETTING, Fault, Sanitizer
from specdec.kvcache.store import KVStore


def sanitized(cache: KVCache, backend: Backend, capture: Capture | None) -> tuple[Backend, Capture | None]:
    """The backend and the capture for an engine: these two, or wrapped ones if the environment asks for checks."""
    if os.environ.get(SETTING, "") in ("", "0"):
        return backend, capture
    cache.sanitizer = sanitizer = Sanitizer(cache.table, cache.stores)
    return CheckedBackend(backend, sanitizer), None if capture is None else sanitizer.deferring(capture)


class CheckedBackend:
    """Wraps a backend: `sanitizer` checks its plans and its attention results."""

    def __init__(self, backend: Backend, sanitizer: Sanitizer) -> None:
        self.backend = backend
        self.sanitizer, self.table = sanitizer, sanitizer.table
        self.name = backend.name
        self.locate, self.expand, self.select_tree = backend.locate, backend.expand, backend.select_tree
        self.store, self.move, self.fold = backend.store, backend.move, backend.fold
        self.recurrence = backend.recurrence

    def attention(self, plan: KVPlan, group: GroupId, window: int | None, shares: int = 1) -> Attend:
        if isinstance(plan.prefix, PackTables):
            self._check_writes(plan, group)
            self._check_pack_reads(plan, plan.prefix, group, window)
        else:
            self._check_lengths(plan)
            self._check_writes(plan, group)
            self._check_reads(group, plan.rows, plan.prefix.table(group), int(self.table.retain[group]))
        attend = self.backend.attention(plan, group, window, shares)
        own, rows = self._own(plan), self._rows(plan).expand_as(plan.positions)

        def checked(query: torch.Tensor, *pools: torch.Tensor, **options: Unpack[ScoreOptions]) -> torch.Tensor:
            out = attend(query, *pools, **options)
            self.check_finite(group, query, out, own, rows, plan.positions)
            return out

        return checked

    def draft_block(self, store: KVStore, draft: DraftPlan) -> DraftBlock:
        block = self.backend.draft_block(store, draft)
        for layer, kept in store.layers.items():
            window = draft.windows[layer]
            num_keys = None if window is None else window - 1
            self._check_reads(kept.group, draft.rows.index, block.prefix_table(layer), num_keys)
        attend, own = block.attend, draft.rows.index[:, None] != self.table.padding_row

        def checked(layer: int, query: torch.Tensor, **options: Unpack[ScoreOptions]) -> torch.Tensor:
            out = attend(layer, query, **options)
            positions = draft.level_positions(block.level)
            self.check_finite(store.layers[layer].group, query, out, own, draft.rows.index[:, None], positions)
            return out

        block.attend = checked  # type: ignore[method-assign]
        return block

    def _slots_at(self, group: GroupId, rows: torch.Tensor, positions: torch.Tensor) -> GroupLoc:
        """The table's slots in one group at positions of rows. A position past the end of a row gets the row's last
        slot."""
        slots = self.table.slots.tensor
        return self.table.allocator.translate(group, PrimaryLoc(slots[rows, positions.clamp(max=slots.shape[1] - 1)]))

    def _check_slots(
        self, group: GroupId, rows: torch.Tensor, positions: torch.Tensor, read: torch.Tensor, seen: torch.Tensor
    ) -> None:
        """Compare `read` [B, L] with the table where `seen`: the slots from which a forward reads keys at these
        positions [B, L]."""
        expected = self._slots_at(group, rows, positions)
        wrong = seen & ((read != expected) | (read == NULL_SLOT))
        self.sanitizer.record_fault(Fault.READ, group, wrong, rows, positions, read, expected)

    def _check_pack_reads(self, plan: KVPlan, tables: PackTables, group: GroupId, window: int | None) -> None:
        """Check the slot of the oldest and of the newest key that each place sees."""
        newest = plan.positions
        inside = self._own(plan) & (newest < self.table.slots.tensor.shape[1])
        oldest = torch.zeros_like(newest) if window is None else (newest - window + 1).clamp(min=0)
        for positions in (oldest, newest):
            read = tables.lines[group].slots_at(tables.pack.run_of, positions)
            self._check_slots(group, self._rows(plan), positions, read, inside)

    def _check_lengths(self, plan: KVPlan) -> None:
        """Check where forwards without a pack begin: a chunk at any position up to S, a tree or frozen draft at S."""
        rows, planned = plan.rows[:, None], plan.committed_len[:, None]
        committed = self.table.committed_len.tensor[rows]
        wrong = planned > committed if plan.block_len is not None else planned != committed
        wrong &= rows != self.table.padding_row
        self.sanitizer.record_fault(Fault.LENGTH, PRIMARY, wrong, rows, planned, committed, planned)

    def _check_writes(self, plan: KVPlan, group: GroupId) -> None:
        if plan.write is None:
            return
        rows, positions, stored = self._rows(plan), plan.positions, self._own(plan)
        if plan.pack is None:  # node n lies at S + n, whatever its depth
            positions = plan.committed_len[:, None] + torch.arange(positions.shape[1], device=positions.device)
        else:
            stored = stored & (positions >= self.table.shared_len.tensor[rows])
        write, primary = (plan.write_slots(each).view(positions.shape) for each in (group, PRIMARY))
        inside = stored & (positions < self.table.slots.tensor.shape[1])
        expected = torch.where(inside, self._slots_at(group, rows, positions), NULL_SLOT)
        wrong = (write != expected) | (stored & (write == NULL_SLOT))
        self.sanitizer.record_fault(Fault.WRITE, group, wrong, rows, positions, write, expected)
        shared = stored & (self.sanitizer.owners.tensor[primary // self.table.allocator.page_size] > 1)
        self.sanitizer.record_fault(Fault.SHARED, group, shared, rows, positions, write, expected)

    def _check_reads(self, group: GroupId, rows: torch.Tensor, table: PageTable, num_keys: int | None) -> None:
        """Check the first slot of each page, and that the pages cover the last `num_keys` keys of each prefix; None:
        all."""
        pages, page_size, begin = table.pages, table.page_size, table.begin[:, None]
        rows, length = rows[:, None], table.committed_len[:, None]
        positions = begin + torch.arange(pages.shape[1], device=pages.device) * page_size
        real = rows != self.table.padding_row
        self._check_slots(group, rows, positions, pages * page_size, real & (positions < length))
        oldest = torch.zeros_like(length) if num_keys is None else (length - num_keys).clamp(min=0)
        end = begin + pages.shape[1] * page_size
        short = real & ((begin > oldest) | (end < length))
        missing = torch.where(begin > oldest, oldest, end)
        lost = self._slots_at(group, rows, missing)
        self.sanitizer.record_fault(Fault.COVER, group, short, rows, missing, lost, lost)

    def check_finite(
        self,
        group: GroupId,
        query: torch.Tensor,
        out: torch.Tensor,
        own: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        """Check, where `own`, that finite queries [B, Hq, N, D] have finite results `out` [B, N, Hq, D]."""
        broken = own & query.isfinite().all(-1).all(1) & ~out.isfinite().flatten(2).all(-1)
        null = torch.zeros_like(positions)
        self.sanitizer.record_fault(Fault.POISON, group, broken, rows, positions, null, null)

    def _rows(self, plan: KVPlan) -> torch.Tensor:
        """Row of the request table of each query: [B, 1], or [1, T] of a pack."""
        return plan.rows[:, None] if plan.pack is None else plan.rows[plan.pack.run_of][None]

    def _own(self, plan: KVPlan) -> torch.Tensor:
        """Mask [B, N] of queries that are not padding."""
        own = (self._rows(plan) != self.table.padding_row).expand_as(plan.positions)
        if plan.pack is not None:
            return own & plan.pack.exists
        if plan.block_len is None:
            return own
        return own & (torch.arange(own.shape[1], device=own.device) < plan.block_len[:, None])
