r"""The target's next token as a pure function of (logits, parameters, seed, position), in plain torch.

    x = edited(logits)        softcap, logit bias, repetition, frequency and presence penalty, the mask of a grammar
    s = (x - max x) / T,      P = e^s over the tokens that top-n-sigma, top-k, top-p and min-p keep, in this order
    token(p) = argmax_v ( log P_v + g(seed, p, v) )      g: `gumbel_noise`;   T = 0: argmax_v x_v, the lowest id first

    top-n-sigma  keeps x_v >= max x - n sigma, sigma the standard deviation of the finite x (Tang et al. 2024)
    top-k        keeps the k best tokens, and those that tie with the k-th
    top-p        keeps a token if all better ones (by score, then lower id) weigh less than p; always keeps the best
    min-p        keeps tokens that are at least min_p times as likely as the best

This is a draw from P (the Gumbel-max trick). It is the same in any batch, at any time and on any device, since the
noise is counter-based and has no state. Speculation therefore changes no token: verification computes this function at
every tree node. CPUs run this module; it is also the oracle of the kernels (`KernelSampler`), which do not sort.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch

from specdec.sampling.log_probs import TopTokens, top_tokens
from specdec.sampling.noise import gumbel_noise
from specdec.sampling.sampling_table import SAMPLED, ParamVectors, SamplerFeatures, unpack_bias
from specdec.sampling.softcap import reference_softcap
from specdec.sampling.token_bitmaps import unpack_bits


class NodePaths(Protocol):
    """A tree of drafts as penalties read it: tokens [B, N], ancestors [B, N, N] bool (ancestor or self)."""

    @property
    def tokens(self) -> torch.Tensor: ...

    @property
    def ancestors(self) -> torch.Tensor: ...


class EditInputs(NamedTuple):
    """Inputs of the edits of logits [B, N, V].

    read_history: copies the tokens so far [B, L], the root included; the first `length` [B] are valid. tree: the drafts
    after the history; None: N = 1, the token after each history. prompt_len [B]: where each output begins. allowed
    [B, N, V / 32] int32: bits of the tokens that a grammar allows after each node. seen [B, V / 32] int32: bits of the
    history's tokens; None: not kept.
    """

    length: torch.Tensor
    tree: NodePaths | None
    read_history: Callable[[], torch.Tensor]
    prompt_len: torch.Tensor | None = None
    allowed: torch.Tensor | None = None
    seen: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ReferenceSampler:
    """Draws tokens of B requests with their parameters.

    params, features, bias: from `SamplingTable.row_params`. noise: [B, W, V] for the W positions from first [B] on,
    made once for all draws there (`with_noise`); None: made as needed.
    """

    params: ParamVectors
    features: SamplerFeatures = SAMPLED
    bias: torch.Tensor | None = None
    first: torch.Tensor | None = None
    noise: torch.Tensor | None = None

    def with_noise(self, first: torch.Tensor, count: int, vocab_size: int) -> "ReferenceSampler":
        """Returns this sampler with the noise of `count` positions from first [B] on, which tree nodes and draft steps
        share."""
        if not self.features.sampled:
            return self
        positions = first[:, None] + torch.arange(count, device=first.device)
        return replace(self, first=first, noise=gumbel_noise(self.params.column("seed"), positions, vocab_size))

    def sample(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Draw the token of each position: logits [B, N, V], positions [B, N] -> [B, N] int64."""
        return (logits if not self.features.sampled else self._perturbed(logits, positions)).argmax(dim=-1)

    def draw(
        self, logits: torch.Tensor, positions: torch.Tensor, inputs: EditInputs, softcap: float | None = None
    ) -> torch.Tensor:
        """The target's tokens [B, N]: `sample` after `edited`. softcap: applied first, if the logits are uncapped."""
        return self.sample(self.edited(logits, inputs, softcap), positions)

    def best(self, logits: torch.Tensor, positions: torch.Tensor, count: int) -> TopTokens:
        """The `count` best of `log_scores`, a node's children. If the filters leave fewer tokens, the lowest removed
        ids follow, with -inf."""
        return top_tokens(self.log_scores(logits, positions), count)

    def log_scores(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Normalised log P plus noise, [B, N, V] float32; `sample` draws the argmax."""
        scores = logits.float() if not self.features.sampled else self._perturbed(logits, positions)
        return scores.log_softmax(dim=-1)

    def _perturbed(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits of greedy rows, log P plus noise of others: [B, N, V] float32."""
        if self.noise is None or self.first is None:
            noise = gumbel_noise(self.params.column("seed"), positions, logits.shape[-1])
        else:
            noise = self.noise.gather(1, (positions - self.first[:, None])[:, :, None].expand_as(logits))
        sampled = self.params.over_logits("temperature") > 0
        return torch.where(sampled, self.log_weights(logits) + noise, logits.float())

    # the distribution

    def log_weights(self, logits: torch.Tensor) -> torch.Tensor:
        """log P up to a constant, [B, N, V] float32, -inf for filtered tokens; rows at temperature 0 are
        meaningless."""
        temperature = self.params.over_logits("temperature")
        scores = logits.float()
        if "top_n_sigma" in self.features.filters:
            scores = scores.masked_fill(scores < self._sigma_floor(scores), -torch.inf)
        # the best token stays at 0 at any temperature, so nothing overflows
        scores = (scores - scores.amax(-1, keepdim=True)) / torch.where(temperature > 0, temperature, 1.0)
        if self.features.filters & {"top_k", "top_p"}:
            scores = self._top_k_top_p(scores)
        if "min_p" in self.features.filters:  # P_v < min_p * max P
            floor = scores.amax(-1, keepdim=True) + torch.log(self.params.over_logits("min_p"))
            scores = scores.masked_fill(scores < floor, -torch.inf)
        return scores

    def _sigma_floor(self, x: torch.Tensor) -> torch.Tensor:
        """max x - n sigma, [B, N, 1] float32; -inf where n is 0 or less."""
        finite = x > -torch.inf
        count = finite.sum(-1, keepdim=True)
        wide = x.double().where(finite, 0.0)
        # in float64 another summation order gives the same float32; `cumsum` uses one order for every batch
        total, squares = wide.cumsum(-1)[..., -1:], (wide * wide).cumsum(-1)[..., -1:]
        sigma = ((squares - total * total / count) / count).clamp(min=0).sqrt()
        n = self.params.over_logits("top_n_sigma")
        return (x.amax(-1, keepdim=True).double() - n.double() * sigma).float().where(n > 0, -torch.inf)

    def _top_k_top_p(self, scores: torch.Tensor) -> torch.Tensor:
        vocab_size = scores.shape[-1]
        ordered, order = scores.sort(dim=-1, descending=True, stable=True)
        top_k, top_p = self.params.over_logits("top_k"), self.params.over_logits("top_p")
        k = torch.where(top_k > 0, top_k.clamp(max=vocab_size), vocab_size)
        kth = ordered.gather(-1, (k - 1).expand(-1, scores.shape[1], 1))
        ordered = ordered.masked_fill(ordered < kth, -torch.inf)  # ties with the k-th stay, as in transformers
        weights = ordered.softmax(dim=-1)
        before = weights.cumsum(dim=-1) - weights  # mass of strictly better-ranked tokens
        outside = (before >= top_p) & (top_p < 1)
        outside[..., 0].fill_(False)  # the best token stays, also where top_p rounds to 0
        ordered = ordered.masked_fill(outside, -torch.inf)
        return torch.empty_like(scores).scatter_(-1, order, ordered)

    # edits of logits

    def edited(self, logits: torch.Tensor, inputs: EditInputs, softcap: float | None = None) -> torch.Tensor:
        """Logits [B, N, V] after every edit that comes before temperature."""
        logits = logits if softcap is None else reference_softcap(logits, softcap)
        vocab_size = logits.shape[-1]
        if self.features.bias:
            logits = self.biased(logits)
        if self.features.penalty:
            logits = self.penalised(logits, past_tokens(inputs, vocab_size))
        if self.features.counts:
            logits = self.counted(logits, output_counts(inputs, vocab_size))
        if inputs.allowed is not None:
            logits = masked(logits, inputs.allowed)
        return logits

    def biased(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [B, N, V] plus each request's bias."""
        assert self.bias is not None
        token, value = unpack_bias(self.bias)
        shape = (*logits.shape[:2], self.bias.shape[1])
        # unused cells add 0 to token 0, so the order does not matter
        return logits.float().scatter_add(2, *(x[:, None].expand(shape) for x in (token, value)))

    def penalised(self, logits: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Repetition penalty (Keskar et al. 2019): tokens with seen [B, N, V] have logits divided (or multiplied)."""
        penalty = self.params.over_logits("repetition_penalty")
        logits = logits.float()
        return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)

    def counted(self, logits: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Frequency and presence penalty: counts [B, N, V] of the output so far."""
        logits = logits.float() - self.params.over_logits("frequency_penalty") * counts
        return logits - self.params.over_logits("presence_penalty") * (counts > 0)


class RootMaskedSampler(NamedTuple):
    """A drafter's sampler if grammars apply: it draws the same, but only allowed tokens directly after the root.

    allowed [B, V / 32]: bits of the tokens allowed after the root; first [B]: the position after the root. Deeper
    levels are not masked: the host cannot know what is allowed after a draft before it has read the draft.
    """

    sampler: ReferenceSampler
    first: torch.Tensor
    allowed: torch.Tensor

    def sample(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.sampler.sample(self._masked(logits, positions), positions)

    def best(self, logits: torch.Tensor, positions: torch.Tensor, count: int) -> TopTokens:
        return self.sampler.best(self._masked(logits, positions), positions, count)

    def _masked(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        is_first = (positions == self.first[:, None])[:, :, None]
        return torch.where(is_first, masked(logits, self.allowed[:, None]), logits)


def masked(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Logits [B, N, V] as float32, and -inf for tokens whose bit in allowed [B, N, V / 32] is not set."""
    # an allowed token outranks a forbidden one, even if its logit is -inf
    kept = logits.float().clamp(min=torch.finfo(torch.float32).min)
    return torch.where(unpack_bits(allowed, logits.shape[-1]), kept, -torch.inf)


def output_counts(inputs: EditInputs, vocab_size: int) -> torch.Tensor:
    """Counts of each token in the output before each node's continuation: [B, N, V] float32, along its own path."""
    assert inputs.prompt_len is not None
    history = inputs.read_history()
    columns = torch.arange(history.shape[1], device=history.device)
    counted = (columns >= inputs.prompt_len[:, None]) & (columns < inputs.length[:, None])  # [B, L]
    empty = torch.zeros((len(history), vocab_size), dtype=torch.float32, device=history.device)
    counts = empty.scatter_add(1, torch.where(counted, history, 0), counted.float())[:, None]
    if inputs.tree is None:
        return counts
    num_nodes = inputs.tree.tokens.shape[1]
    drafted = inputs.tree.ancestors & (torch.arange(num_nodes, device=columns.device) > 0)  # the root is in the history
    tokens = inputs.tree.tokens[:, None, :].expand(drafted.shape)  # [B, N, N]
    return counts.repeat(1, num_nodes, 1).scatter_add(2, tokens, drafted.float())


def past_tokens(inputs: EditInputs, vocab_size: int) -> torch.Tensor:
    """Tokens that already occur before each node's continuation: [B, N, V] bool, along its own ancestor path."""
    tree = inputs.tree
    if inputs.seen is not None:
        seen = unpack_bits(inputs.seen, vocab_size)
    else:
        history = inputs.read_history()
        valid = torch.arange(history.shape[1], device=history.device) < inputs.length[:, None]
        column = torch.where(valid, history, history[:, :1])  # repeat the first token instead of padding
        empty = torch.zeros((len(history), vocab_size), dtype=torch.bool, device=history.device)
        seen = empty.scatter_(1, column, True)
    if tree is None:
        return seen[:, None]
    path_tokens = torch.where(tree.ancestors, tree.tokens[:, None, :], tree.tokens[:, :, None])  # [B, N, N]
    return seen[:, None].repeat(1, tree.tokens.shape[1], 1).scatter_(2, path_tokens, True)
