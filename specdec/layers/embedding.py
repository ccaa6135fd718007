r"""Embeddings of T tokens, alone or with a drafter's other inputs, in one launch each.

    embed             y_t = [ E[token_t] s | z_t ]                   s: the family's scale; z: other rows; or neither
    embed_and_norm    x_t = [ norm_0(E[token_t]) | norm_1(h_t) ]     an EAGLE-3 layer's input; norm: see `norm.py`
                      h = dtype(sum_s parts[s] + bias)               the previous product

The product of E and s is rounded to the model's dtype, as in transformers. Bits depend on no other row.
"""

import torch
import torch.nn.functional as F

from specdec.gpu.operations import op
from specdec.gpu.triton_shim import KEEP, pdl_options, tl, trigger_next, triton, wait_for_previous
from specdec.layers.gemm.product import Product, reference_finish, sum_parts
from specdec.layers.norm import Norm, reference_rms_norm, rms_norm, row_options

BLOCK = 512


def reference_embed(
    tokens: torch.Tensor, table: torch.Tensor, scale: torch.Tensor | None = None, right: torch.Tensor | None = None
) -> torch.Tensor:
    rows = F.embedding(tokens, table)
    if scale is not None:
        rows = rows * scale.to(table.dtype)
    return rows if right is None else torch.cat([rows, right], dim=-1)


def reference_embed_and_norm(
    tokens: torch.Tensor, table: torch.Tensor, product: Product, token_gain: Norm, state_gain: Norm
) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = reference_finish(product)
    embedded = reference_rms_norm(F.embedding(tokens, table), token_gain)
    return hidden, torch.cat([embedded, reference_rms_norm(hidden, state_gain)], dim=-1)


