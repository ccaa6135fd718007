r"""Norms of a layer with an MLP and experts (Gemma 4): where the residual stream forks, and where the branches join.

    fork    h = r + post(y);   x_mlp, x_experts, x_router = norm_m(h), norm_e(h), norm_r(h) f
    join    h = (r + post(norm_d(y_mlp) + norm_c(y_experts))) c;   x = pre(h)               c and pre may be absent

y is a product, dtype(sum_s parts[s] + bias); the experts' parts are their weighted results in rank order. Norms are as
in `norm.py`, all in float32. The router's norm (a product of three factors in transformers) also rounds before its
weight and before the factor f. Each is one launch with one program per row, so results do not depend on the number of
rows.
"""

from typing import Any, NamedTuple

import torch

from specdec.gpu.operations import op
from specdec.gpu.triton_shim import KEEP, tl, trigger_next, triton, wait_for_previous
from specdec.layers.gemm.product import Product, sum_parts
from specdec.layers.norm import ABSENT, Norm, reference_norm, reference_rms_norm, rms_norm, row_options, scale_row


class BranchInputs(NamedTuple):
    """The residual stream and its normed forms, each [M, H]."""

    hidden: torch.Tensor
    mlp: torch.Tensor
    experts: torch.Tensor
    router: torch.Tensor


def reference_fork_norm(
    product: Product, *, post: Norm, residual: torch.Tensor, mlp: Norm, experts: Norm, router: Norm, factor: float
) -> BranchInputs:
    hidden, x = reference_norm(product, post=post, residual=residual, pre=mlp)
    return BranchInputs(hidden, x, reference_rms_norm(hidden, experts), reference_rms_norm(hidden, router) * factor)


