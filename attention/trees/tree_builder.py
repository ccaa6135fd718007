r"""Best-first growth of draft trees from scored candidates, shared by all drafters.

A request's candidates are added level by level; K = `topk`. Level 1 holds the K children of the root. Every later level
holds the K * K children of the K best candidates (the beam) of the previous level:

    candidate    0 .. K-1 | K .. K+K*K-1 | ...       level 1 | level 2 | ...
    parent       -1 (root)| a candidate of level 1   always a smaller number than its child's
    score        sum of log-probabilities on the path; NaN counts as -inf, and -inf as the smallest number

Growth: take the best candidate whose parent is taken, until the tree has N nodes; among equal scores the lowest number
goes first. A child's score is at most its parent's. So the order (score descending, number ascending) puts every parent
before its children, also on ties, and growth simply takes the first N - 1 candidates in this order. Nodes are numbered
in candidate order, so parents come before children; siblings are distinct if a parent's K tokens are.

    K = 2   candidates  0 [-.1] 1 [-2.]   2, 3 under 0 [-.1 -3.]   4, 5 under 1 [-2. -9.]
    N = 4   taken       0, 2 (equal to its parent), 1              parents of nodes -1 0 0 1, depth 0 1 1 2
"""

from typing import Protocol

import torch

from specdec.attention.trees.beam import LOWEST, Beam, Candidates, Scored
from specdec.attention.trees.tree import DraftTree
from specdec.attention.trees.walk import tree_fields
from specdec.gpu.triton_shim import tl, triton

MAX_CANDIDATES = 4096


class TreeBackend(Protocol):
    """Expands beams and selects trees, in plain torch or by one launch each."""

    def expand(
        self, above: Scored | None, tokens: torch.Tensor, log_probs: torch.Tensor, out: Candidates, first_candidate: int
    ) -> Scored:
        """Expand one or more levels and write their candidates to `out`. Returns the beam after the last level."""

    def select_tree(self, root: torch.Tensor, found: Candidates, *, num_nodes: int, num_levels: int) -> DraftTree:
        """The best tree of `num_nodes` nodes among the candidates."""


class TreeBuilder:
    """Collects the candidates of B trees level by level, then selects the trees. `root`: [B] int64 tokens."""

    def __init__(self, root: torch.Tensor, backend: TreeBackend, num_levels: int) -> None:
        self.root, self.backend, self.num_levels = root, backend, num_levels
        self._beam: Scored | None = None  # the root
        self.candidates: Candidates | None = None  # made when K is known
        self._count = 0

    def add_level(self, tokens: torch.Tensor, log_probs: torch.Tensor) -> Beam:
        """Add the children of the beam: tokens [B, M, K] distinct in K, log_probs [B, M, K]; M = 1 on level 1, then
        K."""
        return self._add(tokens[:, None], log_probs[:, None])

    def add_all_levels(self, tokens: torch.Tensor, log_probs: torch.Tensor) -> Beam:
        """Add all levels at once; all nodes of a level have the same children: tokens and log_probs [B, L, K]."""
        assert tokens.shape[1] == self.num_levels and self._count == 0, f"{tokens.shape=} {self._count=}"
        return self._add(tokens[:, :, None], log_probs[:, :, None])

    def _add(self, tokens: torch.Tensor, log_probs: torch.Tensor) -> Beam:
        """Add L levels: tokens and log_probs [B, L, M, K]."""
        topk = tokens.shape[-1]
        if self.candidates is None:
            self.candidates = Candidates.empty(self.root, num_candidates(topk, self.num_levels))
        width = 1 if self._beam is None else topk
        self._beam = self.backend.expand(self._beam, tokens, log_probs, self.candidates, self._count)
        self._count += width * topk + (tokens.shape[1] - 1) * topk**2
        return self._beam.beam

    def select(self, num_nodes: int) -> DraftTree:
        """The best tree of `num_nodes` nodes, root included. Requires that all levels have been added."""
        found = self.candidates
        assert found is not None and self._count == found.tokens.shape[1], f"{self._count} candidates of {found}"
        return self.backend.select_tree(self.root, found, num_nodes=num_nodes, num_levels=self.num_levels)


def num_candidates(topk: int, num_levels: int) -> int:
    """Candidates of a tree that is grown by `num_levels` levels."""
    return topk + (num_levels - 1) * topk**2


