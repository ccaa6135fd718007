"""Page tables and write locations of one verify step in both index spaces, translated in registers, one launch each.

For request b with S = committed_len[b] committed keys, `slot(p) = req_to_slot[rows[b], p]`, page size P:

    full_pages[b, j] = slot(j P) / P                              j P < S
    swa_start[b]     = floor_page(max(0, S - retain))
    swa_pages[b, j]  = full_to_swa[slot(swa_start[b] + j P)] / P  swa_start[b] + j P < S
    write_full[b, n] = slot(S + n),   write_swa[b, n] = full_to_swa[write_full[b, n]]

Pages past a prefix are not read, and undefined: so a table may be as wide as the longest context there can be, and
costs what its prefixes are long. `retain` is how many committed keys some query of the step may see on a sliding layer,
so the SWA part costs O(window). The padding row (the last of req_to_slot) counts as S = 0, and writes go to the null
slot there. Widths and lengths are run-time values: no shape of a batch compiles anything. Both backends read prefixes
through such tables.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from specdec.gpu.triton_shim import KEEP, tl, triton
from specdec.kvcache.index_spaces import NULL_SLOT, FullLoc, Space, SwaLoc
from specdec.kvcache.table import RequestTable, Rows

BLOCK = 1024

FEW_PROGRAMS = 512
"""Programs for the prefixes of all rows together; those of a row take its blocks in turn."""

MIN_PROGRAMS = 4
"""Lower bound on the programs for the prefix of one row, if it has as many blocks."""


class PageTables(NamedTuple):
    """The `PrefixTables` of one launch: full_pages [B, full_width], swa_pages [B, swa_width], and swa_start [B], the
    position of swa_pages[:, 0]. The SWA parts are None on a model that has no SWA layer."""

    full_pages: torch.Tensor
    swa_pages: torch.Tensor | None
    swa_start: torch.Tensor | None
    write_full: FullLoc
    write_swa: SwaLoc | None

    def of(self, space: Space) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Page ids [B, P], and the position [B] of each first page; None: 0 for all."""
        if space is Space.FULL:
            return self.full_pages, None
        assert self.swa_pages is not None, "a sliding layer, but the plan has no SWA table"
        return self.swa_pages, self.swa_start

    def pages(self, space: Space) -> tuple[torch.Tensor, torch.Tensor]:
        pages, start = self.of(space)
        return pages, pages.new_zeros(len(pages)) if start is None else start

    def slots(self, space: Space, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The slot [B, P * page_size] of every key in one space, and the position [B] of the first column."""
        pages, start = self.pages(space)
        if page_size == 1:
            return pages, start
        return (pages[:, :, None] * page_size + torch.arange(page_size, device=pages.device)).flatten(1), start


def locate_prefixes(
    build: Callable[..., PageTables], table: RequestTable, rows: Rows, committed_len: torch.Tensor, num_queries: int
) -> PageTables:
    """`PlanBackend.locate` by `build_page_tables` or its reference."""
    page_size, retain = table.allocator.page_size, table.retain
    full_width = -(-rows.longest // page_size)
    full_to_swa = None if retain is None else table.allocator.full_to_swa.tensor
    return build(
        *(table.slots.tensor, full_to_swa, rows.index, committed_len),
        num_nodes=num_queries,
        retain=retain,
        page_size=page_size,
        full_width=full_width,
        swa_width=0 if retain is None else min(full_width, 1 + -(-retain // page_size)),
    )


def reference_build_page_tables(
    req_to_slot: torch.Tensor,
    full_to_swa: torch.Tensor | None,
    rows: torch.Tensor,
    committed_len: torch.Tensor,
    *,
    num_nodes: int,
    retain: int | None,
    page_size: int,
    full_width: int,
    swa_width: int,
) -> PageTables:
    num_rows, row_width = req_to_slot.shape
    device = req_to_slot.device
    length = torch.where(rows == num_rows - 1, 0, committed_len)

    def slots_at(positions: torch.Tensor) -> torch.Tensor:
        """[B, L] slots of positions [B, L] or [L]; past the row, its last one."""
        return req_to_slot[rows[:, None], positions.clamp(max=row_width - 1)]

    full_pages = slots_at(torch.arange(full_width, device=device) * page_size) // page_size
    nodes = length[:, None] + torch.arange(num_nodes, device=device)
    write_full = FullLoc(torch.where(nodes < row_width, slots_at(nodes), NULL_SLOT))
    if full_to_swa is None or retain is None:
        return PageTables(full_pages, None, None, write_full, None)
    start = (length - retain).clamp(min=0) // page_size * page_size
    swa_slots = slots_at(start[:, None] + torch.arange(swa_width, device=device) * page_size)
    return PageTables(
        full_pages, full_to_swa[swa_slots] // page_size, start, write_full, SwaLoc(full_to_swa[write_full])
    )


@triton.jit(do_not_specialize=["num_nodes", "retain", "full_width", "swa_width", "full_programs", "swa_blocks"])
def _page_tables_kernel(
    p_req_to_slot: tl.tensor,
    p_full_to_swa: tl.tensor,
    p_rows: tl.tensor,
    p_committed_len: tl.tensor,
    p_full_pages: tl.tensor,
    p_swa_pages: tl.tensor,
    p_swa_start: tl.tensor,
    p_write_full: tl.tensor,
    p_write_swa: tl.tensor,
    padding_row: tl.tensor,
    row_width: tl.tensor,
    num_nodes: tl.tensor,
    retain: tl.tensor,
    full_width: tl.tensor,
    swa_width: tl.tensor,
    full_programs: tl.tensor,
    swa_blocks: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    HAS_SWA: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    i_request = tl.program_id(0).to(tl.int64)
    i_block = tl.program_id(1)
    row = tl.load(p_rows + i_request).to(tl.int64)
    real = row != padding_row
    length = tl.where(real, tl.load(p_committed_len + i_request), 0).to(tl.int64)
    row_end = tl.where(real, row_width, 0).to(tl.int64)
    p_req_to_slot += row * row_width
    start = (tl.maximum(length - retain, 0) // PAGE_SIZE) * PAGE_SIZE
    if i_block < full_programs:  # the prefix in full space
        num_pages = tl.minimum(tl.cdiv(tl.minimum(length, row_end), PAGE_SIZE), full_width)
        for i_page in range(i_block * BLOCK, num_pages, full_programs * BLOCK):
            o_page = i_page + tl.arange(0, BLOCK).to(tl.int64)
            slot = tl.load(p_req_to_slot + o_page * PAGE_SIZE, mask=o_page < num_pages, other=0)
            p_page = p_full_pages + i_request * full_width + o_page
            tl.store(p_page, slot // PAGE_SIZE, mask=o_page < num_pages, eviction_policy=KEEP)
    if HAS_SWA:  # noqa: SIM102 - a constexpr: without SWA the body does not compile
        if (i_block >= full_programs) & (i_block < full_programs + swa_blocks):  # the newest of it in SWA space
            o_page = (i_block - full_programs).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            o_pos = start + o_page * PAGE_SIZE
            m_page = (o_page < swa_width) & (o_pos < tl.minimum(length, row_end))
            slot = tl.load(p_req_to_slot + o_pos, mask=m_page, other=0)
            swa_slot = tl.load(p_full_to_swa + slot, mask=m_page, other=0)
            p_page = p_swa_pages + i_request * swa_width + o_page
            tl.store(p_page, swa_slot // PAGE_SIZE, mask=o_page < swa_width, eviction_policy=KEEP)
    if i_block >= full_programs + swa_blocks:  # the draft nodes, in both
        o_node = (i_block - full_programs - swa_blocks) * BLOCK + tl.arange(0, BLOCK)
        m_node = o_node < num_nodes
        m_held = m_node & (length + o_node < row_end)
        slot = tl.load(p_req_to_slot + length + o_node, mask=m_held, other=0)
        tl.store(p_write_full + i_request * num_nodes + o_node, slot, mask=m_node, eviction_policy=KEEP)
        if HAS_SWA:
            swa_slot = tl.load(p_full_to_swa + slot, mask=m_held, other=0)
            tl.store(p_write_swa + i_request * num_nodes + o_node, swa_slot, mask=m_node, eviction_policy=KEEP)
            tl.store(p_swa_start + i_request, start, eviction_policy=KEEP)


def build_page_tables(
    req_to_slot: torch.Tensor,
    full_to_swa: torch.Tensor | None,
    rows: torch.Tensor,
    committed_len: torch.Tensor,
    *,
    num_nodes: int,
    retain: int | None,
    page_size: int,
    full_width: int,
    swa_width: int,
) -> PageTables:
    """Page tables of the committed prefixes and write locations of the N draft nodes after them.

    req_to_slot [R, W] int64: full slots by position, the last row is for padding; full_to_swa [slots] int64, None
    without SWA layers (and then retain is None); rows, committed_len [B] int64; widths in pages. A width too small for
    a prefix cuts its newest pages off: `swa_width` >= 1 + ceil(retain / page_size) is always enough.
    """
    batch = len(rows)
    num_rows, row_width = req_to_slot.shape
    assert committed_len.shape == rows.shape == (batch,), f"{rows.shape=} {committed_len.shape=}"
    assert req_to_slot.is_contiguous() and rows.is_contiguous() and committed_len.is_contiguous(), "not contiguous"
    assert (full_to_swa is None) == (retain is None), f"{full_to_swa is None=} {retain=}"
    full_pages, write_full = (req_to_slot.new_empty((batch, width)) for width in (full_width, num_nodes))
    swa_pages = swa_start = write_swa = None
    if full_to_swa is not None:
        swa_pages, write_swa = (req_to_slot.new_empty((batch, width)) for width in (swa_width, num_nodes))
        swa_start = req_to_slot.new_empty((batch,))
    full_programs = min(triton.cdiv(full_width, BLOCK), max(MIN_PROGRAMS, FEW_PROGRAMS // max(batch, 1)))
    swa_blocks = 0 if swa_pages is None else triton.cdiv(swa_width, BLOCK)
    node_blocks = max(triton.cdiv(num_nodes, BLOCK), 1)  # one in any case: it says where the SWA part starts
    _page_tables_kernel[(batch, full_programs + swa_blocks + node_blocks)](
        *(req_to_slot, full_to_swa, rows, committed_len, full_pages, swa_pages, swa_start, write_full, write_swa),
        *(num_rows - 1, row_width, num_nodes, retain or 0, full_width, swa_width, full_programs, swa_blocks),
        PAGE_SIZE=page_size,
        HAS_SWA=full_to_swa is not None,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return PageTables(
        full_pages, swa_pages, swa_start, FullLoc(write_full), None if write_swa is None else SwaLoc(write_swa)
    )
