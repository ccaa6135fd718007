r"""The target's next token as a pure function of (logits, parameters, seed, position).

    token(p) = argmax_v ( log P_v + g(seed, p, v) ),   g = -log(-log u),   u = hash(seed, p, v) in (0, 1)

is a draw from P (the Gumbel-max trick), and the same draw wherever, whenever and in whatever batch it is made: the
noise is counter-based and has no state. Speculation therefore changes no token: verify computes this function at every
tree node. Temperature 0 is plain argmax, lowest id first. P is the softmax after repetition penalty, temperature,
top-k, top-p and min-p, in that order, as transformers applies them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from specdec.attention.tree import DraftTree
from specdec.config import SamplingParams
from specdec.kvcache.mirror import MirroredArray
from specdec.layers.sampling.sample import SampleParams
from specdec.layers.softcap import reference_softcap


def _int64(value: int) -> int:
    """The two's complement of an unsigned 64-bit constant: torch has no uint64 arithmetic."""
    return value - (1 << 64) if value >= 1 << 63 else value


# SplitMix64 (Steele, Lea, Flood 2014): state += GAMMA, then two xor-shift-multiply rounds
_GAMMA = _int64(0x9E3779B97F4A7C15)
_MIX1 = _int64(0xBF58476D1CE4E5B9)
_MIX2 = _int64(0x94D049BB133111EB)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch shifts int64 arithmetically."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX1
    x = (x ^ _shift_right(x, 27)) * _MIX2
    return x ^ _shift_right(x, 31)


