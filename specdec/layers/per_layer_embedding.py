r"""Gemma 4's per-layer embeddings: a small vector per token and layer, gated into the residual stream.

Computed once per forward, for every layer l (width P, hidden size H):

    e_l = (norm(c_l) + T[token]_l t) / sqrt(2),     c = x W_model / sqrt(H)        x: the token's embedding

T is the second embedding table and t its scale. In layer l, before its last norm, residual and scale (`norm.py`):

    y = W_proj (act(W_gate h) e_l)

Both products are narrow: latency bounds them, not memory. For few rows, the second product applies the activation and
e_l as it loads (K is only P), and has its weight in registers before it waits. For many rows each of its programs would
repeat the activation, so that is a separate launch. Everything is rounded where transformers rounds it.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from specdec.gpu.operations import Operations, op
from specdec.gpu.triton_shim import KEEP, pdl_options, tl, trigger_next, triton, wait_for_previous
from specdec.layers.gemm.gemm_medium import can_describe, gemm_medium
from specdec.layers.gemm.linear import linear
from specdec.layers.gemm.product import (
    MAX_MEDIUM_ROWS,
    Product,
    SplitK,
    Tiles,
    activate,
    reference_activate,
    reference_finish,
    split_k_of,
    sum_parts,
)
from specdec.layers.norm import Norm, reference_rms_norm, rms_norm
from specdec.layers.packed.packed_gemm import packed_gemm
from specdec.layers.packed.packed_launch import PackedLaunch, takes_packed_rows
from specdec.layers.packed.packed_tile import (
    load_tile,
    multiply_tile,
    row_pointers,
    scale_pointers,
    scale_sum,
    tile_columns,
    weight_constants,
    weight_pointers,
    zero_pointers,
)
from specdec.layers.packed.packed_weight import Weight, multiply

FEW_ROWS = 64
"""Rows up to which the activation goes into the loads of the second product."""

FEW_FP8_ROWS = 56
"""FEW_ROWS for FP8 weights. For 64 rows there would be more programs than multiprocessors."""

SOME_ROWS_TILES = Tiles(64, 32, 64, 4, 4, 64)
"""Tiles above FEW_ROWS. They give more programs than `choose_small_tiles`, which assumes long weights."""

ANY_ORDER_TILES = {192: Tiles(32, 64, 128, 4, 2, 32), MAX_MEDIUM_ROWS: Tiles(64, 128, 64, 8, 4, 64)}
"""Tiles by the largest number of rows that uses them, if bits may depend on that number."""

FP8_TILES = {128: Tiles(64, 64, 128, 4, 3, 64), MAX_MEDIUM_ROWS: Tiles(64, 128, 64, 4, 3, 64)}
"""Tiles over an FP8 weight above FEW_FP8_ROWS: K is too short for four of them on their way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingParts:
    """The part of Gemma 4's per-layer embeddings that is computed once per forward.

    context: W_model [L P, H]. table: T [V, L P], rows of any stride. norm: over P. columns: columns of the context
    product that this rank's table has, if ranks share it.
    """

    context: Weight
    table: torch.Tensor
    norm: Norm
    context_scale: float
    table_scale: float
    columns: slice | None = None

    @property
    def width(self) -> int:
        """P"""
        assert self.norm.weight is not None and self.norm.is_plain, f"{self.norm}"
        return len(self.norm.weight)


def reference_layer_inputs(context: Product, tokens: torch.Tensor, parts: EmbeddingParts) -> torch.Tensor:
    num_layers = parts.table.shape[1] // parts.width
    by_layer = (reference_finish(context) * parts.context_scale).unflatten(-1, (num_layers, parts.width))
    normed = reference_rms_norm(by_layer, parts.norm)
    return (normed + F.embedding(tokens, parts.table).view_as(normed) * parts.table_scale) * math.sqrt(0.5)


def reference_gated_projection(gate: Product, inputs: torch.Tensor, weight: Weight, activation: str) -> Product:
    gated = reference_activate(reference_finish(gate).float(), activation).to(inputs.dtype)
    return Product.from_value(multiply(gated * inputs, weight))


