r"""The draft tree, which a drafter proposes and the target verifies. A chain is a tree too.

    node      0  1  2  3  4          0 (root: the previous bonus token, its K/V not yet written)
    parent   -1  0  0  1  3         / \
    depth     0  1  1  2  3        1   2      node n sits at position S + depth[n];
                                   |          parents come before their children;
                                   3 - 4      siblings carry distinct tokens.

Walks follow `parents` from node to node, without a mask, so the number of nodes has no limit:

    tree_fields   parents -> depth and ancestors, one program per block of nodes (plain torch needs a launch per hop)
    walk          sample and match, a part of the kernel that closes a round (`closing.py`): node 0 is accepted; from an
                  accepted node go to the child whose token the target drew there, else stop. The token drawn at the
                  last accepted node is the bonus token.

Accepted nodes form one path. Unlike rejection sampling, there is no acceptance ratio and no residual distribution: the
output is what plain decoding draws, token for token.

    tree   0 [the] - 1 [cat] - 3 [sat]     target draws after 0: cat, after 1: ran
                   \ 2 [dog]               path [0, 1], length 2, emitted [cat, ran]
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from specdec.gpu.triton_shim import tl, triton


@dataclass(frozen=True, slots=True)
class DraftTree:
    """B trees of N nodes.

    tokens, parents, depth: [B, N] int64 (parents[:, 0] = -1, depth[:, 0] = 0).
    ancestors: [B, N, N] bool, `ancestors[b, i, j]`: j is i itself or an ancestor of i.
    max_depth: upper bound on depths; None: not known, so N - 1.
    is_chain: each node is the parent of the next.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depth: torch.Tensor
    ancestors: torch.Tensor
    max_depth: int | None = None
    is_chain: bool = False

    @property
    def num_nodes(self) -> int:
        return self.tokens.shape[1]

    @classmethod
    def chain(cls, tokens: torch.Tensor) -> "DraftTree":
        """Chains of tokens [B, N], root first."""
        batch, num_nodes = tokens.shape
        parents, depth, ancestors = _chain_fields(num_nodes, tokens.device)
        return cls(
            tokens=tokens,
            parents=parents.expand(batch, num_nodes),
            depth=depth.expand(batch, num_nodes),
            ancestors=ancestors.expand(batch, num_nodes, num_nodes),
            max_depth=num_nodes - 1,
            is_chain=True,
        )

    @classmethod
    def from_parents(cls, tokens: torch.Tensor, parents: torch.Tensor) -> "DraftTree":
        """Trees of tokens and parents [B, N]; parents must come before their children."""
        batch, num_nodes = tokens.shape
        nodes = torch.arange(num_nodes, device=tokens.device)
        ancestors = torch.eye(num_nodes, dtype=torch.bool, device=tokens.device).repeat(batch, 1, 1)
        current = parents
        for _ in range(num_nodes - 1):  # all nodes take one hop towards the root
            ancestors |= (current[:, :, None] == nodes) & (current >= 0)[:, :, None]
            current = torch.where(current > 0, parents.gather(1, current.clamp(min=0)), -1)
        return cls(tokens=tokens, parents=parents, depth=ancestors.sum(-1) - 1, ancestors=ancestors)

    def check(self) -> None:
        """Assert the rules above. Synchronises with the device; meant for tests and drafter conformance."""
        batch, num_nodes = self.tokens.shape
        nodes = torch.arange(num_nodes, device=self.tokens.device)
        assert self.parents.shape == self.depth.shape == (batch, num_nodes), (
            f"{self.parents.shape=} {self.depth.shape=}"
        )
        assert bool((self.parents[:, 0] == -1).all()) and bool((self.depth[:, 0] == 0).all()), "node 0 is not the root"
        assert bool(((self.parents[:, 1:] >= 0) & (self.parents[:, 1:] < nodes[1:])).all()), "a parent after its child"
        rebuilt = DraftTree.from_parents(self.tokens, self.parents)
        assert bool((rebuilt.depth == self.depth).all()), "depth disagrees with parents"
        assert bool((rebuilt.ancestors == self.ancestors).all()), "ancestors disagree with parents"
        assert self.max_depth is None or bool((self.depth <= self.max_depth).all()), f"deeper than {self.max_depth}"
        assert not self.is_chain or bool((self.parents == nodes - 1).all()), "is_chain, but it branches"
        same = (self.parents[:, :, None] == self.parents[:, None, :]) & (
            self.tokens[:, :, None] == self.tokens[:, None, :]
        )
        assert not bool((same & ~torch.eye(num_nodes, dtype=torch.bool, device=same.device)).any()), "equal siblings"


@cache  # never emptied: captured rounds refer to its tensors
def _chain_fields(num_nodes: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Parents and depth [N] and ancestors [N, N] of a chain. Made once, on the host: made on a GPU they would cost
    seven launches per round, all on one thread's stream."""
    with torch.inference_mode(False):
        steps = torch.arange(num_nodes, device="cpu")
        ancestors = steps[:, None] >= steps[None, :]
        return (steps - 1).to(device), steps.to(device), ancestors.to(device)


BLANK = -1
"""Token of a node that only fills up a tree of fixed size: a child of the root that the target never draws."""


def force_tokens(tree: DraftTree, forced: torch.Tensor, length: torch.Tensor, num_nodes: int) -> DraftTree:
    """Trees of `num_nodes` nodes. For each request: a chain of the root and the first `length` [B] tokens of forced [B,
    F], or the given tree if `length` is 0. Blank nodes fill up the rest."""
    nodes = torch.arange(num_nodes, device=length.device)
    extra = num_nodes - tree.num_nodes
    blank_path = (nodes == 0) | (nodes[:, None] == nodes)  # [N, N]: the root and itself
    tokens = F.pad(tree.tokens, (0, extra), value=BLANK)
    parents, depth = F.pad(tree.parents, (0, extra), value=0), F.pad(tree.depth, (0, extra), value=1)
    own = F.pad(tree.ancestors, (0, extra, 0, extra))
    ancestors = torch.where((nodes < tree.num_nodes)[:, None], own, blank_path)

    on_chain, is_forced = nodes <= length[:, None], (length > 0)[:, None]  # [B, N], [B, 1]
    chain = F.pad(torch.cat([tree.tokens[:, :1], forced], dim=1), (0, num_nodes), value=BLANK)[:, :num_nodes]
    chain_path = torch.where(on_chain[:, :, None], nodes[:, None] >= nodes, blank_path)  # [B, N, N]
    return DraftTree(
        tokens=torch.where(is_forced, torch.where(on_chain, chain, BLANK), tokens),
        parents=torch.where(is_forced, torch.where(on_chain, nodes - 1, 0), parents),
        depth=torch.where(is_forced, torch.where(on_chain, nodes, 1), depth),
        ancestors=torch.where(is_forced[:, :, None], chain_path, ancestors),
    )


def without_blanks(tree: DraftTree) -> DraftTree:
    """Returns the tree with token 0 at blank nodes, so that every token can be looked up in an embedding."""
    return replace(tree, tokens=tree.tokens.clamp(min=0))


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
    length = 1 + torch.where(accepted, tree.depth, 0).amax(dim=-1)  # not a sum: siblings of a bad draft may be equal
    return Accepted(path, length, target_tokens.gather(1, path))


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


def tree_fields(parents: torch.Tensor, *, max_depth: int) -> tuple[torch.Tensor, torch.Tensor]:
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
        *(parents, depth, ancestors, parents.stride(0), num_nodes, min(max_depth, num_nodes - 1)),
        NODES=nodes,
        BLOCK=block,
        num_warps=2,
    )
    return depth, ancestors
