r"""Drafters that look up earlier occurrences of the newest tokens. They need no model and no K/V.

    ngram     The longest suffix of at most `max_ngram` tokens that occurred before, at its latest occurrence; proposes
              its continuation (Saxena, "Prompt Lookup Decoding", 2023). Without a match the newest token is repeated.
    suffix    The continuations of all matches form a tree, which grows best first, like those of models (Oliaro et al.,
              "SuffixDecoding", 2024). That paper keeps a suffix tree on the host; here the device finds matches by
              comparison, so rounds stay captured.

In both a continuation that reaches the end of the text repeats with its period. Suffix decoding by example:

    text        .. the cat sat .. the cat ran .. the cat sat .. the cat
    matches     earlier places that end with the text's last tokens; m_i of these tokens match (at most MATCH)
    weight      4^(m_i - max m): a longer match outweighs shorter ones
    draft       sat with 2 / 3 of the weight, ran with 1 / 3; below each, the tokens that followed it

A node's probability is its share of its parent's weight. With `EngineConfig.finished_tokens`, outputs of finished
requests are searched too (`finished_texts.py`). Matches of equal length have the same weight in both.

Next to a model (`ModelAndLookup`), the lookup drafts in the rounds in which it is expected to give more tokens per
second; with `SpecConfig(adaptive=False)` the model makes all drafts.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from specdec.attention.backend import Backend
from specdec.attention.trees.tree import DraftTree
from specdec.attention.trees.tree_builder import LOWEST, TreeBuilder
from specdec.draft_models.base import (
    Binding,
    DraftBatch,
    Drafter,
    DraftWorker,
    Observation,
    PromptObservation,
    StatelessDrafter,
    with_defaults,
)
from specdec.draft_models.finished_texts import BEFORE, MATCH, NOTHING, FinishedTexts, StoredMatches

MATCHES = 64
"""Maximum matches used from a request's own text: the longest ones; among equally long ones the latest."""

COMPARED = 1 << 23
"""Tokens that are compared at one time, at 3 bytes each."""


class NgramDrafter(StatelessDrafter):
    """Proposes a chain by lookup, for all requests at once and without a host synchronisation."""

    name = "ngram"
    reads_every_state = False

    def __init__(self, max_ngram: int = 3) -> None:
        self.max_ngram = max_ngram

    def propose(self, batch: DraftBatch) -> DraftTree:
        newest = newest_tokens(batch.history, batch.history_len, self.max_ngram)
        match = find_matches(batch.history, batch.history_len, newest, 1)  # without a match, the root repeats
        steps = torch.arange(batch.num_steps, device=newest.device) % match.period
        drafts = batch.history.gather(1, match.after + steps)  # [B, num_steps]
        return DraftTree.chain(torch.cat([batch.root[:, None], drafts], dim=1))


class SuffixDrafter(Drafter):
    """Proposes chains and trees by lookup, for all requests at once and without a host synchronisation."""

    name = "suffix"
    reads_every_state = False
    reads_finished = True

    def bind(self, binding: Binding) -> DraftWorker:
        finished = None
        if binding.finished_tokens:
            table = binding.cache.table
            finished = FinishedTexts(binding.finished_tokens, table.max_requests + 1, table.allocator.device)
        return SuffixWorker(binding.backend, finished)


class SuffixWorker(DraftWorker):
    """Suffix decoding in one engine. It has the backend, which selects trees, and the store of finished texts."""

    def __init__(self, backend: Backend, finished: FinishedTexts | None = None) -> None:
        self.backend = backend
        self.finished = finished

    def propose(self, batch: DraftBatch) -> DraftTree:
        newest = newest_tokens(batch.history, batch.history_len)
        matches: list[OwnMatches | StoredMatches] = [find_matches(batch.history, batch.history_len, newest)]
        if self.finished is not None:
            matches.append(self.finished.matches(newest, batch.rows.index))
        builder = TreeBuilder(batch.root, self.backend, batch.num_steps)
        weight = match_weights(join_matches([each.matched for each in matches]))
        followed = weight[:, None]  # [B, beam, P]: weights of the matches whose text runs through each node
        chain = [batch.root[:, None]]
        for level in range(batch.num_steps):
            next_token = join_matches([each.tokens_at(level) for each in matches])  # [B, P]
            followed = followed * (next_token != NOTHING)[:, None]
            tokens, log_probs = children(next_token, followed, batch.topk)
            beam = builder.add_level(tokens, log_probs)
            through = next_token[:, None] == beam.tokens[..., None]
            followed = followed.gather(1, beam.origin[..., None].expand_as(through)) * through
            chain.append(beam.tokens)
        if batch.topk == 1:
            return DraftTree.chain(torch.cat(chain, dim=1))
        return builder.select(batch.num_nodes)


class OwnMatches(NamedTuple):
    """Earlier occurrences of the newest tokens in each request's own text, best first.

    history: [B, L]. after: [B, P] the position after each. period: [B, P] >= 1, the distance from there to the end of
    the text. matched: [B, P] number of equal tokens, at most MATCH; 0: no match.
    """

    history: torch.Tensor
    after: torch.Tensor
    period: torch.Tensor
    matched: torch.Tensor

    def tokens_at(self, level: int) -> torch.Tensor:
        """The token `level` places after the first token that follows each match, [B, P]."""
        return self.history.gather(1, self.after + level % self.period)


