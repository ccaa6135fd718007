"""Page tables and write slots of one verify step, for every group in one launch. Slots are translated in registers.

For request b with S = committed_len[b] committed keys, `slot(p) = req_to_slot[rows[b], p]`, page size P, and a group g
that keeps retain[g] committed keys of a row, `peer(g, s) = s` in the primary group, else maps[g, s]:

    start[g, b]    = floor_page(max(0, S - retain[g]))           0 in the primary group, which keeps all keys
    pages[g][b, j] = peer(g, slot(start[g, b] + j P)) / P        start[g, b] + j P < S
    write[g][b, n] = peer(g, slot(S + n))

Pages after a prefix are undefined and not read. So a table may be as wide as the longest possible context, yet costs
only as much as its prefixes are long; the table of a windowed group is O(window) wide. The grid has an axis for groups,
and all tables are in one buffer, so a capture does not depend on the number of groups. The padding row (the last of
req_to_slot) counts as S = 0, and its writes go to the null slot. Widths and lengths are run-time values: no batch shape
compiles a new kernel. Both backends read prefixes through these tables, except those of packed prompts.
"""

from typing import NamedTuple

import torch

from specdec.gpu.mirrored_array import IntArray
from specdec.gpu.triton_shim import KEEP, tl, triton
from specdec.kvcache.layout import NULL_SLOT, PRIMARY, ByGroup, GroupId, GroupLoc
from specdec.kvcache.table import RequestTable, Rows

BLOCK = 1024

TARGET_PROGRAMS = 512
"""Target number of programs for the prefixes of all rows together. The programs of one row take its blocks in turn."""

MIN_PROGRAMS = 4
"""Lower bound on the programs for one row's prefix, unless it has fewer blocks."""

ALIGNED = 16
"""Each group's part of a buffer is rounded up to a multiple of this size, so that every part begins at an aligned
address."""


class PageTable(NamedTuple):
    """Committed prefixes of B requests in one group: page ids [B, P], the position [B] of each first page (None: 0 for
    all), and the number of keys [B]. A table may be wider than its prefixes, and begins before every window."""

    pages: torch.Tensor
    start: torch.Tensor | None
    committed_len: torch.Tensor
    page_size: int

    @property
    def begin(self) -> torch.Tensor:
        """Position of each first page, [B]."""
        return torch.zeros_like(self.committed_len) if self.start is None else self.start

    def slots(self) -> torch.Tensor:
        """The slot [B, P * page_size] of every key."""
        if self.page_size == 1:
            return self.pages
        offsets = torch.arange(self.page_size, device=self.pages.device)
        return (self.pages[:, :, None] * self.page_size + offsets).flatten(1)


class PageTables(NamedTuple):
    """The committed prefixes that a forward reads, in every group, and the slots to write. From one launch.

    tables: page ids [B, width] of each group. start: position of each first column, [groups, B]. committed_len: keys of
    each prefix, [B]. write: slots [B, N] of the tokens after each prefix.
    """

    tables: ByGroup[torch.Tensor]
    start: torch.Tensor
    write: ByGroup[GroupLoc]
    committed_len: torch.Tensor
    page_size: int

    def table(self, group: GroupId) -> PageTable:
        start = None if group == PRIMARY else self.start[group]
        return PageTable(self.tables[group], start, self.committed_len, self.page_size)


