"""Log-probabilities of the tokens of one prompt, filled in as its chunks settle.

    tokens   0 ................ known ................ prompt_len
             | scores are here  | still to be computed |

All samples of a prompt share one object: the first sample to compute a token's score fills it in for all. The first
token has no score, since no token precedes it. `score_chunk` computes them. This file knows numbers on the host, no
tensor and no request. Invariant: `known` only grows, and the scores of tokens 1 to `known` - 1 are complete.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from specdec.gpu.mirrored_array import IntArray
from specdec.sampling.log_probs import TokenScores


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


class PromptLogProbs:
    """Log-probabilities of one prompt's tokens.

    alternatives: how many of the likeliest tokens are reported at each place, at most the vocabulary.
    """

    def __init__(self, prompt_len: int, alternatives: int) -> None:
        self.prompt_len = prompt_len
        self.alternatives = alternatives
        self.known = 1
        self._parts: list[TokenScores] = []

    @property
    def complete(self) -> bool:
        return self.known >= self.prompt_len

    def fill(self, first: int, scores: TokenScores) -> None:
        """Add the scores of the tokens from position `first` (at most `known`) on. Known scores are not replaced."""
        assert first <= self.known, f"{first=} {self.known=}"
        new_from = self.known - first
        new = TokenScores(scores.chosen[new_from:], scores.values[new_from:], scores.ids[new_from:])
        if len(new.chosen):
            self._parts.append(new)
            self.known += len(new.chosen)  # set last: another thread may be reading

    def entries(self) -> list[tuple[float, dict[int, float]] | None]:
        """For each prompt token: (its log-probability, the likeliest tokens with theirs, best first), or None if
        unknown."""
        entries: list[tuple[float, dict[int, float]] | None] = [None]
        for chosen, values, ids in list(self._parts):
            tops = zip(ids[:, : self.alternatives].tolist(), values[:, : self.alternatives].tolist(), strict=True)
            best = [dict(zip(*top, strict=True)) for top in tops]
            entries += zip(chosen.tolist(), best, strict=True)
        return entries + [None] * (self.prompt_len - len(entries))


def scoring_of(prompts: Sequence[PromptLogProbs | None], done: IntArray, chunk_len: IntArray) -> ChunkScoring | None:
    """Tokens to score in chunks of `chunk_len` [B] tokens after `done` [B] committed ones; None: there are none.

    The chunk that holds a token's predecessor scores it, in the first sample that reaches it. Known scores are not
    computed again, nor are those of output tokens that a preempted request rereads.
    """
    spans: list[ScoredSpan] = []
    alternatives = 0
    for number, (scores, start, length) in enumerate(zip(prompts, done.tolist(), chunk_len.tolist(), strict=True)):
        if scores is None:
            continue
        first, end = max(start + 1, scores.known), min(start + length + 1, scores.prompt_len)
        if first < end:
            spans.append(ScoredSpan(number, first - start - 1, first, end - first))
            alternatives = max(alternatives, scores.alternatives)
    return ChunkScoring(spans, alternatives) if spans else None
