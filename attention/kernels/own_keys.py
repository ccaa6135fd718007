"""Own keys: slots, by position, of the keys that differ from node to node. Made once per plan and window of a group.

Request b has S committed keys. Keys from position base_b = S - S % ALIGN on are a node's own (see `tree_attention.py`):

    slots[b, r, j]   slot of the key at position p = base_b + j on the path of node r
                     p < S: committed, through the page table;   p >= S: the ancestor of r at depth p - S, r included
    run_end[b, n]    the last node of the chain n, n + 1, ... in which each is the parent of the next

All nodes of a run are on the path of its last node, so one row serves the whole run; if the block is a chain (decode,
prefill, `parents` None), it has one row. A path is found by walking `parents` without a mask, so the number of nodes
has no limit. Columns after a node's own position hold slot 0 and are not used.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from specdec.attention.kernels.page_table import PageTable
from specdec.gpu.triton_shim import KEEP, tl, triton
from specdec.kvcache.layout import NULL_SLOT

ALIGN = 64
"""The largest BLOCK_K, so that base_b is a tile boundary for every layer's BLOCK_K."""

BLOCK = 512


class OwnKeys(NamedTuple):
    """Own keys of B requests: slots [B, R, ALIGN + path_len] int32 and run_end [B, N] int32, with R = N. If the block
    is a chain, R = 1 and run_end is None.

    path_len: nodes on the longest path; 0 if the queries have no keys.
    """

    slots: torch.Tensor
    run_end: torch.Tensor | None

    @property
    def path_len(self) -> int:
        return self.slots.shape[2] - ALIGN


class PathKeys(NamedTuple):
    """The keys that N queries of each of B requests see, each along its own path.

    table: the committed prefixes.            own: own keys of this step in the group of the table.
    positions: [B, N] of the queries; the root's is the least.
    block_len: [B], number of real rows (None: N); the result of the other rows is 0, and no row sees them.
    window: a key is visible if it lies fewer than this many positions back.
    first_key: keys before this position do not exist, except a query's own.
    """

    table: PageTable
    own: OwnKeys
    positions: torch.Tensor
    block_len: torch.Tensor | None = None
    window: int | None = None
    first_key: int = 0


def reference_own_keys(
    table: PageTable, write: torch.Tensor | None, parents: torch.Tensor | None = None, max_depth: int | None = None
) -> OwnKeys:
    num_nodes = 0 if write is None else write.shape[1]
    path_len = num_nodes if max_depth is None else min(num_nodes, max_depth + 1)
    rows, committed = 1 if parents is None else num_nodes, table.slots()
    slots = committed.new_full((len(committed), rows, ALIGN + path_len), NULL_SLOT, dtype=torch.int32)
    for b, (length, begin) in enumerate(zip(table.committed_len.tolist(), table.begin.tolist(), strict=True)):
        base = length // ALIGN * ALIGN
        first = max(base, begin)
        slots[b, :, first - base : length - base] = committed[b, first - begin : length - begin]
        if write is not None:
            for row in range(rows):
                path = list(range(num_nodes)) if parents is None else _path_of(row, parents[b].tolist())
                slots[b, row, length - base : length - base + len(path)] = write[b, path]
    if parents is None:
        return OwnKeys(slots, None)
    run_end = torch.full_like(parents, num_nodes - 1, dtype=torch.int32)
    for node in reversed(range(num_nodes - 1)):
        run_end[:, node] = torch.where(parents[:, node + 1] == node, run_end[:, node + 1], node)
    return OwnKeys(slots, run_end)


def _path_of(node: int, parents: Sequence[int]) -> list[int]:
    """The nodes from the root to `node`."""
    return [*_path_of(parents[node], parents), node] if node >= 0 else []


