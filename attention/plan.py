"""Everything one forward needs to know about KV, in one immutable object made for that forward.

Both write locations are looked up once, here; no layer translates anything, and nothing outlives the step. A plan is
made on the device from the request table by one of three builders:

    plan_prefill   B prompt chunks, causal, padded to the longest; padded rows write to the sink in both spaces
    plan_verify    B trees of N nodes behind their committed prefixes
    plan_frozen    one query a request on the committed prefix only: what a frozen-KV drafter reads

Where the engine runs on Triton kernels, a plan has page tables, made with the write locations in one launch; plain
torch reads tables of slots.
"""

from dataclasses import dataclass

import numpy as np
import torch

from specdec.attention.page_table import PageTables, build_page_tables
from specdec.attention.tree import DraftTree
from specdec.kvcache.mirror import IntArray
from specdec.kvcache.spaces import NULL_SLOT, FullLoc, SlotTable, Space, SwaLoc
from specdec.kvcache.table import RequestTable


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPlan:
    """B requests, N query rows each, packed as one sequence of B * N rows.

    committed_len: [B] keys in the prefix.      positions: [B, N] of the queries.
    ancestors: [B, N, N] bool, which rows of the block a row sees; None when the queries bring no keys of their own.
    write_full, write_swa: [B * N] where the block's K/V go; None when nothing is written.
    page_size: slots a page.
    prefix_full, prefix_swa: slot tables of the committed prefix; SWA is O(window) wide.
    page_tables: the same by page, for kernels. A plan has the one or the other.
    block_len: [B] rows of each block that exist, and the block is causal; None: all of them.
    window_shift: added to the sliding window of every sliding layer (0 except for a frozen drafter's convention).
    """

    committed_len: torch.Tensor
    positions: torch.Tensor
    ancestors: torch.Tensor | None
    write_full: FullLoc | None
    write_swa: SwaLoc | None
    page_size: int
    prefix_full: SlotTable[FullLoc] | None = None
    prefix_swa: SlotTable[SwaLoc] | None = None
    page_tables: PageTables | None = None
    block_len: torch.Tensor | None = None
    window_shift: int = 0


def runs_kernels(table: RequestTable) -> bool:
    """Whether the engine of this table chose the Triton kernels: its pools know."""
    return table.allocator.pools[Space.FULL].kernels


def plan_prefill(table: RequestTable, rows: IntArray, chunk_len: IntArray) -> KVPlan:
    """A chunk of `chunk_len` [B] prompt tokens behind each row's committed prefix."""
    num_nodes = int(chunk_len.max())
    steps = torch.arange(num_nodes, device=table.allocator.device)
    causal = (steps[:, None] >= steps[None, :]).expand(len(rows), num_nodes, num_nodes)
    depth = steps.expand(len(rows), num_nodes)
    return _plan(table, rows, depth, causal, block_len=_upload(table, chunk_len))


def plan_verify(table: RequestTable, rows: IntArray, tree: DraftTree) -> KVPlan:
    """One tree a request. Node n writes at slot index S + n and sits at position S + depth[n]."""
    owned = table.capacity[rows] - table.committed_len[rows]
    assert ((owned >= tree.num_nodes) | (rows == table.padding_row)).all(), f"{owned=} slots for {tree.num_nodes} nodes"
    return _plan(table, rows, tree.depth, tree.ancestors)


def plan_frozen(
    table: RequestTable, rows: IntArray, *, position_offset: int, window_shift: int, num_rows: int = 1
) -> KVPlan:
    """`num_rows` queries a request, all at S + `position_offset`, on the committed prefix [0, S) and nothing else."""
    assert window_shift - position_offset <= table.extra_keys, f"eviction keeps too little for {window_shift=}"
    depth = torch.full((len(rows), num_rows), position_offset, device=table.allocator.device)
    return _plan(table, rows, depth, None, window_shift=window_shift)


