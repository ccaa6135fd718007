"""One row of slots per draft node: what backends read that take a page table for every query (page size 1).

Node n of request b sits at depth d and position q = S + d. Its row lists, in position order, the keys it sees:

    prefix      slot(p)       max(0, q - window + 1) <= p < S          (0 <= p < S without a window)
    ancestors   slot(S + a)   a on the path root .. n, itself included, and q - (S + depth[a]) < window

where slot(p) = req_to_slot[rows[b], p], in SWA space translated in registers. Distance in the list is distance in
position, so a causal kernel with the same window over the row is exact. The path is found by walking `parents`; there
is no mask, no sort, and a row costs O(window + N) whatever the context. Rows are padded with 0, the null slot.
"""

from typing import NamedTuple

import torch

from specdec.gpu.triton_shim import tl, triton
from specdec.kvcache.index_spaces import NULL_SLOT

BLOCK = 512


class NodeRows(NamedTuple):
    """slots [B, N, width]: the row of each node, then 0s; lengths [B, N] >= 1: how many of them count."""

    slots: torch.Tensor
    lengths: torch.Tensor


def reference_build_node_rows(
    req_to_slot: torch.Tensor,
    full_to_swa: torch.Tensor | None,
    rows: torch.Tensor,
    committed_len: torch.Tensor,
    parents: torch.Tensor,
    depth: torch.Tensor,
    *,
    window: int | None,
    width: int,
) -> NodeRows:
    """See `build_node_rows`."""
    num_rows, row_width = req_to_slot.shape
    num_nodes = parents.shape[1]
    padding = (rows == num_rows - 1)[:, None]
    length = torch.where(padding, 0, committed_len[:, None])  # [B, 1]
    oldest = torch.zeros_like(depth) if window is None else length + depth - window + 1  # [B, N] position
    prefix_start = oldest.clamp(min=0)
    prefix_len = (length - prefix_start).clamp(min=0)
    path_start = torch.zeros_like(depth) if window is None else (oldest - length).clamp(min=0)  # depth of the first
    lengths = prefix_len + depth + 1 - path_start

    columns = torch.arange(width, device=rows.device)
    in_prefix = columns < prefix_len[:, :, None]  # [B, N, width]
    positions = torch.where(in_prefix, prefix_start[:, :, None] + columns, row_width)  # row_width: no slot
    node = torch.arange(num_nodes, device=rows.device).expand_as(parents)
    for hop in range(num_nodes):  # the ancestor `hop` levels above each node
        column = prefix_len + depth - hop - path_start
        here = (columns == column[:, :, None]) & ((node >= 0) & (depth - hop >= path_start))[:, :, None]
        positions = torch.where(here, (length + node)[:, :, None], positions)
        node = torch.where(node > 0, parents.gather(1, node.clamp(min=0)), -1)
    held = (positions < row_width) & ~padding[:, :, None]
    slots = torch.where(held, req_to_slot[rows[:, None, None], positions.clamp(max=row_width - 1)], NULL_SLOT)
    return NodeRows(slots if full_to_swa is None else full_to_swa[slots], lengths)


@triton.jit(do_not_specialize=["num_nodes", "window", "width"])
def _node_rows_kernel(
    p_req_to_slot: tl.tensor,
    p_full_to_swa: tl.tensor,
    p_rows: tl.tensor,
    p_committed_len: tl.tensor,
    p_parents: tl.tensor,
    p_depth: tl.tensor,
    p_slots: tl.tensor,
    p_lengths: tl.tensor,
    stride_parents: tl.tensor,
    stride_depth: tl.tensor,
    padding_row: tl.tensor,
    row_width: tl.tensor,
    num_nodes: tl.tensor,
    window: tl.tensor,
    width: tl.tensor,
    HAS_WINDOW: tl.constexpr,
    TRANSLATE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    i_query = tl.program_id(0).to(tl.int64)  # request * num_nodes + node
    i_block = tl.program_id(1)
    i_request = i_query // num_nodes
    node = i_query % num_nodes
    row = tl.load(p_rows + i_request).to(tl.int64)
    real = row != padding_row
    length = tl.where(real, tl.load(p_committed_len + i_request), 0).to(tl.int64)
    depth = tl.load(p_depth + i_request * stride_depth + node).to(tl.int64)
    p_parents += i_request * stride_parents
    prefix_start = length * 0
    path_start = length * 0
    if HAS_WINDOW:
        prefix_start = tl.maximum(length + depth - window + 1, 0)
        path_start = tl.maximum(depth - window + 1, 0)
    prefix_len = tl.maximum(length - prefix_start, 0)
    path_len = depth + 1 - path_start

    o_column = i_block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    o_pos = tl.where(o_column < prefix_len, prefix_start + o_column, row_width)  # row_width: no slot
    hops = tl.where((i_block + 1) * BLOCK > prefix_len, tl.minimum(path_len, num_nodes), 0).to(tl.int32)
    for hop in range(hops):
        o_pos = tl.where(o_column == prefix_len + path_len - 1 - hop, length + node, o_pos)
        node = tl.load(p_parents + node, mask=node >= 0, other=-1).to(tl.int64)
    m_held = o_pos < tl.where(real, row_width, 0)
    slot = tl.load(p_req_to_slot + row * row_width + o_pos, mask=m_held, other=0)
    if TRANSLATE:
        slot = tl.load(p_full_to_swa + slot, mask=m_held, other=0)
    tl.store(p_slots + i_query * width + o_column, slot, mask=o_column < width)
    if i_block == 0:
        tl.store(p_lengths + i_query, prefix_len + path_len)


def build_node_rows(
    req_to_slot: torch.Tensor,
    full_to_swa: torch.Tensor | None,
    rows: torch.Tensor,
    committed_len: torch.Tensor,
    parents: torch.Tensor,
    depth: torch.Tensor,
    *,
    window: int | None,
    width: int,
) -> NodeRows:
    """The row of every node, in SWA space when `full_to_swa` is given, else in full space.

    req_to_slot [R, W] int64, the last row for padding; rows, committed_len [B]; parents, depth [B, N] of the trees.
    `width` >= every length: `window` is always enough with a window, the longest context + depth + 1 without.
    """
    batch, num_nodes = parents.shape
    num_rows, row_width = req_to_slot.shape
    assert depth.shape == parents.shape and (num_nodes == 1 or parents.stride(1) == depth.stride(1) == 1), (
        f"{parents.stride()=} {depth.stride()=}"
    )
    assert rows.shape == committed_len.shape == (batch,), f"{rows.shape=} {committed_len.shape=}"
    assert req_to_slot.is_contiguous() and rows.is_contiguous() and committed_len.is_contiguous(), "not contiguous"
    slots = req_to_slot.new_empty((batch, num_nodes, width))
    lengths = req_to_slot.new_empty((batch, num_nodes))
    _node_rows_kernel[(batch * num_nodes, max(triton.cdiv(width, BLOCK), 1))](
        req_to_slot,
        full_to_swa,
        rows,
        committed_len,
        parents,
        depth,
        slots,
        lengths,
        parents.stride(0),
        depth.stride(0),
        num_rows - 1,
        row_width,
        num_nodes,
        window or 0,
        width,
        HAS_WINDOW=window is not None,
        TRANSLATE=full_to_swa is not None,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return NodeRows(slots, lengths)