@triton.jit(do_not_specialize=["num_pages", "num_nodes", "width"])
def _own_keys_kernel(
    p_pages: tl.tensor,  # [B, P]
    p_start: tl.tensor,  # [B] or None
    p_committed_len: tl.tensor,  # [B]
    p_write: tl.tensor,  # [B, N] or None
    p_parents: tl.tensor,  # [B, N] or None
    p_slots: tl.tensor,  # [B, R, W]
    p_run_end: tl.tensor,  # [B, N] or None
    s_page_b: tl.tensor,
    s_page: tl.tensor,
    s_parent_b: tl.tensor,
    num_pages: tl.tensor,
    num_nodes: tl.tensor,
    width: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    i_row, i_block = tl.program_id(0), tl.program_id(1)
    i_b = tl.program_id(2).to(tl.int64)
    length = tl.load(p_committed_len + i_b).to(tl.int32)
    o_column = i_block * BLOCK + tl.arange(0, BLOCK)
    o_pos = length // ALIGN * ALIGN + o_column
    o_key = o_pos
    if p_start is not None:
        o_key -= tl.load(p_start + i_b).to(tl.int32)
    m_held = (o_pos < length) & (o_key >= 0) & (o_key < num_pages * PAGE_SIZE)
    b_page = tl.load(p_pages + i_b * s_page_b + (o_key // PAGE_SIZE).to(tl.int64) * s_page, mask=m_held, other=0)
    b_slot = tl.where(m_held, b_page.to(tl.int32) * PAGE_SIZE + o_key % PAGE_SIZE, 0)
    if p_write is not None:
        p_write += i_b * num_nodes
        if p_parents is None:
            o_node = o_pos - length
            m_own = (o_node >= 0) & (o_node < num_nodes)
            b_slot = tl.where(m_own, tl.load(p_write + o_node, mask=m_own, other=0).to(tl.int32), b_slot)
        else:
            p_parents += i_b * s_parent_b
            o_node = tl.arange(0, BLOCK_N)
            if i_block == 0:
                m_break = (o_node > i_row) & (o_node < num_nodes)
                m_break &= tl.load(p_parents + o_node, mask=m_break, other=-1).to(tl.int32) != o_node - 1
                last = tl.min(tl.where(m_break, o_node, num_nodes), 0) - 1
                tl.store(p_run_end + i_b * num_nodes + i_row, last, eviction_policy=KEEP)
            depth = -1
            node = i_row
            while node >= 0:  # terminates: parents come before their children
                depth += 1
                node = tl.load(p_parents + node).to(tl.int32)
            node = i_row
            while node >= 0:
                b_slot = tl.where(o_pos == length + depth, tl.load(p_write + node).to(tl.int32), b_slot)
                depth -= 1
                node = tl.load(p_parents + node).to(tl.int32)
    o_slot = (i_b * tl.num_programs(0) + i_row) * width + o_column
    tl.store(p_slots + o_slot, b_slot, mask=o_column < width, eviction_policy=KEEP)


def own_keys(
    table: PageTable, write: torch.Tensor | None, parents: torch.Tensor | None = None, max_depth: int | None = None
) -> OwnKeys:
    """Make the own keys of N nodes per request, in the group of `table` and `write`.

    write [B, N]: the slot of each node; None: the queries have no keys.
    parents [B, N]: -1 at the root, parents[n] < n elsewhere; None: the block is a chain.   max_depth: of all nodes.
    """
    pages, start, committed_len, page_size = table
    batch, num_pages = pages.shape
    assert committed_len.shape == (batch,) and committed_len.is_contiguous(), f"{committed_len.shape=} {pages.shape=}"
    assert start is None or (start.shape == (batch,) and start.is_contiguous()), "start is [B]"
    num_nodes = 0 if write is None else write.shape[1]
    assert write is None or (write.shape == (batch, num_nodes) and write.is_contiguous()), "write is [B, N]"
    if parents is not None:
        assert write is not None and parents.shape == write.shape, f"{parents.shape=}"
        assert num_nodes == 1 or parents.stride(1) == 1, f"{parents.stride()=}"
    path_len = num_nodes if max_depth is None else min(num_nodes, max_depth + 1)
    rows, width = 1 if parents is None else num_nodes, ALIGN + path_len
    slots = pages.new_empty((batch, rows, width), dtype=torch.int32)
    run_end = None if parents is None else pages.new_empty((batch, num_nodes), dtype=torch.int32)
    _own_keys_kernel[(rows, triton.cdiv(width, BLOCK), batch)](
        *(pages, start, committed_len, write, parents, slots, run_end),
        *(*pages.stride(), 0 if parents is None else parents.stride(0), num_pages, num_nodes, width),
        PAGE_SIZE=page_size,
        ALIGN=ALIGN,
        BLOCK=min(BLOCK, triton.next_power_of_2(width)),
        BLOCK_N=triton.next_power_of_2(max(num_nodes, 1)),
        num_warps=4,
    )
    return OwnKeys(slots, run_end)
