r"""A head with ordered embeddings: score C centroids, then only the tokens of the best k of them.

    a_c = c . h,   best = the k centroids with the largest a (lower number first),   x_v = w_v . h for their tokens v

All other tokens have x = -inf, so a draw cannot pick them. `ordering` [C, V / C] names the tokens of each centroid.
The k V / C scored tokens are a row's list, and `choose_kernel` draws from it: no row of the
vocabulary is ever made. Scores are rounded to the model's dtype, as a dense head's are.

    score_kernel    grid (centroid tiles, rows)   a, rounded
    gather_kernel   grid (k, rows)                finds its centroid, reads the rows of its tokens, writes the list
    choose_kernel   grid (rows)                   parameters, noise by token id, the best
"""

from typing import NamedTuple

import torch

from specdec.kvcache.triton_shim import tl, triton
from specdec.layers.launch import pdl_options, trigger_next, wait_for_previous
from specdec.layers.sampling.choose_kernel import choose_kernel
from specdec.layers.sampling.sample import MAX_BEST, Best, SampleParams, reference_best_tokens, reference_sample
from specdec.layers.sampling.sample_kernels import LARGEST


class CentroidHead(NamedTuple):
    """centroids [C, H], ordering [C, V / C] of token ids, weight [V, H], and how many centroids are opened."""

    centroids: torch.Tensor
    ordering: torch.Tensor
    weight: torch.Tensor
    top_k: int

    @property
    def num_listed(self) -> int:
        """Tokens that a row scores."""
        return self.top_k * self.ordering.shape[1]


def reference_centroid_logits(hidden: torch.Tensor, head: CentroidHead) -> torch.Tensor:
    """hidden [B, M, H] -> [B, M, V], -inf outside the best centroids."""
    ordered = (hidden @ head.centroids.T).sort(dim=-1, descending=True, stable=True)
    selected = head.ordering[ordered.indices[..., : head.top_k]].flatten(2)  # [B, M, k V / C]
    scores = torch.einsum("bmkh,bmh->bmk", head.weight[selected], hidden)
    return scores.new_full((*hidden.shape[:2], len(head.weight)), -torch.inf).scatter_(2, selected, scores)


def reference_centroid_sample(
    hidden: torch.Tensor, positions: torch.Tensor, params: SampleParams, head: CentroidHead
) -> torch.Tensor:
    """See `centroid_sample`."""
    return reference_sample(reference_centroid_logits(hidden, head), positions, params)


def reference_centroid_best(
    hidden: torch.Tensor, positions: torch.Tensor, params: SampleParams, head: CentroidHead, k: int
) -> Best:
    """See `centroid_best`."""
    return reference_best_tokens(reference_centroid_logits(hidden, head), positions, params, k)


