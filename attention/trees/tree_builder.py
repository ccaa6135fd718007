r"""Best-first growth of draft trees from scored candidates, shared by all drafters.

A request's candidates are added level by level; K = `topk`. Level 1 holds the K children of the root. Every later level
holds the K * K children of the K best candidates (the beam) of the previous level:

    candidate    0 .. K-1 | K .. K+K*K-1 | ...       level 1 | level 2 | ...
    parent       -1 (root)| a candidate of level 1   always a smaller number than its child's
    score        sum of log-probabilities on the path; NaN counts as -inf, -inf as the smallest number, and a
                 log-probability of more than 0 as 0

    K = 2    beam -.1 -2.    log-probabilities -.0 -3.    scores -.1 -3.1    next beam: candidates 0 and 2
                                               -.4 -9.           -2.4 -11.

If log-probabilities do not depend on the node (a block drafter's marginals), one launch expands all levels; otherwise a
level takes about ten launches.

Growth: take the best candidate whose parent is taken, until the tree has N nodes; among equal scores the lowest number
goes first. A child's score is at most its parent's. So the order (score descending, number ascending) puts every parent
before its children, also on ties, and growth simply takes the first N - 1 candidates in this order. Nodes are numbered
in candidate order, so parents come before children; siblings are distinct if a parent's K tokens are.

    K = 2   candidates  0 [-.1] 1 [-2.]   2, 3 under 0 [-.1 -3.]   4, 5 under 1 [-2. -9.]
    N = 4   taken       0, 2 (equal to its parent), 1              parents of nodes -1 0 0 1, depth 0 1 1 2
"""

from typing import NamedTuple, Protocol

import torch

from specdec.attention.trees.tree import DraftTree, tree_fields
from specdec.gpu.triton_shim import tl, triton

LOWEST = torch.finfo(torch.float32).min
MAX_KERNEL_TOPK = 32
"""Widest beam of the kernel: it holds this number squared of scores in registers."""


class Candidates(NamedTuple):
    """All candidates of a tree in order of creation, [B, C]: tokens, scores, and parents (a candidate's number; -1: the
    root)."""

    tokens: torch.Tensor
    scores: torch.Tensor
    parents: torch.Tensor

    @classmethod
    def empty(cls, root: torch.Tensor, count: int) -> "Candidates":
        shape = (len(root), count)
        scores = torch.empty(shape, dtype=torch.float32, device=root.device)
        return cls(root.new_empty(shape), scores, root.new_empty(shape))


class Beam(NamedTuple):
    """Nodes to expand next, [B, K] each: tokens; the place of each one's parent in the previous beam; scores and
    candidate numbers, from which children's scores are computed."""

    tokens: torch.Tensor
    origin: torch.Tensor
    scores: torch.Tensor
    candidates: torch.Tensor