@triton.jit(do_not_specialize=["part_len", "eps", "context_scale", "table_scale"])
def _layer_inputs_kernel(
    p_parts: tl.tensor,  # [S, T, L P]
    p_tokens: tl.tensor,  # [T]
    p_table: tl.tensor,  # [V, L P], rows of any stride
    p_gain: tl.tensor,  # [P]
    p_out: tl.tensor,  # [T, L, P]
    part_len: tl.tensor,
    P: tl.tensor,
    s_tokens: tl.tensor,
    s_table: tl.tensor,
    eps: tl.tensor,
    context_scale: tl.tensor,
    table_scale: tl.tensor,
    ROUND_FIRST: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    i_t, i_layer = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_p = tl.arange(0, BLOCK)
    m_p = o_p < P
    width = tl.num_programs(1).to(tl.int64) * P
    DTYPE: tl.constexpr = p_out.dtype.element_ty
    b_gain = tl.load(p_gain + o_p, mask=m_p, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    token = tl.load(p_tokens + i_t * s_tokens).to(tl.int64)
    b_token = tl.load(p_table + token * s_table + i_layer * P + o_p, mask=m_p, other=0.0).to(tl.float32)
    o_part = i_t * width + i_layer * P + o_p
    b_x = sum_parts(p_parts, None, o_part, o_p, m_p, part_len, SPLITS, DTYPE)
    b_x = (b_x * context_scale).to(DTYPE).to(tl.float32)
    b_x = rms_norm(b_x, b_gain, P, eps, ROUND_FIRST, DTYPE)
    b_x = (b_x + (b_token * table_scale).to(DTYPE).to(tl.float32)).to(DTYPE).to(tl.float32)
    tl.store(p_out + o_part, (b_x * 0.7071067811865476).to(DTYPE), mask=m_p, eviction_policy=KEEP)


@triton.jit
def _gated(b_gate: tl.tensor, b_in: tl.tensor, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """act(gate) e_l, rounded twice, with the same bits in every kernel."""
    return (activate(b_gate, ACTIVATION).to(DTYPE).to(tl.float32) * b_in).to(DTYPE)


@triton.jit(do_not_specialize=["num_rows"])
def _gated_projection_kernel(
    p_parts: tl.tensor,  # [S, T, P]
    p_inputs: tl.tensor,  # [T, P]
    p_w: tl.tensor,  # [H, P], and scales and zeros: a weight by `weight_pointers`
    p_scales: tl.tensor,
    p_zeros: tl.tensor,
    p_out: tl.tensor,  # [T, H]
    num_rows: tl.tensor,
    H: tl.tensor,
    P: tl.tensor,
    s_inputs: tl.tensor,
    s_w: tl.tensor,
    s_scales: tl.tensor,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    FAST: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    i_m, i_n = tl.program_id(0), tl.program_id(1)
    o_k = tl.arange(0, BLOCK_K)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_k = o_k < P
    m_n = (o_n < H)[:, None]
    DTYPE: tl.constexpr = p_out.dtype.element_ty
    p_scale = scale_pointers(p_scales, o_n, CODE)
    i_k = tl.full([], 0, tl.int32)
    b_w = load_tile(
        *(row_pointers(p_w, o_n, s_w, CODE), p_scale, zero_pointers(p_zeros, o_n, CODE), s_scales, i_k, P, m_n, m_n),
        *(False, CODE, GROUP, FAST, BLOCK_K, DTYPE),
    )
    wait_for_previous(PDL)
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_row = o_m.to(tl.int64)[None, :]
    mask = (o_m < num_rows)[None, :] & m_k[:, None]
    b_in = tl.load(p_inputs + o_row * s_inputs + o_k[:, None], mask=mask, other=0.0).to(tl.float32)  # [BK, BM]
    part_len = num_rows.to(tl.int64) * P
    b_gate = sum_parts(p_parts, None, o_row * P + o_k[:, None], o_k, mask, part_len, SPLITS, DTYPE)
    b_x = _gated(b_gate, b_in, ACTIVATION, DTYPE)
    b_y = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    b_y = multiply_tile(b_w, b_x, b_y, p_scale, s_scales, i_k, m_n, CODE, GROUP)
    b_y = scale_sum(b_y, p_scale, m_n, CODE, GROUP, FAST, DTYPE)
    m_out = (o_m < num_rows)[None, :] & m_n
    tl.store(p_out + o_row * H + o_n[:, None], b_y.to(DTYPE), mask=m_out, eviction_policy=KEEP)


@triton.jit(do_not_specialize=["part_len"])
def _gate_inputs_kernel(
    p_parts: tl.tensor,  # [S, T, P]
    p_inputs: tl.tensor,  # [T, P]
    p_out: tl.tensor,  # [T, P]
    part_len: tl.tensor,
    P: tl.tensor,
    s_inputs: tl.tensor,
    ACTIVATION: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    i_t = tl.program_id(0).to(tl.int64)
    o_p = tl.arange(0, BLOCK)
    m_p = o_p < P
    wait_for_previous(PDL)
    b_in = tl.load(p_inputs + i_t * s_inputs + o_p, mask=m_p, other=0.0).to(tl.float32)
    DTYPE: tl.constexpr = p_out.dtype.element_ty
    b_gate = sum_parts(p_parts, None, i_t * P + o_p, o_p, m_p, part_len, SPLITS, DTYPE)
    tl.store(p_out + i_t * P + o_p, _gated(b_gate, b_in, ACTIVATION, DTYPE), mask=m_p, eviction_policy=KEEP)


@op(reference=reference_layer_inputs)
def layer_inputs(context: Product, tokens: torch.Tensor, parts: EmbeddingParts) -> torch.Tensor:
    """e [T, L, P]. context: x W_model [T, L P]; tokens [T]."""
    splits, num_rows, total = context.parts.shape
    table, gain, width = parts.table, parts.norm, parts.width
    assert context.bias is None and context.parts.is_contiguous(), f"{context.parts.stride()=}"
    assert table.shape[1] == total and total % width == 0 and table.stride(1) == 1, f"{table.shape=} {total=}"
    assert tokens.shape == (num_rows,), f"{tokens.shape=} {num_rows=}"
    out = torch.empty((num_rows, total // width, width), dtype=context.dtype, device=tokens.device)
    if out.numel() == 0:
        return out
    _layer_inputs_kernel[(num_rows, total // width)](
        *(context.parts, tokens, table, gain.weight, out),
        *(num_rows * total, width, tokens.stride(0), table.stride(0), gain.eps),
        *(parts.context_scale, parts.table_scale),
        ROUND_FIRST=gain.round_first,
        SPLITS=splits,
        BLOCK=triton.next_power_of_2(width),
        num_warps=1,
        **pdl_options(out.device),
    )
    return out


@op(reference=reference_gated_projection, has_orders=True)
def gated_projection(
    gate: Product, inputs: torch.Tensor, weight: Weight, activation: str, *, in_order: bool = True
) -> Product:
    """W_proj (act(gate) e_l). gate: W_gate h [T, P]; inputs: e_l [T, P], rows of any stride; weight: W_proj [H, P]."""
    splits, num_rows, width = gate.parts.shape
    height = len(weight)
    assert gate.bias is None and gate.parts.is_contiguous(), f"{gate.parts.stride()=}"
    assert inputs.shape == (num_rows, width) and inputs.stride(1) == 1, f"{inputs.shape=} {gate.parts.shape=}"
    assert weight.shape == (height, width) and inputs.dtype == gate.dtype, f"{weight.shape=} {inputs.dtype=}"
    if plain := isinstance(weight, torch.Tensor):
        assert weight.is_contiguous() and weight.dtype == gate.dtype, f"{weight.dtype=} {gate.dtype=}"
    blocks = tile_columns(weight) > 0  # several scales per row, applied to sums
    fp8 = weight if takes_packed_rows(weight, inputs) and weight.has_row_scales else None
    many = num_rows > (FEW_ROWS if fp8 is None else FEW_FP8_ROWS)
    if blocks or (many and split_k_of(weight).splits == 1):  # the sum is in one piece there too
        gated = torch.empty((num_rows, width), dtype=inputs.dtype, device=inputs.device)
        _gate_inputs_kernel[(num_rows,)](
            *(gate.parts, inputs, gated, gated.numel(), width, inputs.stride(0)),
            ACTIVATION=activation,
            SPLITS=splits,
            BLOCK=triton.next_power_of_2(width),
            num_warps=1,
            **pdl_options(gated.device),
        )
        if not in_order and num_rows <= MAX_MEDIUM_ROWS and can_describe(weight, gated):
            some = next(tiles for most, tiles in ANY_ORDER_TILES.items() if num_rows <= most)
            return gemm_medium(gated, weight, None, None, some)
        if fp8 is not None and num_rows <= MAX_MEDIUM_ROWS:
            tiles = next(tiles for most, tiles in FP8_TILES.items() if num_rows <= most)
            return packed_gemm(gated, fp8, None, None, PackedLaunch(tiles, SplitK(1, width)))
        few = FEW_ROWS < num_rows <= MAX_MEDIUM_ROWS and gate.dtype != torch.float32 and plain
        return linear(gated, weight, tiles=SOME_ROWS_TILES if few else None)
    out = torch.empty((num_rows, height), dtype=inputs.dtype, device=inputs.device)
    if num_rows:
        words, scales, zeros, s_w, s_scales = weight_pointers(weight)
        block_m, block_n = 16, 64  # every program repeats the activation: use few rows each
        _gated_projection_kernel[(triton.cdiv(num_rows, block_m), triton.cdiv(height, block_n))](
            *(gate.parts, inputs, words, scales, zeros, out, num_rows, height, width, inputs.stride(0), s_w, s_scales),
            **weight_constants(weight, inputs.dtype),
            ACTIVATION=activation,
            SPLITS=splits,
            BLOCK_N=block_n,
            BLOCK_M=block_m,
            BLOCK_K=max(16, triton.next_power_of_2(width)),
            num_warps=8,
            **pdl_options(out.device),
        )
    return Product.from_value(out)


def per_layer_inputs(
    parts: EmbeddingParts, hidden: torch.Tensor, input_ids: torch.Tensor | None, ops: Operations
) -> torch.Tensor:
    """Per-layer embeddings [T, L, P] of a forward over embeddings [T, H]."""
    assert input_ids is not None, "per-layer embeddings are looked up by token"
    context = ops(linear)(hidden, parts.context)
    if parts.columns is not None:
        context = context._replace(parts=context.parts[..., parts.columns].contiguous())
    return ops(layer_inputs)(context, input_ids.reshape(-1), parts)