@triton.jit(do_not_specialize=["s_x"])
def score_kernel(
    p_x: tl.tensor,  # [R, H]
    p_centroids: tl.tensor,  # [C, H]
    p_scores: tl.tensor,  # [R, C]
    num_centroids: tl.tensor,
    H: tl.tensor,
    s_x: tl.tensor,
    BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    i_row = tl.program_id(1).to(tl.int64)
    o_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < num_centroids
    wait_for_previous(PDL)
    b_sum = tl.zeros([BLOCK_C, BLOCK_H], tl.float32)
    for i_h in range(0, H, BLOCK_H):
        o_h = i_h + tl.arange(0, BLOCK_H)
        m_h = o_h < H
        b_w = tl.load(p_centroids + o_c[:, None] * H + o_h[None, :], mask=m_c[:, None] & m_h[None, :], other=0.0)
        b_x = tl.load(p_x + i_row * s_x + o_h, mask=m_h, other=0.0)
        b_sum += b_w.to(tl.float32) * b_x.to(tl.float32)[None, :]
    p_scores += i_row * num_centroids + o_c
    tl.store(p_scores, tl.sum(b_sum, 1).to(p_scores.dtype.element_ty), mask=m_c)


@triton.jit
def _ranked(b_score: tl.tensor, o_c: tl.tensor, rank: tl.tensor, k: tl.tensor) -> tl.tensor:
    """The `rank`-th by number of the k entries with the largest scores, the lower number first among equals."""
    b_bits = (b_score + 0.0).to(tl.int32, bitcast=True)  # + 0.0: no negative zero
    b_key = tl.where(b_bits < 0, b_bits ^ LARGEST, b_bits)  # ordered as the scores are
    lo, hi = tl.min(b_key), tl.max(b_key)  # at least k entries reach lo
    while lo < hi:
        key = (lo >> 1) + (hi >> 1) + ((lo | hi) & 1)
        if tl.sum((b_key >= key).to(tl.int32)) >= k:
            lo = tl.min(tl.where(b_key >= key, b_key, LARGEST))
        else:
            hi = tl.max(tl.where(b_key < key, b_key, -LARGEST - 1))
    m_better, m_equal = b_key > lo, b_key == lo
    missing = k - tl.sum(m_better.to(tl.int32))
    m_best = m_better | (m_equal & (tl.cumsum(m_equal.to(tl.int32)) <= missing))
    return tl.min(tl.where(m_best & (tl.cumsum(m_best.to(tl.int32)) == rank + 1), o_c, LARGEST))


@triton.jit(do_not_specialize=["s_x"])
def gather_kernel(
    p_x: tl.tensor,  # [R, H]
    p_scores: tl.tensor,  # [R, C]
    p_ordering: tl.tensor,  # [C, tokens of a centroid]
    p_weight: tl.tensor,  # [V, H]
    p_list_id: tl.tensor,  # [R, k * tokens of a centroid]
    p_list_x: tl.tensor,  # the same
    num_centroids: tl.tensor,
    cluster: tl.tensor,  # tokens of a centroid
    H: tl.tensor,
    s_x: tl.tensor,
    CENTROIDS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    i_rank, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_c = tl.arange(0, CENTROIDS)
    wait_for_previous(PDL)
    b_score = tl.load(p_scores + i_row * num_centroids + o_c, mask=o_c < num_centroids, other=float("-inf"))
    i_centroid = _ranked(b_score.to(tl.float32), o_c, i_rank, tl.num_programs(0))
    for i_v in range(0, cluster, BLOCK_V):
        o_v = i_v + tl.arange(0, BLOCK_V)
        m_v = o_v < cluster
        b_id = tl.load(p_ordering + i_centroid * cluster + o_v, mask=m_v, other=0)
        b_sum = tl.zeros([BLOCK_V, BLOCK_H], tl.float32)
        for i_h in range(0, H, BLOCK_H):
            o_h = i_h + tl.arange(0, BLOCK_H)
            m_h = o_h < H
            o_weight = b_id.to(tl.int64)[:, None] * H + o_h[None, :]
            b_w = tl.load(p_weight + o_weight, mask=m_v[:, None] & m_h[None, :], other=0.0)
            b_x = tl.load(p_x + i_row * s_x + o_h, mask=m_h, other=0.0)
            b_sum += b_w.to(tl.float32) * b_x.to(tl.float32)[None, :]
        b_logit = tl.sum(b_sum, 1).to(p_weight.dtype.element_ty).to(tl.float32)
        o_list = (i_row * tl.num_programs(0) + i_rank) * cluster + o_v
        tl.store(p_list_id + o_list, b_id.to(tl.int32), mask=m_v)
        tl.store(p_list_x + o_list, b_logit, mask=m_v)


def centroid_sample(
    hidden: torch.Tensor, positions: torch.Tensor, params: SampleParams, head: CentroidHead
) -> torch.Tensor:
    """The token drawn behind each row: hidden [B, M, H], positions [B, M] int64, params of B requests -> [B, M]."""
    return _choose(hidden, positions, params, head, 1, scores=False).tokens[..., 0]


def centroid_best(
    hidden: torch.Tensor, positions: torch.Tensor, params: SampleParams, head: CentroidHead, k: int
) -> Best:
    """The k best tokens of log P + noise behind each row and their log-probabilities: [B, M, k]."""
    return _choose(hidden, positions, params, head, k, scores=True)


def _choose(
    hidden: torch.Tensor, positions: torch.Tensor, params: SampleParams, head: CentroidHead, k: int, *, scores: bool
) -> Best:
    batch, num_nodes, width = hidden.shape
    rows = batch * num_nodes
    num_centroids, cluster = head.ordering.shape
    vocab_size = num_centroids * cluster
    list_len = head.num_listed
    assert head.centroids.shape == (num_centroids, width) and head.weight.shape == (vocab_size, width), (
        f"{head.centroids.shape=} {head.weight.shape=} {head.ordering.shape=} {hidden.shape=}"
    )
    assert all(part.is_contiguous() for part in head[:3]), "not contiguous"
    assert 1 <= head.top_k <= num_centroids and 1 <= k <= min(MAX_BEST, list_len), f"{head.top_k=} {k=}"
    assert positions.shape == (batch, num_nodes) and all(p.shape == (batch,) for p in params), f"{positions.shape=}"
    x = hidden.reshape(rows, width)
    tokens = torch.empty((batch, num_nodes, k), dtype=torch.int64, device=x.device)
    values = torch.empty((batch, num_nodes, k), dtype=torch.float32, device=x.device)
    if rows == 0:
        return Best(tokens, values)
    centroid_scores = torch.empty((rows, num_centroids), dtype=x.dtype, device=x.device)
    list_id = torch.empty((rows, list_len), dtype=torch.int32, device=x.device)
    list_x = torch.empty((rows, list_len), dtype=torch.float32, device=x.device)
    options = pdl_options(x.device)
    block_h = min(128, triton.next_power_of_2(width))
    score_kernel[(triton.cdiv(num_centroids, 32), rows)](
        *(x, head.centroids, centroid_scores, num_centroids, width, x.stride(0)),
        BLOCK_C=32,
        BLOCK_H=block_h,
        num_warps=4,
        **options,
    )
    gather_kernel[(head.top_k, rows)](
        *(x, centroid_scores, head.ordering, head.weight, list_id, list_x, num_centroids, cluster, width, x.stride(0)),
        CENTROIDS=triton.next_power_of_2(num_centroids),
        BLOCK_V=min(64, triton.next_power_of_2(cluster)),
        BLOCK_H=block_h,
        num_warps=8,
        **options,
    )
    nothing = [None] * 6
    choose_kernel[(rows,)](
        *(None, positions.contiguous(), *params[:4], None, params.seed, None, None, *nothing),
        *(list_id, list_x, None, None, None, tokens, values if scores else None, None),
        *(0, vocab_size, num_nodes, list_len, list_len, None, 0, 0, 0),
        LISTED=True,
        SCORES=scores,
        K=k,
        SLOTS=max(2, triton.next_power_of_2(k)),
        TILES=1,
        TILE=min(2048, triton.next_power_of_2(list_len)),
        num_warps=8,
        **options,
    )
    return Best(tokens, values)
