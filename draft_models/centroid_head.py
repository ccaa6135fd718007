r"""A head with ordered embeddings: it scores C centroids, then only the tokens of the best k centroids.

    a_c = c . h,   best = the k centroids with the largest a (lower number first),   x_v = w_v . h for their tokens v

All other tokens have x = -inf. `ordering` [C, V / C] has the tokens of each centroid. Scores are rounded to the model's
dtype, as in a dense head. `select_kernel` picks the centroids, `gather_kernel` lists their tokens with scores, and
`choose_kernel` draws from the list, so full logits are never made.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from specdec.gpu.operations import op
from specdec.gpu.triton_shim import pdl_options, tl, trigger_next, triton, wait_for_previous
from specdec.layers.gemm.linear import linear
from specdec.layers.gemm.product import finish
from specdec.sampling.choose_candidate import choose_kernel
from specdec.sampling.collect_candidates import Shortlist
from specdec.sampling.kernel_sampler import MAX_BEST
from specdec.sampling.log_probs import TopTokens
from specdec.sampling.reference_sampler import ReferenceSampler
from specdec.sampling.sampling_table import ParamVectors

LOW_BITS = {torch.float32: 0, torch.float16: 12, torch.bfloat16: 16}
MAX_CENTROIDS = 1 << 15
"""Upper bound on centroids, since `select_kernel` counts them in 16 bits."""


class CentroidHead(NamedTuple):
    """An ordered head: centroids [C, H], ordering [C, V / C] of token ids, weight [V, H], and top_k, k above."""

    centroids: torch.Tensor
    ordering: torch.Tensor
    weight: torch.Tensor
    top_k: int

    @property
    def num_listed(self) -> int:
        return self.top_k * self.ordering.shape[1]


def reference_centroid_logits(hidden: torch.Tensor, head: CentroidHead) -> torch.Tensor:
    """Logits of hidden [B, M, H] -> [B, M, V], -inf outside the best centroids."""
    ordered = F.linear(hidden, head.centroids).sort(dim=-1, descending=True, stable=True)
    selected = head.ordering[ordered.indices[..., : head.top_k]].flatten(2)  # [B, M, k V / C]
    scores = torch.einsum("bmkh,bmh->bmk", head.weight[selected], hidden)
    return scores.new_full((*hidden.shape[:2], len(head.weight)), -torch.inf).scatter_(2, selected, scores)


def reference_centroid_sample(
    hidden: torch.Tensor, positions: torch.Tensor, params: ParamVectors, head: CentroidHead
) -> torch.Tensor:
    return ReferenceSampler(params).sample(reference_centroid_logits(hidden, head), positions)


def reference_centroid_best(
    hidden: torch.Tensor, positions: torch.Tensor, params: ParamVectors, head: CentroidHead, k: int
) -> TopTokens:
    return ReferenceSampler(params).best(reference_centroid_logits(hidden, head), positions, k)


@triton.jit
def select_kernel(
    p_scores: tl.tensor,  # [R, C]
    p_opened: tl.tensor,  # [R, k]
    num_centroids: tl.tensor,
    k: tl.tensor,
    LOW_BITS: tl.constexpr,  # float32 bits that the scores' dtype lacks
    CENTROIDS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    i_row = tl.program_id(0).to(tl.int64)
    o_c = tl.arange(0, CENTROIDS)
    wait_for_previous(PDL)
    b_score = tl.load(p_scores + i_row * num_centroids + o_c, mask=o_c < num_centroids, other=float("-inf"))
    b_bits = (b_score.to(tl.float32) + 0.0).to(tl.uint32, bitcast=True)  # + 0.0: no negative zero
    b_key = tl.where(b_bits >> 31 != 0, ~b_bits, b_bits | 0x80000000) >> LOW_BITS  # same order as the scores
    # find the k-th largest key, two bits per step: the largest value that k keys reach
    kth = tl.zeros([], tl.uint32)
    o_digit = tl.arange(0, 4).to(tl.uint32)
    for i_step in range(16 - LOW_BITS // 2):
        shift = 30 - LOW_BITS - 2 * i_step
        b_least = kth + (o_digit << shift)
        b_count = tl.sum((b_key[:, None] >= b_least[None, :]).to(tl.int32), 0)
        digit = tl.sum((b_count >= k).to(tl.int32)) - 1
        kth += digit.to(tl.uint32) << shift
    m_better, m_equal = b_key > kth, b_key == kth
    # places: first all better keys, then equal ones while there is room, each in order of number
    b_up_to = tl.cumsum(m_better.to(tl.int32) + (m_equal.to(tl.int32) << 16), 0)
    num_better = tl.sum(m_better.to(tl.int32))
    b_place = tl.where(m_better, b_up_to & 0xFFFF, num_better + (b_up_to >> 16)) - 1
    m_opened = m_better | (m_equal & (b_place < k))
    tl.store(p_opened + i_row * k + b_place, o_c, mask=m_opened)


@triton.jit(do_not_specialize=["s_x"])
def gather_kernel(
    p_x: tl.tensor,  # [R, H]
    p_opened: tl.tensor,  # [R, k]
    p_ordering: tl.tensor,  # [C, tokens of a centroid]
    p_weight: tl.tensor,  # [V, H]
    p_list_id: tl.tensor,  # [R, k * tokens of a centroid]
    p_list_x: tl.tensor,  # same shape
    k: tl.tensor,
    cluster: tl.tensor,  # tokens per centroid
    H: tl.tensor,
    s_x: tl.tensor,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    num_tiles = tl.cdiv(cluster, BLOCK_V)
    i_rank, i_row = tl.program_id(0) // num_tiles, tl.program_id(1).to(tl.int64)
    o_v = tl.program_id(0) % num_tiles * BLOCK_V + tl.arange(0, BLOCK_V)
    m_v = o_v < cluster
    wait_for_previous(PDL)
    i_centroid = tl.load(p_opened + i_row * k + i_rank)
    b_id = tl.load(p_ordering + i_centroid * cluster + o_v, mask=m_v, other=0)
    b_logit = tl.zeros([BLOCK_V], tl.float32)
    for i_h in range(0, H, BLOCK_H):
        o_h = i_h + tl.arange(0, BLOCK_H)
        m_h = o_h < H
        o_weight = b_id.to(tl.int64)[:, None] * H + o_h[None, :]
        b_w = tl.load(p_weight + o_weight, mask=m_v[:, None] & m_h[None, :], other=0.0)
        b_x = tl.load(p_x + i_row * s_x + o_h, mask=m_h, other=0.0)
        b_logit += tl.sum(b_w.to(tl.float32) * b_x.to(tl.float32)[None, :], 1)
    o_list = (i_row * k + i_rank) * cluster + o_v
    tl.store(p_list_id + o_list, b_id.to(tl.int32), mask=m_v)
    tl.store(p_list_x + o_list, b_logit.to(p_weight.dtype.element_ty).to(tl.float32), mask=m_v)


@op(reference=reference_centroid_sample)
def centroid_sample(
    hidden: torch.Tensor, positions: torch.Tensor, params: ParamVectors, head: CentroidHead
) -> torch.Tensor:
    """Draw the token after each row: hidden [B, M, H], positions [B, M] int64, params of B requests -> [B, M]."""
    return _choose(hidden, positions, params, head, 1, scores=False).tokens[..., 0]


@op(reference=reference_centroid_best)
def centroid_best(
    hidden: torch.Tensor, positions: torch.Tensor, params: ParamVectors, head: CentroidHead, k: int
) -> TopTokens:
    """The k best tokens by log P + noise after each row, and their log-probabilities: [B, M, k]."""
    return _choose(hidden, positions, params, head, k, scores=True)


def _choose(
    hidden: torch.Tensor, positions: torch.Tensor, params: ParamVectors, head: CentroidHead, k: int, *, scores: bool
) -> TopTokens:
    batch, num_nodes, width = hidden.shape
    rows = batch * num_nodes
    num_centroids, cluster = head.ordering.shape
    vocab_size = num_centroids * cluster
    list_len = head.num_listed
    assert head.centroids.shape == (num_centroids, width) and head.weight.shape == (vocab_size, width), (
        f"{head.centroids.shape=} {head.weight.shape=} {head.ordering.shape=} {hidden.shape=}"
    )
    assert all(part.is_contiguous() for part in head[:3]), "not contiguous"
    assert 1 <= head.top_k <= num_centroids <= MAX_CENTROIDS and 1 <= k <= min(MAX_BEST, list_len), (
        f"{head.top_k=} {k=}"
    )
    assert positions.shape == (batch, num_nodes) and all(p.shape[1:] == (batch,) for p in params), f"{positions.shape=}"
    x = hidden.reshape(rows, width)
    best = TopTokens.empty((batch, num_nodes), k, x.device)
    if rows == 0:
        return best
    opened = torch.empty((rows, head.top_k), dtype=torch.int32, device=x.device)
    list_id = torch.empty((rows, list_len), dtype=torch.int32, device=x.device)
    list_x = torch.empty((rows, list_len), dtype=torch.float32, device=x.device)
    options = pdl_options(x.device)
    centroid_scores = finish(linear(x, head.centroids))
    select_kernel[(rows,)](
        *(centroid_scores, opened, num_centroids, head.top_k),
        LOW_BITS=LOW_BITS[x.dtype],
        CENTROIDS=triton.next_power_of_2(num_centroids),
        num_warps=4,
        **options,
    )
    block_v = min(32, triton.next_power_of_2(cluster))
    gather_kernel[(head.top_k * triton.cdiv(cluster, block_v), rows)](
        *(x, opened, head.ordering, head.weight, list_id, list_x, head.top_k, cluster, width, x.stride(0)),
        BLOCK_V=block_v,
        BLOCK_H=min(256, triton.next_power_of_2(width)),
        num_warps=4,
        **options,
    )
    choose_kernel[(rows,)](
        *(None, positions.contiguous(), *params, None, None, *Shortlist.from_lists(list_id, list_x)),
        *(best.tokens, best.scores if scores else None),
        *(0, vocab_size, num_nodes, batch, list_len, list_len, None, None, 0, 0, 0),
        LISTED=True,
        SCORES=scores,
        K=k,
        SLOTS=max(2, triton.next_power_of_2(k)),
        TILES=1,
        TILE=min(4096, triton.next_power_of_2(list_len)),
        SCAN_TILE=1,
        num_warps=8,
        **options,
    )
    return best
