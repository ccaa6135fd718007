r"""A dense MLP and a mixture of experts beside each other (Gemma 4): two launches for the products of both.

    fork     the residual stream's three norms (`branches.py`)
    route    two launches, of one multiprocessor in five and of a warp a row, which read next to nothing
    1        act(x_mlp W_gate) (x_mlp W_up)  |  the same of every chosen expert
    2        times W_down, in its ranges     |  the same, times the routing weight

Launch 1 starts `early` (`launch.py`): its dense programs wait for nothing but the fork, and read their weight while the
router is read and picks. The sums are those of `gated_linear`, `linear` and `apply_experts`, to the bit; where
assignments are many it is these that run, since a tile that holds all rows would keep programs off a multiprocessor.
"""

from collections.abc import Callable
from typing import Any

import torch

from specdec.gpu.operations import op
from specdec.gpu.triton_shim import triton
from specdec.layers.branches import Fork
from specdec.layers.linear import (
    Mlp,
    Product,
    gated_linear,
    linear,
    reference_gated_linear,
    reference_linear,
    vendor_gated_linear,
    vendor_linear,
)
from specdec.layers.moe.mixture import (
    ExpertLaunch,
    Experts,
    Router,
    apply_experts,
    are_few,
    list_products,
    reference_apply_experts,
    reference_route,
    route,
)
from specdec.layers.moe.moe_kernels import beside_kernel
from specdec.layers.tiling import Cut, choose_cut


def reference_mlp_and_experts(fork: Fork, mlp: Mlp, router: Router, experts: Experts) -> tuple[Product, Product]:
    """-> what the MLP and what the experts make of the fork, each [T, H]."""
    dense = reference_linear(reference_gated_linear(fork.mlp, mlp.gate_up, mlp.activation), mlp.down)
    return dense, reference_apply_experts(fork.experts, reference_route(fork.router, router), experts)


def vendor_mlp_and_experts(fork: Fork, mlp: Mlp, router: Router, experts: Experts) -> tuple[Product, Product]:
    """`mlp_and_experts`, by the vendor's library where x has many rows."""
    return mlp_and_experts(fork, mlp, router, experts, linear=vendor_linear, gated_linear=vendor_gated_linear)


@op(reference=reference_mlp_and_experts, vendor=vendor_mlp_and_experts)
def mlp_and_experts(
    fork: Fork,
    mlp: Mlp,
    router: Router,
    experts: Experts,
    *,
    linear: Callable[..., Product] = linear,
    gated_linear: Callable[..., torch.Tensor] = gated_linear,
) -> tuple[Product, Product]:
    """-> what the MLP and what the experts make of the fork, each [T, H]. linear, gated_linear: for many rows."""
    num_rows, hidden = fork.mlp.shape
    width = len(mlp.gate_up) // 2
    assert mlp.gate_up.shape == (2 * width, hidden) and mlp.down.shape == (hidden, width), f"{mlp.gate_up.shape=}"
    if num_rows == 0 or not are_few(num_rows, router.top_k):
        routing = route(fork.router, router)
        dense = linear(gated_linear(fork.mlp, mlp.gate_up, mlp.activation), mlp.down)
        return dense, apply_experts(fork.experts, routing, experts)
    # an early program may write while the router is still read: memory that nobody gave back since the fork
    gated = torch.empty((num_rows, width), dtype=fork.mlp.dtype, device=fork.mlp.device)
    products = list_products(fork.experts, route(fork.router, router, holds=True), experts, few=True)
    _launch(fork.mlp, mlp.gate_up, gated, mlp.activation, Cut(1, hidden), products.gate_up, start="early")
    cut = choose_cut(hidden, width)
    parts = torch.empty((cut.splits, num_rows, hidden), dtype=torch.float32, device=fork.mlp.device)
    _launch(gated, mlp.down, parts, None, cut, products.down, start="usual")
    return Product(parts, None, fork.mlp.dtype), products.result


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    activation: str | None,
    cut: Cut,
    beside: ExpertLaunch,
    start: str,
) -> None:
    n, k = weight.shape
    assert x.dtype == weight.dtype and x.stride(1) == weight.stride(1) == 1, f"{x.dtype=} {weight.dtype=}"
    assert x.shape[1] == k and (cut.splits == 1 or cut.split_len % beside.options["BLOCK_K"] == 0), f"{x.shape=} {cut=}"
    options: dict[str, Any] = beside.options
    tiles = triton.cdiv(n, options["BLOCK_N"])
    num_dense = tiles * cut.splits
    beside_kernel[(num_dense + beside.tiles * beside.lists,)](
        *(x, weight, out, len(x), num_dense, tiles, n, k, cut.split_len, x.stride(0), weight.stride(0)),
        *beside.arguments,
        DENSE_ACT=activation,
        DENSE_WHOLE=cut.splits == 1,
        DENSE_EVEN_K=k % options["BLOCK_K"] == 0,
        START=start,
        **options,
    )
