r"""All operations between two products of a decoder layer in one launch: the last sum, norms, residual, scale.

    y = dtype(sum_s parts[s] + bias)           the previous product                         [H]
    y = dtype(y + y')                          plus a parallel product; may be absent
    h = (r + f post(y)) c                      each of post, r, f and c may be absent
    x = pre(h)                                 the input of the next product; may be absent

    norm(z) = z (mean(z^2) + eps)^(-1/2) w     in float32, rounded once to the model's dtype (Gemma 4)
                                               or also before w (`round_first`; Llama and most others)
                                               times 1 + w (`plus_one`; Gemma 2 and 3)
                                               of z - mean(z) (`centred`; Cohere)

So one call is Gemma 4's post_attention_norm + residual + pre_feedforward_norm, or Llama's residual + norm, or the end
of a Gemma 4 layer, up to its scale and the next layer's input_layernorm. `qk_norm` norms queries and keys over all
heads, as in OLMo 2. Values that transformers holds in the model's dtype are rounded to it here too. There is one
program per row (or per queries, keys and values of a row), so results do not depend on the number of rows.
"""

from functools import cache
from typing import Any, NamedTuple

import torch

from specdec.gpu.operations import op
from specdec.gpu.triton_shim import KEEP, TL_DTYPES, pdl_options, tl, trigger_next, triton, wait_for_previous
from specdec.layers.gemm.product import MAX_SMALL_ROWS, Product, reference_finish, sum_parts

NUMBERS_A_WARP = 256


class Norm(NamedTuple):
    """An RMSNorm with weight [H] or None. The flags are its differences from y = z / rms(z) w: see above."""

    weight: torch.Tensor | None
    eps: float
    round_first: bool = False
    plus_one: bool = False
    centred: bool = False

    @property
    def is_plain(self) -> bool:
        """Is it the plain form, which every kernel computes?"""
        return not (self.plus_one or self.centred)


ABSENT = Norm(None, 0.0)
"""Kernel arguments for an absent norm."""


def reference_rms_norm(x: torch.Tensor, gain: Norm) -> torch.Tensor:
    """Norm the rows of x [..., H], in x's dtype."""
    wide = x.float()
    if gain.centred:
        wide = wide - wide.mean(-1, keepdim=True)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + gain.eps)
    if gain.weight is None:
        return normed.to(x.dtype)
    if gain.round_first:
        return gain.weight * normed.to(x.dtype)
    return (normed * (1.0 + gain.weight.float() if gain.plus_one else gain.weight.float())).to(x.dtype)


