r"""A mixture of experts: for each token the k experts its router prefers, their gated products, one weighted sum.

    l = W_r x + b_r      Gemma 4: x is RMS-normed, scaled per channel and by H^-1/2 first
    w = softmax over the k largest l (`normalised`), or softmax over all l; times expert_scale
    y = sum_j w_j ( D_{e_j} act(G_{e_j} x, U_{e_j} x) + b )       over the k experts e_j in the order of their rank

`route` is one launch, `apply_experts` three, or four with more than FEW_SLOTS assignments (token, expert). Partial
results are float32 and each token's are added in rank order, so that a row has the same bits beside any other rows.
Of equal router logits, rounded to the model's dtype as the model rounds them, the lower expert comes first.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from specdec.kvcache.triton_shim import triton
from specdec.layers.launch import pdl_options
from specdec.layers.moe.kernels import list_kernel, product_kernel, route_kernel, sum_kernel

ACTIVATIONS = ("gelu_tanh", "silu", "swiglu_clamped")

FEW_SLOTS = 256
"""Up to so many assignments every program finds its expert's assignments itself; more are listed first."""

FEW_ROWS = 64
"""And up to so many rows: each must fit the tile of an expert that all of them choose."""

ROUTER_ROWS = 16
"""Rows that one program of the router takes."""

ROUTER_RANGE = 256
"""Columns of K that one program of the router multiplies. Part of the logits' bits: no function of the rows."""


class Router(NamedTuple):
    """weight [E, H], bias [E] or None; scale [H]: x is normed (with eps) and scaled; expert_scale [E] of weights."""

    weight: torch.Tensor
    top_k: int
    bias: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    eps: float = 0.0
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
    """experts [T, k] int32, best first, and their weights [T, k] float32."""

    experts: torch.Tensor
    weights: torch.Tensor


