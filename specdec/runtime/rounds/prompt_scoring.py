"""Log-probabilities of prompt tokens, computed from the states of a forward over prompt chunks.

    chunk      s ................ e          tokens whose K/V the forward makes, and whose states it has
    scored       s + 1 ............ e + 1    each state predicts the token after its own

The logits of a whole chunk would take V numbers per token, so they are computed and reduced a few rows at a time. If
the target is deterministic, a row's numbers do not depend on other rows: head and softmax work row by row as in a round
(`LogProbs`), so a token has the same score in an output and in a prompt. The host never waits here.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from specdec.gpu.mirrored_array import IntArray
from specdec.models.target import StatesNeeded
from specdec.runtime.rounds.device_state import Chunk, DeviceState
from specdec.sampling.log_probs import LogProbs, TokenScores

MAX_LOGITS = 1 << 24
"""Logits per tile: 64 rows of a vocabulary of 262,144. Reducing them takes about 24 bytes of memory per logit."""


class ScoredSpan(NamedTuple):
    """Tokens of one chunk to score: `length` tokens from position `first` of the prompt on. chunk_index: the chunk's
    index in its step. column: index in the chunk of the state that predicts the token at `first`."""

    chunk_index: int
    column: int
    first: int
    length: int


class ChunkScoring(NamedTuple):
    """All tokens of a step's chunks to score, M in all. alternatives: K, the most that any request asks for."""

    spans: Sequence[ScoredSpan]
    alternatives: int

    def cells(self) -> IntArray:
        """Chunk and column of the state that scores each token, span by span, [2, M]."""
        numbers = [np.full(span.length, span.chunk_index) for span in self.spans]
        columns = [np.arange(span.column, span.column + span.length) for span in self.spans]
        return np.stack([np.concatenate(numbers), np.concatenate(columns)]).astype(np.int64)

    def split(self, packed: "np.ndarray[Any, Any]") -> list[tuple[ScoredSpan, TokenScores]]:
        """Split the host copy of `score_chunk`'s result, [M, 1 + 2K] int32, into the scores of each span."""
        alternatives = (packed.shape[1] - 1) // 2
        chosen, values, ids = np.split(np.ascontiguousarray(packed), [1, 1 + alternatives], axis=1)
        ends = np.cumsum([span.length for span in self.spans])[:-1]
        floats = [np.ascontiguousarray(bits).view(np.float32) for bits in (chosen[:, 0], values)]
        parts = zip(*(np.split(numbers, ends) for numbers in (*floats, ids)), strict=True)
        return [(span, TokenScores(*part)) for span, part in zip(self.spans, parts, strict=True)]


@torch.inference_mode()
def score_chunk(state: DeviceState, chunk: Chunk, cells: torch.Tensor, alternatives: int) -> torch.Tensor:
    """Log-probabilities, under the unmodified logits, of M prompt tokens, and of the K likeliest tokens at each place.

    cells [2, M]: see `ChunkScoring.cells`. Returns [M, 1 + 2K] int32: the bits of the float32 numbers, then the ids.
    """
    assert chunk.needed is StatesNeeded.EVERY, f"a chunk is scored from every state: {chunk.needed}"
    chunk_index, column = cells
    pack = chunk.pack
    following = state.tokens.tensor[pack.rows[chunk_index], pack.start[chunk_index] + column + 1]  # [M]
    hidden = chunk.hidden[pack.cu_len[chunk_index] + column]  # [M, H]
    tile = max(1, MAX_LOGITS // state.target.vocab_size)
    parts = []
    for first in range(0, len(following), tile):
        some = slice(first, first + tile)
        logits = state.target.logits(hidden[None, some])  # [1, tile, V]
        found = LogProbs.from_logits(logits, following[None, some], alternatives)
        floats = torch.cat([found.chosen[0, :, None], found.values[0]], dim=1)
        parts.append(torch.cat([floats.contiguous().view(torch.int32), found.ids[0].int()], dim=1))
    return torch.cat(parts)
