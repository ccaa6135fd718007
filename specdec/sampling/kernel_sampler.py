r"""Draws the tokens of `ReferenceSampler` with kernels that neither sort the logits nor copy them to float32.

`sample` draws the token of each node; `best_tokens` gives the K best of log P + g with their log-probabilities (the
children of a tree's node). Parameters are read by row on the device, so one captured round serves any mix of
parameters. `collect_candidates` lists the tokens that can be chosen, and `choose_candidate` chooses: once from the
list, and again from the row itself if its list is insufficient.
"""

from dataclasses import dataclass

import torch

from specdec.gpu.triton_shim import pdl_options, triton
from specdec.sampling.choose_candidate import choose_kernel
from specdec.sampling.collect_candidates import DEFAULT_VOCAB_SPLIT, VocabSplit, collect
from specdec.sampling.log_probs import TopTokens
from specdec.sampling.reference_sampler import EditInputs, ReferenceSampler
from specdec.sampling.row_scores import LogitRows, SeenTokens

MAX_BEST = 64
"""Upper bound on the tokens per row that `best_tokens` returns."""


@dataclass(frozen=True, slots=True)
class KernelSampler(ReferenceSampler):
    """Draws the tokens that `ReferenceSampler` draws, in a few launches; kernels compute the noise as they add it."""

    def with_noise(self, first: torch.Tensor, count: int, vocab_size: int) -> "KernelSampler":
        return self

    def sample(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return sample(LogitRows(logits, positions, self.params))

    def draw(
        self, logits: torch.Tensor, positions: torch.Tensor, inputs: EditInputs, softcap: float | None = None
    ) -> torch.Tensor:
        if self.features.edits:  # edits that the kernels cannot do while they read
            return self.sample(self.edited(logits, inputs, softcap), positions)
        seen, tree = None, inputs.tree
        if self.features.penalty:
            assert inputs.seen is not None
            nothing = positions.new_full((*positions.shape, 1), -1)
            seen = SeenTokens(inputs.seen, nothing if tree is None else path_tokens(tree.tokens, tree.ancestors))
        return sample(LogitRows(logits, positions, self.params, softcap, seen))

    def best(self, logits: torch.Tensor, positions: torch.Tensor, count: int) -> TopTokens:
        return best_tokens(LogitRows(logits, positions, self.params), count)


def path_tokens(tokens: torch.Tensor, ancestors: torch.Tensor) -> torch.Tensor:
    """tokens [B, N] of a tree, ancestors [B, N, N] (a node is its own) -> the tokens on each node's path [B, N, N], -1
    elsewhere."""
    return torch.where(ancestors, tokens[:, None, :], -1)


def sample(rows: LogitRows, vocab_split: VocabSplit = DEFAULT_VOCAB_SPLIT) -> torch.Tensor:
    """The token drawn at each node, [B, N] int64."""
    return _choose(rows, 1, vocab_split, scores=False).tokens[..., 0]


def best_tokens(rows: LogitRows, k: int, vocab_split: VocabSplit = DEFAULT_VOCAB_SPLIT) -> TopTokens:
    """The k best tokens of log P + g at each node and their log-probabilities, normalised over all tokens; greedy: the
    best tokens of the logits. If the filters leave fewer, the lowest removed ids follow, with -inf."""
    return _choose(rows, k, vocab_split, scores=True)


def _choose(rows: LogitRows, k: int, vocab_split: VocabSplit, *, scores: bool) -> TopTokens:
    logits, positions, params, *_ = rows
    batch, num_nodes, vocab_size = logits.shape
    assert 1 <= k <= min(MAX_BEST, vocab_size), f"{k=} {vocab_size=}"
    assert positions.shape == (batch, num_nodes), f"{positions.shape=}"
    assert all(p.shape[1:] == (batch,) and p.is_contiguous() for p in params), [p.shape for p in params]
    best = TopTokens.empty((batch, num_nodes), k, logits.device)
    if batch * num_nodes == 0:
        return best
    rows = rows._replace(positions=positions.contiguous())
    found = collect(rows, k, vocab_split, scores=scores)
    num_tiles = triton.cdiv(vocab_size, vocab_split.tile)
    for listed in (True, False):
        choose_kernel[(batch * num_nodes,)](
            *(logits, rows.positions, *params, *rows.pointers, *found, best.tokens, best.scores if scores else None),
            *(num_tiles, vocab_size, num_nodes, batch, vocab_split.capacity, 0, *rows.scalars),
            LISTED=listed,
            SCORES=scores,
            K=k,
            SLOTS=max(2, triton.next_power_of_2(k)),
            TILES=triton.next_power_of_2(num_tiles),
            TILE=vocab_split.listed if listed else vocab_split.tile,
            SCAN_TILE=vocab_split.tile,
            num_warps=4 if listed else 16,
            **pdl_options(logits.device),
        )
    return best