@triton.jit(do_not_specialize=["s_tokens"])
def _embed_kernel(
    p_tokens: tl.tensor,  # [T]
    p_table: tl.tensor,  # [V, H]
    p_scale: tl.tensor,  # one number, or None
    p_right: tl.tensor,  # [T, Z] or None
    p_out: tl.tensor,  # [T, H + Z]
    H: tl.tensor,
    Z: tl.tensor,
    s_tokens: tl.tensor,
    s_right: tl.tensor,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    i_t = tl.program_id(0).to(tl.int64)
    i_block, num_blocks = tl.program_id(1), tl.cdiv(H, BLOCK)  # of the table's columns
    DTYPE: tl.constexpr = p_out.dtype.element_ty
    p_out += i_t * (H + Z)
    wait_for_previous(PDL)
    if i_block < num_blocks:
        o_h = i_block * BLOCK + tl.arange(0, BLOCK)
        token = tl.load(p_tokens + i_t * s_tokens).to(tl.int64)
        b_row = tl.load(p_table + token * H + o_h, mask=o_h < H, other=0.0)
        if p_scale is not None:
            scale = tl.load(p_scale).to(DTYPE).to(tl.float32)
            b_row = (b_row.to(tl.float32) * scale).to(DTYPE)
        tl.store(p_out + o_h, b_row, mask=o_h < H, eviction_policy=KEEP)
    if p_right is not None:  # noqa: SIM102 - this is decided when the kernel is compiled
        if i_block >= num_blocks:
            o_z = (i_block - num_blocks) * BLOCK + tl.arange(0, BLOCK)
            b_z = tl.load(p_right + i_t * s_right + o_z, mask=o_z < Z, other=0.0)
            tl.store(p_out + H + o_z, b_z, mask=o_z < Z, eviction_policy=KEEP)


@triton.jit(do_not_specialize=["part_len", "eps_token", "eps_state"])
def _embed_and_norm_kernel(
    p_tokens: tl.tensor,  # [T]
    p_table: tl.tensor,  # [V, H]
    p_parts: tl.tensor,  # [S, T, H]
    p_bias: tl.tensor,  # [H] or None
    p_token_gain: tl.tensor,  # [H]
    p_state_gain: tl.tensor,  # [H]
    p_hidden: tl.tensor,  # [T, H] or None
    p_normed: tl.tensor,  # [T, 2H]
    part_len: tl.tensor,
    H: tl.tensor,
    eps_token: tl.tensor,
    eps_state: tl.tensor,
    s_tokens: tl.tensor,
    s_table: tl.tensor,
    TOKEN_ROUNDS: tl.constexpr,
    STATE_ROUNDS: tl.constexpr,
    DTYPE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    i_row = tl.program_id(0).to(tl.int64)
    o_h = tl.arange(0, BLOCK)
    m_h = o_h < H
    p_normed += i_row * 2 * H
    if tl.program_id(1) == 0:
        b_gain = tl.load(p_token_gain + o_h, mask=m_h, other=0.0).to(tl.float32)
        wait_for_previous(PDL)
        token = tl.load(p_tokens + i_row * s_tokens).to(tl.int64)
        b_x = tl.load(p_table + token * s_table + o_h, mask=m_h, other=0.0).to(tl.float32)
        b_x = rms_norm(b_x, b_gain, H, eps_token, TOKEN_ROUNDS, DTYPE)
        tl.store(p_normed + o_h, b_x.to(DTYPE), mask=m_h, eviction_policy=KEEP)
    else:
        b_gain = tl.load(p_state_gain + o_h, mask=m_h, other=0.0).to(tl.float32)
        wait_for_previous(PDL)
        b_x = sum_parts(p_parts, p_bias, i_row * H + o_h, o_h, m_h, part_len, SPLITS, DTYPE)
        if p_hidden is not None:
            tl.store(p_hidden + i_row * H + o_h, b_x.to(DTYPE), mask=m_h, eviction_policy=KEEP)
        b_x = rms_norm(b_x, b_gain, H, eps_state, STATE_ROUNDS, DTYPE)
        tl.store(p_normed + H + o_h, b_x.to(DTYPE), mask=m_h, eviction_policy=KEEP)


@op(reference=reference_embed)
def embed(
    tokens: torch.Tensor, table: torch.Tensor, scale: torch.Tensor | None = None, right: torch.Tensor | None = None
) -> torch.Tensor:
    """Embed tokens [T]: table [V, H], scale of one number, right [T, Z] -> [T, H], or [T, H + Z]."""
    (num_rows,), width = tokens.shape, table.shape[1]
    right_width = 0 if right is None else right.shape[1]
    assert table.is_contiguous() and (scale is None or scale.numel() == 1), f"{table.stride()=} {scale=}"
    if right is not None:
        assert len(right) == num_rows and right.dtype == table.dtype, f"{right.shape=} {right.dtype=} {num_rows=}"
        assert right.stride(1) == 1, f"{right.stride()=}"
    out = torch.empty((num_rows, width + right_width), dtype=table.dtype, device=table.device)
    if num_rows:
        _embed_kernel[(num_rows, triton.cdiv(width, BLOCK) + triton.cdiv(right_width, BLOCK))](
            *(tokens, table, scale, right, out, width, right_width),
            *(tokens.stride(0), 0 if right is None else right.stride(0)),
            BLOCK=BLOCK,
            num_warps=2,
            **pdl_options(out.device),
        )
    return out


@op(reference=reference_embed_and_norm)
def embed_and_norm(
    tokens: torch.Tensor, table: torch.Tensor, product: Product, token_gain: Norm, state_gain: Norm
) -> tuple[torch.Tensor, torch.Tensor]:
    """Embed tokens [T], and norm: table [V, H] with rows of any stride, product [T, H] -> h [T, H], x [T, 2H]."""
    parts, bias, dtype = product
    _, num_rows, width = parts.shape
    assert tokens.shape == (num_rows,), f"{tokens.shape=} {parts.shape=}"
    assert table.shape[1] == width and table.stride(1) == 1 and table.dtype == dtype, f"{table.shape=} {parts.shape=}"
    assert parts.is_contiguous(), f"{parts.stride()=}"
    for gain in (token_gain, state_gain):
        assert gain.weight is not None and gain.weight.shape == (width,) and gain.is_plain, f"{gain} for {width=}"
    hidden = parts[0] if product.is_value else parts.new_empty((num_rows, width), dtype=dtype)
    normed = parts.new_empty((num_rows, 2 * width), dtype=dtype)
    if num_rows:
        _embed_and_norm_kernel[(num_rows, 2)](
            *(tokens, table, parts, bias, token_gain.weight, state_gain.weight),
            *(None if product.is_value else hidden, normed),
            *(num_rows * width, width, token_gain.eps, state_gain.eps, tokens.stride(0), table.stride(0)),
            TOKEN_ROUNDS=token_gain.round_first,
            STATE_ROUNDS=state_gain.round_first,
            **row_options(product, width),
        )
    return hidden, normed