def reference_join_norm(
    dense: Product, chosen: Product, *, dense_gain: Norm, chosen_gain: Norm, **end: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm both results and their sum. end: arguments of the last norm."""
    added = reference_norm(dense, post=dense_gain)[0] + reference_norm(chosen, post=chosen_gain)[0]
    return reference_norm(Product.from_value(added), **end)


@triton.jit(do_not_specialize=["num_rows", "eps_post", "eps_mlp", "eps_experts", "eps_router", "factor"])
def _fork_norm_kernel(
    p_parts: tl.tensor,  # [S, M, H]
    p_bias: tl.tensor,  # [H] or None
    p_post: tl.tensor,  # [H], and those below
    p_mlp: tl.tensor,
    p_experts: tl.tensor,
    p_router: tl.tensor,
    p_residual: tl.tensor,  # [M, H]
    p_out: tl.tensor,  # [4, M, H]
    num_rows: tl.tensor,
    H: tl.tensor,
    s_residual: tl.tensor,
    eps_post: tl.tensor,
    eps_mlp: tl.tensor,
    eps_experts: tl.tensor,
    eps_router: tl.tensor,
    factor: tl.tensor,
    DTYPE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    i_row = tl.program_id(0).to(tl.int64)
    o_h = tl.arange(0, BLOCK)
    m_h = o_h < H
    b_post = tl.load(p_post + o_h, mask=m_h, other=0.0).to(tl.float32)
    b_mlp = tl.load(p_mlp + o_h, mask=m_h, other=0.0).to(tl.float32)
    b_experts = tl.load(p_experts + o_h, mask=m_h, other=0.0).to(tl.float32)
    b_router = tl.load(p_router + o_h, mask=m_h, other=0.0).to(tl.float32)
    wait_for_previous(PDL)

    b_residual = tl.load(p_residual + i_row * s_residual + o_h, mask=m_h, other=0.0).to(tl.float32)
    part_len = num_rows.to(tl.int64) * H  # has the divisibility of H
    b_h = sum_parts(p_parts, p_bias, i_row * H + o_h, o_h, m_h, part_len, SPLITS, DTYPE)
    b_h = (b_residual + rms_norm(b_h, b_post, H, eps_post, False, DTYPE)).to(DTYPE).to(tl.float32)
    square = tl.sum(b_h * b_h, 0) / H
    b_mlp = scale_row(b_h, b_mlp, square, eps_mlp, False, DTYPE)
    b_experts = scale_row(b_h, b_experts, square, eps_experts, False, DTYPE)
    b_router = scale_row(b_h, b_router, square, eps_router, True, DTYPE) * factor
    p_out += i_row * H + o_h
    tl.store(p_out, b_h.to(DTYPE), mask=m_h, eviction_policy=KEEP)
    tl.store(p_out + part_len, b_mlp.to(DTYPE), mask=m_h, eviction_policy=KEEP)
    tl.store(p_out + 2 * part_len, b_experts.to(DTYPE), mask=m_h, eviction_policy=KEEP)
    tl.store(p_out + 3 * part_len, b_router.to(DTYPE), mask=m_h, eviction_policy=KEEP)


@triton.jit(do_not_specialize=["num_rows", "eps_dense", "eps_chosen", "eps_post", "eps_pre"])
def _join_norm_kernel(
    p_dense: tl.tensor,  # [S, M, H]
    p_chosen: tl.tensor,  # [k, M, H]
    p_dense_gain: tl.tensor,  # [H], and those below
    p_chosen_gain: tl.tensor,
    p_post: tl.tensor,
    p_pre: tl.tensor,  # or None
    p_residual: tl.tensor,  # [M, H]
    p_scale: tl.tensor,  # [1] or None
    p_hidden: tl.tensor,  # [M, H]
    p_normed: tl.tensor,  # [M, H] or None
    num_rows: tl.tensor,
    H: tl.tensor,
    eps_dense: tl.tensor,
    eps_chosen: tl.tensor,
    eps_post: tl.tensor,
    eps_pre: tl.tensor,
    s_residual: tl.tensor,
    DTYPE: tl.constexpr,
    SPLITS: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    i_row = tl.program_id(0).to(tl.int64)
    o_h = tl.arange(0, BLOCK)
    m_h = o_h < H
    o_part = i_row * H + o_h
    b_dense_gain = tl.load(p_dense_gain + o_h, mask=m_h, other=0.0).to(tl.float32)
    b_chosen_gain = tl.load(p_chosen_gain + o_h, mask=m_h, other=0.0).to(tl.float32)
    b_post = tl.load(p_post + o_h, mask=m_h, other=0.0).to(tl.float32)
    b_pre = tl.load(p_pre + o_h, mask=m_h, other=0.0).to(tl.float32) if p_pre is not None else 1.0
    b_scale = tl.load(p_scale).to(tl.float32) if p_scale is not None else 1.0
    wait_for_previous(PDL)

    b_residual = tl.load(p_residual + i_row * s_residual + o_h, mask=m_h, other=0.0).to(tl.float32)
    part_len = num_rows.to(tl.int64) * H
    b_chosen = sum_parts(p_chosen, None, o_part, o_h, m_h, part_len, CHOSEN, DTYPE)
    b_dense = sum_parts(p_dense, None, o_part, o_h, m_h, part_len, SPLITS, DTYPE)
    b_dense = rms_norm(b_dense, b_dense_gain, H, eps_dense, False, DTYPE)
    b_chosen = rms_norm(b_chosen, b_chosen_gain, H, eps_chosen, False, DTYPE)
    b_h = (b_dense + b_chosen).to(DTYPE).to(tl.float32)
    b_h = (b_residual + rms_norm(b_h, b_post, H, eps_post, False, DTYPE)).to(DTYPE).to(tl.float32)
    if p_scale is not None:
        b_h = (b_h * b_scale).to(DTYPE).to(tl.float32)
    tl.store(p_hidden + o_part, b_h.to(DTYPE), mask=m_h, eviction_policy=KEEP)
    if p_pre is not None:
        b_h = rms_norm(b_h, b_pre, H, eps_pre, False, DTYPE)
        tl.store(p_normed + o_part, b_h.to(DTYPE), mask=m_h, eviction_policy=KEEP)


@op(reference=reference_fork_norm)
def fork_norm(
    product: Product, *, post: Norm, residual: torch.Tensor, mlp: Norm, experts: Norm, router: Norm, factor: float
) -> BranchInputs:
    """Norm the stream for each branch. residual [M, H], rows of any stride."""
    parts, bias, dtype = product
    _, num_rows, width = parts.shape
    _check(product, residual, post, mlp, experts, router._replace(round_first=False))
    assert router.round_first, f"{router=}"
    out = parts.new_empty((4, num_rows, width), dtype=dtype)
    if num_rows:
        _fork_norm_kernel[(num_rows,)](
            *(parts, bias, post.weight, mlp.weight, experts.weight, router.weight, residual, out),
            *(num_rows, width, residual.stride(0), post.eps, mlp.eps, experts.eps, router.eps, factor),
            **row_options(product, width),
        )
    return BranchInputs(*out)


@op(reference=reference_join_norm)
def join_norm(
    dense: Product,
    chosen: Product,
    *,
    dense_gain: Norm,
    chosen_gain: Norm,
    post: Norm,
    residual: torch.Tensor,
    scale: torch.Tensor | None = None,
    pre: Norm | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute h, x [M, H]; without `pre`, x is h. residual: [M, H], rows of any stride; scale: [1]."""
    _, num_rows, width = dense.parts.shape
    for product in (dense, chosen):
        _check(product, residual, dense_gain, chosen_gain, post, *([] if pre is None else [pre]))
        assert product.bias is None, "branches have no biases"
    hidden = residual.new_empty((num_rows, width))
    normed = hidden if pre is None else torch.empty_like(hidden)
    if num_rows:
        last = pre or ABSENT
        _join_norm_kernel[(num_rows,)](
            *(dense.parts, chosen.parts, dense_gain.weight, chosen_gain.weight, post.weight, last.weight),
            *(residual, scale, hidden, None if pre is None else normed, num_rows, width),
            *(dense_gain.eps, chosen_gain.eps, post.eps, last.eps, residual.stride(0)),
            CHOSEN=len(chosen.parts),
            **row_options(dense, width),
        )
    return hidden, normed


def _check(product: Product, residual: torch.Tensor, *gains: Norm) -> None:
    parts, _, dtype = product
    assert parts.is_contiguous(), f"{parts.stride()=}"
    assert residual.shape == parts.shape[1:] and residual.stride(1) == 1, f"{residual.shape=} {parts.shape=}"
    assert residual.dtype == dtype, f"{residual.dtype=} {dtype=}"
    for gain in gains:
        assert gain.weight is not None and gain.weight.shape == residual.shape[1:], f"{gain} for {residual.shape=}"
        assert gain.is_plain and not gain.round_first, f"{gain}"
