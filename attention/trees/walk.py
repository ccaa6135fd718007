"""Walks over draft trees: tree fields from parents, and the accepted path.

    tree_fields   parents -> depth and ancestors, one program per block of nodes (plain torch needs a launch per hop)
    walk          sample and match, a part of the kernel that closes a round (`closing.py`): node 0 is accepted; from an
                  accepted node go to the child whose token the target drew there, else stop. The token drawn at the
                  last accepted node is the bonus token.

Siblings have distinct tokens, so accepted nodes form one path. Unlike rejection sampling, there is no acceptance ratio
and no residual distribution: the output is what plain decoding draws, token for token.

    tree   0 [the] - 1 [cat] - 3 [sat]     target draws after 0: cat, after 1: ran
                   \\ 2 [dog]               path [0, 1], length 2, emitted [cat, ran]

Both follow `parents` from node to node, without a mask, so the number of nodes has no limit.
"""

from typing import NamedTuple

import torch

from specdec.attention.trees.tree import DraftTree
from specdec.gpu.triton_shim import tl, triton

CELLS = 4096
"""Cells of the ancestor matrix that one program handles."""


class Accepted(NamedTuple):
    """Accepted paths of B trees, and the tokens to emit.

    path [B, N]: accepted nodes in order, root first, then 0s. length [B]: number of accepted nodes. tokens [B, N]:
    tokens[:, i] is the target's token after path[:, i]. The first `length` are emitted; the last of these is the bonus
    token.
    """

    path: torch.Tensor
    length: torch.Tensor
    tokens: torch.Tensor


def reference_accept(tree: DraftTree, target_tokens: torch.Tensor) -> Accepted:
    """`walk` for B trees at once. target_tokens [B, N]: the token that the target draws after each node."""
    batch, num_nodes = tree.tokens.shape
    drawn_at_parent = target_tokens.gather(1, tree.parents.clamp(min=0))
    matches = (tree.tokens == drawn_at_parent) | (tree.parents < 0)  # the root is always accepted
    accepted = (matches[:, None, :] | ~tree.ancestors).all(dim=-1)  # [B, N]: itself and all its ancestors
    nodes = torch.arange(num_nodes, device=target_tokens.device).expand(batch, num_nodes)
    by_depth = torch.where(accepted, tree.depth, num_nodes)  # column num_nodes takes rejected nodes
    path = nodes.new_zeros((batch, num_nodes + 1)).scatter_(1, by_depth, nodes)[:, :num_nodes]
    return Accepted(path, accepted.sum(dim=-1), target_tokens.gather(1, path))


@triton.jit(do_not_specialize=["num_nodes", "max_depth"])
def _tree_fields_kernel(
    p_parents: tl.tensor,
    p_depth: tl.tensor,
    p_ancestors: tl.tensor,
    stride_parents: tl.tensor,
    num_nodes: tl.tensor,
    max_depth: tl.tensor,
    NODES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    i_request = tl.program_id(0).to(tl.int64)
    o_node = (tl.program_id(1) * NODES + tl.arange(0, NODES)).to(tl.int64)
    o_column = tl.arange(0, BLOCK).to(tl.int64)
    m_node = o_node < num_nodes
    p_parents += i_request * stride_parents
    ancestors = o_column[None, :] == o_node[:, None]  # [NODES, BLOCK]
    depth = tl.zeros([NODES], tl.int64)
    above = tl.load(p_parents + o_node, mask=m_node, other=-1).to(tl.int64)  # [NODES], -1 past the root
    for _ in range(max_depth):  # one hop towards the root for every node at once
        ancestors = ancestors | (o_column[None, :] == above[:, None])
        depth += tl.where(above >= 0, 1, 0)
        above = tl.load(p_parents + above, mask=above >= 0, other=-1).to(tl.int64)
    o_out = i_request * num_nodes + o_node
    tl.store(p_depth + o_out, depth, mask=m_node)
    m_out = m_node[:, None] & (o_column < num_nodes)[None, :]
    tl.store(p_ancestors + o_out[:, None] * num_nodes + o_column[None, :], ancestors, mask=m_out)


@triton.jit
def walk(
    p_tokens: tl.tensor,  # [N]
    p_parents: tl.tensor,
    p_target: tl.tensor,
    num_nodes: tl.tensor,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Walk one tree -> path [BLOCK], padded with 0s; each node's place on the path [BLOCK], or BLOCK if off it;
    length."""
    o_node = tl.arange(0, BLOCK).to(tl.int64)
    m_node = o_node < num_nodes
    b_tokens = tl.load(p_tokens + o_node, mask=m_node, other=0)
    b_parents = tl.load(p_parents + o_node, mask=m_node, other=-1)
    path = tl.zeros([BLOCK], tl.int64)
    place = tl.full([BLOCK], BLOCK, tl.int64)
    length = tl.program_id(0).to(tl.int64) * 0
    node = length
    while node >= 0:  # terminates: children come after their parents
        path = tl.where(o_node == length, node, path)
        place = tl.where(o_node == node, length, place)
        length += 1
        drawn = tl.load(p_target + node)
        m_child = m_node & (o_node > node) & (b_parents == node) & (b_tokens == drawn)
        node = tl.max(tl.where(m_child, o_node, -1), axis=0)
    return path, place, length


def tree_fields(parents: torch.Tensor, *, max_depth: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The fields that `DraftTree.from_parents` computes: depth [B, N] int64, and ancestors [B, N, N] bool.

    parents [B, N] int64, -1 at node 0 and parents[n] < n elsewhere; no node is deeper than `max_depth`.
    """
    batch, num_nodes = parents.shape
    assert num_nodes == 1 or parents.stride(1) == 1, f"{parents.stride()=}"
    depth = parents.new_empty((batch, num_nodes))
    ancestors = parents.new_empty((batch, num_nodes, num_nodes), dtype=torch.bool)
    block = triton.next_power_of_2(num_nodes)
    nodes = min(block, max(1, CELLS // block))
    _tree_fields_kernel[(batch, triton.cdiv(num_nodes, nodes))](
        *(parents, depth, ancestors, parents.stride(0), num_nodes),
        num_nodes - 1 if max_depth is None else min(max_depth, num_nodes - 1),
        NODES=nodes,
        BLOCK=block,
        num_warps=2,
    )
    return depth, ancestors