def _plan(
    table: RequestTable,
    rows: IntArray,
    depth: torch.Tensor,
    ancestors: torch.Tensor | None,
    *,
    block_len: torch.Tensor | None = None,
    window_shift: int = 0,
) -> KVPlan:
    """Queries at S + `depth` [B, N]; the N rows are written, unless they see no `ancestors`."""
    num_nodes = depth.shape[1]
    committed_len = _upload(table, table.committed_len[rows])
    prefix_full, prefix_swa, tables = None, None, None
    if runs_kernels(table):
        tables = _page_tables(table, rows, committed_len, num_nodes)
        full, swa = tables.write_full, tables.write_swa
    else:
        prefix_full, prefix_swa = _prefix_tables(table, rows, committed_len)
        # node n of the block lives at slot index S + n, whatever its depth
        columns = committed_len[:, None] + torch.arange(num_nodes, device=committed_len.device)  # [B, N]
        columns = columns.clamp(max=table.slots.tensor.shape[1] - 1)
        full = FullLoc(table.slots.tensor[_upload(table, rows)[:, None], columns])
        swa = table.allocator.translate(full) if table.allocator.layout.has_swa else None
    if block_len is not None:
        padding = depth >= block_len[:, None]  # in a chunk, depth is the row
        full = FullLoc(full.masked_fill(padding, NULL_SLOT))
        swa = None if swa is None else SwaLoc(swa.masked_fill(padding, NULL_SLOT))
    written = ancestors is not None
    return KVPlan(
        committed_len=committed_len,
        positions=committed_len[:, None] + depth,
        ancestors=ancestors,
        write_full=FullLoc(full.reshape(-1)) if written else None,
        write_swa=SwaLoc(swa.reshape(-1)) if written and swa is not None else None,
        page_size=table.allocator.page_size,
        prefix_full=prefix_full,
        prefix_swa=prefix_swa,
        page_tables=tables,
        block_len=block_len,
        window_shift=window_shift,
    )


def _page_tables(table: RequestTable, rows: IntArray, committed_len: torch.Tensor, num_nodes: int) -> PageTables:
    """Tables and write locations from the kernel, as wide as the longest prefix and as the window."""
    page_size, retain = table.allocator.page_size, table.retain
    full_width = -(-int(table.committed_len[rows].max()) // page_size)
    return build_page_tables(
        table.slots.tensor,
        None if retain is None else table.allocator.full_to_swa.tensor,
        _upload(table, rows),
        committed_len,
        num_nodes=num_nodes,
        retain=retain,
        page_size=page_size,
        full_width=full_width,
        swa_width=0 if retain is None else min(full_width, 1 + -(-retain // page_size)),
    )


def _prefix_tables(
    table: RequestTable, rows: IntArray, committed_len: torch.Tensor
) -> tuple[SlotTable[FullLoc], SlotTable[SwaLoc] | None]:
    """Page tables of the committed prefixes. Columns past a request's length are masked by `committed_len`."""
    page_size = table.allocator.page_size
    length = table.committed_len[rows]
    device_rows = _upload(table, rows)
    width = int(length.max())
    full = FullLoc(table.slots.tensor[device_rows, :width])
    prefix_full = SlotTable(full, torch.zeros_like(committed_len), page_size)
    if table.retain is None:
        return prefix_full, None
    # only pages that a query of this step can see: O(window), from the host's lengths, so no synchronisation
    start = np.maximum(0, length - table.retain) // page_size * page_size
    start_device = _upload(table, start)
    swa_width = int((length - start).max())
    columns = start_device[:, None] + torch.arange(swa_width, device=start_device.device)
    swa = table.allocator.translate(FullLoc(table.slots.tensor[device_rows[:, None], columns.clamp(max=width - 1)]))
    return prefix_full, SlotTable(swa, start_device, page_size)


def _upload(table: RequestTable, array: IntArray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(table.allocator.device, non_blocking=True)
