"""Which tokens a request has had, one bit a token: what the repetition penalty reads (`sample.Seen`).

bits [rows, ceil(V / 32)] int32, bit v % 32 of word v // 32. A row is cleared when a request takes it, marked with its
prompt, and after every round with the tokens that the round committed; a launch of its own, with no value on the host.
"""

import torch

from specdec.gpu.dependent_launch import pdl_options, trigger_next, wait_for_previous
from specdec.gpu.triton_shim import tl, triton


def reference_mark_seen(bits: torch.Tensor, row: torch.Tensor, tokens: torch.Tensor, num_tokens: torch.Tensor) -> None:
    """See `mark_seen`."""
    one = torch.ones((), dtype=torch.int64, device=bits.device)
    for i, count in enumerate(num_tokens.tolist()):
        for token in tokens[i, :count].unique():
            word = bits[row[i], token // 32].long() | (one << (token % 32))
            bits[row[i], token // 32] = torch.where(word >= 1 << 31, word - (1 << 32), word).int()


@triton.jit(do_not_specialize=["s_bits", "s_tokens", "max_tokens"])
def _mark_seen_kernel(
    p_bits: tl.tensor,  # [rows, W]
    p_row: tl.tensor,  # [B]
    p_tokens: tl.tensor,  # [B, L]
    p_num_tokens: tl.tensor,  # [B]
    s_bits: tl.tensor,
    s_tokens: tl.tensor,
    max_tokens: tl.tensor,  # L
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    trigger_next(PDL)
    i_request = tl.program_id(1).to(tl.int64)
    o_token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait_for_previous(PDL)
    m_token = o_token < tl.minimum(tl.load(p_num_tokens + i_request).to(tl.int32), max_tokens)
    b_token = tl.load(p_tokens + i_request * s_tokens + o_token, mask=m_token, other=0).to(tl.int32)
    p_bits += tl.load(p_row + i_request).to(tl.int64) * s_bits
    tl.atomic_or(p_bits + (b_token >> 5), 1 << (b_token & 31), mask=m_token, sem="relaxed")


def mark_seen(bits: torch.Tensor, row: torch.Tensor, tokens: torch.Tensor, num_tokens: torch.Tensor) -> None:
    """Set the bits of tokens[i, :num_tokens[i]] in row[i] of bits: tokens [B, L], row and num_tokens [B], integers."""
    batch, max_tokens = tokens.shape
    assert bits.dtype == torch.int32 and bits.stride(1) == tokens.stride(1) == 1, f"{bits.dtype=} {tokens.stride()=}"
    assert row.shape == num_tokens.shape == (batch,), f"{row.shape=} {num_tokens.shape=} {batch=}"
    if batch and max_tokens:
        block = min(256, triton.next_power_of_2(max_tokens))
        _mark_seen_kernel[(triton.cdiv(max_tokens, block), batch)](
            *(bits, row, tokens, num_tokens, bits.stride(0), tokens.stride(0), max_tokens),
            BLOCK=block,
            num_warps=1,
            **pdl_options(bits.device),
        )


def path_tokens(tokens: torch.Tensor, ancestors: torch.Tensor) -> torch.Tensor:
    """tokens [B, N] of a tree, ancestors [B, N, N] (a node is its own) -> each node's path [B, N, N], -1 elsewhere."""
    return torch.where(ancestors, tokens[:, None, :], -1)
