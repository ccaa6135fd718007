r"""A mixture of experts: for each token the k experts its router prefers, their gated products, one weighted sum.

    l = W_r x + b_r      x: what the router reads, normed by its own norm where it has one (Gemma 4: `branches.py`)
    w = softmax over the k largest l (`normalised`), or softmax over all l; times expert_scale
    y = sum_j w_j ( D_{e_j} act(G_{e_j} x, U_{e_j} x) + b )       over the k experts e_j in the order of their rank

`route` is two launches, `apply_experts` two, or three with more than FEW_SLOTS assignments (token, expert). The last
sum is left to whoever reads the result, a `Product` whose parts are float32 and in rank order, so that a row has the
same bits beside any other rows. Of equal router logits, rounded to the model's dtype as the model rounds them, the
lower expert comes first.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from specdec.gpu.dependent_launch import TL_DTYPES, pdl_options
from specdec.gpu.operations import op
from specdec.gpu.triton_shim import triton
from specdec.layers.linear import Product, linear
from specdec.layers.moe.moe_kernels import list_kernel, pick_kernel, product_kernel
from specdec.layers.norm import Gain

ACTIVATIONS = ("gelu_tanh", "silu", "swiglu_clamped")

FEW_SLOTS = 256
"""Up to so many assignments every program finds its expert's assignments itself; more are listed first."""

FEW_ROWS = 64
"""And up to so many rows: each must fit the tile of an expert that all of them choose."""


STAGES = {128: 4, 64: 6, 32: 6}
FEW_STAGES = STAGES | {128: 5}
"""Columns a tile -> tiles on their way, such that two programs fit a multiprocessor; FEW: of 16 rows."""


class Router(NamedTuple):
    """weight [E, H], bias [E] or None; expert_scale [E] of weights.

    gain: its input is the residual stream, normed so and times `factor`; None: what the experts read.
    """

    weight: torch.Tensor
    top_k: int
    bias: torch.Tensor | None = None
    gain: Gain | None = None
    factor: float = 1.0
    expert_scale: torch.Tensor | None = None
    normalised: bool = True


class Experts(NamedTuple):
    """gate_up [E, 2 I, H] and down [E, H, I], views at any strides; biases [E, 2 I] and [E, H].

    interleaved: rows 2 i and 2 i + 1 of gate_up are gate and up of i; otherwise all gates come first.
    swiglu_clamped: (clamp(u, -limit, limit) + 1) g sigmoid(alpha g), g the gate, at most `limit`.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    activation: str
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    interleaved: bool = False
    alpha: float = 0.0
    limit: float = 0.0


class Routing(NamedTuple):
    """experts [T, k] int32, best first and all of a row different, and their weights [T, k] float32."""

    experts: torch.Tensor
    weights: torch.Tensor


def reference_route(x: torch.Tensor, router: Router) -> Routing:
    """x [T, H], normed -> its experts."""
    logits = F.linear(x, router.weight, router.bias).float()
    ordered = logits.sort(dim=-1, descending=True, stable=True)
    experts, best = ordered.indices[:, : router.top_k], ordered.values[:, : router.top_k]
    weights = best.softmax(-1) if router.normalised else logits.softmax(-1).gather(1, experts)
    if router.expert_scale is not None:
        weights = weights * router.expert_scale.float()[experts]
    return Routing(experts.int(), weights)


def reference_apply_experts(x: torch.Tensor, routing: Routing, experts: Experts) -> Product:
    """x [T, H] -> [T, H], expert by expert."""
    parts = torch.zeros((*routing.experts.shape, x.shape[1]), device=x.device)  # [T, k, H]
    for expert in routing.experts.unique().tolist():
        row, rank = (routing.experts == expert).nonzero(as_tuple=True)
        up_bias, down_bias = (None if b is None else b[expert] for b in (experts.gate_up_bias, experts.down_bias))
        hidden = F.linear(x[row], experts.gate_up[expert], up_bias).float()
        gate, up = (hidden[:, ::2], hidden[:, 1::2]) if experts.interleaved else hidden.chunk(2, dim=-1)
        hidden = reference_gate(gate, up, experts).to(x.dtype)
        parts[row, rank] = F.linear(hidden, experts.down[expert], down_bias).float()
    return Product((parts * routing.weights[..., None]).transpose(0, 1), None, x.dtype)


def reference_gate(gate: torch.Tensor, up: torch.Tensor, experts: Experts) -> torch.Tensor:
    if experts.activation == "swiglu_clamped":
        gate, up = gate.clamp(max=experts.limit), up.clamp(-experts.limit, experts.limit)
        return (up + 1) * gate * torch.sigmoid(experts.alpha * gate)
    return (F.silu(gate) if experts.activation == "silu" else F.gelu(gate, approximate="tanh")) * up


@op(reference=reference_route)
def route(x: torch.Tensor, router: Router, *, holds: bool = False) -> Routing:
    """x [T, H], normed -> its experts. holds: no kernel behind these starts before x is there."""
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
        TOP_K=router.top_k,
        NORMALISED=router.normalised,
        DTYPE=TL_DTYPES[x.dtype],
        SPLITS=len(logits.parts),
        BLOCK_E=triton.next_power_of_2(num_experts),
        num_warps=1,
        **pdl_options(x.device),
    )
    return Routing(experts, weights)


@op(reference=reference_apply_experts)
def apply_experts(x: torch.Tensor, routing: Routing, experts: Experts, *, few: bool | None = None) -> Product:
    """x [T, H] -> [T, H]. `few`: without a list; None: as `are_few` says."""
    products = list_products(x, routing, experts, are_few(*routing.experts.shape) if few is None else few)
    if len(x):
        for launch in (products.gate_up, products.down):
            product_kernel[(launch.tiles, launch.lists)](*launch.arguments, **launch.options)
    return products.result


class ExpertLaunch(NamedTuple):
    """A product of the experts: `tiles` programs for each of `lists` lists, or assignments where there are none."""

    tiles: int
    lists: int
    arguments: tuple[Any, ...]  # of `expert_program`, behind its place, up to the constants
    options: dict[str, Any]


class ExpertProducts(NamedTuple):
    """Two launches, one behind the other, and what they make."""

    gate_up: ExpertLaunch
    down: ExpertLaunch
    result: Product


def are_few(num_rows: int, top_k: int) -> bool:
    """Whether programs find their expert's assignments themselves."""
    return num_rows * top_k <= FEW_SLOTS and num_rows <= FEW_ROWS


