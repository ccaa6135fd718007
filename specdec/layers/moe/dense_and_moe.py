r"""A dense MLP and a mixture of experts that read one residual stream: two launches compute the products of both.

    fork     three norms of the residual stream (Gemma 4, `fork_join.py`), or one norm (a shared expert)
    route    two small launches, on a fifth of the multiprocessors and with a warp per row
    1        act(x_mlp W_gate) (x_mlp W_up)  |  the same of every chosen expert
    2        times W_down, in its ranges     |  the same, times the routing weight

Launch 1 starts `early` (`triton_shim.py`): its dense programs depend only on the fork, so they read their weights
while the router still chooses. The sums have the bits of `gated_linear`, `linear` and `apply_experts`. With many
assignments (not `are_few`) these three run instead.
"""

from collections.abc import Callable
from math import inf

import torch

from specdec.gpu.operations import op
from specdec.gpu.triton_shim import tl, triton
from specdec.layers.gemm.gemm_small import gemm_small_kernel
from specdec.layers.gemm.linear import Mlp, gated_linear, linear, reference_gated_linear, reference_linear
from specdec.layers.gemm.product import Product, SplitK, require_operands, split_k_of
from specdec.layers.moe.expert_tiles import expert_tiles, tiles_that_fit
from specdec.layers.moe.experts import (
    ExpertLaunch,
    Experts,
    apply_experts,
    are_few,
    list_products,
    product_kernel,
    reference_apply_experts,
)
from specdec.layers.moe.fork_join import BranchInputs
from specdec.layers.moe.routing import Router, reference_route, route
from specdec.layers.packed.packed_tile import tile_columns, weight_constants, weight_pointers
from specdec.layers.packed.packed_weight import PackedWeight, Weight


def reference_mlp_and_experts(
    inputs: BranchInputs, mlp: Mlp, router: Router, experts: Experts, *, down: Callable[..., Product] = reference_linear
) -> tuple[Product, Product]:
    """Compute both branches one after the other. down: computes the last product of the MLP."""
    dense = down(reference_gated_linear(inputs.mlp, mlp.gate_up, mlp.activation, mlp.limit), mlp.down)
    return dense, reference_apply_experts(inputs.experts, reference_route(inputs.router, router), experts)


@triton.jit(do_not_specialize=["num_rows", "num_dense", "num_slots"])
def _both_kernel(
    p_dense_x: tl.tensor,  # [T, K']; from here on: arguments of `gemm_small_kernel`
    p_dense_w: tl.tensor,
    p_dense_scales: tl.tensor,
    p_dense_zeros: tl.tensor,
    p_dense_out: tl.tensor,
    num_rows: tl.tensor,
    num_dense: tl.tensor,  # number of programs of the dense product
    dense_tiles: tl.tensor,  # number of programs per range of its K
    dense_n: tl.tensor,
    dense_k: tl.tensor,
    split_len: tl.tensor,
    s_dense_x: tl.tensor,
    s_dense_w: tl.tensor,
    s_dense_scales: tl.tensor,
    p_x: tl.tensor,  # from here on: arguments of `product_kernel`
    p_w: tl.tensor,
    p_scales: tl.tensor,
    p_zeros: tl.tensor,
    p_bias: tl.tensor,
    p_experts: tl.tensor,
    p_first: tl.tensor,
    p_order: tl.tensor,
    p_weights: tl.tensor,
    p_out: tl.tensor,
    num_slots: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    s_x: tl.tensor,
    s_we: tl.tensor,
    s_wn: tl.tensor,
    s_wk: tl.tensor,
    s_se: tl.tensor,
    s_scales: tl.tensor,
    alpha: tl.tensor,
    limit: tl.tensor,
    DENSE_CODE: tl.constexpr,
    DENSE_GROUP: tl.constexpr,
    DENSE_FAST: tl.constexpr,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    FAST: tl.constexpr,
    DENSE_ACT: tl.constexpr,  # None: each range of K has a program
    DENSE_WHOLE: tl.constexpr,  # there is one range
    DENSE_EVEN_K: tl.constexpr,
    START: tl.constexpr,
    TOP_K: tl.constexpr,
    ACT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    SLOTS: tl.constexpr,
    LONE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TAIL_K: tl.constexpr,
    PDL: tl.constexpr,
    SHARED: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    if program < num_dense:
        TILE_ROWS: tl.constexpr = BLOCK_N if DENSE_ACT is None else BLOCK_N // 2
        gemm_small_kernel(
            *(0, program % dense_tiles, program // dense_tiles),
            *(p_dense_x, p_dense_w, p_dense_scales, p_dense_zeros, None, p_dense_out, num_rows, TILE_ROWS, dense_n),
            *(dense_k, split_len, s_dense_x, s_dense_w, s_dense_scales, DENSE_CODE, DENSE_GROUP, DENSE_FAST),
            *(DENSE_ACT is None, False, DENSE_WHOLE, DENSE_ACT, DENSE_EVEN_K),
            *(BLOCK_N, BLOCK_M, 0, BLOCK_K, START, PDL),
        )
    else:
        program -= num_dense
        tiles = tl.cdiv(N, BLOCK_N)
        product_kernel(
            *(program % tiles, program // tiles),
            *(p_x, p_w, p_scales, p_zeros, p_bias, p_experts, p_first, p_order, p_weights, p_out, num_slots, N, K, s_x),
            *(s_we, s_wn, s_wk, s_se, s_scales, alpha, limit, CODE, GROUP, FAST, TOP_K, ACT, INTERLEAVED, EVEN_N),
            *(EVEN_K, SLOTS, LONE, BLOCK_N, BLOCK_M, BLOCK_K, TAIL_K, PDL, SHARED),
        )


@op(reference=reference_mlp_and_experts, has_orders=True)
def mlp_and_experts(
    inputs: BranchInputs, mlp: Mlp, router: Router, experts: Experts, *, in_order: bool = True
) -> tuple[Product, Product]:
    """Outputs of the MLP and of the experts for these inputs, each [T, H]. in_order: see `linear`."""
    num_rows, hidden = inputs.mlp.shape
    width = len(mlp.gate_up) // 2
    assert mlp.gate_up.shape == (2 * width, hidden) and mlp.down.shape == (hidden, width), f"{mlp.gate_up.shape=}"
    pairs = (mlp.gate_up, SplitK(1, hidden), experts.gate_up), (mlp.down, split_k_of(mlp.down), experts.down)
    alike = all(_tiles_alike(*pair, num_rows * router.top_k, inputs.mlp.dtype) for pair in pairs)
    if num_rows == 0 or not alike or not are_few(num_rows, router.top_k) or mlp.limit < inf:
        routing = route(inputs.router, router)
        gated = gated_linear(inputs.mlp, mlp.gate_up, mlp.activation, mlp.limit, in_order=in_order)
        dense = linear(gated, mlp.down, in_order=in_order)
        return dense, apply_experts(inputs.experts, routing, experts)
    # an early program may write while the router's input is read: allocate memory that was not freed since the fork
    gated = torch.empty((num_rows, width), dtype=inputs.mlp.dtype, device=inputs.mlp.device)
    routing = route(inputs.router, router, hold_next=True)
    (gate_up, down), result = list_products(inputs.experts, routing, experts, few=True)
    _launch_both(inputs.mlp, mlp.gate_up, gated, mlp.activation, SplitK(1, hidden), gate_up, start="early")
    split_k = split_k_of(mlp.down)
    parts = torch.empty((split_k.splits, num_rows, hidden), dtype=torch.float32, device=inputs.mlp.device)
    _launch_both(gated, mlp.down, parts, None, split_k, down, start="usual")
    return Product(parts, None, inputs.mlp.dtype), result


def _tiles_alike(dense: Weight, split_k: SplitK, experts: Weight, slots: int, dtype: torch.dtype) -> bool:
    """Do the experts' tiles fit the ranges and groups of the dense weight? Not always if the two are packed
    differently."""
    columns = expert_tiles(slots, experts, dtype, listed=False).block_k
    if split_k.splits > 1 and split_k.split_len % columns:
        return False
    if not isinstance(dense, PackedWeight):
        return True
    return tile_columns(dense) in (0, columns) and (dense.has_row_scales or columns % dense.group == 0)


def _launch_both(
    x: torch.Tensor,
    weight: Weight,
    out: torch.Tensor,
    activation: str | None,
    split_k: SplitK,
    experts: ExpertLaunch,
    start: str,
) -> None:
    n, k = weight.shape
    require_operands(x, weight, None)
    tiles = tiles_that_fit(experts.tiles, weight)
    assert split_k.splits == 1 or split_k.split_len % tiles.block_k == 0, f"{split_k=} {tiles=}"
    dense_tiles = triton.cdiv(n, tiles.block_n)
    num_dense = dense_tiles * split_k.splits
    words, scales, zeros, s_w, s_scales = weight_pointers(weight)
    _both_kernel[(num_dense + experts.programs * experts.lists,)](
        *(x, words, scales, zeros, out, len(x), num_dense, dense_tiles, n, k, split_k.split_len, x.stride(0)),
        *(s_w, s_scales, *experts.arguments),
        **{f"DENSE_{name}": value for name, value in weight_constants(weight, x.dtype).items()},
        DENSE_ACT=activation,
        DENSE_WHOLE=split_k.splits == 1,
        DENSE_EVEN_K=k % tiles.block_k == 0,
        START=start,
        **experts.options | tiles.options,
    )
