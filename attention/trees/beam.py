"""The beam of a growing draft tree: scores the children of K nodes and chooses the K children to expand next.

The beam has M nodes: 1 on level 1, then K. A level's candidates are the K children of each, M * K in all. A child's
score is its parent's score plus its log-probability; NaN counts as -inf, -inf as the smallest number, and more than 0
as 0. The next beam holds the K best candidates; among equal scores the lowest number goes first.

    K = 2    beam -.1 -2.    log-probabilities -.0 -3.    scores -.1 -3.1    next beam: candidates 0 and 2
                                               -.4 -9.           -2.4 -11.

If log-probabilities do not depend on the node (a block drafter's marginals), one launch expands all levels; otherwise a
level takes about ten launches.
"""

from typing import NamedTuple

import torch

from specdec.gpu.triton_shim import tl, triton

LOWEST = torch.finfo(torch.float32).min
MAX_KERNEL_TOPK = 32
"""Widest beam of the kernel: it holds MAX_TOPK squared scores in registers."""


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
    """Nodes to expand next: tokens [B, K], and the place [B, K] of each one's parent in the previous beam."""

    tokens: torch.Tensor
    origin: torch.Tensor


class Scored(NamedTuple):
    """A beam, with scores [B, K] and candidate numbers [B, K] of its nodes, from which children's scores are
    computed."""

    beam: Beam
    scores: torch.Tensor
    candidates: torch.Tensor


def reference_expand(
    above: Scored | None, tokens: torch.Tensor, log_probs: torch.Tensor, out: Candidates, first_candidate: int
) -> Scored:
    """See `expand`; takes any K."""
    batch, topk = tokens.shape[0], tokens.shape[-1]
    if above is None:
        zero = tokens.new_zeros((batch, 1))
        above = Scored(Beam(zero, zero), zero.float(), zero - 1)
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
        beam = Beam(flat.gather(1, chosen), chosen // topk)
        above = Scored(beam, best.values[:, :topk], chosen + first_candidate)
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
    above: Scored | None, tokens: torch.Tensor, log_probs: torch.Tensor, out: Candidates, first_candidate: int
) -> Scored:
    """Expand a beam of M nodes, or the root (None), by L levels.

    tokens, log_probs: [B, L, M, K] of each node's children, K <= MAX_TOPK distinct tokens; or [B, L, 1, K], shared by
    all nodes (required if L > 1). Their candidates are written to `out` from column `first_candidate` on. Returns the
    beam after the last level.
    """
    batch, levels, _, topk = tokens.shape
    assert tokens.shape == log_probs.shape and topk <= MAX_KERNEL_TOPK, f"{tokens.shape=} {log_probs.shape=}"
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
    return Scored(Beam(chosen[0], chosen[1]), best, chosen[2])