def list_products(x: torch.Tensor, routing: Routing, experts: Experts, few: bool) -> ExpertProducts:
    """What is to be launched for x [T, H]; assignments are listed at once, unless they are few."""
    num_rows, hidden = x.shape
    num_experts, width = len(experts.gate_up), experts.gate_up.shape[1]
    top_k = routing.experts.shape[1]
    slots = num_rows * top_k
    assert experts.gate_up.shape == (num_experts, width, hidden), f"{experts.gate_up.shape=} {x.shape=}"
    assert experts.down.shape == (num_experts, hidden, width // 2), f"{experts.down.shape=} {experts.gate_up.shape=}"
    assert experts.activation in ACTIVATIONS and x.stride(1) == 1, f"{experts.activation=} {x.stride()=}"
    assert x.dtype == experts.gate_up.dtype == experts.down.dtype, f"{x.dtype=} {experts.gate_up.dtype=}"
    gated = torch.empty((slots, width // 2), dtype=x.dtype, device=x.device)
    parts = torch.empty((top_k, num_rows, hidden), dtype=torch.float32, device=x.device)
    first = order = None
    if not few:
        first = torch.empty(num_experts + 1, dtype=torch.int32, device=x.device)
        order = torch.empty(slots, dtype=torch.int32, device=x.device)
        if slots:
            options = pdl_options(x.device)
            list_kernel[(num_experts,)](routing.experts, first, order, slots, BLOCK=1024, num_warps=4, **options)

    def launch(
        source: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out_weight: torch.Tensor | None,
        target: torch.Tensor,
    ) -> ExpertLaunch:
        _, n, k = weight.shape
        block_n, block_m, block_k, num_warps, num_stages = _tiles(num_rows, slots, num_experts, k, x.dtype, first)
        arguments = (
            *(source, weight, bias, routing.experts if first is None else None, first, order, out_weight, target),
            *(slots, n, k, source.stride(0), *weight.stride(), experts.alpha, experts.limit),
        )
        options = {
            "TOP_K": top_k,
            "ACT": experts.activation if out_weight is None else None,
            "INTERLEAVED": experts.interleaved,
            "EVEN_N": n % block_n == 0,
            "EVEN_K": k % block_k == 0,
            "SLOTS": triton.next_power_of_2(slots) if first is None else 1,
            "LONE": first is None and num_rows == 1,
            "BLOCK_N": block_n,
            "BLOCK_M": block_m,
            "BLOCK_K": block_k,
            "num_warps": num_warps,
            "num_stages": num_stages,
            **pdl_options(x.device),
        }
        return ExpertLaunch(triton.cdiv(n, block_n), slots if first is None else num_experts, arguments, options)

    return ExpertProducts(
        launch(x, experts.gate_up, experts.gate_up_bias, None, gated),
        launch(gated, experts.down, experts.down_bias, routing.weights, parts),
        Product(parts, None, x.dtype),
    )


def _tiles(
    num_rows: int, slots: int, num_experts: int, k: int, dtype: torch.dtype, listed: torch.Tensor | None
) -> tuple[int, int, int, int, int]:
    """(BLOCK_N, BLOCK_M, BLOCK_K, warps, stages). BLOCK_K is part of the bits: a function of the weight alone."""
    block_k = 32 if dtype == torch.float32 else 128 if k % 128 == 0 else 64
    wanted = num_rows if listed is None else 2 * slots // num_experts
    block_m = min(max(16, triton.next_power_of_2(wanted)), 64 if listed is not None else 256)
    stages = (FEW_STAGES if block_m == 16 else STAGES)[block_k] if block_m <= 32 else 3
    return 64, block_m, block_k, 4, stages
