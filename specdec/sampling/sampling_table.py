r"""The target's next token as a pure function of (logits, parameters, seed, position).

    token(p) = argmax_v ( log P_v + g(seed, p, v) ),   g = -log(-log u),   u = hash(seed, p, v) in (0, 1)

is a draw from P (the Gumbel-max trick), and the same draw wherever, whenever and in whatever batch it is made: the
noise is counter-based and has no state. Speculation therefore changes no token: verify computes this function at every
tree node. Temperature 0 is plain argmax, lowest id first. P is the softmax after logit bias, repetition, frequency and
presence penalty, the mask of a grammar, temperature, top-k, top-p and min-p, in that order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple, Protocol

import numpy as np
import torch

from specdec.config import SamplingParams
from specdec.gpu.mirrored_array import IntArray, MirroredArray
from specdec.gpu.on_demand import OnDemand
from specdec.sampling.fused_sample import SampleParams
from specdec.sampling.logit_bias import bias_room, pack_bias, unpack_bias
from specdec.sampling.softcap import reference_softcap


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
    counts: bool = False
    bias: int = 0  # room for so many entries a request
    masked: bool = False  # by a grammar, or by rules about tokens

    @property
    def edits(self) -> bool:
        """Are logits changed by more than the repetition penalty?"""
        return self.counts or self.bias > 0 or self.masked

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> "Uses":
        return cls(
            sampled=any(p.temperature > 0 for p in params),
            top_k_top_p=any(p.temperature > 0 and (p.top_k > 0 or p.top_p < 1) for p in params),
            min_p=any(p.temperature > 0 and p.min_p > 0 for p in params),
            penalty=any(p.repetition_penalty != 1 for p in params),
            counts=any(p.presence_penalty != 0 or p.frequency_penalty != 0 for p in params),
            bias=bias_room(max((len(p.logit_bias) for p in params if p.logit_bias), default=0)),
            masked=any(p.restricted for p in params),
        )


class Best(NamedTuple):
    """tokens [B, K, C] int64, best first, and their log-probabilities, the noise given."""

    tokens: torch.Tensor
    scores: torch.Tensor


class NodePaths(Protocol):
    """A tree of drafts as penalties read it: tokens [B, N], ancestors [B, N, N] bool (ancestor or self)."""

    @property
    def tokens(self) -> torch.Tensor: ...

    @property
    def ancestors(self) -> torch.Tensor: ...

    @property
    def num_nodes(self) -> int: ...


class Past:
    """What penalties read: the tokens so far, the root included, history [B, L], of which length [B] count, and the
    tree behind them; no tree: one place behind each history. prompt_len [B]: the output begins there. allowed
    [B, N, V / 32] int32: bits of the tokens that a grammar allows behind each node. seen [B, V / 32] int32: bits of the
    history's tokens, None where nobody keeps them."""

    history = OnDemand()

    def __init__(
        self,
        history: torch.Tensor | Callable[[], torch.Tensor],
        length: torch.Tensor,
        tree: NodePaths | None,
        prompt_len: torch.Tensor | None = None,
        allowed: torch.Tensor | None = None,
        seen: torch.Tensor | None = None,
    ) -> None:
        self.history = history
        self.length = length
        self.tree = tree
        self.prompt_len = prompt_len
        self.allowed = allowed
        self.seen = seen


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The parameters of B requests as vectors [B] on the device, and what any of them uses.

    bias: [B, K] entries of `pack_bias`. noise: [B, W, V] of positions first [B] and behind, made once for all that draw
    there (`ahead`); None: made as needed.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    repetition_penalty: torch.Tensor
    presence_penalty: torch.Tensor
    frequency_penalty: torch.Tensor
    seed: torch.Tensor
    uses: Uses
    bias: torch.Tensor | None = None
    first: torch.Tensor | None = None
    noise: torch.Tensor | None = None

    @classmethod
    def of(cls, params: Sequence[SamplingParams], seeds: Sequence[int], device: torch.device) -> "SamplingBatch":
        table = SamplingTable(len(params), device)
        table.take(np.arange(len(params)), list(zip(params, seeds, strict=True)))
        uses = Uses.of(params)
        table.bring(np.arange(len(params)), params, uses)
        return table.at(torch.arange(len(params), device=device), uses)

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
        return self.sample(self.edited(logits, past, softcap), positions)

    def edited(self, logits: torch.Tensor, past: "Past", softcap: float | None = None) -> torch.Tensor:
        """Logits [B, K, V] with all that comes before temperature."""
        logits = logits if softcap is None else reference_softcap(logits, softcap)
        vocab_size = logits.shape[-1]
        if self.uses.bias:
            logits = self.biased(logits)
        if self.uses.penalty:
            logits = self.penalised(logits, past_tokens(past, vocab_size))
        if self.uses.counts:
            logits = self.counted(logits, output_counts(past, vocab_size))
        if past.allowed is not None:
            logits = masked(logits, past.allowed)
        return logits

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

    def counted(self, logits: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Frequency and presence penalty: counts [B, K, V] of the output so far."""
        frequency, presence = self.frequency_penalty[:, None, None], self.presence_penalty[:, None, None]
        logits = logits.float() - frequency * counts
        return logits - presence * (counts > 0)

    def biased(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [B, K, V] plus each request's bias."""
        assert self.bias is not None
        token, value = unpack_bias(self.bias)
        shape = (*logits.shape[:2], self.bias.shape[1])
        # rooms that are left over add 0 to token 0, so the order does not matter
        return logits.float().scatter_add(2, *(x[:, None].expand(shape) for x in (token, value)))

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
    samples with them. Biases lie in an array for each room that a round had, and come when their row takes part
    (`bring`): rounds that have none read none.
    """

    def __init__(self, num_rows: int, device: torch.device, kind: type[SamplingBatch] = SamplingBatch) -> None:
        self.cells = MirroredArray((num_rows, 8), device)
        self._biases: dict[int, MirroredArray] = {}  # by room, [rows, room]; never replaced: captured rounds read it
        self._biased: set[tuple[int, int]] = set()  # rooms and rows that have held entries
        self._kind = kind
        self._looked: tuple[list[SamplingParams], Uses] = [], Uses.of([])  # at whom, the last time

    @property
    def arrays(self) -> list[MirroredArray]:
        return [self.cells, *self._biases.values()]

    def take(self, rows: IntArray, asked: Sequence[tuple[SamplingParams, int]]) -> None:
        """Rows [B] sample like this from now on, with these seeds."""
        whole = np.array([(seed, params.top_k) for params, seed in asked], dtype=np.int64)
        real = np.array([_REAL(params) for params, _ in asked], dtype=np.float64)
        columns = np.arange(self.cells.host.shape[1])
        self.cells[rows[:, None], columns] = np.concatenate([whole, real.view(np.int64)], axis=1)

    def uses(self, params: Sequence[SamplingParams]) -> Uses:
        """`Uses.of`, which looks at everything, for a batch that is mostly that of the round before."""
        before, uses = self._looked
        if before != list(params):  # of what is the same object nothing is compared
            uses = Uses.of(params)
            self._looked = list(params), uses
        return uses

    def bring(self, rows: IntArray, params: Sequence[SamplingParams], uses: Uses) -> None:
        """The biases of these rows, for a round of these uses."""
        if not uses.bias:
            return
        if uses.bias not in self._biases:
            self._biases[uses.bias] = MirroredArray((len(self.cells.host), uses.bias), self.cells.tensor.device)
        biases = self._biases[uses.bias]
        for row, each in zip(rows.tolist(), params, strict=True):
            if each.logit_bias:
                self._biased.add((uses.bias, row))
            elif (uses.bias, row) not in self._biased:
                continue  # it holds nothing
            wanted = pack_bias(each.logit_bias or {}, uses.bias)
            if (biases.host[row] != wanted).any():
                biases[row] = wanted

    def at(self, rows: torch.Tensor, uses: Uses) -> SamplingBatch:
        """The parameters of rows [B], a copy on the device."""
        return self.batch(rows, uses, *split_cells(self.cells.tensor[rows]))

    def batch(self, rows: torch.Tensor, uses: Uses, whole: torch.Tensor, real: torch.Tensor) -> SamplingBatch:
        """The same from what `split_cells` makes of their cells."""
        seed, top_k = whole.unbind()
        temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty = real.unbind()
        return self._kind(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            seed=seed,
            uses=uses,
            bias=self._biases[uses.bias].tensor[rows] if uses.bias else None,
        )


WHOLE_CELLS = 2
"""Seed and top_k, which come first."""

_REAL = attrgetter(
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"
)  # the others, in order


def split_cells(cells: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cells [B, 8] of a `SamplingTable` -> its whole numbers [2, B] int64 and the others [6, B] float32."""
    by_kind = cells.t().contiguous()
    return by_kind[:WHOLE_CELLS], by_kind[WHOLE_CELLS:].view(torch.float64).float()


def masked(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Logits [B, N, V] as float32 where allowed [B, N, V / 32] has their bit, -inf elsewhere."""
    # what is allowed is always more likely than what is not, even to a model that rules it out
    kept = logits.float().clamp(min=torch.finfo(torch.float32).min)
    return torch.where(unpack_bits(allowed, logits.shape[-1]), kept, -torch.inf)


def unpack_bits(words: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """words [..., ceil(V / 32)] int32 -> [..., V] bool."""
    in_bytes = words.view(torch.uint8)[..., None]
    bits = in_bytes >> torch.arange(8, dtype=torch.uint8, device=words.device) & 1
    return bits.flatten(-2)[..., :vocab_size] != 0


def output_counts(past: Past, vocab_size: int) -> torch.Tensor:
    """How often the output has each token before each node's continuation: [B, N, V] float32, along its own path."""
    assert past.prompt_len is not None
    columns = torch.arange(past.history.shape[1], device=past.history.device)
    counted = (columns >= past.prompt_len[:, None]) & (columns < past.length[:, None])  # [B, L]
    empty = torch.zeros((len(past.history), vocab_size), dtype=torch.float32, device=past.history.device)
    counts = empty.scatter_add(1, torch.where(counted, past.history, 0), counted.float())[:, None]
    if past.tree is None:
        return counts
    num_nodes = past.tree.num_nodes
    drafted = past.tree.ancestors & (torch.arange(num_nodes, device=columns.device) > 0)  # the root is in the history
    tokens = past.tree.tokens[:, None, :].expand(drafted.shape)  # [B, N, N]
    return counts.repeat(1, num_nodes, 1).scatter_add(2, tokens, drafted.float())


def past_tokens(past: Past, vocab_size: int) -> torch.Tensor:
    """Which tokens each node's continuation repeats: [B, N, V] bool, from bits where somebody keeps them."""
    if past.seen is None:
        return seen_tokens(past.history, past.length, vocab_size, past.tree)
    return _along_paths(unpack_bits(past.seen, vocab_size), past.tree)


def seen_tokens(
    history: torch.Tensor, history_len: torch.Tensor, vocab_size: int, tree: NodePaths | None
) -> torch.Tensor:
    """Which tokens each node's continuation repeats: [B, N, V] bool, along its own ancestor path.

    history [B, L] are the tokens so far, the root included, history_len [B] how many count; no tree: [B, 1, V].
    """
    valid = torch.arange(history.shape[1], device=history.device) < history_len[:, None]
    column = torch.where(valid, history, history[:, :1])  # repeat the first token instead of padding
    seen = torch.zeros((len(history), vocab_size), dtype=torch.bool, device=history.device).scatter_(1, column, True)
    return _along_paths(seen, tree)


def _along_paths(seen: torch.Tensor, tree: NodePaths | None) -> torch.Tensor:
    """seen [B, V], and each node's own ancestors: [B, N, V]; no tree: [B, 1, V]."""
    if tree is None:
        return seen[:, None]
    path_tokens = torch.where(tree.ancestors, tree.tokens[:, None, :], tree.tokens[:, :, None])  # [B, N, N]
    return seen[:, None].repeat(1, tree.num_nodes, 1).scatter_(2, path_tokens, True)
