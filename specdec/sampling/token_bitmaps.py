"""Sets of tokens as bits on the device: the tokens that a row has seen, and those that a grammar allows after a node.

A set is ceil(V / 32) words of int32: bit v % 32 of word v // 32 is token v.

The repetition penalty reads the tokens that a row has seen. The host writes a row once, when a request takes it, and
each round sets the bits of the tokens that it commits (`mark_seen`, one launch). Grammars run on the host: it writes
the masks of a round's nodes into one buffer, whose address is the same for rounds of all shapes. Masks of rows without
a grammar are filled on the device, so the host computes and sends only those of grammars.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from specdec.gpu.mirrored_array import IntArray, upload
from specdec.gpu.triton_shim import pdl_options, tl, trigger_next, triton, wait_for_previous
from specdec.sampling.grammars.token_rules import token_bits


def unpack_bits(words: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """words [..., ceil(V / 32)] int32 -> [..., V] bool."""
    in_bytes = words.view(torch.uint8)[..., None]
    bits = in_bytes >> torch.arange(8, dtype=torch.uint8, device=words.device) & 1
    return bits.flatten(-2)[..., :vocab_size] != 0


# tokens that rows have seen


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


class SeenBits:
    """bits [rows, ceil(V / 32)] int32 of the tokens that each row has seen. Never replaced: captured rounds use them.

    Only rows with a repetition penalty are kept up to date; the bits of others are meaningless and never read.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.bits = torch.zeros((num_rows, -(-vocab_size // 32)), dtype=torch.int32, device=device)

    def load(self, rows: IntArray, tokens: Sequence[Sequence[int]]) -> None:
        """Set the tokens of these rows, replacing earlier ones."""
        if not len(rows):
            return
        words = np.stack([token_bits(each, self.bits.shape[1]) for each in tokens])
        device = self.bits.device
        self.bits.index_copy_(0, upload(rows, device), upload(words, device))


# tokens that grammars allow

ALL_ALLOWED = -1
"""All bits: every token is allowed."""


class RowMasks(NamedTuple):
    """Masks of the M rows of a batch that have a grammar: row indices [M], and words [M, N, ceil(V / 32)] int32."""

    rows: IntArray
    words: npt.NDArray[np.int32]


class MaskBuffer:
    """The masks of all nodes of a round. Made with the first grammar, large enough for any round of the engine
    (max_rows, max_nodes), and never replaced: captured rounds read it."""

    def __init__(self, vocab_size: int, max_rows: int, max_nodes: int, device: torch.device) -> None:
        self.num_words = -(-vocab_size // 32)
        self._max_size = max_rows * max_nodes * self.num_words
        self._device = device
        self._words: torch.Tensor | None = None

    def view(self, batch: int, num_nodes: int) -> torch.Tensor:
        """Tokens allowed after each of N nodes, [B, N, ceil(V / 32)] int32: a view of the one buffer."""
        size = batch * num_nodes * self.num_words
        if self._words is None:
            self._words = torch.full((self._max_size,), ALL_ALLOWED, dtype=torch.int32, device=self._device)
        assert size <= self._words.numel(), f"{batch=} {num_nodes=} {self._max_size=}"
        return self._words[:size].view(batch, num_nodes, self.num_words)


def write_masks(target: torch.Tensor, masks: RowMasks) -> None:
    """Write masks into target [B, N, words], queued after earlier launches without waiting; other rows allow every
    token."""
    target.fill_(ALL_ALLOWED)
    target.index_copy_(0, upload(masks.rows, target.device), upload(np.ascontiguousarray(masks.words), target.device))
