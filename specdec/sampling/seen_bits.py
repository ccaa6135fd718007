"""Which tokens each row has had, a bit a token, for the repetition penalty: kept on the device as the text grows.

A row is written once when a request takes it, with all tokens that the request has, and every round sets the bits of
the tokens that it commits. Only rows with a penalty are kept so; the others' bits mean nothing, and nobody reads them.
"""

from collections.abc import Sequence

import numpy as np
import torch

from specdec.gpu.mirrored_array import IntArray, upload
from specdec.sampling.grammars.grammar import token_bits
from specdec.sampling.seen_tokens import mark_seen


class SeenBits:
    """bits [rows, ceil(V / 32)] int32: bit v % 32 of word v // 32. Never replaced: captured rounds use them."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.bits = torch.zeros((num_rows, -(-vocab_size // 32)), dtype=torch.int32, device=device)

    def take(self, rows: IntArray, tokens: Sequence[Sequence[int]]) -> None:
        """These rows hold these tokens, whatever they held before."""
        if not len(rows):
            return
        words = np.stack([token_bits(each, self.bits.shape[1]) for each in tokens])
        device = self.bits.device
        self.bits.index_copy_(0, upload(rows, device), upload(words, device))

    def of(self, rows: torch.Tensor) -> torch.Tensor:
        """[B, ceil(V / 32)], a copy."""
        return self.bits.index_select(0, rows)

    def add(self, rows: torch.Tensor, tokens: torch.Tensor, length: torch.Tensor) -> None:
        """The first `length` [B] of tokens [B, D] are committed to rows [B]."""
        mark_seen(self.bits, rows, tokens, length)
