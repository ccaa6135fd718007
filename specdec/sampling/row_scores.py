"""How kernels read a row of logits: with softcap and repetition penalty, as scores, and as masses that sum exactly.

x        = penalise(softcap(logits)), float32
score    = (x - max x) / T, at most 0
mass     = e^score in units of 2^-40, an integer, so that sums do not depend on their order
"""

from typing import Any, NamedTuple

import torch

from specdec.gpu.triton_shim import tl, triton
from specdec.sampling.sampling_table import ParamVectors, index_of
from specdec.sampling.softcap import capped, inverse_cap

INF = tl.constexpr(float("inf"))
LARGEST = tl.constexpr(0x7FFFFFFF)
MASS_UNIT = tl.constexpr(float(1 << 40))

SEED, TOP_K = index_of("seed"), index_of("top_k")
TEMPERATURE, TOP_P, MIN_P = index_of("temperature"), index_of("top_p"), index_of("min_p")
PENALTY = index_of("repetition_penalty")


class SeenTokens(NamedTuple):
    """Tokens that the repetition penalty applies to. bits [B, ceil(V / 32)] int32: bit v % 32 of word v // 32 is set
    for a token v of the request's history; path [B, N, D] int64: tokens on a node's own path, padded with -1."""

    bits: torch.Tensor
    path: torch.Tensor


class LogitRows(NamedTuple):
    """Logits [B, N, V] of any floating dtype with positions [B, N] int64, as kernels read them.

    softcap: applied first, if the logits are uncapped. seen: tokens that the repetition penalty applies to; None: none.
    """

    logits: torch.Tensor
    positions: torch.Tensor
    params: ParamVectors
    softcap: float | None = None
    seen: SeenTokens | None = None

    @property
    def pointers(self) -> tuple[Any, ...]:
        """(p_seen, p_path) of the kernels."""
        return (None, None) if self.seen is None else (self.seen.bits, self.seen.path.contiguous())

    @property
    def scalars(self) -> tuple[Any, ...]:
        """(softcap, cap_inverse, s_row, s_seen, path_len) of the kernels."""
        (batch, num_nodes, _), strides, seen = self.logits.shape, self.logits.stride(), self.seen
        assert strides[2] == 1 and (1 in (batch, num_nodes) or strides[0] == num_nodes * strides[1]), f"{strides=}"
        assert seen is None or (seen.path.shape[:2] == (batch, num_nodes) and seen.bits.stride(1) == 1), (
            f"{seen.path.shape=}"
        )
        cap = (self.softcap, None if self.softcap is None else inverse_cap(self.softcap))
        of_seen = (0, 0) if seen is None else (seen.bits.stride(0), seen.path.shape[2])
        return (*cap, strides[1] if num_nodes > 1 else strides[0], *of_seen)


@triton.jit
def load_logits(row: tl.tuple, o_token: tl.tensor) -> tl.tensor:
    """float32, after softcap (each step rounded like the model's) and penalty; -inf beyond the vocabulary.

    row: (p_logits, p_penalty, p_seen, p_path, vocab_size, softcap, cap_inverse, path_len)."""
    p_logits, p_penalty, p_seen, p_path, vocab_size, softcap, cap_inverse, path_len = row
    m_token = o_token < vocab_size
    b_x = tl.load(p_logits + o_token, mask=m_token, other=0.0)
    if softcap is not None:
        b_x = capped(b_x, softcap, cap_inverse)
    b_x = b_x.to(tl.float32)
    if p_seen is not None:
        penalty = tl.load(p_penalty)
        if penalty != 1.0:
            b_word = tl.load(p_seen + (o_token >> 5), mask=m_token, other=0)
            m_seen = ((b_word >> (o_token & 31)) & 1) != 0
            for i_path in range(path_len):
                m_seen = m_seen | (o_token == tl.load(p_path + i_path))
            b_x = tl.where(m_seen, tl.where(b_x > 0, tl.div_rn(b_x, penalty), b_x * penalty), b_x)
    return tl.where(m_token, b_x, -INF)


@triton.jit
def score_of(b_x: tl.tensor, row_max: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """(x - max) / T <= 0, the best token is at 0 for any T; T = 1 if greedy."""
    return tl.where(b_x == row_max, 0.0, tl.div_rn(b_x - row_max, tl.where(temperature > 0, temperature, 1.0)))


@triton.jit
def min_score_of(min_p: tl.tensor) -> tl.tensor:
    """log min_p, the score of a token min_p times as likely as the best; -inf for 0."""
    return tl.where(min_p > 0, tl.log(tl.where(min_p > 0, min_p, 1.0)), -INF)


@triton.jit
def mass_of(b_s: tl.tensor) -> tl.tensor:
    return (tl.exp(b_s) * MASS_UNIT).to(tl.int64)
