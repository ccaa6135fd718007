r"""What an EAGLE-3 layer reads: a token and a state, normed each for itself, side by side, in one launch.

    h[t] = dtype(sum_s parts[s, t] + bias)                          the product before
    x[t] = cat[ norm_0(table[token_t]), norm_1(h[t]) ]              norm: see `norm.py`

One program a row and half: no result depends on the number of rows.
"""

import torch
import torch.nn.functional as F

from specdec.gpu.dependent_launch import TL_DTYPES, pdl_options, trigger_next, wait_for_previous
from specdec.gpu.operations import op
from specdec.gpu.triton_shim import KEEP, tl, triton
from specdec.layers.norm import Gain, reference_rms_norm, rms_norm, row_block
from specdec.layers.product import Product, reference_finish, sum_parts


def reference_embed_and_norm(
    tokens: torch.Tensor, table: torch.Tensor, product: Product, token_gain: Gain, state_gain: Gain
) -> tuple[torch.Tensor, torch.Tensor]:
    """tokens [T], table [V, H], product [T, H] -> h [T, H], x [T, 2H]."""
    hidden = reference_finish(product)
    embedded = reference_rms_norm(F.embedding(tokens, table), token_gain)
    return hidden, torch.cat([embedded, reference_rms_norm(hidden, state_gain)], dim=-1)


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
        tl.store(
            p_normed + o_h,
            rms_norm(b_x, b_gain, H, eps_token, TOKEN_ROUNDS, DTYPE).to(DTYPE),
            mask=m_h,
            eviction_policy=KEEP,
        )
    else:
        b_gain = tl.load(p_state_gain + o_h, mask=m_h, other=0.0).to(tl.float32)
        wait_for_previous(PDL)
        b_x = sum_parts(p_parts, p_bias, i_row * H + o_h, o_h, m_h, part_len, SPLITS, DTYPE)
        if p_hidden is not None:
            tl.store(p_hidden + i_row * H + o_h, b_x.to(DTYPE), mask=m_h, eviction_policy=KEEP)
        tl.store(
            p_normed + H + o_h,
            rms_norm(b_x, b_gain, H, eps_state, STATE_ROUNDS, DTYPE).to(DTYPE),
            mask=m_h,
            eviction_policy=KEEP,
        )


@op(reference=reference_embed_and_norm)
def embed_and_norm(
    tokens: torch.Tensor, table: torch.Tensor, product: Product, token_gain: Gain, state_gain: Gain
) -> tuple[torch.Tensor, torch.Tensor]:
    """tokens [T], table [V, H] with rows of any stride, product [T, H] -> h [T, H], x [T, 2H]."""
    parts, bias, dtype = product
    splits, num_rows, width = parts.shape
    assert tokens.shape == (num_rows,), f"{tokens.shape=} {parts.shape=}"
    assert table.shape[1] == width and table.stride(1) == 1 and table.dtype == dtype, f"{table.shape=} {parts.shape=}"
    assert parts.is_contiguous(), f"{parts.stride()=}"
    for gain in (token_gain, state_gain):
        assert gain.weight is not None and gain.weight.shape == (width,) and gain.is_plain, f"{gain} for {width=}"
    whole = splits == 1 and parts.dtype == dtype and bias is None
    hidden = parts[0] if whole else parts.new_empty((num_rows, width), dtype=dtype)
    normed = parts.new_empty((num_rows, 2 * width), dtype=dtype)
    if num_rows == 0:
        return hidden, normed
    _embed_and_norm_kernel[(num_rows, 2)](
        *(tokens, table, parts, bias, token_gain.weight, state_gain.weight, None if whole else hidden, normed),
        *(num_rows * width, width, token_gain.eps, state_gain.eps, tokens.stride(0), table.stride(0)),
        TOKEN_ROUNDS=token_gain.round_first,
        STATE_ROUNDS=state_gain.round_first,
        DTYPE=TL_DTYPES[dtype],
        SPLITS=splits,
        **row_block(width),
        **pdl_options(parts.device),
    )
    return hidden, normed
