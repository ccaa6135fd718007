r"""Gemma 4's per-layer embeddings: a small vector per token and layer, gated into the residual stream.

Computed once per forward, for every layer l (width P, hidden size H):

    e_l = (norm(c_l) + T[token]_l t) / sqrt(2),     c = x W_model / sqrt(H)        x: the token's embedding

T is the second embedding table and t its scale. In layer l, before its last norm, residual and scale (`norm.py`):

    y = W_proj (act(W_gate h) e_l)

Both products are narrow: latency bounds them, not memory. The activation has a launch of its own, since each program of
the second product would repeat it and add the parts of the first one again. The second product's programs then have
their part of the weight in registers (K is only P) before they wait. Everything is rounded where transformers rounds
it.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from specdec.gpu.operations import Operations, op
from specdec.gpu.triton_shim import KEEP, pdl_options, tl, trigger_next, triton, wait_for_previous
from specdec.layers.gemm.gemm_small import fits_registers, gemm_small
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
from specdec.layers.packed.packed_weight import Weight, multiply

MAX_HELD_WIDTH = 256
"""Up to this width P, the second product's programs hold whole rows of the weight."""


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
        """P: numbers per token and layer."""
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
    b_out = activate(b_gate, ACTIVATION).to(DTYPE).to(tl.float32) * b_in
    tl.store(p_out + i_t * P + o_p, b_out.to(DTYPE), mask=m_p, eviction_policy=KEEP)


@op(reference=reference_layer_inputs)
def layer_inputs(context: Product, tokens: torch.Tensor, parts: EmbeddingParts) -> torch.Tensor:
    """Compute e [T, L, P]. context: x W_model [T, L P]; tokens [T]."""
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


@op(reference=reference_gated_projection)
def gated_projection(gate: Product, inputs: torch.Tensor, weight: Weight, activation: str) -> Product:
    """Compute W_proj (act(gate) e_l). gate: W_gate h [T, P]; inputs: e_l [T, P], rows of any stride; weight: W_proj [H,
    P]."""
    splits, num_rows, width = gate.parts.shape
    assert gate.bias is None and gate.parts.is_contiguous(), f"{gate.parts.stride()=}"
    assert inputs.shape == (num_rows, width) and inputs.stride(1) == 1, f"{inputs.shape=} {gate.parts.shape=}"
    assert weight.shape[1] == width and inputs.dtype == gate.dtype, f"{weight.shape=} {inputs.dtype=}"
    gated = torch.empty((num_rows, width), dtype=inputs.dtype, device=inputs.device)
    if num_rows:
        _gate_inputs_kernel[(num_rows,)](
            *(gate.parts, inputs, gated, gated.numel(), width, inputs.stride(0)),
            ACTIVATION=activation,
            SPLITS=splits,
            BLOCK=triton.next_power_of_2(width),
            num_warps=1,
            **pdl_options(gated.device),
        )
    if num_rows > MAX_MEDIUM_ROWS or width > MAX_HELD_WIDTH or not _is_held(weight, gated.dtype):
        return linear(gated, weight)
    out = torch.empty((1, num_rows, len(weight)), dtype=gated.dtype, device=gated.device)
    tiles = Tiles(64, 16 if num_rows <= 16 else 32, max(16, triton.next_power_of_2(width)), 4, 1, 64)
    gemm_small(gated, weight, None, out, None, SplitK(1, tiles.block_k), tiles, split=True)
    return Product(out, None, out.dtype)


def _is_held(weight: Weight, dtype: torch.dtype) -> bool:
    """Can a program hold rows of the weight, with the bits of `linear`, which then has one range of K too?"""
    return dtype != torch.float32 and split_k_of(weight).splits == 1 and fits_registers(weight, dtype)


def per_layer_inputs(
    parts: EmbeddingParts, hidden: torch.Tensor, input_ids: torch.Tensor | None, ops: Operations
) -> torch.Tensor:
    """Per-layer embeddings [T, L, P] of a forward over embeddings [T, H]."""
    assert input_ids is not None, "per-layer embeddings are looked up by token"
    context = ops(linear)(hidden, parts.context)
    if parts.columns is not None:
        context = context._replace(parts=context.parts[..., parts.columns].contiguous())
    return ops(layer_inputs)(context, input_ids.reshape(-1), parts)