def reference_expand(
    above: Beam | None, tokens: torch.Tensor, log_probs: torch.Tensor, out: Candidates, first_candidate: int
) -> Beam:
    """See `expand`; takes any K."""
    batch, topk = tokens.shape[0], tokens.shape[-1]
    if above is None:
        zero = tokens.new_zeros((batch, 1))
        above = Beam(zero, zero, zero.float(), zero - 1)
    for level in range(tokens.shape[1]):
        width = above.scores.shape[1]
        added = log_probs[:, level].float().nan_to_num(nan=LOWEST).clamp(max=0)  # [B, M, K]
        scores = (above.scores[:, :, None] + added).clamp(min=LOWEST).view(batch, width * topk)
        flat = tokens[:, level].expand(-1, width, -1).reshape(batch, width * topk)
        places = slice(first_candidate, first_candidate + width * topk)
        out.tokens[:, places], out.scores[:, places] = flat, scores
        out.parents[:, places] = above.candidates[:, :, None].expand(-1, -1, topk).flatten(1)
        best = scores.sort(dim=1, descending=True, stable=True)
        chosen = best.indices[:, :topk]
        above = Beam(flat.gather(1, chosen), chosen // topk, best.values[:, :topk], chosen + first_candidate)
        first_candidate += width * topk
    return above


@triton.jit(do_not_specialize=["num_levels", "width", "first_candidate", "num_candidates"])
def _expand_kernel(
    p_tokens: tl.tensor,  # [B, L, M or 1, K]
    p_log_probs: tl.tensor,
    p_scores: tl.tensor,  # [B, M] of the beam; None: it is the root
    p_candidates: tl.tensor,
    p_out_tokens: tl.tensor,  # [B, C]
    p_out_scores: tl.tensor,
    p_out_parents: tl.tensor,
    p_beam: tl.tensor,  # [3, B, K]: tokens, origin, candidates
    p_beam_scores: tl.tensor,  # [B, K]
    num_levels: tl.tensor,
    width: tl.tensor,  # M
    first_candidate: tl.tensor,
    num_candidates: tl.tensor,  # C
    s_request: tl.tensor,
    s_level: tl.tensor,
    s_node: tl.tensor,
    LOWEST: tl.constexpr,
    K: tl.constexpr,
    SLOTS: tl.constexpr,  # K or more, a power of two
) -> None:
    i_request, num_requests = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    o_slot = tl.arange(0, SLOTS)
    o_node, o_child = o_slot[:, None], o_slot[None, :]
    o_flat = tl.arange(0, SLOTS * SLOTS)
    b_score, b_candidate = tl.zeros([SLOTS], tl.float32), tl.full([SLOTS], -1, tl.int64)
    if p_scores is not None:
        b_score = tl.load(p_scores + i_request * width + o_slot, mask=o_slot < width, other=0.0)
        b_candidate = tl.load(p_candidates + i_request * width + o_slot, mask=o_slot < width, other=-1)
    p_tokens += i_request * s_request
    p_log_probs += i_request * s_request
    o_out = i_request * num_candidates + first_candidate
    o_beam = i_request * K
    for i_level in range(num_levels):
        m_pair = (o_node < width) & (o_child < K)
        o_pair = i_level * s_level + o_node * s_node + o_child
        b_added = tl.load(p_log_probs + o_pair, mask=m_pair, other=0.0).to(tl.float32)
        b_added = tl.minimum(tl.where(b_added > LOWEST, b_added, LOWEST), 0.0)  # NaN and -inf too
        b_added = tl.maximum(b_added, LOWEST - b_score[:, None])  # padding rows have arbitrary scores: avoid overflow
        b_sum = tl.maximum(b_score[:, None] + b_added, LOWEST)  # [SLOTS, SLOTS]
        o_made = o_out + o_node * K + o_child
        tl.store(p_out_tokens + o_made, tl.load(p_tokens + o_pair, mask=m_pair, other=0), mask=m_pair)
        tl.store(p_out_scores + o_made, b_sum, mask=m_pair)
        b_parent = b_candidate[:, None] + tl.zeros([SLOTS, SLOTS], tl.int64)
        tl.store(p_out_parents + o_made, b_parent, mask=m_pair)
        b_left = tl.reshape(tl.where(m_pair, b_sum, float("-inf")), [SLOTS * SLOTS])
        b_score, b_candidate = tl.zeros([SLOTS], tl.float32), tl.zeros([SLOTS], tl.int64)
        for i_best in range(K):
            best, i_pair = tl.max(b_left, axis=0, return_indices=True, return_indices_tie_break_left=True)
            b_left = tl.where(o_flat == i_pair, float("-inf"), b_left)
            i_node, i_child = i_pair // SLOTS, i_pair % SLOTS
            candidate = (first_candidate + i_node * K + i_child).to(tl.int64)
            b_score = tl.where(o_slot == i_best, best, b_score)
            b_candidate = tl.where(o_slot == i_best, candidate, b_candidate)
            if i_level == num_levels - 1:
                token = tl.load(p_tokens + i_level * s_level + i_node * s_node + i_child)
                tl.store(p_beam + o_beam + i_best, token)
                tl.store(p_beam + num_requests * K + o_beam + i_best, i_node.to(tl.int64))
                tl.store(p_beam + 2 * num_requests * K + o_beam + i_best, candidate)
                tl.store(p_beam_scores + o_beam + i_best, best)
        o_out += width * K
        first_candidate += width * K
        width = width * 0 + K


def expand(
    above: Beam | None, tokens: torch.Tensor, log_probs: torch.Tensor, out: Candidates, first_candidate: int
) -> Beam:
    """Expand a beam of M nodes, or the root (None), by L levels.

    tokens, log_probs: [B, L, M, K] of each node's children, K distinct tokens; or [B, L, 1, K], shared by all nodes
    (required if L > 1). Their candidates are written to `out` from column `first_candidate` on. Returns the beam after
    the last level. If K > MAX_KERNEL_TOPK, the reference runs.
    """
    batch, levels, _, topk = tokens.shape
    assert tokens.shape == log_probs.shape, f"{tokens.shape=} {log_probs.shape=}"
    if topk > MAX_KERNEL_TOPK:
        return reference_expand(above, tokens, log_probs, out, first_candidate)
    tokens, log_probs = tokens.contiguous(), log_probs.contiguous()
    sums = (None, None) if above is None else (above.scores.contiguous(), above.candidates.contiguous())
    width = 1 if above is None else above.scores.shape[1]
    assert levels == 1 or tokens.shape[2] == 1, f"{levels} levels of {tokens.shape[2]} nodes"
    chosen = tokens.new_empty((3, batch, topk))
    best = torch.empty((batch, topk), dtype=torch.float32, device=tokens.device)
    shared = tokens.shape[2] == 1
    slots = max(2, triton.next_power_of_2(topk))
    _expand_kernel[(batch,)](
        *(tokens, log_probs, *sums, *out, chosen, best),
        *(levels, width, first_candidate, out.tokens.shape[1]),
        *(tokens.stride(0), tokens.stride(1), 0 if shared else tokens.stride(2)),
        LOWEST=LOWEST,
        K=topk,
        SLOTS=slots,
        num_warps=max(1, min(slots * slots // 256, 8)),
    )
    return Beam(chosen[0], chosen[1], best, chosen[2])


MAX_CANDIDATES = 4096


class TreeBackend(Protocol):
    """Expands beams and selects trees, in plain torch or by one launch each."""

    def expand(
        self, above: Beam | None, tokens: torch.Tensor, log_probs: torch.Tensor, out: Candidates, first_candidate: int
    ) -> Beam:
        """Expand one or more levels and write their candidates to `out`. Returns the beam after the last level."""

    def select_tree(self, root: torch.Tensor, found: Candidates, *, num_nodes: int, num_levels: int) -> DraftTree:
        """The best tree of `num_nodes` nodes among the candidates."""


class TreeBuilder:
    """Collects the candidates of B trees level by level, then selects the trees. `root`: [B] int64 tokens."""

    def __init__(self, root: torch.Tensor, backend: TreeBackend, num_levels: int) -> None:
        self.root, self.backend, self.num_levels = root, backend, num_levels
        self._beam: Beam | None = None  # the root
        self.candidates: Candidates | None = None  # made when K is known
        self._count = 0

    def add_level(self, tokens: torch.Tensor, log_probs: torch.Tensor) -> Beam:
        """Add the children of the beam: tokens [B, M, K] distinct in K, log_probs [B, M, K]; M = 1 on level 1, then
        K."""
        return self.add_levels(tokens[:, None], log_probs[:, None])

    def add_levels(self, tokens: torch.Tensor, log_probs: torch.Tensor) -> Beam:
        """Add L levels: tokens and log_probs [B, L, M, K]. If L > 1, M is 1: a level's nodes have the same children."""
        topk = tokens.shape[-1]
        if self.candidates is None:
            self.candidates = Candidates.empty(self.root, num_candidates(topk, self.num_levels))
        width = 1 if self._beam is None else topk
        self._beam = self.backend.expand(self._beam, tokens, log_probs, self.candidates, self._count)
        self._count += width * topk + (tokens.shape[1] - 1) * topk**2
        return self._beam

    def select(self, num_nodes: int) -> DraftTree:
        """The best tree of `num_nodes` nodes, root included. Requires that all levels have been added."""
        found = self.candidates
        assert found is not None and self._count == found.tokens.shape[1], f"{self._count} candidates of {found}"
        return self.backend.select_tree(self.root, found, num_nodes=num_nodes, num_levels=self.num_levels)


def num_candidates(topk: int, num_levels: int) -> int:
    """Number of candidates of a tree that is grown by `num_levels` levels."""
    return topk + (num_levels - 1) * topk**2


def reference_select_tree(root: torch.Tensor, found: Candidates, *, num_nodes: int, num_levels: int) -> DraftTree:
    """See `select_tree`; takes any number of candidates."""
    _check_candidates(root, found, num_nodes)
    tokens, scores, parents = found
    capped = scores.float().nan_to_num(nan=LOWEST, posinf=torch.inf, neginf=LOWEST)
    above = parents
    for _ in range(num_levels.bit_length()):  # pointer jumping: ancestors double each time
        ancestor_score = capped.gather(1, above.clamp(min=0))
        capped = torch.where(above >= 0, torch.minimum(capped, ancestor_score), capped)
        above = torch.where(above >= 0, above.gather(1, above.clamp(min=0)), -1)
    order = (capped + 0.0).sort(dim=1, descending=True, stable=True).indices  # + 0.0: no negative zero
    taken = order[:, : num_nodes - 1].sort(dim=1).values  # [B, N - 1] candidates
    nodes = torch.arange(1, num_nodes, device=tokens.device).expand(len(tokens), -1)
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


def select_tree(root: torch.Tensor, found: Candidates, *, num_nodes: int, num_levels: int) -> DraftTree:
    """The best tree of N = `num_nodes` nodes among C >= N - 1 candidates. If C > MAX_CANDIDATES, the reference runs.

    root [B] int64; found: tokens, parents [B, C] int64, scores [B, C]; parents[c] < c is a candidate, or -1, the root.
    `num_levels`: upper bound on depths.
    """
    _check_candidates(root, found, num_nodes)
    batch, num_candidates = found.tokens.shape
    if num_candidates > MAX_CANDIDATES:
        return reference_select_tree(root, found, num_nodes=num_nodes, num_levels=num_levels)
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