def gumbel_noise(seed: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise [B, K, V] float32 for seed [B] and positions [B, K] (int64)."""
    stream = _mix(_mix(seed + _GAMMA)[:, None] + positions * _GAMMA)  # [B, K]
    tokens = torch.arange(1, vocab_size + 1, device=seed.device)
    bits = _shift_right(_mix(stream[:, :, None] + tokens * _GAMMA), 12)  # 52 bits: x + 0.5 is exact in float64
    uniform = (bits.double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(uniform)).float()


class Uses(NamedTuple):
    """What any of a batch's requests asks for: all that its rounds need to compute."""

    sampled: bool
    top_k_top_p: bool
    min_p: bool
    penalty: bool

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> "Uses":
        return cls(
            sampled=any(p.temperature > 0 for p in params),
            top_k_top_p=any(p.temperature > 0 and (p.top_k > 0 or p.top_p < 1) for p in params),
            min_p=any(p.temperature > 0 and p.min_p > 0 for p in params),
            penalty=any(p.repetition_penalty != 1 for p in params),
        )


class Best(NamedTuple):
    """tokens [B, K, C] int64, best first, and their log-probabilities, the noise given."""

    tokens: torch.Tensor
    scores: torch.Tensor


class Past(NamedTuple):
    """What penalties read: the tokens so far, the root included, history [B, L], of which length [B] count, and the
    tree behind them; no tree: one place behind each history."""

    history: torch.Tensor
    length: torch.Tensor
    tree: DraftTree | None


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The parameters of B requests as vectors [B] on the device, and what any of them uses.

    noise: [B, W, V] of positions first [B] and behind, made once for all that draw there (`ahead`); None: made as
    needed.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    repetition_penalty: torch.Tensor
    seed: torch.Tensor
    uses: Uses
    first: torch.Tensor | None = None
    noise: torch.Tensor | None = None

    @classmethod
    def of(cls, params: Sequence[SamplingParams], seeds: Sequence[int], device: torch.device) -> "SamplingBatch":
        table = SamplingTable(len(params), device)
        for row, each in enumerate(zip(params, seeds, strict=True)):
            table[row] = each
        return table.at(torch.arange(len(params), device=device), Uses.of(params))

    @property
    def params(self) -> SampleParams:
        """The vectors alone, as the kernels take them."""
        return SampleParams(self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty, self.seed)

    def ahead(self, first: torch.Tensor, count: int, vocab_size: int) -> "SamplingBatch":
        """The same for `count` positions from first [B] on: nodes of a tree and steps of a draft share their noise."""
        if not self.uses.sampled:
            return self
        positions = first[:, None] + torch.arange(count, device=first.device)
        return replace(self, first=first, noise=gumbel_noise(self.seed, positions, vocab_size))

    def sample(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Draw the token of each position: logits [B, K, V], positions [B, K] -> [B, K] int64."""
        return (logits if not self.uses.sampled else self._perturbed(logits, positions)).argmax(dim=-1)

    def draw(
        self, logits: torch.Tensor, positions: torch.Tensor, past: "Past", softcap: float | None = None
    ) -> torch.Tensor:
        """The target's tokens [B, K], penalties included; softcap: one that the logits are still to get."""
        logits = logits if softcap is None else reference_softcap(logits, softcap)
        if self.uses.penalty:
            logits = self.penalised(logits, seen_tokens(past.history, past.length, logits.shape[-1], past.tree))
        return self.sample(logits, positions)

    def best(self, logits: torch.Tensor, positions: torch.Tensor, count: int) -> Best:
        """The `count` best of `log_scores`: a node's children."""
        return Best(*reversed(self.log_scores(logits, positions).topk(count, dim=-1)))

    def log_scores(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Log-probabilities [B, K, V] float32 of being drawn, the noise given; their argmax is what `sample` draws."""
        scores = logits.float() if not self.uses.sampled else self._perturbed(logits, positions)
        return scores.log_softmax(dim=-1)

    def _perturbed(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits where greedy, log P plus noise elsewhere: [B, K, V] float32."""
        if self.noise is None or self.first is None:
            noise = gumbel_noise(self.seed, positions, logits.shape[-1])
        else:
            noise = self.noise.gather(1, (positions - self.first[:, None])[:, :, None].expand_as(logits))
        return torch.where(self.temperature[:, None, None] > 0, self.log_weights(logits) + noise, logits.float())

    def log_weights(self, logits: torch.Tensor) -> torch.Tensor:
        """log P up to a constant, [B, K, V] float32, -inf where filtered; rows at temperature 0 are meaningless."""
        temperature = torch.where(self.temperature > 0, self.temperature, 1.0)
        scores = logits.float()
        # the best token stays at 0 however small the temperature, so that nothing overflows
        scores = (scores - scores.amax(-1, keepdim=True)) / temperature[:, None, None]
        if self.uses.top_k_top_p:
            scores = self._top_k_top_p(scores)
        if self.uses.min_p:  # P_v < min_p * max P
            floor = scores.amax(-1, keepdim=True) + torch.log(self.min_p)[:, None, None]
            scores = scores.masked_fill(scores < floor, -torch.inf)
        return scores

    def penalised(self, logits: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Repetition penalty (Keskar et al. 2019): tokens with seen [B, K, V] have logits divided (or multiplied)."""
        penalty = self.repetition_penalty[:, None, None]
        logits = logits.float()
        return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)

    def _top_k_top_p(self, scores: torch.Tensor) -> torch.Tensor:
        vocab_size = scores.shape[-1]
        ordered, order = scores.sort(dim=-1, descending=True, stable=True)
        k = torch.where(self.top_k > 0, self.top_k.clamp(max=vocab_size), vocab_size)
        kth = ordered.gather(-1, (k - 1)[:, None, None].expand(-1, scores.shape[1], 1))
        ordered = ordered.masked_fill(ordered < kth, -torch.inf)  # ties with the k-th stay, as in transformers
        weights = ordered.softmax(dim=-1)
        before = weights.cumsum(dim=-1) - weights  # mass of strictly better-ranked tokens
        nucleus = self.top_p[:, None, None]
        outside = (before >= nucleus) & (nucleus < 1)
        outside[..., 0].fill_(False)  # the best token stays, also where top_p rounds to 0
        ordered = ordered.masked_fill(outside, -torch.inf)
        return torch.empty_like(scores).scatter_(-1, order, ordered)


class SamplingTable:
    """The sampling parameters of every row of the request table, on both sides: a request brings its own once.

    One row: seed and top_k as they are, the others as the bits of a float64; one that nobody took is greedy. kind: what
    samples with them.
    """

    def __init__(self, num_rows: int, device: torch.device, kind: type[SamplingBatch] = SamplingBatch) -> None:
        self.cells = MirroredArray((num_rows, 6), device)
        self._kind = kind

    def __setitem__(self, row: int, params_and_seed: tuple[SamplingParams, int]) -> None:
        params, seed = params_and_seed
        numbers = [params.temperature, params.top_p, params.min_p, params.repetition_penalty]
        whole = np.array([seed, params.top_k], dtype=np.int64)
        self.cells[row] = np.concatenate([whole, np.array(numbers, dtype=np.float64).view(np.int64)])

    def at(self, rows: torch.Tensor, uses: Uses) -> SamplingBatch:
        """The parameters of rows [B], a copy on the device."""
        cells = self.cells.tensor[rows].t().contiguous()  # [6, B]
        temperature, top_p, min_p, repetition_penalty = cells[2:].view(torch.float64).float().unbind()
        return self._kind(
            temperature=temperature,
            top_k=cells[1],
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=cells[0],
            uses=uses,
        )


def seen_tokens(
    history: torch.Tensor, history_len: torch.Tensor, vocab_size: int, tree: DraftTree | None
) -> torch.Tensor:
    """Which tokens each node's continuation repeats: [B, N, V] bool, along its own ancestor path.

    history [B, L] are the tokens so far, the root included, history_len [B] how many count; no tree: [B, 1, V].
    """
    valid = torch.arange(history.shape[1], device=history.device) < history_len[:, None]
    column = torch.where(valid, history, history[:, :1])  # repeat the first token instead of padding
    seen = torch.zeros((len(history), vocab_size), dtype=torch.bool, device=history.device).scatter_(1, column, True)
    if tree is None:
        return seen[:, None]
    path_tokens = torch.where(tree.ancestors, tree.tokens[:, None, :], tree.tokens[:, :, None])  # [B, N, N]
    return seen[:, None].repeat(1, tree.num_nodes, 1).scatter_(2, path_tokens, True)