def reference_select_tree(
    root: torch.Tensor, found: Candidates, *, num_nodes: int, num_levels: int | None = None
) -> DraftTree:
    """See `select_tree`; takes any number of candidates."""
    _check_candidates(root, found, num_nodes)
    tokens, scores, parents = found
    batch, num_candidates = tokens.shape
    capped = scores.float().nan_to_num(nan=LOWEST, posinf=torch.inf, neginf=LOWEST)
    above = parents
    for _ in range((num_levels or num_candidates).bit_length()):  # pointer jumping: ancestors double each time
        ancestor_score = capped.gather(1, above.clamp(min=0))
        capped = torch.where(above >= 0, torch.minimum(capped, ancestor_score), capped)
        above = torch.where(above >= 0, above.gather(1, above.clamp(min=0)), -1)
    order = (capped + 0.0).sort(dim=1, descending=True, stable=True).indices  # + 0.0: no negative zero
    taken = order[:, : num_nodes - 1].sort(dim=1).values  # [B, N - 1] candidates
    nodes = torch.arange(1, num_nodes, device=tokens.device).expand(batch, -1)
    node_of = torch.zeros_like(parents).scatter_(1, taken, nodes)
    parent = parents.gather(1, taken)
    parent = torch.where(parent < 0, 0, node_of.gather(1, parent.clamp(min=0)))
    return DraftTree.from_parents(
        torch.cat([root[:, None], tokens.gather(1, taken)], dim=1),
        torch.cat([torch.full_like(root, -1)[:, None], parent], dim=1),
    )


@triton.jit(do_not_specialize=["num_candidates", "num_nodes"])
def _select_nodes_kernel(
    p_root: tl.tensor,
    p_tokens: tl.tensor,
    p_scores: tl.tensor,
    p_parents: tl.tensor,
    p_node_tokens: tl.tensor,
    p_node_parents: tl.tensor,
    num_candidates: tl.tensor,
    num_nodes: tl.tensor,
    LOWEST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    i_request = tl.program_id(0).to(tl.int64)
    o_candidate = tl.arange(0, BLOCK)
    m_candidate = o_candidate < num_candidates
    o_in = i_request * num_candidates + o_candidate
    score = tl.load(p_scores + o_in, mask=m_candidate, other=0.0).to(tl.float32)
    score = tl.where(score > LOWEST, score, LOWEST)  # NaN and -inf too
    parent = tl.load(p_parents + o_in, mask=m_candidate, other=-2).to(tl.int32)
    ready = tl.where(parent == -1, score, float("-inf"))  # ready: not taken, but its parent is
    taken = o_candidate < 0
    node = tl.zeros([BLOCK], tl.int32)  # candidates taken up to and including this one
    parent_node = tl.zeros([BLOCK], tl.int32)  # the same at its parent: the parent's node number
    for _ in range(1, num_nodes):
        best, i_best = tl.max(ready, axis=0, return_indices=True, return_indices_tie_break_left=True)
        taken = taken | (o_candidate == i_best)
        node += tl.where(o_candidate >= i_best, 1, 0)
        parent_node += tl.where(parent >= i_best, 1, 0)
        ready = tl.where(o_candidate == i_best, float("-inf"), ready)
        ready = tl.where(parent == i_best, tl.minimum(score, best), ready)
    o_out = i_request * num_nodes
    tl.store(p_node_tokens + o_out, tl.load(p_root + i_request))
    tl.store(p_node_parents + o_out, -1)
    token = tl.load(p_tokens + o_in, mask=taken, other=0)
    tl.store(p_node_tokens + o_out + node, token, mask=taken)
    tl.store(p_node_parents + o_out + node, parent_node.to(tl.int64), mask=taken)


def select_tree(root: torch.Tensor, found: Candidates, *, num_nodes: int, num_levels: int | None = None) -> DraftTree:
    """The best tree of N = `num_nodes` nodes among C >= N - 1 candidates, C <= MAX_CANDIDATES.

    root [B] int64; found: tokens, parents [B, C] int64, scores [B, C]; parents[c] < c is a candidate, or -1, the root.
    `num_levels`: upper bound on depths (None: not known).
    """
    _check_candidates(root, found, num_nodes)
    batch, num_candidates = found.tokens.shape
    assert num_candidates <= MAX_CANDIDATES, f"{num_candidates} candidates, at most {MAX_CANDIDATES}"
    assert all(x.is_contiguous() for x in (root, *found)), "not contiguous"
    node_tokens, node_parents = (root.new_empty((batch, num_nodes)) for _ in range(2))
    block = triton.next_power_of_2(num_candidates)
    _select_nodes_kernel[(batch,)](
        *(root, *found, node_tokens, node_parents, num_candidates, num_nodes),
        LOWEST=LOWEST,
        BLOCK=block,
        num_warps=max(1, min(block // 256, 8)),
    )
    return DraftTree(node_tokens, node_parents, *tree_fields(node_parents, max_depth=num_levels), max_depth=num_levels)


def _check_candidates(root: torch.Tensor, found: Candidates, num_nodes: int) -> None:
    tokens, scores, parents = found
    batch, num_candidates = tokens.shape
    assert 1 <= num_nodes <= num_candidates + 1, f"{num_candidates} candidates cannot fill {num_nodes} nodes"
    assert tokens.shape == scores.shape == parents.shape and root.shape == (batch,), f"{scores.shape=} {parents.shape=}"