def group_widths(retain: IntArray, max_len: int, page_size: int) -> list[int]:
    """Width in pages of each group's table if the longest prefix has `max_len` keys; a windowed group needs no more
    than its window. The kernel computes these widths from that of the primary group."""
    retained = [1 + -(-keys // page_size) for keys in retain.tolist()]
    max_pages = min(-(-max_len // page_size), retained[PRIMARY])
    return [min(max_pages, pages) for pages in retained]


def reference_build_page_tables(
    table: RequestTable, rows: Rows, committed_len: torch.Tensor, num_nodes: int
) -> PageTables:
    req_to_slot, maps, page_size = table.slots.tensor, table.allocator.maps.tensor, table.allocator.page_size
    num_rows, row_width = req_to_slot.shape
    device = req_to_slot.device
    length = torch.where(rows.index == num_rows - 1, 0, committed_len)
    start = (length - table.retain_on_device[:, None]).clamp(min=0) // page_size * page_size  # [groups, B]

    def slots_at(positions: torch.Tensor, group: int) -> torch.Tensor:
        """Slots [B, L] of positions [B, L] in a group; positions after the row are clamped to its last."""
        slots = req_to_slot[rows.index[:, None], positions.clamp(max=row_width - 1)]
        return slots if group == PRIMARY else maps[group][slots]

    nodes = length[:, None] + torch.arange(num_nodes, device=device)
    tables, write = [], []
    for group, width in enumerate(group_widths(table.retain, rows.max_committed_len, page_size)):
        columns = start[group][:, None] + torch.arange(width, device=device) * page_size
        tables.append(slots_at(columns, group) // page_size)
        write.append(GroupLoc(torch.where(nodes < row_width, slots_at(nodes, group), NULL_SLOT)))
    return PageTables(ByGroup(tuple(tables)), start, ByGroup(tuple(write)), committed_len, page_size)


@triton.jit(do_not_specialize=["num_slots", "num_nodes", "full_width", "node_blocks", "s_start", "s_write"])
def _page_tables_kernel(
    p_req_to_slot: tl.tensor,
    p_maps: tl.tensor,
    p_retain: tl.tensor,
    p_rows: tl.tensor,
    p_committed_len: tl.tensor,
    p_pages: tl.tensor,
    p_start: tl.tensor,
    p_write: tl.tensor,
    padding_row: tl.tensor,
    row_width: tl.tensor,
    num_slots: tl.tensor,
    num_nodes: tl.tensor,
    full_width: tl.tensor,
    node_blocks: tl.tensor,
    s_start: tl.tensor,
    s_write: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    i_request = tl.program_id(0).to(tl.int64)
    i_block = tl.program_id(1)
    i_group = tl.program_id(2)
    row = tl.load(p_rows + i_request).to(tl.int64)
    real = row != padding_row
    length = tl.where(real, tl.load(p_committed_len + i_request), 0).to(tl.int64)
    row_end = tl.where(real, row_width, 0).to(tl.int64)
    start = (tl.maximum(length - tl.load(p_retain + i_group), 0) // PAGE_SIZE) * PAGE_SIZE
    p_req_to_slot += row * row_width
    p_map = p_maps + i_group * num_slots.to(tl.int64)
    if i_block < node_blocks:  # the draft nodes
        o_node = i_block * BLOCK + tl.arange(0, BLOCK)
        m_node = o_node < num_nodes
        m_held = m_node & (length + o_node < row_end)
        slot = tl.load(p_req_to_slot + length + o_node, mask=m_held, other=0)
        if i_group > 0:
            slot = tl.load(p_map + slot, mask=m_held, other=0)
        p_node = p_write + i_group * s_write.to(tl.int64) + i_request * num_nodes + o_node
        tl.store(p_node, slot, mask=m_node, eviction_policy=KEEP)
        tl.store(p_start + i_group * s_start.to(tl.int64) + i_request, start, eviction_policy=KEEP)
    else:  # the part of the prefix that the group keeps
        for j_group in range(i_group):
            width = tl.minimum(full_width, 1 + tl.cdiv(tl.load(p_retain + j_group), PAGE_SIZE))
            p_pages += tl.cdiv(tl.num_programs(0) * width, ALIGNED) * ALIGNED
        width = tl.minimum(full_width, 1 + tl.cdiv(tl.load(p_retain + i_group), PAGE_SIZE))
        num_pages = tl.minimum(tl.cdiv(tl.minimum(length, row_end) - start, PAGE_SIZE), width)
        stride = (tl.num_programs(1) - node_blocks) * BLOCK
        for i_page in range((i_block - node_blocks) * BLOCK, num_pages, stride):
            o_page = i_page + tl.arange(0, BLOCK).to(tl.int64)
            slot = tl.load(p_req_to_slot + start + o_page * PAGE_SIZE, mask=o_page < num_pages, other=0)
            if i_group > 0:
                slot = tl.load(p_map + slot, mask=o_page < num_pages, other=0)
            p_page = p_pages + i_request * width + o_page
            tl.store(p_page, slot // PAGE_SIZE, mask=o_page < num_pages, eviction_policy=KEEP)


def build_page_tables(table: RequestTable, rows: Rows, committed_len: torch.Tensor, num_nodes: int) -> PageTables:
    """Make page tables of the prefixes [0, committed_len [B]) of rows, and write slots of the N draft nodes after them,
    in every group."""
    req_to_slot, maps, page_size = table.slots.tensor, table.allocator.maps.tensor, table.allocator.page_size
    batch, (num_rows, row_width) = len(committed_len), req_to_slot.shape
    widths = group_widths(table.retain, rows.max_committed_len, page_size)
    assert committed_len.shape == rows.index.shape == (batch,), f"{rows.index.shape=} {committed_len.shape=}"
    assert all(x.is_contiguous() for x in (req_to_slot, maps, rows.index, committed_len)), "not contiguous"
    starts = [0]
    for width in widths:
        starts.append(starts[-1] + _rounded(batch * width))
    pages = req_to_slot.new_empty(starts[-1])
    start = req_to_slot.new_empty((len(widths), _rounded(batch)))
    write = req_to_slot.new_empty((len(widths), _rounded(batch * num_nodes)))
    programs = min(triton.cdiv(widths[PRIMARY], BLOCK), max(MIN_PROGRAMS, TARGET_PROGRAMS // max(batch, 1)))
    node_blocks = max(triton.cdiv(num_nodes, BLOCK), 1)  # at least one: it writes `start`
    _page_tables_kernel[(batch, node_blocks + programs, len(widths))](
        *(req_to_slot, maps, table.retain_on_device, rows.index, committed_len, pages, start, write),
        *(num_rows - 1, row_width, maps.shape[1], num_nodes, widths[PRIMARY], node_blocks),
        *(start.stride(0), write.stride(0)),
        PAGE_SIZE=page_size,
        ALIGNED=ALIGNED,
        BLOCK=BLOCK,
        num_warps=4,
    )
    sizes = zip(starts, widths, strict=False)
    tables = tuple(pages[first : first + batch * width].view(batch, width) for first, width in sizes)
    slots = tuple(GroupLoc(line[: batch * num_nodes].view(batch, num_nodes)) for line in write)
    return PageTables(ByGroup(tables), start[:, :batch], ByGroup(slots), committed_len, page_size)


def _rounded(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED
