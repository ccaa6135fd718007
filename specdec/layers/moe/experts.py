r"""The experts of a mixture: for each token, the gated products of its chosen experts, and their weighted sum.

    y = sum_j w_j ( D_{e_j} act(G_{e_j} x, U_{e_j} x) + b )       over the k experts e_j in order of rank

It takes two launches of `product_kernel`, for plain and for packed weights (`packed_tile.py` unpacks them in
registers). Unless assignments (token, expert) are few, `list_kernel` runs first. The result is a `Product` with float32
parts in rank order, which its reader sums: so a row has the same bits next to any other rows.
"""

from typing import Any, NamedTuple

import torch

from specdec.gpu.operations import op
from specdec.gpu.triton_shim import KEEP, pdl_options, tl, trigger_next, triton, wait_for_previous
from specdec.layers.gemm.product import Product, Tiles, activate, reference_activate
from specdec.layers.moe.expert_tiles import UNLISTED_ROWS, expert_tiles, tail_columns
from specdec.layers.moe.routing import Routing, list_kernel
from specdec.layers.packed.packed_tile import (
    load_tile,
    load_words,
    multiply_tile,
    row_pointers,
    scale_pointers,
    scale_sum,
    unpack_tile,
    weight_constants,
    weight_pointers,
    zero_pointers,
)
from specdec.layers.packed.packed_weight import PackedWeight, Weight, multiply

ACTIVATIONS = ("gelu_tanh", "silu", "silu_clamped", "swiglu_clamped")

FEW_SLOTS = 256
"""Maximum assignments without a list (`are_few`; also at most UNLISTED_ROWS rows): each program then finds its expert's
assignments itself."""


class Experts(NamedTuple):
    """Experts of a mixture: gate_up [E, 2 I, H] and down [E, H, I], views at any strides, or packed; biases [E, 2 I]
    and [E, H].

    interleaved: rows 2 i and 2 i + 1 of gate_up are gate and up of i; otherwise all gates come first. shared: other
    ranks have more experts. Assignments to these have expert -1, and their parts are undefined here. activation
    "swiglu_clamped": (clamp(u, -limit, limit) + 1) g sigmoid(alpha g), g the gate, at most `limit`; "silu_clamped":
    min(silu(g), limit) clamp(u, -limit, limit); "relu2", which only packed modules run: no gate, relu(u)^2, and
    gate_up [E, I, H].
    """

    gate_up: Weight
    down: Weight
    activation: str
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    interleaved: bool = False
    alpha: float = 0.0
    limit: float = 0.0
    shared: bool = False


def reference_apply_experts(x: torch.Tensor, routing: Routing, experts: Experts) -> Product:
    """Apply the experts one by one: x [T, H] -> [T, H]."""
    parts = torch.zeros((*routing.experts.shape, x.shape[1]), dtype=torch.float32, device=x.device)  # [T, k, H]
    for expert in routing.experts[routing.experts >= 0].unique().tolist():
        row, rank = (routing.experts == expert).nonzero(as_tuple=True)
        up_bias, down_bias = (None if b is None else b[expert] for b in (experts.gate_up_bias, experts.down_bias))
        hidden = multiply(x[row], experts.gate_up[expert], up_bias).float()
        gate, up = (hidden[:, ::2], hidden[:, 1::2]) if experts.interleaved else hidden.chunk(2, dim=-1)
        hidden = reference_gate(gate, up, experts).to(x.dtype)
        parts[row, rank] = multiply(hidden, experts.down[expert], down_bias).float()
    return Product((parts * routing.weights[..., None]).transpose(0, 1), None, x.dtype)


def reference_gate(gate: torch.Tensor, up: torch.Tensor, experts: Experts) -> torch.Tensor:
    if experts.activation == "swiglu_clamped":
        gate, up = gate.clamp(max=experts.limit), up.clamp(-experts.limit, experts.limit)
        return (up + 1) * gate * torch.sigmoid(experts.alpha * gate)
    if experts.activation == "silu_clamped":
        return reference_activate(gate, "silu").clamp(max=experts.limit) * up.clamp(-experts.limit, experts.limit)
    return reference_activate(gate, experts.activation) * up


@triton.jit
def _gate(b_gate: tl.tensor, b_up: tl.tensor, alpha: tl.tensor, limit: tl.tensor, ACT: tl.constexpr) -> tl.tensor:
    if ACT == "swiglu_clamped":
        b_gate = tl.minimum(b_gate, limit)
        b_sigmoid = tl.sigmoid(tl.maximum(alpha * b_gate, -80.0))  # e^80 is a float32
        return (tl.clamp(b_up, -limit, limit) + 1.0) * b_gate * b_sigmoid
    if ACT == "silu_clamped":
        return tl.minimum(activate(b_gate, "silu"), limit) * tl.clamp(b_up, -limit, limit)
    return activate(b_gate, ACT) * b_up


@triton.jit
def _multiply(
    p_x: tl.tensor,
    p_w: tl.tensor,  # [BN, 1], and scales and zeros: a weight as `load_tile` takes it
    p_scales: tl.tensor,
    p_zeros: tl.tensor,
    p_bias: tl.tensor,
    p_weights: tl.tensor,  # [A], or None where activated
    p_out: tl.tensor,  # [top_k, T, N], or [A, N / 2] where activated
    b_slot: tl.tensor,  # [BM] assignments
    m_slot: tl.tensor,
    num_slots: tl.tensor,
    o_bias: tl.tensor,  # [BN]
    m_n: tl.tensor,  # [BN, 1]: rows that the weight has
    i_n: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    s_x: tl.tensor,
    s_wk: tl.tensor,
    s_scales: tl.tensor,
    alpha: tl.tensor,
    limit: tl.tensor,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    FAST: tl.constexpr,
    TOP_K: tl.constexpr,
    ACT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TAIL_K: tl.constexpr,  # columns after the last tile of BLOCK_K
) -> None:
    """Multiply one tile of an expert's weight by BLOCK_M assignments; then bias, activation or routing weight."""
    b_row = b_slot // TOP_K
    p_x += (b_slot if ACT is None else b_row).to(tl.int64)[None, :] * s_x
    b_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    end = K - TAIL_K
    DTYPE: tl.constexpr = p_x.dtype.element_ty
    b_bias, b_weight = 0.0, 1.0  # loaded before the loop, to hide the latency
    if p_bias is not None:
        b_bias = tl.load(p_bias + o_bias[:, None], mask=m_n, other=0.0).to(tl.float32)
    if ACT is None:
        b_weight = tl.load(p_weights + b_slot, mask=m_slot, other=0.0)[None, :]
    if TAIL_K:  # loaded before the other tiles, multiplied after them
        b_words, b_scales, b_zeros = load_words(
            *(p_w, p_scales, p_zeros, s_scales, end, K, m_n, m_n, True, CODE, GROUP, TAIL_K)
        )
        b_last = tl.load(p_x + end + tl.arange(0, TAIL_K)[:, None], mask=m_slot[None, :], other=0.0)
    for i_k in range(0, end, BLOCK_K):
        o_k = i_k + tl.arange(0, BLOCK_K)
        if CODE is not None:
            b_w = load_tile(
                *(p_w, p_scales, p_zeros, s_scales, i_k, K, m_n, m_n, EVEN_K, CODE, GROUP, FAST, BLOCK_K, DTYPE)
            )
        elif EVEN_K:
            b_w = tl.load(p_w + o_k[None, :] * s_wk)  # [BN, BK]
        else:
            b_w = tl.load(p_w + o_k[None, :] * s_wk, mask=(o_k < K)[None, :], other=0.0)
        m_k = o_k < (i_k + BLOCK_K if EVEN_K else K)
        b_x = tl.load(p_x + o_k[:, None], mask=m_k[:, None] & m_slot[None, :], other=0.0)  # [BK, BM]
        if CODE is None:
            b_acc = tl.dot(b_w, b_x, b_acc, input_precision="ieee")
        else:
            b_acc = multiply_tile(b_w, b_x, b_acc, p_scales, s_scales, i_k, m_n, CODE, GROUP)
    if TAIL_K:
        b_w = unpack_tile(b_words, b_scales, b_zeros, CODE, FAST, DTYPE)
        b_acc = multiply_tile(b_w, b_last, b_acc, p_scales, s_scales, end, m_n, CODE, GROUP)
    if CODE is not None:
        b_acc = scale_sum(b_acc, p_scales, m_n, CODE, GROUP, FAST, DTYPE)
    if p_bias is not None:
        b_acc += b_bias
    if ACT is None:
        o_out = (b_slot % TOP_K * (num_slots // TOP_K) + b_row).to(tl.int64)[None, :]
        b_acc *= b_weight
        o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
        tl.store(p_out + o_out * N + o_n, b_acc, mask=m_slot[None, :] & (o_n < N), eviction_policy=KEEP)
    else:
        HALF: tl.constexpr = BLOCK_N // 2
        if INTERLEAVED:
            b_pair = tl.permute(tl.reshape(b_acc, (HALF, 2, BLOCK_M)), (0, 2, 1))
        else:
            b_pair = tl.permute(tl.reshape(b_acc, (2, HALF, BLOCK_M)), (1, 2, 0))
        b_gate, b_up = tl.split(b_pair)
        o_n = i_n * HALF + tl.arange(0, HALF)[:, None]
        b_out = _gate(b_gate, b_up, alpha, limit, ACT).to(p_out.dtype.element_ty)
        p_out += b_slot.to(tl.int64)[None, :] * (N // 2) + o_n
        tl.store(p_out, b_out, mask=m_slot[None, :] & (o_n < N // 2), eviction_policy=KEEP)


@triton.jit(do_not_specialize=["num_slots"])
def product_kernel(
    tile: tl.tensor,  # this program's, if another kernel calls this one; None if launched
    slot: tl.tensor,
    p_x: tl.tensor,  # [T, K], or [A, K] after the first product
    p_w: tl.tensor,  # [E, N, K] at any strides, and scales and zeros: weights by `weight_pointers`
    p_scales: tl.tensor,
    p_zeros: tl.tensor,
    p_bias: tl.tensor,  # [E, N] or None
    p_experts: tl.tensor,  # [A], or None with a list
    p_first: tl.tensor,  # [E + 1], or None
    p_order: tl.tensor,  # [A], or None
    p_weights: tl.tensor,  # [A], or None where activated
    p_out: tl.tensor,  # [top_k, T, N] float32, or [A, N / 2] where activated
    num_slots: tl.tensor,  # A = T * top_k
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
    CODE: tl.constexpr,  # and GROUP and FAST: `weight_constants`
    GROUP: tl.constexpr,
    FAST: tl.constexpr,
    TOP_K: tl.constexpr,
    ACT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    SLOTS: tl.constexpr,  # A, rounded up to a power of 2; unused with a list
    LONE: tl.constexpr,  # one row, so no expert has two assignments; unused with a list
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TAIL_K: tl.constexpr,
    PDL: tl.constexpr,
    SHARED: tl.constexpr,  # expert -1 is another rank's: nothing is stored for its assignments
) -> None:
    """grid (weight tiles, slots). Weight rows are the M operand, an expert's assignments the N operand.

    A slot is an expert with its list of assignments. For few rows it is an assignment, without a list: the program of
    an expert's first assignment computes all of them, and the expert's other programs exit. Either way a weight is read
    once. An assignment has its own column in a product whose sum over K is never cut, so other assignments cannot
    change its bits.
    """
    trigger_next(PDL)
    if tile is None:
        i_n, i_slot = tl.program_id(0), tl.program_id(1)
    else:
        i_n, i_slot = tile, slot
    o_n = tl.arange(0, BLOCK_N)
    # rows after the weight's end: plain weights read the last row instead. For packed weights a minimum would hide
    # contiguity from the compiler, which then prefetches no scales
    if ACT is None or INTERLEAVED:
        o_w = i_n * BLOCK_N + o_n
        m_n = (o_w < N)[:, None]
        if CODE is None and not EVEN_N:
            o_w = tl.minimum(o_w, N - 1)
    else:  # half a tile of gate rows, then as many up rows
        o_half = i_n * (BLOCK_N // 2) + o_n % (BLOCK_N // 2)
        m_n = (o_half < N // 2)[:, None]
        o_w = (o_half if CODE is not None else tl.minimum(o_half, N // 2 - 1)) + o_n // (BLOCK_N // 2) * (N // 2)
    wait_for_previous(PDL)
    if p_order is not None:
        begin, end = tl.load(p_first + i_slot), tl.load(p_first + i_slot + 1)
        p_tile, p_scale_tile, p_zero_tile = _expert_rows(*(p_w, p_scales, p_zeros, i_slot, o_w, s_we, s_wn, s_se, CODE))
        for i_first in range(begin, end, BLOCK_M):
            o_list = i_first + tl.arange(0, BLOCK_M)
            b_slot = tl.load(p_order + o_list, mask=o_list < end, other=0)
            _multiply(
                *(p_x, p_tile, p_scale_tile, p_zero_tile, p_bias, p_weights, p_out, b_slot, o_list < end, num_slots),
                *(i_slot * N + o_w, m_n, i_n, N, K, s_x, s_wk, s_scales, alpha, limit, CODE, GROUP, FAST),
                *(TOP_K, ACT, INTERLEAVED, EVEN_K, BLOCK_N, BLOCK_M, BLOCK_K, TAIL_K),
            )
    else:
        i_expert = tl.load(p_experts + i_slot)
        o_slot, o_m = tl.arange(0, SLOTS), tl.arange(0, BLOCK_M)
        first = i_slot
        if not LONE:
            m_same = tl.load(p_experts + o_slot, mask=o_slot < num_slots, other=-1) == i_expert
            first = tl.min(tl.where(m_same, o_slot, SLOTS))
        if SHARED:
            first = tl.where(i_expert < 0, -1, first)
        if first == i_slot:
            b_slot = tl.where(o_m == 0, i_slot, -1)  # [BM]
            if not LONE:
                b_rank = tl.where(m_same, tl.cumsum(m_same.to(tl.int32)) - 1, -1)
                b_slot = tl.max(tl.where(b_rank[:, None] == o_m[None, :], o_slot[:, None], -1), 0)
            p_tile, p_scale_tile, p_zero_tile = _expert_rows(
                *(p_w, p_scales, p_zeros, i_expert, o_w, s_we, s_wn, s_se, CODE)
            )
            _multiply(
                *(p_x, p_tile, p_scale_tile, p_zero_tile, p_bias, p_weights, p_out, tl.maximum(b_slot, 0), b_slot >= 0),
                *(num_slots, i_expert * N + o_w, m_n, i_n, N, K, s_x, s_wk, s_scales, alpha, limit, CODE, GROUP, FAST),
                *(TOP_K, ACT, INTERLEAVED, EVEN_K, BLOCK_N, BLOCK_M, BLOCK_K, TAIL_K),
            )


@triton.jit
def _expert_rows(
    p_w: tl.tensor,
    p_scales: tl.tensor,
    p_zeros: tl.tensor,
    i_expert: tl.tensor,
    o_w: tl.tensor,  # [BN]
    s_we: tl.tensor,
    s_wn: tl.tensor,
    s_se: tl.tensor,
    CODE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Pointers [BN, 1] to rows of an expert's weight, and to their scales and zeros."""
    i_expert = i_expert.to(tl.int64)
    p_w = row_pointers(p_w + i_expert * s_we, o_w, s_wn, CODE)
    o_scale = i_expert * s_se + o_w
    return p_w, scale_pointers(p_scales, o_scale, CODE), zero_pointers(p_zeros, o_scale, CODE)


@op(reference=reference_apply_experts)
def apply_experts(x: torch.Tensor, routing: Routing, experts: Experts, *, few: bool | None = None) -> Product:
    """Apply the chosen experts: x [T, H] -> [T, H]. few: use no list; None: `are_few` decides."""
    launches, result = list_products(x, routing, experts, are_few(*routing.experts.shape) if few is None else few)
    if len(x):
        for launch in launches:
            product_kernel[(launch.programs, launch.lists)](None, None, *launch.arguments, **launch.options)
    return result


class ExpertLaunch(NamedTuple):
    """Launch of an experts' product: `programs` programs for each of `lists` lists (or assignments if there are no
    lists)."""

    programs: int
    lists: int
    tiles: Tiles
    arguments: tuple[Any, ...]  # of `product_kernel`: after its place, before the constants
    options: dict[str, Any]


def are_few(num_rows: int, top_k: int) -> bool:
    return num_rows * top_k <= FEW_SLOTS and num_rows <= UNLISTED_ROWS


def list_products(x: torch.Tensor, routing: Routing, experts: Experts, few: bool) -> tuple[list[ExpertLaunch], Product]:
    """Prepare two launches for x [T, H], of gate_up and of down, and their result. Unless assignments are few, they are
    listed now."""
    num_rows, hidden = x.shape
    num_experts, width = len(experts.gate_up), experts.gate_up.shape[1]
    top_k = routing.experts.shape[1]
    slots = num_rows * top_k
    assert experts.gate_up.shape == (num_experts, width, hidden), f"{experts.gate_up.shape=} {x.shape=}"
    assert experts.down.shape == (num_experts, hidden, width // 2), f"{experts.down.shape=} {experts.gate_up.shape=}"
    assert experts.activation in ACTIVATIONS and x.stride(1) == 1, f"{experts.activation=} {x.stride()=}"
    assert not few or num_rows <= UNLISTED_ROWS, f"{num_rows=}"
    gated = torch.empty((slots, width // 2), dtype=x.dtype, device=x.device)
    parts = torch.empty((top_k, num_rows, hidden), dtype=torch.float32, device=x.device)
    first = order = None
    if not few:
        first = torch.empty(num_experts + 1, dtype=torch.int32, device=x.device)
        order = torch.empty(slots, dtype=torch.int32, device=x.device)
        if slots:
            options = pdl_options(x.device)
            list_kernel[(num_experts,)](routing.experts, first, order, slots, BLOCK=1024, num_warps=4, **options)

    launches: list[ExpertLaunch] = []
    for source, weight, bias, out_weight, target in (
        (x, experts.gate_up, experts.gate_up_bias, None, gated),
        (gated, experts.down, experts.down_bias, routing.weights, parts),
    ):
        assert isinstance(weight, PackedWeight) or weight.dtype == x.dtype, f"{x.dtype=} {weight.dtype=}"
        _, n, k = weight.shape
        tiles = expert_tiles(slots, weight, x.dtype, listed=not few)
        tail = tail_columns(tiles, weight)
        words, scales, zeros, s_rows, s_scales = weight_pointers(weight)
        s_experts = 0 if scales is None else scales.stride(0)
        arguments = (
            *(source, words, scales, zeros, bias, routing.experts if few else None, first, order, out_weight, target),
            *(slots, n, k, source.stride(0), words.stride(0), s_rows, words.stride(2), s_experts, s_scales),
            *(experts.alpha, experts.limit),
        )
        options = {
            **weight_constants(weight, x.dtype),
            "TOP_K": top_k,
            "ACT": experts.activation if out_weight is None else None,
            "INTERLEAVED": experts.interleaved,
            "EVEN_N": n % tiles.block_n == 0,
            "EVEN_K": k % tiles.block_k == tail,
            "SLOTS": triton.next_power_of_2(slots) if few else 1,
            "LONE": few and num_rows == 1,
            "TAIL_K": tail,
            "SHARED": experts.shared,
            **tiles.options,
            **pdl_options(x.device),
        }
        lists = slots if few else num_experts
        launches.append(ExpertLaunch(triton.cdiv(n, tiles.block_n), lists, tiles, arguments, options))
    return launches, Product(parts, None, x.dtype)