def reference_norm(
    product: Product,
    *,
    post: Norm | None = None,
    residual: torch.Tensor | None = None,
    factor: float = 1.0,
    scale: torch.Tensor | None = None,
    pre: Norm | None = None,
    addend: Product | None = None,
    late: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute h, x [M, H]; without `pre`, x is h. residual: [M, H]; scale: [1]. late: ignored."""
    hidden = reference_finish(product)
    if addend is not None:
        hidden = hidden + reference_finish(addend)
    if post is not None:
        hidden = reference_rms_norm(hidden, post)
    if factor != 1.0:
        hidden = hidden * factor
    if residual is not None:
        hidden = residual + hidden
    if scale is not None:
        hidden = hidden * scale
    return hidden, hidden if pre is None else reference_rms_norm(hidden, pre)


def reference_qk_norm(product: Product, q_gain: Norm, k_gain: Norm) -> Product:
    assert q_gain.weight is not None and k_gain.weight is not None
    widths = len(q_gain.weight), len(k_gain.weight)
    q, k, v = reference_finish(product).split([*widths, widths[1]], dim=-1)
    return Product.from_value(torch.cat([reference_rms_norm(q, q_gain), reference_rms_norm(k, k_gain), v], dim=-1))


@triton.jit
def scale_row(
    b_x: tl.tensor, b_w: tl.tensor, square: tl.tensor, eps: tl.tensor, ROUND_FIRST: tl.constexpr, DTYPE: tl.constexpr
) -> tl.tensor:
    """Apply the norm to b_x, given its mean square."""
    b_x = b_x * tl.rsqrt(square + eps)
    if ROUND_FIRST:
        b_x = b_x.to(DTYPE).to(tl.float32)
    return (b_x * b_w).to(DTYPE).to(tl.float32)


@triton.jit
def rms_norm(
    b_x: tl.tensor,
    b_w: tl.tensor,
    num_columns: tl.tensor,
    eps: tl.tensor,
    ROUND_FIRST: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """Norm of b_x, float32 and 0 from `num_columns` on; the result is float32 rounded to DTYPE."""
    return scale_row(b_x, b_w, tl.sum(b_x * b_x, 0) / num_columns, eps, ROUND_FIRST, DTYPE)


@triton.jit
def _load_gain(p_gain: tl.tensor, o_h: tl.tensor, m_h: tl.tensor, PLUS_ONE: tl.constexpr) -> tl.tensor:
    b_gain = tl.load(p_gain + o_h, mask=m_h, other=0.0).to(tl.float32)
    return 1.0 + b_gain if PLUS_ONE else b_gain


@triton.jit
def _centred(b_x: tl.tensor, m_h: tl.tensor, num_columns: tl.tensor, CENTRED: tl.constexpr) -> tl.tensor:
    """b_x minus its mean if CENTRED; 0 from `num_columns` on."""
    return tl.where(m_h, b_x - tl.sum(b_x, 0) / num_columns, 0.0) if CENTRED else b_x


@triton.jit(do_not_specialize=["num_rows", "eps_post", "eps_pre"])
def _norm_kernel(
    p_parts: tl.tensor,  # [S, M, H]
    p_bias: tl.tensor,  # [H] or None
    p_addend: tl.tensor,  # [S', M, H] or None
    p_post: tl.tensor,  # [H] or None
    p_residual: tl.tensor,  # [M, H] or None
    p_scale: tl.tensor,  # [1] or None
    p_pre: tl.tensor,  # [H] or None
    p_hidden: tl.tensor,  # [M, H] or None
    p_normed: tl.tensor,  # [M, H] or None
    num_rows: tl.tensor,
    H: tl.tensor,
    eps_post: tl.tensor,
    eps_pre: tl.tensor,
    s_residual: tl.tensor,
    POST: tl.constexpr,
    PRE: tl.constexpr,
    POST_ROUNDS: tl.constexpr,
    PRE_ROUNDS: tl.constexpr,
    PLUS_ONE: tl.constexpr,  # for both norms, like the next
    CENTRED: tl.constexpr,
    FACTOR: tl.constexpr,
    ADDEND: tl.constexpr,
    DTYPE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    i_row = tl.program_id(0).to(tl.int64)
    o_h = tl.arange(0, BLOCK)
    m_h = o_h < H
    b_post = _load_gain(p_post, o_h, m_h, PLUS_ONE) if p_post is not None else 1.0
    b_pre = _load_gain(p_pre, o_h, m_h, PLUS_ONE) if p_pre is not None else 1.0
    b_scale = tl.load(p_scale).to(tl.float32) if p_scale is not None else 1.0
    wait_for_previous(PDL)

    if p_residual is not None:  # before the parts, so that all loads overlap
        b_residual = tl.load(p_residual + i_row * s_residual + o_h, mask=m_h, other=0.0).to(tl.float32)
    part_len = num_rows.to(tl.int64) * H  # has H's divisibility, so every part gets wide loads
    b_h = sum_parts(p_parts, p_bias, i_row * H + o_h, o_h, m_h, part_len, SPLITS, DTYPE)
    if p_addend is not None:
        b_addend = sum_parts(p_addend, None, i_row * H + o_h, o_h, m_h, part_len, ADDEND, DTYPE)
        b_h = (b_h + b_addend).to(DTYPE).to(tl.float32)
    if POST:
        b_h = rms_norm(_centred(b_h, m_h, H, CENTRED), b_post, H, eps_post, POST_ROUNDS, DTYPE)
    if FACTOR != 1.0:
        b_h = (b_h * FACTOR).to(DTYPE).to(tl.float32)
    if p_residual is not None:
        b_h = (b_residual + b_h).to(DTYPE).to(tl.float32)
    if p_scale is not None:
        b_h = (b_h * b_scale).to(DTYPE).to(tl.float32)
    if p_hidden is not None:
        tl.store(p_hidden + i_row * H + o_h, b_h.to(DTYPE), mask=m_h, eviction_policy=KEEP)
    if PRE:
        b_h = rms_norm(_centred(b_h, m_h, H, CENTRED), b_pre, H, eps_pre, PRE_ROUNDS, DTYPE)
        tl.store(p_normed + i_row * H + o_h, b_h.to(DTYPE), mask=m_h, eviction_policy=KEEP)


@triton.jit(do_not_specialize=["num_rows", "eps_q", "eps_k"])
def _qk_norm_kernel(
    p_parts: tl.tensor,  # [S, T, Q + 2 K]
    p_bias: tl.tensor,  # [Q + 2 K] or None
    p_q_gain: tl.tensor,  # [Q]
    p_k_gain: tl.tensor,  # [K]
    p_out: tl.tensor,  # [T, Q + 2 K]
    num_rows: tl.tensor,
    Q: tl.tensor,
    K: tl.tensor,
    eps_q: tl.tensor,
    eps_k: tl.tensor,
    ROUND_FIRST: tl.constexpr,
    DTYPE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    i_row, i_third = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = Q + 2 * K
    width = tl.where(i_third == 0, Q, K)
    first = tl.where(i_third == 0, 0, Q + (i_third - 1) * K)  # column
    o_w = tl.arange(0, BLOCK)
    m_w = o_w < width
    b_gain = tl.zeros([BLOCK], tl.float32)
    if i_third == 0:
        b_gain = tl.load(p_q_gain + o_w, mask=m_w, other=0.0).to(tl.float32)
    elif i_third == 1:
        b_gain = tl.load(p_k_gain + o_w, mask=m_w, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    o_part = i_row * columns + first + o_w
    b_y = sum_parts(p_parts, p_bias, o_part, first + o_w, m_w, num_rows.to(tl.int64) * columns, SPLITS, DTYPE)
    if i_third < 2:
        eps = tl.where(i_third == 0, eps_q, eps_k)
        b_y = rms_norm(b_y, b_gain, width, eps, ROUND_FIRST, DTYPE)
    tl.store(p_out + o_part, b_y.to(DTYPE), mask=m_w, eviction_policy=KEEP)


def row_options(product: Product, width: int, num_warps: int | None = None, *, late: bool = False) -> dict[str, Any]:
    """Launch options of programs that finish a product and hold `width` of its columns. late: see `triton_shim.py`."""
    return _row_options(product.dtype, len(product.parts), width, num_warps, late, product.parts.device)


@cache
def _row_options(
    dtype: torch.dtype, splits: int, width: int, num_warps: int | None, late: bool, device: torch.device
) -> dict[str, Any]:
    block = triton.next_power_of_2(width)
    warps = num_warps or min(16, max(1, block // NUMBERS_A_WARP))
    pdl = pdl_options(device, late=late)
    return {"DTYPE": TL_DTYPES[dtype], "SPLITS": splits, "BLOCK": block, "num_warps": warps, **pdl}


@op(reference=reference_norm)
def norm(
    product: Product,
    *,
    post: Norm | None = None,
    residual: torch.Tensor | None = None,
    factor: float = 1.0,
    scale: torch.Tensor | None = None,
    pre: Norm | None = None,
    addend: Product | None = None,
    late: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute h, x [M, H]; without `pre`, x is h. residual: [M, H], rows of any stride; factor: f; scale: c [1];
    addend: y', without a bias; late: the kernel triggers late (`triton_shim.py`) for few rows too.

    If there is no operation before `pre`, h is the product's value.
    """
    parts, bias, dtype = product
    _, num_rows, width = parts.shape
    assert parts.is_contiguous(), f"{parts.stride()=}"
    gains = [gain for gain in (post, pre) if gain is not None]
    for gain in gains:
        assert gain.weight is None or gain.weight.shape == (width,), f"{gain} for {width=}"
        assert gain[3:] == gains[0][3:] and not (gain.plus_one and gain.round_first), f"{gains=}"
    if residual is not None:
        assert residual.shape == (num_rows, width) and residual.stride(1) == 1, f"{residual.shape=} {parts.shape=}"
        assert residual.dtype == dtype, f"{residual.dtype=} {dtype=}"
    if addend is not None:
        assert addend.parts.is_contiguous() and addend.bias is None, f"{addend.parts.stride()=} {addend.bias=}"
        assert addend.parts.shape[1:] == parts.shape[1:] and addend.dtype == dtype, f"{addend.parts.shape=}"
    others = (post, residual, scale, addend)
    changed = not product.is_value or factor != 1.0 or any(x is not None for x in others)
    hidden = parts.new_empty((num_rows, width), dtype=dtype) if changed else parts[0]
    normed = hidden if pre is None else torch.empty_like(hidden)
    if num_rows == 0 or not (changed or pre is not None):
        return hidden, normed
    first, last = post or ABSENT, pre or ABSENT
    _norm_kernel[(num_rows,)](
        *(parts, bias, None if addend is None else addend.parts, first.weight, residual, scale, last.weight),
        *(hidden if changed else None, None if pre is None else normed),
        *(num_rows, width, first.eps, last.eps, 0 if residual is None else residual.stride(0)),
        POST=post is not None,
        PRE=pre is not None,
        POST_ROUNDS=first.round_first,
        PRE_ROUNDS=last.round_first,
        PLUS_ONE=any(gain.plus_one for gain in gains),
        CENTRED=any(gain.centred for gain in gains),
        FACTOR=factor,
        ADDEND=0 if addend is None else len(addend.parts),
        enable_fp_fusion=False,  # fusion would round a product and a sum only once
        **row_options(product, width, late=late or num_rows > MAX_SMALL_ROWS),
    )
    return hidden, normed


@op(reference=reference_qk_norm)
def qk_norm(product: Product, q_gain: Norm, k_gain: Norm) -> Product:
    """Norm queries (width Q of q_gain) and keys (width K of k_gain) of a product [M, Q + 2 K] -> the same shape."""
    parts, bias, dtype = product
    _, num_rows, columns = parts.shape
    assert q_gain.weight is not None and k_gain.weight is not None
    q_width, k_width = len(q_gain.weight), len(k_gain.weight)
    assert parts.is_contiguous() and columns == q_width + 2 * k_width, f"{parts.shape=} {q_width=} {k_width=}"
    assert q_gain.is_plain and q_gain[2:] == k_gain[2:], f"{q_gain} {k_gain}"
    out = parts.new_empty((num_rows, columns), dtype=dtype)
    if num_rows:
        _qk_norm_kernel[(num_rows, 3)](
            *(parts, bias, q_gain.weight, k_gain.weight, out, num_rows, q_width, k_width, q_gain.eps, k_gain.eps),
            ROUND_FIRST=q_gain.round_first,
            **row_options(product, max(q_width, k_width)),
        )
    return Product.from_value(out)
