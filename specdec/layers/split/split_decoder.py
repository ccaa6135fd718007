"""A fused decoder on several ranks: each goes through its share of a layer, and they meet where a sum is whole again.

    rank 0    embeddings ---> | heads 0..  o_proj parts | norm, MLP columns, down parts | .. -> final norm, head
    rank 1           sent --> | heads ..   o_proj parts | norm, MLP columns, down parts | ..
                                                   gather                          gather

The parts of every rank are gathered on each, in the order of ranks, which is that of the ranges of K; the kernel that
adds parts up on one device adds them up here. The residual stream and all norms are computed on every rank, from the
same bits. One loop of the host launches for all ranks, phase by phase.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from specdec.gpu.operations import Operations
from specdec.gpu.ranks import Ranks
from specdec.kvcache.layer_context import LayerContext, SplitContext
from specdec.layers.decoder import Entry, FusedDecoder, FusedLayer, Shared, Walk, begin
from specdec.layers.norm import norm
from specdec.layers.product import OwnedParts, Product, finish
from specdec.layers.split.layer_shares import share_of

State = tuple[torch.Tensor, torch.Tensor, Shared]
"""Of one rank between two layers: the residual stream [T, H], its normed form, what all layers share."""


class SplitLayer(nn.Module):
    """One layer of every rank."""

    def __init__(self, layers: Sequence[FusedLayer], ranks: Ranks) -> None:
        super().__init__()
        self.shares = nn.ModuleList(layers)
        self.ranks = ranks

    def forward(
        self, hidden: torch.Tensor, *, states: list[State], specdec_ctx: SplitContext
    ) -> tuple[torch.Tensor, list[State]]:
        """hidden [T, H]: of rank 0, as `states` have it -> the next layer's."""
        contexts: list[LayerContext] = [specdec_ctx, *specdec_ctx.peers]
        walks: list[Walk] = [
            share.walk(*state, context)  # type: ignore[operator]
            for share, state, context in zip(self.shares, states, contexts, strict=True)
        ]
        ended = walk_together(walks, self.ranks, self.shares[0].ops)  # type: ignore[arg-type]
        after = [(*pair, state[2]) for pair, state in zip(ended, states, strict=True)]
        return after[0][0], after


def walk_together(walks: Sequence[Walk], ranks: Ranks, ops: Operations) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Every rank goes on to its next sum, then the sums are made whole, until all have ended: what each returns."""
    ended: list[tuple[torch.Tensor, torch.Tensor]] = []
    whole: list[Any] = [None] * len(walks)
    while not ended:
        products: list[Product | OwnedParts] = []
        for rank, walk in enumerate(walks):
            with ranks.on(rank):
                try:
                    products.append(walk.send(whole[rank]))
                except StopIteration as end:
                    ended.append(end.value)
        if products:
            assert len(products) == len(walks), "ranks take the same path"
            whole = complete(products, ranks, ops)
    return ended


def complete(shares: Sequence[Product | OwnedParts], ranks: Ranks, ops: Operations) -> list[Product]:
    """What each rank has of one product -> the whole product on each, in blocks of the rows that there is room for."""
    products = [share.product if isinstance(share, OwnedParts) else share for share in shares]
    owners = [share.owners for share in shares if isinstance(share, OwnedParts)]
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
    return [Product.of(torch.cat(blocks)) for blocks in values]


class SplitDecoder(nn.Module):
    """Stands where a `FusedDecoder` stood, over copies of its weights; embeddings and the final norm are rank 0's."""

    def __init__(self, whole: FusedDecoder, ranks: Ranks) -> None:
        super().__init__()
        self.whole, self.ranks, self.ops = whole, ranks, whole.ops
        self.config: Any = whole.config
        with torch.inference_mode(False), torch.no_grad():
            self.parts = [share_of(whole.parts, rank, device, len(ranks)) for rank, device in enumerate(ranks.devices)]
        by_rank = [
            [
                FusedLayer(i, layer, gain, whole.ops)
                for i, (layer, gain) in enumerate(zip(parts.layers, parts.next_norms, strict=True))
            ]
            for parts in self.parts
        ]
        self.layers = nn.ModuleList(SplitLayer(shares, ranks) for shares in zip(*by_rank, strict=True))

    def get_input_embeddings(self) -> nn.Module:
        return self.whole.get_input_embeddings()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        specdec_ctx: SplitContext | None = None,
        **unused: Any,
    ) -> BaseModelOutputWithPast:
        """As that of a `FusedDecoder`, of all rows."""
        assert position_ids is not None and specdec_ctx is not None
        if inputs_embeds is None:
            inputs_embeds = self.whole.embedding(input_ids)
        hidden = inputs_embeds.reshape(-1, inputs_embeds.shape[-1])
        entry = Entry(hidden, position_ids.reshape(-1), self.whole.layer_inputs(hidden, input_ids))
        states: list[State] = []
        for rank, sent in enumerate(self.ranks.send(entry)):
            with self.ranks.on(rank):
                states.append(begin(self.parts[rank], sent, self.ops))
        for layer in self.layers:
            _, states = layer(states[0][0], states=states, specdec_ctx=specdec_ctx)
        self.ranks.end()
        last: Any = self.ops(norm)(Product.of(states[0][0]), pre=self.parts[0].final_norm)[1]
        return BaseModelOutputWithPast(last_hidden_state=last.view(inputs_embeds.shape))
