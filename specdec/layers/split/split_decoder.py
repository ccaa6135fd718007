"""A fused decoder and its head on several ranks. Each rank has a share of every layer; ranks exchange parts of sums.

    rank 0    embeddings ---> | heads 0..  o_proj parts | norm, MLP columns, down parts | .. -> final norm, head
    rank 1           sent --> | heads ..   o_proj parts | norm, MLP columns, down parts | ..
                                                   gather                          gather

All ranks' parts are gathered on each rank, in the order of ranks, which is the order of the ranges of K; the same
kernel as on one device adds them. For a weight that is divided by rows, ranks exchange columns of its input and of its
output, and concatenate them. Every rank computes the residual stream and all norms, from the same bits. One host loop
launches for all ranks, phase by phase.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from transformers.modeling_outputs import BaseModelOutputWithPast

from specdec.gpu.operations import Operations
from specdec.gpu.ranks import Ranks
from specdec.kvcache.layer_context import LayerContext
from specdec.layers.decoder import FusedLayer, LayerRun, LayerState, described_layers, embed_inputs
from specdec.layers.description.decoder_parts import DecoderParts
from specdec.layers.fuse import FusedModule
from specdec.layers.gemm.linear import linear
from specdec.layers.gemm.product import Product, RankShare, finish, split_k_of
from specdec.layers.norm import norm
from specdec.layers.packed.packed_weight import Weight
from specdec.layers.packed.weight_slices import place_weight, rank_rows
from specdec.layers.per_layer_embedding import per_layer_inputs
from specdec.layers.split.layer_shares import share_of


class SplitLayer(nn.Module):
    """One layer on all ranks."""

    def __init__(self, layers: Sequence[FusedLayer], ranks: Ranks) -> None:
        super().__init__()
        self.shares = nn.ModuleList(layers)
        self.ranks = ranks

    def forward(
        self, hidden: torch.Tensor, *, states: list[LayerState], specdec_ctx: LayerContext
    ) -> tuple[torch.Tensor, list[LayerState]]:
        """Run the layer on all ranks: hidden [T, H] of rank 0 (as in `states`) -> the next layer's."""
        contexts: list[LayerContext] = [specdec_ctx, *specdec_ctx.other_ranks]
        runs: list[LayerRun] = [
            share.begin(*state, context)  # type: ignore[operator]
            for share, state, context in zip(self.shares, states, contexts, strict=True)
        ]
        ended = run_together(runs, self.ranks, self.shares[0].ops)  # type: ignore[arg-type]
        after = [(*pair, state[2]) for pair, state in zip(ended, states, strict=True)]
        return after[0][0], after


def run_together(runs: Sequence[LayerRun], ranks: Ranks, ops: Operations) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Run every rank to its next sum, then complete the sums, until all have ended. Returns each rank's result."""
    ended: list[tuple[torch.Tensor, torch.Tensor]] = []
    whole: list[Any] = [None] * len(runs)
    while not ended:
        shares: list[RankShare] = []
        for rank, run in enumerate(runs):
            with ranks.on(rank):
                try:
                    shares.append(run.send(whole[rank]))
                except StopIteration as end:
                    ended.append(end.value)
        if shares:
            assert len(shares) == len(runs), "ranks take the same path"
            whole = complete(shares, ranks, ops)
    return ended


def complete(shares: Sequence[RankShare], ranks: Ranks, ops: Operations) -> list[Product]:
    """Exchange the ranks' shares of one product -> the whole product on each rank, in blocks of as many rows as there
    is room for."""
    products = [share.product for share in shares]
    if shares[0].columns:
        return side_by_side([product.parts[0] for product in products], ranks)
    owners = [share.owners for share in shares if share.owners is not None]
    num_parts, num_rows, width = products[0].parts.shape
    at_once = ranks.room // (num_parts * width * (1 if owners else len(ranks)))
    assert at_once, f"{ranks.room=} {products[0].parts.shape=}"
    values: list[list[torch.Tensor]] = [[] for _ in products]
    for first in range(0, max(num_rows, 1), at_once):
        rows = slice(first, first + at_once)
        parts = [product.parts[:, rows].contiguous() for product in products]
        gathered = ranks.select(parts, [some[rows] for some in owners]) if owners else ranks.gather(parts)
        whole = [product._replace(parts=parts) for product, parts in zip(products, gathered, strict=True)]
        if num_rows <= at_once:
            return whole
        for rank, product in enumerate(whole):
            with ranks.on(rank):
                values[rank].append(ops(finish)(product))
    return [Product.from_value(torch.cat(blocks)) for blocks in values]


def side_by_side(columns: Sequence[torch.Tensor], ranks: Ranks) -> list[Product]:
    """Exchange columns [T, N / R] of each rank -> [T, N] on each, copied to memory that no later exchange writes."""
    num_rows = len(columns[0])
    numbers = [own.contiguous().view(torch.float32) for own in columns]  # bits are moved unchanged
    at_once = ranks.room // (len(ranks) * numbers[0].shape[1])
    assert at_once, f"{ranks.room=} {columns[0].shape=}"
    values: list[list[torch.Tensor]] = [[] for _ in columns]
    for first in range(0, max(num_rows, 1), at_once):
        gathered = ranks.gather([own[first : first + at_once] for own in numbers])
        for rank, whole in enumerate(gathered):
            with ranks.on(rank):
                by_rank = whole.view(len(ranks), -1, numbers[0].shape[1])  # [R, T, N / R]
                block = torch.cat(by_rank.unbind(), dim=1)  # a copy, even for one row
                values[rank].append(block.view(columns[0].dtype))
    return [Product.from_value(blocks[0] if len(blocks) == 1 else torch.cat(blocks)) for blocks in values]