def join_matches(parts: list[torch.Tensor]) -> torch.Tensor:
    """Join values [B, ..] of the matches in the text itself with those of matches in finished texts, if any -> [B,
    P]."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def match_weights(matched: torch.Tensor) -> torch.Tensor:
    """Weight 4^(m - max m) of each match [B, P] with m equal tokens, float32; 0 without a match."""
    return torch.where(matched > 0, 4.0 ** (matched - matched.amax(1, keepdim=True)), 0.0)


def newest_tokens(history: torch.Tensor, length: torch.Tensor, count: int = MATCH) -> torch.Tensor:
    """The `count` newest of the first `length` [B] tokens of history [B, L], last one first: [B, count], padded with
    BEFORE."""
    positions = length[:, None] - 1 - torch.arange(count, device=history.device)
    return torch.where(positions < 0, BEFORE, history.gather(1, positions.clamp(min=0)))


def find_matches(history: torch.Tensor, length: torch.Tensor, newest: torch.Tensor, count: int = MATCHES) -> OwnMatches:
    """Find the `count` best matches in history [B, L]. Its first `length` [B] tokens are the text; `newest` [B, N] are
    the text's last, of which at most N match."""
    matched = matched_lengths(history, newest)
    ends = torch.arange(history.shape[1], device=history.device)
    matched = torch.where(ends < length[:, None] - 1, matched, 0)
    rank = matched * history.shape[1] + ends  # among equal matches the later one
    best = rank.topk(min(count, history.shape[1]), dim=1).indices
    after = torch.minimum(best + 1, length[:, None] - 1)
    return OwnMatches(history, after, length[:, None] - after, matched.gather(1, best))


def matched_lengths(history: torch.Tensor, newest: torch.Tensor) -> torch.Tensor:
    """Number [B, L] of tokens that match `newest` [B, N], counted backwards from each token of history [B, L].

    Computed in blocks: all at once, a long history would take N times its own memory.
    """
    size = newest.shape[1]
    windows = F.pad(history, (size - 1, 0), value=BEFORE).unfold(1, size, 1)  # [B, L, N], window p ends with p
    wanted = newest.flip(-1)[:, None]
    lengths = [
        (block == wanted).flip(-1).cumprod(-1, dtype=torch.int8).sum(-1)
        for block in windows.split(max(1, COMPARED // (len(newest) * MATCH)), dim=1)
    ]
    return torch.cat(lengths, dim=1)


def children(next_token: torch.Tensor, followed: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The K distinct next tokens of each node that have most weight: tokens [B, M, K] and log-probabilities [B, M, K].

    next_token: [B, P] of each match. followed: [B, M, P] weights of the matches that pass through each node. If fewer
    than K tokens follow a node, the rest are the lowest other token ids, with log-probability LOWEST.
    """
    same = next_token[:, :, None] == next_token[:, None]  # [B, P, P]
    share = followed @ same.to(followed.dtype)  # weight share of each match's next token
    earlier = same.tril(-1).to(followed.dtype)
    is_first = (followed > 0) & ((followed > 0).to(followed.dtype) @ earlier.mT == 0)  # first with its token
    share = torch.where(is_first, share, 0.0)
    width = share.shape[-1]
    if width < topk:
        share, next_token = F.pad(share, (0, topk - width)), F.pad(next_token, (0, topk - width))
    heaviest = share.sort(dim=-1, descending=True, stable=True)
    share, chosen = heaviest.values[..., :topk], heaviest.indices[..., :topk]
    tokens = next_token[:, None].expand(-1, share.shape[1], -1).gather(2, chosen)
    real = share > 0
    log_probs = torch.where(real, (share / followed.sum(-1, keepdim=True)).log(), LOWEST)
    slots = torch.arange(topk, device=tokens.device)
    taken = ((slots[:, None] == tokens[..., None, :]) & real[..., None, :]).any(-1)  # [B, M, K] of the lowest ids
    unused = taken.to(torch.int8).sort(dim=-1, stable=True).indices
    unused = unused.gather(2, (slots - real.sum(-1, keepdim=True)).clamp(min=0))
    return torch.where(real, tokens, unused), log_probs


class ModelAndLookup(Drafter):
    """A model and a lookup; the engine chooses one of them for each round. model: any drafter; it reads the committed
    tokens of every round. lookup: a drafter whose worker ignores observations."""

    def __init__(self, model: Drafter, lookup: Drafter) -> None:
        self.model, self.lookup = with_defaults(model), lookup
        for name in Drafter.__annotations__:  # layers, depths and the like are the model's
            setattr(self, name, getattr(self.model, name))
        self.name, self.has_lookup = f"{model.name} or {lookup.name}", True
        self.reads_finished = lookup.reads_finished

    def bind(self, binding: Binding) -> DraftWorker:
        return ModelOrLookupWorker(self.model.bind(binding), self.lookup.bind(binding))


class ModelOrLookupWorker(DraftWorker):
    """Proposes with the worker that the batch selects. Only the model's worker observes, and has a view while it
    proposes."""

    def __init__(self, model: DraftWorker, lookup: DraftWorker) -> None:
        self.model, self.lookup = model, lookup
        self.finished: FinishedTexts | None = getattr(lookup, "finished", None)

    def propose(self, batch: DraftBatch) -> DraftTree:
        return (self.lookup if batch.by_lookup else self.model).propose(batch)

    def observe(self, seen: Observation) -> None:
        self.model.observe(seen)

    def observe_prompts(self, seen: PromptObservation) -> None:
        self.model.observe_prompts(seen)


def model_of(drafter: Drafter) -> Drafter:
    """The drafter that is fitted to the target: the model of a `ModelAndLookup`, or the drafter itself."""
    return drafter.model if isinstance(drafter, ModelAndLookup) else drafter