def arrivals(x: torch.Tensor) -> torch.Tensor:
    """What `route` counts with, for all layers of one forward over x [T, H], one after the other."""
    return torch.zeros(-(-len(x) // ROUTER_ROWS), dtype=torch.int32, device=x.device)


def reference_route(x: torch.Tensor, router: Router, arrived: torch.Tensor | None = None) -> Routing:
    """x [T, H]. `arrived` is not used."""
    if router.scale is not None:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + router.eps)
        x = wide.to(x.dtype) * router.scale * x.shape[1] ** -0.5
    logits = F.linear(x, router.weight, router.bias).float()
    ordered = logits.sort(dim=-1, descending=True, stable=True)
    experts, best = ordered.indices[:, : router.top_k], ordered.values[:, : router.top_k]
    weights = best.softmax(-1) if router.normalised else logits.softmax(-1).gather(1, experts)
    if router.expert_scale is not None:
        weights = weights * router.expert_scale.float()[experts]
    return Routing(experts.int(), weights)


def reference_apply_experts(x: torch.Tensor, routing: Routing, experts: Experts) -> torch.Tensor:
    """x [T, H] -> [T, H], expert by expert."""
    parts = torch.zeros((*routing.experts.shape, x.shape[1]), device=x.device)  # [T, k, H]
    for expert in routing.experts.unique().tolist():
        row, rank = (routing.experts == expert).nonzero(as_tuple=True)
        up_bias, down_bias = (None if b is None else b[expert] for b in (experts.gate_up_bias, experts.down_bias))
        hidden = F.linear(x[row], experts.gate_up[expert], up_bias).float()
        gate, up = (hidden[:, ::2], hidden[:, 1::2]) if experts.interleaved else hidden.chunk(2, dim=-1)
        hidden = reference_gate(gate, up, experts).to(x.dtype)
        parts[row, rank] = F.linear(hidden, experts.down[expert], down_bias).float()
    out = torch.zeros_like(parts[:, 0])
    for rank in range(parts.shape[1]):
        out = out + parts[:, rank] * routing.weights[:, rank, None]
    return out.to(x.dtype)


def reference_gate(gate: torch.Tensor, up: torch.Tensor, experts: Experts) -> torch.Tensor:
    if experts.activation == "swiglu_clamped":
        gate, up = gate.clamp(max=experts.limit), up.clamp(-experts.limit, experts.limit)
        return (up + 1) * gate * torch.sigmoid(experts.alpha * gate)
    return (F.silu(gate) if experts.activation == "silu" else F.gelu(gate, approximate="tanh")) * up


def route(x: torch.Tensor, router: Router, arrived: torch.Tensor) -> Routing:
    """x [T, H] -> its experts. `arrived`: see `arrivals`; this caller's own, and zeros again after."""
    num_rows, hidden = x.shape
    num_experts = len(router.weight)
    assert router.weight.shape == (num_experts, hidden) and router.weight.is_contiguous(), f"{router.weight.shape=}"
    assert x.stride(1) == 1 and x.dtype == router.weight.dtype, f"{x.stride()=} {x.dtype=} {router.weight.dtype=}"
    assert 1 <= router.top_k <= num_experts, f"{router.top_k=} {num_experts=}"
    experts = torch.empty((num_rows, router.top_k), dtype=torch.int32, device=x.device)
    weights = torch.empty((num_rows, router.top_k), dtype=torch.float32, device=x.device)
    if num_rows == 0:
        return Routing(experts, weights)
    grid = triton.cdiv(num_rows, ROUTER_ROWS), triton.cdiv(hidden, ROUTER_RANGE)
    assert arrived.dtype == torch.int32 and len(arrived) >= grid[0], f"{arrived.shape=} {num_rows=}"
    block_e = max(16, triton.next_power_of_2(num_experts))
    parts = torch.empty((grid[1], num_rows, num_experts), dtype=torch.float32, device=x.device)
    squares = torch.empty((grid[1], num_rows), dtype=torch.float32, device=x.device)
    route_kernel[grid](
        *(x, router.weight, router.bias, router.scale, router.expert_scale, parts, squares, arrived, experts, weights),
        *(num_rows, num_experts, hidden, x.stride(0), ROUTER_RANGE, router.eps),
        TOP_K=router.top_k,
        SLOTS=triton.next_power_of_2(router.top_k),
        NORMALISED=router.normalised,
        SPLITS=grid[1],
        BLOCK_E=block_e,
        BLOCK_T=ROUTER_ROWS,
        BLOCK_K=64,
        num_warps=4,
        num_stages=min(4, max(1, 160_000 // (64 * (block_e + 16) * x.element_size()))),  # of shared memory
        **pdl_options(x.device),
    )
    return Routing(experts, weights)


def apply_experts(x: torch.Tensor, routing: Routing, experts: Experts, *, few: bool | None = None) -> torch.Tensor:
    """x [T, H] -> [T, H]. `few`: without a list; None: up to FEW_SLOTS assignments of FEW_ROWS rows."""
    num_rows, hidden = x.shape
    num_experts, width = len(experts.gate_up), experts.gate_up.shape[1]
    top_k = routing.experts.shape[1]
    slots = num_rows * top_k
    assert experts.gate_up.shape == (num_experts, width, hidden), f"{experts.gate_up.shape=} {x.shape=}"
    assert experts.down.shape == (num_experts, hidden, width // 2), f"{experts.down.shape=} {experts.gate_up.shape=}"
    assert experts.activation in ACTIVATIONS and x.stride(1) == 1, f"{experts.activation=} {x.stride()=}"
    assert x.dtype == experts.gate_up.dtype == experts.down.dtype, f"{x.dtype=} {experts.gate_up.dtype=}"
    out = torch.empty_like(x)
    if num_rows == 0:
        return out
    gated = torch.empty((slots, width // 2), dtype=x.dtype, device=x.device)
    parts = torch.empty((slots, hidden), dtype=torch.float32, device=x.device)
    options = pdl_options(x.device)
    first = order = None
    if not (slots <= FEW_SLOTS and num_rows <= FEW_ROWS if few is None else few):
        first = torch.empty(num_experts + 1, dtype=torch.int32, device=x.device)
        order = torch.empty(slots, dtype=torch.int32, device=x.device)
        list_kernel[(num_experts,)](routing.experts, first, order, slots, BLOCK=1024, num_warps=4, **options)
    for source, weight, bias, out_weight, target in (
        (x, experts.gate_up, experts.gate_up_bias, None, gated),
        (gated, experts.down, experts.down_bias, routing.weights, parts),
    ):
        _, n, k = weight.shape
        activated = out_weight is None
        block_n, block_m, block_k, num_warps, num_stages = _tiles(num_rows, slots, num_experts, k, x.dtype, first)
        product_kernel[(triton.cdiv(n, block_n), slots if first is None else num_experts)](
            *(source, weight, bias, routing.experts if first is None else None, first, order, out_weight, target),
            *(slots, n, k, source.stride(0), *weight.stride(), experts.alpha, experts.limit),
            PER_ROW=top_k if activated else 1,
            ACT=experts.activation if activated else None,
            INTERLEAVED=experts.interleaved,
            EVEN_N=n % block_n == 0,
            EVEN_K=k % block_k == 0,
            SLOTS=triton.next_power_of_2(slots) if first is None else 1,
            BLOCK_N=block_n,
            BLOCK_M=block_m,
            BLOCK_K=block_k,
            num_warps=num_warps,
            num_stages=num_stages,
            **options,
        )
    sum_kernel[(triton.cdiv(hidden, 512), num_rows)](parts, out, hidden, TOP_K=top_k, BLOCK=512, num_warps=4, **options)
    return out


def _tiles(
    num_rows: int, slots: int, num_experts: int, k: int, dtype: torch.dtype, listed: torch.Tensor | None
) -> tuple[int, int, int, int, int]:
    """(BLOCK_N, BLOCK_M, BLOCK_K, warps, stages). BLOCK_K is part of the bits: a function of the weight alone."""
    block_k = 32 if dtype == torch.float32 else 128 if k % 128 == 0 else 64
    wanted = num_rows if listed is None else 2 * slots // num_experts
    block_m = min(max(16, triton.next_power_of_2(wanted)), 64 if listed is not None else 256)
    return 64, block_m, block_k, 4, (4 if block_k == 128 else 6) if block_m <= 32 else 3
