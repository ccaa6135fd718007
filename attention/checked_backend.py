"""A backend that compares every plan with the request table before a forward uses it: see `kvcache/sanitize.py`.

It wraps another backend and changes none of its results. It checks, for B rows with S tokens committed:

    write[b, n]   the slot of position S + n of the row in its group, with one owner; the null slot on padding
    pages[b, j]   the page of position start + j * page_size of the row, if that is below S;
                  for a draft in progress, the slot of each such position
    start, P      cover [0, S) in the primary group, and the part that some query sees in a windowed one
    attention     is finite for a finite query: freed slots and unwritten slots hold NaN

All checks are tensor operations that read nothing back, so a captured round repeats them at every replay.
"""

from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch

from specdec.attention.backend import Backend
from specdec.attention.kernels.draft_block import DraftBlock, DraftPlan
from specdec.attention.pack import Pack, PackTables
from specdec.attention.path_attention import part_of
from specdec.attention.plan import Attend, KVPlan
from specdec.gpu.captures import Capture
from specdec.kvcache.cache import KVCache
from specdec.kvcache.index_spaces import NULL_SLOT, PRIMARY, GroupId, GroupLoc, PrimaryLoc
from specdec.kvcache.layer_context import ScoreOptions
from specdec.kvcache.sanitize import Fault, Sanitizer, sanitize_requested
from specdec.kvcache.store import KVStore


def sanitized(cache: KVCache, backend: Backend, capture: Capture | None) -> tuple[Backend, Capture | None]:
    """The backend and the capture for an engine: these two, or wrapped ones if the environment asks for checks."""
    if not sanitize_requested():
        return backend, capture
    cache.sanitizer = sanitizer = Sanitizer(cache.table)
    return CheckedBackend(backend, sanitizer), None if capture is None else sanitizer.deferring(capture)