class SplitDecoder(nn.Module):
    """Replaces a `FusedDecoder` with these parts, wherever they are stored: every rank gets its share of the layers.
    Rank 0 has the `embedding`; each rank computes Gemma 4's per-layer embeddings for some layers."""

    def __init__(self, config: Any, parts: DecoderParts, embedding: nn.Module, ops: Operations, ranks: Ranks) -> None:
        super().__init__()
        self.config, self.embedding, self.ranks, self.ops = config, embedding, ranks, ops
        with torch.inference_mode(False), torch.no_grad():
            count = len(ranks)
            self.parts = [share_of(parts, rank, count, partial(ranks.put, rank)) for rank in range(count)]
        by_rank = [described_layers(parts, ops) for parts in self.parts]
        self.layers = nn.ModuleList(SplitLayer(shares, ranks) for shares in zip(*by_rank, strict=True))

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding.source if isinstance(self.embedding, FusedModule) else self.embedding

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, *, specdec_ctx: LayerContext, **unused: Any
    ) -> BaseModelOutputWithPast:
        """The forward of a `FusedDecoder`, for all rows."""
        embeds = self.embedding(input_ids)
        hidden = embeds.reshape(-1, embeds.shape[-1])
        tokens = None if self.parts[0].embeddings is None else input_ids
        sent = self.ranks.send((hidden, position_ids.reshape(-1), tokens))
        states: list[LayerState] = []
        layer_inputs = self._layer_inputs(sent)
        for rank, (embedded, positions, _) in enumerate(sent):
            with self.ranks.on(rank):
                states.append(embed_inputs(self.parts[rank], embedded, positions, layer_inputs[rank], self.ops))
        for layer in self.layers:
            _, states = layer(states[0][0], states=states, specdec_ctx=specdec_ctx)
        self.ranks.end()
        last: Any = self.ops(norm)(Product.from_value(states[0][0]), pre=self.parts[0].final_norm)[1]
        return BaseModelOutputWithPast(last_hidden_state=last.view(embeds.shape))

    def _layer_inputs(self, sent: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]) -> list[Any]:
        """Per-layer embeddings on each rank, [T, L, P] and padding after those of the last layers, or None. sent:
        embeddings, positions and tokens of each rank."""
        own: list[torch.Tensor] = []
        for rank, (hidden, _, tokens) in enumerate(sent):
            tables = self.parts[rank].embeddings
            if tables is None:
                return [None] * len(sent)
            with self.ranks.on(rank):
                made = per_layer_inputs(tables, hidden, tokens, self.ops)
                missing = (own[0] if own else made).shape[1] - made.shape[1]
                own.append(pad(made, (0, 0, 0, missing)) if missing else made)
        whole = side_by_side([made.flatten(1) for made in own], self.ranks)
        return [product.parts[0].unflatten(1, (-1, own[0].shape[2])) for product in whole]


class SplitHead(nn.Module):
    """The head's product on several ranks: each has some rows of the weight, and rank 0 collects all logits.

        rank r    y_r = x W_r^T     W_r [V / R, H]          every logit is one row's sum, the same as on one device
        rank 0    y = y_0 | y_1 | ..                        collected; rank 0 samples

    It is a separate forward: x is sent to all ranks, so it may be called at any time, also by drafters that share the
    head. weights: for each rank, the whole weight from which it takes its rows.
    """

    def __init__(self, weights: Sequence[Weight], bias: torch.Tensor | None, ops: Operations, ranks: Ranks) -> None:
        super().__init__()
        self.ops, self.ranks, self.split_k = ops, ranks, split_k_of(weights[0])
        count = len(ranks)
        self.shares: list[tuple[Weight, torch.Tensor | None]] = []
        with torch.inference_mode(False), torch.no_grad():
            for rank, weight in enumerate(weights):
                own = rank_rows(weight, [len(weight)], rank, count)
                own_bias = None if bias is None else bias.detach().chunk(count)[rank]
                put = partial(ranks.put, rank)
                self.shares.append((place_weight(own, put), None if own_bias is None else put([own_bias])))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply: x [..., K] -> [..., N]."""
        with self.ranks.turn:
            self.ranks.begin()
            logits = []
            for rank, sent in enumerate(self.ranks.send(x.reshape(-1, x.shape[-1]))):
                with self.ranks.on(rank):
                    weight, bias = self.shares[rank]
                    logits.append(self.ops(finish)(self.ops(linear)(sent, weight, bias, self.split_k)))
            whole = self.ranks.collect(logits).transpose(0, 1)  # [M, R, N / R]
        return whole.reshape(*x.shape[:-1], -1)
