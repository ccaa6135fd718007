r"""Which experts each token goes to: the k that its router prefers, and their weights.

    l = W_r x + b_r      x: what the router reads, normed by its own norm where it has one (Gemma 4: `fork_join.py`)
    w = softmax over the k largest l (`normalised`), or softmax over all l; times expert_scale

Two launches. Of equal logits, rounded to the model's dtype as the model rounds them, the lower expert comes first.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from specdec.gpu.dependent_launch import TL_DTYPES, pdl_options, trigger_next, wait_for_previous
from specdec.gpu.operations import op
from specdec.gpu.triton_shim import KEEP, tl, triton
from specdec.layers.linear import linear
from specdec.layers.norm import Gain
from specdec.layers.product import sum_parts

INF = tl.constexpr(float("inf"))


class Router(NamedTuple):
    """weight [E, H], bias [E] or None; expert_scale [E] of weights.

    gain: its input is the residual stream, normed so and times `factor`; None: what the experts read.
    owned: the first of the experts that a rank has, and how many; None: all of them.
    """

    weight: torch.Tensor
    top_k: int
    bias: torch.Tensor | None = None
    gain: Gain | None = None
    factor: float = 1.0
    expert_scale: torch.Tensor | None = None
    normalised: bool = True
    owned: tuple[int, int] | None = None


class Routing(NamedTuple):
    """experts [T, k] int32, best first and all of a row different, and their weights [T, k] float32.

    Of a router with `owned` experts, they are counted from the first of those; -1: an expert of another rank.
    """

    experts: torch.Tensor
    weights: torch.Tensor


def reference_route(x: torch.Tensor, router: Router) -> Routing:
    logits = F.linear(x, router.weight, router.bias).float()
    ordered = logits.sort(dim=-1, descending=True, stable=True)
    experts, best = ordered.indices[:, : router.top_k], ordered.values[:, : router.top_k]
    weights = best.softmax(-1) if router.normalised else logits.softmax(-1).gather(1, experts)
    if router.expert_scale is not None:
        weights = weights * router.expert_scale.float()[experts]
    if router.owned is not None:
        first, count = router.owned
        experts = torch.where((experts >= first) & (experts < first + count), experts - first, -1)
    return Routing(experts.int(), weights)


@triton.jit
def _order(b_logit: tl.tensor, o_e: tl.tensor, m_e: tl.tensor, DTYPE: tl.constexpr, BLOCK_E: tl.constexpr) -> tl.tensor:
    """One integer for logit and expert: larger is better, of equal logits the lower expert; lowest where masked."""
    BITS: tl.constexpr = DTYPE.primitive_bitwidth
    SHORT: tl.constexpr = tl.int32 if BITS == 32 else tl.int16
    WIDE: tl.constexpr = tl.int64 if BITS == 32 else tl.int32  # of 32 bits, its maximum over a warp is one instruction
    b_bits = tl.where(b_logit == 0.0, 0.0, b_logit).to(DTYPE).to(SHORT, bitcast=True).to(WIDE)  # -0 is 0
    b_bits = tl.where(b_bits < 0, b_bits ^ (2 ** (BITS - 1) - 1), b_bits)  # floats ordered as integers
    return tl.where(m_e, b_bits * 2**BITS + (BLOCK_E - o_e), -(2 ** (2 * BITS - 1)))


@triton.jit(do_not_specialize=["num_rows", "first", "num_owned"])
def pick_kernel(
    p_parts: tl.tensor,  # [S, T, E]
    p_bias: tl.tensor,  # [E] or None
    p_scale: tl.tensor,  # [E] or None
    p_experts: tl.tensor,  # [T, top_k] out
    p_weights: tl.tensor,  # [T, top_k] out
    num_rows: tl.tensor,
    num_experts: tl.tensor,
    first: tl.tensor,  # of the experts of this rank
    num_owned: tl.tensor,
    TOP_K: tl.constexpr,
    NORMALISED: tl.constexpr,
    SHARED: tl.constexpr,  # there are other ranks
    DTYPE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    i_row = tl.program_id(0).to(tl.int64)
    o_e = tl.arange(0, BLOCK_E)
    m_e = o_e < num_experts
    b_scale = tl.load(p_scale + o_e, mask=m_e, other=0.0).to(tl.float32) if p_scale is not None else 1.0
    wait_for_previous(PDL)
    part_len = num_rows.to(tl.int64) * num_experts
    b_logit = sum_parts(p_parts, p_bias, i_row * num_experts + o_e, o_e, m_e, part_len, SPLITS, DTYPE)
    b_order = _order(b_logit, o_e, m_e, DTYPE, BLOCK_E)
    NONE: tl.constexpr = -(2 ** (2 * DTYPE.primitive_bitwidth - 1))
    b_rank = tl.full([BLOCK_E], TOP_K, tl.int32)
    for i_rank in tl.static_range(TOP_K):
        m_best = b_order == tl.max(b_order)
        b_rank = tl.where(m_best, i_rank, b_rank)
        b_order = tl.where(m_best, NONE, b_order)
    m_picked = b_rank < TOP_K
    b_logit = tl.where(m_e, b_logit, -INF)
    b_weight = tl.exp(b_logit - tl.max(b_logit))
    b_weight = b_weight / tl.sum(tl.where(m_picked, b_weight, 0.0) if NORMALISED else b_weight) * b_scale
    o_out = i_row * TOP_K + b_rank
    if SHARED:
        o_e = tl.where((o_e >= first) & (o_e < first + num_owned), o_e - first, -1)
    tl.store(p_experts + o_out, o_e, mask=m_picked, eviction_policy=KEEP)
    tl.store(p_weights + o_out, b_weight, mask=m_picked, eviction_policy=KEEP)


@op(reference=reference_route)
def route(x: torch.Tensor, router: Router, *, holds: bool = False) -> Routing:
    """x [T, H], normed -> its experts. holds: no later kernel starts before x is written."""
    num_rows, num_experts = len(x), len(router.weight)
    assert 1 <= router.top_k <= num_experts, f"{router.top_k=} {num_experts=}"
    experts = torch.empty((num_rows, router.top_k), dtype=torch.int32, device=x.device)
    weights = torch.empty((num_rows, router.top_k), dtype=torch.float32, device=x.device)
    if num_rows == 0:
        return Routing(experts, weights)
    # apart: one program for all numbers of rows, so the same bits
    logits = linear(x, router.weight, router.bias, apart=True, holds=holds)
    pick_kernel[(num_rows,)](
        *(logits.parts, logits.bias, router.expert_scale, experts, weights, num_rows, num_experts),
        *(router.owned or (0, num_experts)),
        TOP_K=router.top_k,
        NORMALISED=router.normalised,
        SHARED=router.owned is not None,
        DTYPE=TL_DTYPES[x.dtype],
        SPLITS=len(logits.parts),
        BLOCK_E=triton.next_power_of_2(num_experts),
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
