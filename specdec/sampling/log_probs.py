"""Log-probabilities of tokens under the unmodified logits, on the device and as reported."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from specdec.config import SamplingParams


class TokenLogprob(NamedTuple):
    """Log-probability of an emitted token under the unmodified logits, and of the most likely alternatives."""

    token_id: int
    logprob: float
    top: dict[int, float]


class TokenScores(NamedTuple):
    """Scores of T tokens in a row: log-probabilities of the chosen tokens [T] float32 and of the K likeliest tokens at
    each place [T, K] float32, best first, and the ids of the latter [T, K] int32."""

    chosen: npt.NDArray[np.float32]
    values: npt.NDArray[np.float32]
    ids: npt.NDArray[np.int32]


ALIGN = 64
"""Alignment in elements: a row that begins at a multiple of this is summed in the same order at any place of a
batch."""


PIECE = 128
"""Rows whose log-probabilities are computed at a time: each needs 24 bytes per token of the vocabulary."""


class TopTokens(NamedTuple):
    """The K best tokens of each place, [..., K] int64, and their log-probabilities [..., K] float32. Best first; equals
    by id."""

    tokens: torch.Tensor
    scores: torch.Tensor

    @classmethod
    def empty(cls, places: Sequence[int], count: int, device: torch.device) -> "TopTokens":
        dtypes = torch.int64, torch.float32
        return cls(*(torch.empty((*places, count), dtype=dtype, device=device) for dtype in dtypes))


def top_tokens(log_p: torch.Tensor, count: int) -> TopTokens:
    """The `count` highest of log_p [..., V] float32, each at most 0. A larger count only appends to a smaller one's
    result."""
    # for numbers of at most 0, the bits without the sign rise as the numbers fall
    falling = log_p.abs().contiguous().view(torch.int32).long() << 32
    token = torch.arange(log_p.shape[-1], device=log_p.device)
    tokens = (falling + token).topk(count, dim=-1, largest=False).indices
    return TopTokens(tokens, log_p.gather(-1, tokens))


class LogProbs(NamedTuple):
    """Scores of D tokens: of the chosen ones [B, D] float32, and of the `TopTokens` at each place: values and ids
    [B, D, K]."""

    chosen: torch.Tensor
    values: torch.Tensor
    ids: torch.Tensor

    @classmethod
    def from_logits(cls, logits: torch.Tensor, tokens: torch.Tensor, count: int) -> "LogProbs":
        """logits [B, D, V] that tokens [B, D] were drawn from, unmodified."""
        pieces = zip(logits.flatten(0, 1).split(PIECE), tokens.flatten().split(PIECE), strict=True)
        parts = [cls._of_rows(rows, drawn, count) for rows, drawn in pieces]
        return cls(*(torch.cat(part).unflatten(0, tokens.shape) for part in zip(*parts, strict=True)))

    @classmethod
    def _of_rows(cls, logits: torch.Tensor, tokens: torch.Tensor, count: int) -> "LogProbs":
        """logits [R, V], tokens [R] -> [R], [R, K], [R, K]."""
        vocab_size = logits.shape[-1]
        logits = logits.float()
        if vocab_size % ALIGN:
            logits = F.pad(logits, (0, -vocab_size % ALIGN), value=-torch.inf)
        log_p = logits.log_softmax(dim=-1)[:, :vocab_size]
        best = top_tokens(log_p, min(count, vocab_size))
        return cls(log_p.gather(1, tokens[:, None])[:, 0], best.scores, best.tokens)


def max_logprobs(params: Sequence[SamplingParams]) -> int | None:
    """The most alternatives that any of these requests asks for; None: no request asks for log-probabilities."""
    return max((p.logprobs for p in params if p.logprobs is not None), default=None)
