"""Closes a round in one launch: walks the accepted path, commits it, writes its tokens and packs the result.

    path, length    as in `reference_accept`, cut to max_path[b] nodes
    emitted[b, i]   the target's token after path[b, i]; the first `length` count, the last of these is the bonus token
    committed_len   S -> S + length;   tokens[row, S + 1 + i] = emitted[b, i]
    slots[row]      pages of one slot: the path's slots move to S, S + 1, ... (`path_order`); slots of rejected nodes
                    stay in the lookahead and are overwritten. Larger pages: returns the K/V to move
    packed[b]       length   path [W]   emitted [D]         padded with zeros

One program runs per request. Padding seats get a result, but their row does not change.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from specdec.attention.trees.tree import DraftTree, reference_accept, walk
from specdec.gpu.triton_shim import tl, triton
from specdec.kvcache.layout import PrimaryLoc
from specdec.kvcache.table import Move, RequestTable, Rows


class VerifiedRound(NamedTuple):
    """B trees of N nodes, whose roots are at positions `start` [B] of their rows, as the target has verified them.

    drawn [B, N]: the token that the target draws after each node. max_path [B]: longest path to accept, at least 1.
    width, depth: columns of nodes and of tokens in the packed result; width >= N, depth >= the length of every path.
    """

    tree: DraftTree
    drawn: torch.Tensor
    max_path: torch.Tensor
    rows: Rows
    start: torch.Tensor
    width: int
    depth: int


def reference_closing(
    verified: VerifiedRound, table: RequestTable, tokens: torch.Tensor, packed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Move | None]:
    tree, drawn, max_path, rows, start, width, depth = verified
    path, accepted_len, emitted = reference_accept(tree, drawn)
    length = torch.minimum(accepted_len, max_path)
    move = table.commit_on_device(rows, length, None if tree.is_chain else path)
    if missing := width - tree.num_nodes:
        path, emitted = F.pad(path, (0, missing)), F.pad(emitted, (0, missing))
    emitted = emitted[:, :depth]
    steps = torch.arange(depth, device=drawn.device)
    row, cells = rows.index[:, None], start[:, None] + 1 + steps
    gained = (steps < length[:, None]) & (row != table.padding_row)
    tokens[row, cells] = torch.where(gained, emitted, tokens[row, cells])
    bonus = emitted.gather(1, length[:, None] - 1)[:, 0]
    packed.copy_(torch.cat([length[:, None], path, emitted], dim=1))
    return length, bonus, move


@triton.jit(
    do_not_specialize=[
        *("s_tree_tokens", "s_parents", "s_drawn"),
        *("num_nodes", "width", "depth", "row_width", "padding_row"),
    ]
)
def _closing_kernel(
    p_tree_tokens: tl.tensor,  # [B, N]
    p_parents: tl.tensor,  # [B, N]
    p_drawn: tl.tensor,  # [B, N]
    p_max_path: tl.tensor,  # [B]
    p_rows: tl.tensor,  # [B]
    p_start: tl.tensor,  # [B]
    p_committed_len: tl.tensor,  # [R]
    p_slots: tl.tensor,  # [R, row_width]
    p_tokens: tl.tensor,  # [R, row_width]
    p_length: tl.tensor,  # [B]
    p_bonus: tl.tensor,  # [B]
    p_packed: tl.tensor,  # [B, 1 + W + D]
    p_source: tl.tensor,  # [B, N], or None
    p_destination: tl.tensor,
    s_tree_tokens: tl.tensor,
    s_parents: tl.tensor,
    s_drawn: tl.tensor,
    num_nodes: tl.tensor,
    width: tl.tensor,
    depth: tl.tensor,
    row_width: tl.tensor,
    padding_row: tl.tensor,
    PERMUTES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    i_b = tl.program_id(0).to(tl.int64)
    o_node = tl.arange(0, BLOCK).to(tl.int64)
    m_node = o_node < num_nodes
    row = tl.load(p_rows + i_b).to(tl.int64)
    start = tl.load(p_start + i_b).to(tl.int64)
    max_path = tl.load(p_max_path + i_b).to(tl.int64)
    p_drawn += i_b * s_drawn
    path, place, accepted_len = walk(
        p_tree_tokens + i_b * s_tree_tokens, p_parents + i_b * s_parents, p_drawn, num_nodes, BLOCK
    )
    length = tl.minimum(accepted_len, max_path)
    b_emitted = tl.load(p_drawn + path, mask=m_node, other=0).to(tl.int64)
    tl.store(p_length + i_b, length)
    tl.store(p_bonus + i_b, tl.sum(tl.where(o_node == length - 1, b_emitted, 0), axis=0))
    p_packed += i_b * (1 + width + depth)
    tl.store(p_packed, length)
    tl.store(p_packed + 1 + o_node, path, mask=o_node < width)
    tl.store(p_packed + 1 + width + o_node, b_emitted, mask=o_node < depth)

    gained = tl.where(row != padding_row, length, 0)
    tl.store(p_committed_len + row, start + gained)
    first = row * row_width + start
    tl.store(p_tokens + first + 1 + o_node, b_emitted, mask=o_node < gained)
    if PERMUTES:  # padding: null slots
        left_out = tl.cumsum(tl.where(m_node & (place >= length), 1, 0).to(tl.int64), axis=0)
        b_slot = tl.load(p_slots + first + o_node, mask=m_node, other=0)
        tl.debug_barrier()  # all reads come before any write
        to_place = tl.where(place < length, place, length + left_out - 1)
        tl.store(p_slots + first + to_place, b_slot, mask=m_node)
    if p_source is not None:
        m_displaced = (o_node < gained) & (path != o_node)
        b_source = tl.load(p_slots + first + path, mask=m_displaced, other=0)
        b_destination = tl.load(p_slots + first + o_node, mask=m_displaced, other=0)
        tl.store(p_source + i_b * num_nodes + o_node, b_source, mask=m_node)
        tl.store(p_destination + i_b * num_nodes + o_node, b_destination, mask=m_node)


def closing(
    verified: VerifiedRound, table: RequestTable, tokens: torch.Tensor, packed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Move | None]:
    """Accept and commit a verified round.

    tokens: token ids by row and position; the emitted tokens are appended. packed [B, 1 + W + D]: receives the result.
    Returns length [B], bonus token [B], and with larger pages the K/V to move.
    """
    tree, drawn, max_path, rows, start, width, depth = verified
    batch, num_nodes = tree.tokens.shape
    slots, committed_len = table.slots.tensor, table.committed_len.tensor
    table.allocator.require_unfrozen("commit")
    by_node = (tree.tokens, tree.parents, drawn)
    assert all(x.shape == (batch, num_nodes) for x in by_node) and width >= num_nodes, f"{drawn.shape=} {width=}"
    assert num_nodes == 1 or all(x.stride(1) == 1 for x in by_node), f"{[x.stride() for x in by_node]}"
    by_request = (max_path, rows.index, start)
    assert all(x.shape == (batch,) and x.is_contiguous() for x in by_request), f"{[x.shape for x in by_request]}"
    assert tokens.shape == slots.shape and tokens.is_contiguous() and slots.is_contiguous(), f"{tokens.shape=}"
    length, bonus = drawn.new_empty((batch,)), drawn.new_empty((batch,))
    assert packed.shape == (batch, 1 + width + depth) and packed.is_contiguous(), f"{packed.shape=} {width=} {depth=}"
    move = None
    permutes = not tree.is_chain and table.allocator.page_size == 1
    if not tree.is_chain and not permutes:
        source, destination = (drawn.new_empty((batch * num_nodes,)) for _ in range(2))
        move = Move(PrimaryLoc(source), PrimaryLoc(destination))
    _closing_kernel[(batch,)](
        *(*by_node, *by_request, committed_len, slots, tokens, length, bonus, packed),
        *((None, None) if move is None else move),
        *(x.stride(0) for x in by_node),
        *(num_nodes, width, depth, slots.shape[1], table.padding_row),
        PERMUTES=permutes,
        BLOCK=triton.next_power_of_2(max(width, depth)),
        num_warps=1,
    )
    return length, bonus, move
