r"""Routing: the k experts that the router chooses for each token, and their weights.

    l = W_r x + b_r      x: the router's input, after its own norm if it has one (Gemma 4: `fork_join.py`)
    s = softmax(l) over all experts, or sigmoid(l)
    c = s + correction   the k largest are chosen: of all experts, or of the groups with the largest sums of two c
    w = s, divided by the sum of the chosen s (`normalised`); times scaling, times expert_scale

It takes two launches. For equal c the lower expert comes first, and the lower group. Logits are float32
(`float_logits`), or rounded to the model's dtype like the model's. Without a correction, a softmax router chooses by
logits.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from specdec.gpu.operations import op
from specdec.gpu.triton_shim import KEEP, TL_DTYPES, pdl_options, tl, trigger_next, triton, wait_for_previous
from specdec.layers.gemm.gemm_small import MIN_TILE_HEIGHT
from specdec.layers.gemm.linear import linear
from specdec.layers.gemm.product import MAX_SMALL_ROWS, SplitK, Tiles, sum_parts
from specdec.layers.norm import Norm

INF = tl.constexpr(float("inf"))
NONE = tl.constexpr(-(2**31))
"""Smaller than the `_order` key of any number."""

WIDE_RANGE = 256
"""Columns of a range (one tile) for a router with a float32 weight and 2-byte x."""


class Router(NamedTuple):
    """A router: weight [E, H], bias [E] or None; expert_scale [E] multiplies the weights of chosen experts.

    gain: its input is the residual stream with this norm, times `factor`; None: the experts' input.
    owned: this rank's first expert and its number of experts; None: all experts.
    sigmoid, correction [E] float32, scaling: as above.
    min_sum: lower bound on the divisor of normalised weights.
    groups, kept_groups: experts form `groups` equal consecutive groups, and are chosen from `kept_groups` of these.
    """

    weight: torch.Tensor
    top_k: int
    bias: torch.Tensor | None = None
    gain: Norm | None = None
    factor: float = 1.0
    expert_scale: torch.Tensor | None = None
    normalised: bool = True
    owned: tuple[int, int] | None = None
    sigmoid: bool = False
    float_logits: bool = False
    correction: torch.Tensor | None = None
    groups: int = 1
    kept_groups: int = 1
    min_sum: float = 0.0
    scaling: float = 1.0


class Routing(NamedTuple):
    """Chosen experts [T, k] int32, best first and distinct within a row, and their weights [T, k] float32.

    If the router has `owned` experts, they are counted from the first of these; -1: another rank's expert.
    """

    experts: torch.Tensor
    weights: torch.Tensor


def reference_route(x: torch.Tensor, router: Router) -> Routing:
    dtype = torch.float32 if router.float_logits else x.dtype
    logits = F.linear(x.to(dtype), router.weight.to(dtype), router.bias).float()
    scores = logits.sigmoid() if router.sigmoid else logits.softmax(-1)
    choice = scores if router.sigmoid else logits
    if router.correction is not None:
        choice = scores + router.correction
    if router.groups > 1:
        choice = _reference_keep_groups(choice, router)
    experts = choice.sort(dim=-1, descending=True, stable=True).indices[:, : router.top_k]
    weights = scores.gather(1, experts)
    if router.normalised:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=router.min_sum)
    weights = weights * router.scaling
    if router.expert_scale is not None:
        weights = weights * router.expert_scale.float()[experts]
    if router.owned is not None:
        first, count = router.owned
        experts = torch.where((experts >= first) & (experts < first + count), experts - first, -1)
    return Routing(experts.int(), weights)


def _reference_keep_groups(choice: torch.Tensor, router: Router) -> torch.Tensor:
    """Set choice [T, E] to -inf in groups that are not kept."""
    by_group = choice.unflatten(-1, (router.groups, -1))  # [T, groups, E / groups]
    sums = by_group.topk(2, dim=-1).values.sum(-1)
    kept = sums.sort(dim=-1, descending=True, stable=True).indices[:, : router.kept_groups]
    dropped = torch.ones_like(sums, dtype=torch.bool).scatter_(1, kept, False)
    masked: torch.Tensor = by_group.masked_fill(dropped[..., None], -torch.inf)
    return masked.flatten(1)


@triton.jit
def _order(b_value: tl.tensor, o_e: tl.tensor, m_e: tl.tensor, DTYPE: tl.constexpr, BLOCK_E: tl.constexpr) -> tl.tensor:
    """int32 keys in the order of the numbers, NONE if masked, so that the maximum over a warp is one instruction. For
    2-byte numbers a key includes the expert: among equal numbers the lower expert has the larger key."""
    BITS: tl.constexpr = DTYPE.primitive_bitwidth
    SHORT: tl.constexpr = tl.int32 if BITS == 32 else tl.int16
    b_bits = tl.where(b_value == 0.0, 0.0, b_value).to(DTYPE).to(SHORT, bitcast=True).to(tl.int32)  # -0 is 0
    b_bits = tl.where(b_bits < 0, b_bits ^ (2 ** (BITS - 1) - 1), b_bits)  # floats ordered as integers
    if BITS == 32:
        b_bits = tl.maximum(b_bits, NONE + 1)  # keep NaN above NONE too
    else:
        b_bits = b_bits * 2**BITS + (BLOCK_E - o_e)
    return tl.where(m_e, b_bits, NONE)


@triton.jit
def _best(b_order: tl.tensor, o_e: tl.tensor, axis: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """Mark the best `_order` key along an axis; among equal numbers the lower expert."""
    m_best = b_order == tl.max(b_order, axis, keep_dims=True)
    if DTYPE.primitive_bitwidth == 32:
        m_best &= o_e == tl.min(tl.where(m_best, o_e, 2**31 - 1), axis, keep_dims=True)
    return m_best


@triton.jit
def _keep_groups(
    b_choice: tl.tensor,
    b_order: tl.tensor,
    o_e: tl.tensor,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr,
) -> tl.tensor:
    """b_order [BLOCK_E] of float32 numbers in equal groups -> the same, but NONE in groups that are not kept."""
    BLOCK: tl.constexpr = BLOCK_E // BLOCK_G
    b_left = tl.reshape(b_order, (BLOCK_G, BLOCK))
    b_value = tl.reshape(b_choice, (BLOCK_G, BLOCK))
    o_left = tl.reshape(o_e, (BLOCK_G, BLOCK))
    b_sum = tl.zeros([BLOCK_G], tl.float32)
    for _ in tl.static_range(2):
        m_best = _best(b_left, o_left, 1, tl.float32)
        b_sum += tl.sum(tl.where(m_best, b_value, 0.0), 1)
        b_left = tl.where(m_best, NONE, b_left)
    o_g = tl.arange(0, BLOCK_G)
    b_left = _order(b_sum, o_g, o_g < GROUPS, tl.float32, BLOCK_G)
    b_kept = tl.zeros([BLOCK_G], tl.int32)
    for _ in tl.static_range(KEPT):
        m_best = _best(b_left, o_g, 0, tl.float32)
        b_kept = tl.where(m_best, 1, b_kept)
        b_left = tl.where(m_best, NONE, b_left)
    b_kept = tl.reshape(tl.broadcast_to(b_kept[:, None], (BLOCK_G, BLOCK)), (BLOCK_E,))
    return tl.where(b_kept == 1, b_order, NONE)


@triton.jit(do_not_specialize=["num_rows", "first", "num_owned", "min_sum", "scaling"])
def pick_kernel(
    p_parts: tl.tensor,  # [S, T, E]
    p_bias: tl.tensor,  # [E] or None
    p_correction: tl.tensor,  # [E] or None
    p_scale: tl.tensor,  # [E] or None
    p_experts: tl.tensor,  # [T, top_k] out
    p_weights: tl.tensor,  # [T, top_k] out
    num_rows: tl.tensor,
    num_experts: tl.tensor,
    first: tl.tensor,  # first expert of this rank
    num_owned: tl.tensor,
    min_sum: tl.tensor,
    scaling: tl.tensor,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISED: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,  # number of kept groups
    SHARED: tl.constexpr,  # there are other ranks
    DTYPE: tl.constexpr,  # dtype of logits
    SPLITS: tl.constexpr,
    BLOCK_G: tl.constexpr,  # GROUPS, rounded up to a power of 2
    BLOCK_E: tl.constexpr,  # BLOCK_G times the experts of a group, rounded up likewise
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    i_row = tl.program_id(0).to(tl.int64)
    o_e = tl.arange(0, BLOCK_E)
    m_e = o_e < num_experts
    if GROUPS > 1:
        o_in_group = o_e % (BLOCK_E // BLOCK_G)
        o_e = o_e // (BLOCK_E // BLOCK_G) * (num_experts // GROUPS) + o_in_group
        m_e = (o_in_group < num_experts // GROUPS) & (o_e < num_experts)
    b_scale = tl.load(p_scale + o_e, mask=m_e, other=0.0).to(tl.float32) if p_scale is not None else 1.0
    b_correction = tl.load(p_correction + o_e, mask=m_e, other=0.0) if p_correction is not None else 0.0
    wait_for_previous(PDL)
    part_len = num_rows.to(tl.int64) * num_experts
    b_logit = sum_parts(p_parts, p_bias, i_row * num_experts + o_e, o_e, m_e, part_len, SPLITS, DTYPE)
    b_choice = b_logit
    if SIGMOID:
        b_score = tl.sigmoid(tl.maximum(b_logit, -80.0))  # e^80 is a float32
        b_choice = b_score
    else:
        b_logit = tl.where(m_e, b_logit, -INF)
        b_score = tl.exp(b_logit - tl.max(b_logit))
        if p_correction is not None or not NORMALISED:
            b_score = b_score / tl.sum(b_score)
    if p_correction is not None:
        b_choice = b_score + b_correction
    FLOAT: tl.constexpr = SIGMOID or p_correction is not None or GROUPS > 1
    ORDERED: tl.constexpr = tl.float32 if FLOAT else DTYPE
    b_order = _order(b_choice, o_e, m_e, ORDERED, BLOCK_E)
    if GROUPS > 1:
        b_order = _keep_groups(b_choice, b_order, o_e, GROUPS, KEPT, BLOCK_G, BLOCK_E)
    b_rank = tl.full([BLOCK_E], TOP_K, tl.int32)
    for i_rank in tl.static_range(TOP_K):
        m_best = _best(b_order, o_e, 0, ORDERED)
        b_rank = tl.where(m_best, i_rank, b_rank)
        b_order = tl.where(m_best, NONE, b_order)
    m_picked = b_rank < TOP_K
    b_weight = b_score
    if NORMALISED:
        b_weight = b_weight / tl.maximum(tl.sum(tl.where(m_picked, b_score, 0.0)), min_sum)
    b_weight = b_weight * scaling * b_scale
    o_out = i_row * TOP_K + b_rank
    if SHARED:
        o_e = tl.where((o_e >= first) & (o_e < first + num_owned), o_e - first, -1)
    tl.store(p_experts + o_out, o_e, mask=m_picked, eviction_policy=KEEP)
    tl.store(p_weights + o_out, b_weight, mask=m_picked, eviction_policy=KEEP)


@op(reference=reference_route)
def route(x: torch.Tensor, router: Router, *, hold_next: bool = False) -> Routing:
    """Choose experts for normed x [T, H]. hold_next: no later kernel starts before x is written."""
    num_rows, num_experts = len(x), len(router.weight)
    in_group = num_experts // router.groups
    assert 1 <= router.top_k <= router.kept_groups * in_group, f"{router.top_k=} {num_experts=} {router.kept_groups=}"
    assert router.groups == 1 or num_experts == in_group * router.groups >= 2 * router.groups, f"{router.groups=}"
    experts = torch.empty((num_rows, router.top_k), dtype=torch.int32, device=x.device)
    weights = torch.empty((num_rows, router.top_k), dtype=torch.float32, device=x.device)
    if num_rows == 0:
        return Routing(experts, weights)
    split_k = tiles = None
    if router.weight.dtype != x.dtype:
        split_k = SplitK(triton.cdiv(x.shape[1], WIDE_RANGE), WIDE_RANGE)
        block_m = min(max(16, triton.next_power_of_2(num_rows)), MAX_SMALL_ROWS)
        tiles = Tiles(64, block_m, WIDE_RANGE, 4, 1, MIN_TILE_HEIGHT)
    # apart: the same parts for any number of rows, so the same bits
    logits = linear(x, router.weight, router.bias, split_k, tiles=tiles, keep_parts=True, hold_next=hold_next)
    block_groups = triton.next_power_of_2(router.groups)
    pick_kernel[(num_rows,)](
        *(logits.parts, logits.bias, router.correction, router.expert_scale, experts, weights, num_rows, num_experts),
        *(router.owned or (0, num_experts)),
        *(router.min_sum, router.scaling),
        TOP_K=router.top_k,
        SIGMOID=router.sigmoid,
        NORMALISED=router.normalised,
        GROUPS=router.groups,
        KEPT=router.kept_groups,
        SHARED=router.owned is not None,
        DTYPE=tl.float32 if router.float_logits else TL_DTYPES[x.dtype],
        SPLITS=len(logits.parts),
        BLOCK_G=block_groups,
        BLOCK_E=block_groups * triton.next_power_of_2(in_group),
        num_warps=1,
        **pdl_options(x.device),
    )
    return Routing(experts, weights)


@triton.jit(do_not_specialize=["num_slots"])
def list_kernel(
    p_experts: tl.tensor,  # [T * top_k]
    p_first: tl.tensor,  # [E + 1] out: where the list of each expert begins
    p_order: tl.tensor,  # [T * top_k] out: assignments by expert
    num_slots: tl.tensor,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    i_expert = tl.program_id(0)
    wait_for_previous(PDL)
    b_before, b_mine = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for i_slot in range(0, num_slots, BLOCK):
        o_slot = i_slot + tl.arange(0, BLOCK)
        b_expert = tl.load(p_experts + o_slot, mask=o_slot < num_slots, other=0x7FFFFFFF)
        b_before += (b_expert < i_expert).to(tl.int32)
        b_mine += (b_expert == i_expert).to(tl.int32)
    first, count = tl.sum(b_before), tl.sum(b_mine)
    tl.store(p_first + i_expert, first)
    tl.store(p_first + i_expert + 1, first + count, mask=i_expert == tl.num_programs(0) - 1)
    for i_slot in range(0, num_slots, BLOCK):
        o_slot = i_slot + tl.arange(0, BLOCK)
        m_mine = tl.load(p_experts + o_slot, mask=o_slot < num_slots, other=0x7FFFFFFF) == i_expert
        b_mine = m_mine.to(tl.int32)
        tl.store(p_order + first + tl.cumsum(b_mine) - 1, o_slot, mask=m_mine)
        first += tl.sum(b_mine)