class CheckedBackend:
    """Wraps a backend: `sanitizer` checks its plans and its attention results."""

    def __init__(self, backend: Backend, sanitizer: Sanitizer) -> None:
        self.backend = backend
        self.sanitizer = sanitizer
        self.name = backend.name
        self.locate, self.expand, self.select_tree = backend.locate, backend.expand, backend.select_tree
        self.store, self.move, self.fold = backend.store, backend.move, backend.fold
        self.recurrence = backend.recurrence

    def attention(self, plan: KVPlan, group: GroupId, window: int | None, shares: int = 1) -> Attend:
        if plan.pack is not None:
            self._check_pack(plan, plan.pack, group, window)
            return CheckedAttention(self, self.backend.attention(plan, group, window, shares), plan, group)
        self._check_lengths(plan)
        self._check_writes(plan, group)
        self._check_reads(plan, group)
        return CheckedAttention(self, self.backend.attention(plan, group, window, shares), plan, group)

    def draft_block(self, store: KVStore, draft: DraftPlan) -> DraftBlock:
        block = self.backend.draft_block(store, draft)
        for layer, kept in store.layers.items():
            self._check_draft(draft, kept.group, draft.windows[layer], *block.prefix_slots(layer))
        return CheckedDraftBlock(block, store, draft, self.sanitizer)

    def _slots_at(self, group: GroupId, rows: torch.Tensor, positions: torch.Tensor) -> GroupLoc:
        """Slots in one group that the table has at positions of rows, of one shape; past a row, that of its end."""
        slots = self.sanitizer.table.slots.tensor
        return self.sanitizer.allocator.translate(
            group, PrimaryLoc(slots[rows, positions.clamp(max=slots.shape[1] - 1)])
        )

    def _check_draft(
        self, draft: DraftPlan, group: GroupId, window: int | None, read: torch.Tensor, start: torch.Tensor
    ) -> None:
        """Compare `read` [B, L] with the table: slots of committed keys from position start [B] on."""
        rows, length = draft.rows.index[:, None], draft.committed_len[:, None]
        positions = start[:, None] + torch.arange(read.shape[1], device=read.device)
        expected = self._slots_at(group, rows, positions)
        oldest = 0 if window is None else length - window + 1
        seen = (rows != self.sanitizer.table.padding_row) & (positions >= oldest) & (positions < length)
        wrong = seen & ((read != expected) | (read == NULL_SLOT))
        self.sanitizer.record_fault(Fault.READ, group, wrong, draft.rows.index, positions, read, expected)

    def _check_pack(self, plan: KVPlan, pack: Pack, group: GroupId, window: int | None) -> None:
        """Check the slot of every place, and of the oldest and the newest key that the place sees."""
        assert isinstance(plan.prefix, PackTables)
        table, lines, rows = self.sanitizer.table, plan.prefix.group_table(group), pack.rows[pack.run_of]
        real = pack.exists & (rows != table.padding_row)
        inside = pack.positions < table.slots.tensor.shape[1]

        def note(fault: Fault, found: torch.Tensor, positions: torch.Tensor, *slots: torch.Tensor) -> None:
            self.sanitizer.record_fault(fault, group, found[:, None], rows, *(x[:, None] for x in (positions, *slots)))

        if plan.write is not None:
            write, own = plan.write_slots(group), self._slots_at(group, rows, pack.positions)
            stored = real & (pack.positions >= table.shared_len.tensor[rows])
            wrong = torch.where(stored & inside, (write != own) | (write == NULL_SLOT), write != NULL_SLOT)
            note(Fault.WRITE, wrong, pack.positions, write, own)
            owners = self.sanitizer.owners.tensor[plan.write_slots(PRIMARY) // plan.page_size]
            note(Fault.SHARED, stored & (owners > 1), pack.positions, write, own)
        oldest = torch.zeros_like(pack.positions) if window is None else (pack.positions - window + 1).clamp(min=0)
        for positions in (oldest, pack.positions):
            read, own = lines.slots_at(pack.run_of, positions), self._slots_at(group, rows, positions)
            note(Fault.READ, real & inside & ((read != own) | (read == NULL_SLOT)), positions, read, own)

    def _check_lengths(self, plan: KVPlan) -> None:
        """Check where forwards begin: a run at any committed position, a tree or frozen draft right after the last
        one."""
        planned, committed = plan.committed_len, self.sanitizer.table.committed_len.tensor[plan.rows]
        wrong = planned > committed if plan.block_len is not None else planned != committed
        wrong &= self._real(plan)
        shown = (planned[:, None], committed[:, None], planned[:, None])
        self.sanitizer.record_fault(Fault.LENGTH, PRIMARY, wrong[:, None], plan.rows, *shown)

    def _check_writes(self, plan: KVPlan, group: GroupId) -> None:
        if plan.write is None:
            return
        write = plan.write_slots(group).view(plan.positions.shape)  # [B, N]
        steps = torch.arange(write.shape[1], device=write.device)
        positions = plan.committed_len[:, None] + steps  # node n lies at S + n, whatever its depth
        own = self._own(plan)
        inside = own & (positions < self.sanitizer.table.slots.tensor.shape[1])
        expected = torch.where(inside, self._slots_at(group, plan.rows[:, None], positions), NULL_SLOT)
        wrong = (write != expected) | (own & (write == NULL_SLOT))
        self.sanitizer.record_fault(Fault.WRITE, group, wrong, plan.rows, positions, write, expected)
        owners = self.sanitizer.owners.tensor[plan.write_slots(PRIMARY).view_as(write) // plan.page_size]
        self.sanitizer.record_fault(Fault.SHARED, group, own & (owners > 1), plan.rows, positions, write, expected)

    def _check_reads(self, plan: KVPlan, group: GroupId) -> None:
        rows, page_size, length = plan.rows[:, None], plan.page_size, plan.committed_len[:, None]
        pages, start = plan.prefix.pages(group)  # [B, P], [B]
        columns = torch.arange(pages.shape[1], device=pages.device)
        positions = start[:, None] + columns * page_size
        expected = self._slots_at(group, rows, positions) // page_size
        real = self._real(plan)[:, None]
        wrong = real & (positions < length) & ((pages != expected) | (pages == NULL_SLOT))
        self.sanitizer.record_fault(
            Fault.READ, group, wrong, plan.rows, positions, pages * page_size, expected * page_size
        )

        oldest = (length - int(self.sanitizer.table.retain[group])).clamp(min=0)
        begin, end = start[:, None], start[:, None] + pages.shape[1] * page_size
        short = real & ((begin > oldest) | (end < length))
        missing = torch.where(begin > oldest, oldest, end)
        lost = self._slots_at(group, rows, missing)
        self.sanitizer.record_fault(Fault.COVER, group, short, plan.rows, missing, lost, lost)

    def check_finite(
        self, query: torch.Tensor, out: torch.Tensor, plan: KVPlan, group: GroupId, part: tuple[slice, slice]
    ) -> None:
        """Check attention results `out` [B, N, Hq, D] of `query` [B, Hq, N, D], a part of a plan's requests and
        columns."""
        broken, positions = _broken(query, out) & self._own(plan)[part], plan.positions[part]
        null = torch.zeros_like(positions)
        if plan.pack is not None:
            rows = plan.rows[plan.pack.run_of][part[1]]
            self.sanitizer.record_fault(Fault.POISON, group, broken.t(), rows, positions.t(), null.t(), null.t())
            return
        self.sanitizer.record_fault(Fault.POISON, group, broken, plan.rows[part[0]], positions, null, null)

    def _real(self, plan: KVPlan) -> torch.Tensor:
        """Mask [B] of rows that are not padding."""
        return plan.rows != self.sanitizer.table.padding_row

    def _own(self, plan: KVPlan) -> torch.Tensor:
        """Mask [B, N] of queries that are not padding."""
        if plan.pack is not None:
            return (plan.pack.exists & (plan.rows[plan.pack.run_of] != self.sanitizer.table.padding_row))[None]
        steps = torch.arange(plan.positions.shape[1], device=plan.positions.device)
        real = self._real(plan)[:, None].expand_as(plan.positions)
        return real if plan.block_len is None else real & (steps < plan.block_len[:, None])


@dataclass(frozen=True, slots=True)
class CheckedAttention:
    """`attend` for a plan or a part of its rows. Finite queries must get finite results."""

    checks: CheckedBackend
    attend: Attend
    plan: KVPlan
    group: GroupId
    rows: tuple[slice, slice] = (slice(None), slice(None))

    def __call__(self, query: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        out = self.attend(query, *args, **options)
        self.checks.check_finite(query, out, self.plan, self.group, self.rows)
        return out

    def part(self, requests: slice, columns: slice) -> "CheckedAttention":
        return replace(self, attend=part_of(self.attend, requests, columns), rows=(requests, columns))


class CheckedDraftBlock:
    """A draft in progress. Finite queries must get finite results."""

    def __init__(self, block: DraftBlock, store: KVStore, draft: DraftPlan, sanitizer: Sanitizer) -> None:
        self.block = block
        self.store = store
        self.draft = draft
        self.sanitizer = sanitizer
        self.level = -1
        self.destination, self.prefix_slots = block.destination, block.prefix_slots

    def enter_level(self, origin: torch.Tensor | None) -> None:
        self.level += 1
        self.block.enter_level(origin)

    def attend(self, layer: int, query: torch.Tensor, **options: Unpack[ScoreOptions]) -> torch.Tensor:
        out = self.block.attend(layer, query, **options)  # [B, K, Hq, D]
        rows = self.draft.rows.index
        broken = _broken(query, out) & (rows != self.sanitizer.table.padding_row)[:, None]
        positions = self.draft.level_positions(self.level)
        null = torch.zeros_like(positions)
        self.sanitizer.record_fault(Fault.POISON, self.store.layers[layer].group, broken, rows, positions, null, null)
        return out


def _broken(query: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Mask [B, N] of finite queries [B, Hq, N, D] whose results [B, N, Hq, D] are not finite."""
    return query.isfinite().all(-1).all(1) & ~out.isfinite().flatten(2).all(-1)
