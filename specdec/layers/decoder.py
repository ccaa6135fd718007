"""A decoder of fused layers: the order of products, norms and residuals, for every family of `FAMILIES`.

A layer takes the residual stream h and its normed form x, and hands both to the next: the norm that begins a layer is
computed where the one before ends. Per layer, with [..] where the family has it:

    y = x W_qkv                        linear           [q/k norm over all heads]              qk_norm
    y sum, [q/k/v norm], rotary, store rope_store       a = attention                          the context
    o = a W_o                          linear           h, x = h + [f] [norm](o), [norm](h)    norm
    m = act(x W_gate) (x W_up)         gated_linear     d = m W_down                           linear
                                       x of attention's own norm where the two are parallel (Cohere)
    h = h + [f] [norm](d)              norm
    or the experts' weighted sum:      route, apply_experts
    or both: d = norm(d) + norm(experts)                  fork_norm, mlp_and_experts, join_norm
    [p = W_proj (act(W_gate h) e)      linear, ple      h = h + norm(p)]                       norm, the same launch as
    h, x = [c] h, [norm] of the next layer(h)

The families are descriptions (`LayerParts`) read off the Hugging Face modules; the weights are theirs.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from specdec.gpu.operations import Operations
from specdec.kvcache.layer_context import Ending, LayerContext, Narrowing
from specdec.layers.linear import Mlp, gated_linear, linear, linear_parts
from specdec.layers.moe.dense_and_moe import mlp_and_experts
from specdec.layers.moe.experts import Experts, apply_experts
from specdec.layers.moe.fork_join import fork_norm, join_norm
from specdec.layers.moe.routing import Router, route
from specdec.layers.norm import Gain, norm, qk_norm
from specdec.layers.packed.packed_weight import Weight
from specdec.layers.per_layer_embedding import EmbeddingParts, gated_projection, per_layer_inputs
from specdec.layers.product import Columns, Cut, OwnedParts, Product, finish
from specdec.layers.rope_store import Attended, Heads, Rotary, rope_store, rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class PleParts:
    """Gemma 4's per-layer embedding in one layer: W_gate [P, H], W_proj [H, P], the norm after them."""

    gate: Weight
    activation: str
    projection: Weight
    norm: Gain


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeParts:
    """Experts in the place of an MLP, or next to one (Gemma 4, `fork_join.py`): then router and experts read norms of
    the residual stream of their own, and what both add is normed each for itself before the sum."""

    router: Router
    experts: Experts
    input_norm: Gain | None = None
    mlp_norm: Gain | None = None
    norm: Gain | None = None


class SumShare(NamedTuple):
    """What a rank has of a weight over whose columns a product sums (`layers/split`): whole ranges of K, as `cut`
    says, whose parts ranks exchange; or rows of it, cut as the whole weight: then ranks exchange x and y."""

    cut: Cut
    by_rows: bool


class WideNorms(NamedTuple):
    """Norms over all heads of the queries, and of the keys: of one of `num_ranks`, over those of all ranks.

    kv_shares: parts in which ranks hold the K/V heads; fewer than ranks where heads are repeated."""

    q: Gain
    k: Gain
    rank: int = 0
    num_ranks: int = 1
    kv_shares: int = 1


class Cuts(NamedTuple):
    """How the weights of one rank's share of a layer are cut: as in the whole layer. down: None without an MLP."""

    qkv: Cut
    out: SumShare
    down: SumShare | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """One decoder layer, with an MLP, experts or both. `qkv` is a merged weight; `kind` names its rotary table."""

    kind: str
    heads: Heads
    wide_norms: WideNorms | None = None
    scaling: float
    qkv: Weight
    qkv_bias: torch.Tensor | None
    out: Weight
    out_bias: torch.Tensor | None
    input_norm: Gain | None
    attention_norm: Gain | None  # on what attention adds
    mlp_input_norm: Gain | None
    mlp: Mlp | None
    mlp_norm: Gain | None  # on what the MLP adds
    parallel: bool = False  # the MLP reads what attention reads
    factor: float = 1.0  # of what each of the two adds
    sinks: torch.Tensor | None = None
    softcap: float | None = None  # of attention scores
    moe: MoeParts | None = None
    ple: PleParts | None = None
    scale: torch.Tensor | None = None
    cuts: Cuts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderParts:
    """rotary: kind of layer -> (frequencies, attention factor). factor: of embeddings, after that of their module."""

    layers: tuple[LayerParts, ...]
    final_norm: Gain
    rotary: dict[str, tuple[torch.Tensor, float]]
    factor: float = 1.0
    embeddings: EmbeddingParts | None = None

    @property
    def next_norms(self) -> list[Gain | None]:
        """Norm after each layer, with which the next one begins. After the last it is None: the final norm follows
        apart."""
        return [*(layer.input_norm for layer in self.layers[1:]), None]


class Shared(NamedTuple):
    """What a forward makes once for all layers: rotary tables by kind; per-layer embeddings [T, L, P], or None."""

    rotary: dict[str, Rotary]
    layer_inputs: torch.Tensor | None

    def of(self, rows: torch.Tensor) -> "Shared":
        tables = {kind: Rotary(table.cos[rows], table.sin[rows]) for kind, table in self.rotary.items()}
        return Shared(tables, None if self.layer_inputs is None else self.layer_inputs[rows])


def begin(
    parts: DecoderParts, embedded: torch.Tensor, positions: torch.Tensor, inputs: torch.Tensor | None, ops: Operations
) -> tuple[torch.Tensor, torch.Tensor, Shared]:
    """Embeddings [T, H], positions [T], per-layer embeddings [T, L, P] or None -> the residual stream [T, H] and its
    normed form, which the first layer reads, and what all layers share."""
    tables = {
        kind: ops(rotary)(positions, frequencies, factor, embedded.dtype)
        for kind, (frequencies, factor) in parts.rotary.items()
    }
    hidden, normed = ops(norm)(Product.of(embedded), factor=parts.factor, pre=parts.layers[0].input_norm)
    return hidden, normed, Shared(tables, inputs)


Exchanged = Product | OwnedParts | Columns
Walk = Generator[Exchanged, Product, tuple[torch.Tensor, torch.Tensor]]
"""A layer on its way: yields each product of which other ranks may have parts, is sent the whole one, and returns the
next layer's residual stream and its normed form."""


class FusedLayer(nn.Module):
    """One decoder layer; `next_norm` is how the next one begins."""

    def __init__(self, index: int, parts: LayerParts, next_norm: Gain | None, ops: Operations) -> None:
        super().__init__()
        self.index, self.parts, self.next_norm, self.ops = index, parts, next_norm, ops

    def forward(
        self,
        hidden: torch.Tensor,
        normed: torch.Tensor,
        shared: Shared,
        *,
        specdec_ctx: LayerContext,
        narrowing: Narrowing | Ending | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden, normed [T, H] -> the next layer's, of the rows that the forward goes on with; where it ends here,
        what it was given."""
        walk = self.walk(hidden, normed, shared, specdec_ctx, narrowing)
        try:
            product = next(walk)
            while True:
                assert isinstance(product, Product), "there are no other ranks"
                product = walk.send(product)
        except StopIteration as end:
            states: tuple[torch.Tensor, torch.Tensor] = end.value
            return states

    def walk(
        self,
        hidden: torch.Tensor,
        normed: torch.Tensor,
        shared: Shared,
        context: LayerContext,
        narrowing: Narrowing | Ending | None = None,
    ) -> Walk:
        """Runs `forward` as a generator (`Walk`), so that several ranks can run it with a share of the layer each."""
        parts, ops = self.parts, self.ops
        qkv = ops(linear)(normed, parts.qkv, parts.qkv_bias, None if parts.cuts is None else parts.cuts.qkv)
        if parts.wide_norms is not None:
            qkv = yield from self._norm_all_heads(qkv, parts.wide_norms)
        rows = ops(rope_store)(qkv, parts.heads, shared.rotary[parts.kind], context.destination(self.index))
        if isinstance(narrowing, Ending):
            return hidden, normed
        layer_inputs = shared.layer_inputs
        if narrowing is not None:  # the K/V of all rows are stored; only the chosen ones go on
            chosen, context = narrowing.rows, narrowing.context
            rows = Attended(rows.q[chosen], None, None)
            hidden, normed = hidden[chosen], normed[chosen]
            layer_inputs = None if layer_inputs is None else layer_inputs[chosen]
        attended = context.attend_rows(
            self.index, *rows, scaling=parts.scaling, softcap=parts.softcap, sinks=parts.sinks
        )
        out = yield from self._last_sum(attended.flatten(1), parts.out, parts.out_bias, parts.cuts and parts.cuts.out)
        end: dict[str, Any] = {"scale": parts.scale, "pre": self.next_norm}
        if parts.ple is None or layer_inputs is None:
            return (yield from self._feed_forward(out, hidden, normed, **end))
        hidden, _ = yield from self._feed_forward(out, hidden, normed)
        gate = ops(linear)(hidden, parts.ple.gate)
        layer_input = layer_inputs[:, self.index]
        added = ops(gated_projection)(gate, layer_input, parts.ple.projection, parts.ple.activation)
        return ops(norm)(added, post=parts.ple.norm, residual=hidden, **end)

    def _norm_all_heads(self, qkv: Product, norms: WideNorms) -> Generator[Exchanged, Product, Product]:
        """A rank has the heads of all for that, then its own again."""
        heads, count = self.parts.heads, norms.num_ranks
        if count == 1:
            return self.ops(qk_norm)(qkv, norms.q, norms.k)
        by_rank = yield Columns(self.ops(finish)(qkv))
        widths = [number * heads.head_dim for number in (heads.num_q, heads.num_kv, heads.num_kv)]
        shares = [count, norms.kv_shares, norms.kv_shares]
        kinds = by_rank.parts[0].unflatten(1, (count, -1)).split(widths, dim=2)  # q, k, v: [T, R, heads]
        distinct = [kind[:, :: count // share].flatten(1) for kind, share in zip(kinds, shares, strict=True)]
        whole = self.ops(qk_norm)(Product.of(torch.cat(distinct, 1)), norms.q, norms.k)
        kinds = whole.parts[0].split([kind.shape[1] for kind in distinct], dim=1)
        own = [kind.chunk(share, 1)[norms.rank * share // count] for kind, share in zip(kinds, shares, strict=True)]
        return Product.of(torch.cat(own, 1))

    def _last_sum(
        self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, share: SumShare | None
    ) -> Generator[Exchanged, Product, Product]:
        """A product, of which this rank may have a share."""
        if share is None:
            return (yield self.ops(linear)(x, weight, bias))
        if share.by_rows:
            whole = yield Columns(x)
            own = self.ops(linear)(whole.parts[0], weight, bias, share.cut)
            return (yield Columns(self.ops(finish)(own)))
        assert isinstance(weight, torch.Tensor), "a packed weight is shared by rows"
        return (yield self.ops(linear_parts)(x, weight, share.cut)._replace(bias=bias))

    def _feed_forward(self, out: Product, hidden: torch.Tensor, x: torch.Tensor, **end: Any) -> Walk:
        """Add what attention gave, then what MLP or experts make of it, or of x, which attention read.

        end: what else the norm after them does.
        """
        parts, moe, ops = self.parts, self.parts.moe, self.ops
        if moe is not None and parts.mlp is not None:
            return (yield from self._branches(moe, out, hidden, **end))
        hidden, normed = ops(norm)(
            out, post=parts.attention_norm, residual=hidden, factor=parts.factor, pre=parts.mlp_input_norm
        )
        if parts.parallel:
            normed = x
        if moe is not None:
            added = yield from self._chosen(normed, normed, moe)
        else:
            assert parts.mlp is not None
            gated = ops(gated_linear)(normed, parts.mlp.gate_up, parts.mlp.activation)
            added = yield from self._last_sum(gated, parts.mlp.down, None, parts.cuts and parts.cuts.down)
        return ops(norm)(added, post=parts.mlp_norm, residual=hidden, factor=parts.factor, **end)

    def _chosen(
        self, x: torch.Tensor, router_x: torch.Tensor, moe: MoeParts
    ) -> Generator[OwnedParts, Product, Product]:
        routing = self.ops(route)(router_x, moe.router)
        product = self.ops(apply_experts)(x, routing, moe.experts)
        return (yield OwnedParts(product, routing.experts)) if moe.experts.shared else product

    def _branches(self, moe: MoeParts, out: Product, hidden: torch.Tensor, **end: Any) -> Walk:
        parts, ops = self.parts, self.ops
        assert parts.mlp is not None and parts.attention_norm is not None and parts.factor == 1.0
        readers: dict[str, Any] = {"mlp": parts.mlp_input_norm, "experts": moe.input_norm, "router": moe.router.gain}
        fork = ops(fork_norm)(out, post=parts.attention_norm, residual=hidden, **readers, factor=moe.router.factor)
        if parts.cuts is None:
            dense, chosen = ops(mlp_and_experts)(fork, parts.mlp, moe.router, moe.experts)
        else:
            gated = ops(gated_linear)(fork.mlp, parts.mlp.gate_up, parts.mlp.activation)
            dense = yield from self._last_sum(gated, parts.mlp.down, None, parts.cuts.down)
            dense = Product.of(ops(finish)(dense))  # before the exchange after the next may write where it lies
            chosen = yield from self._chosen(fork.experts, fork.router, moe)
        gains: dict[str, Any] = {"dense_gain": moe.mlp_norm, "chosen_gain": moe.norm, "post": parts.mlp_norm}
        return ops(join_norm)(dense, chosen, **gains, residual=fork.hidden, **end)


class FusedDecoder(nn.Module):
    """Stands where a Hugging Face text model stood: called with the same keywords, it ignores masks and caches.

    `source` is that module, `embedding` stands for its own; its parameters are those that the layers read. When
    something has re-pointed them, `adopt` takes a new description: a forward never reads both old and new weights.
    """

    def __init__(self, source: nn.Module, embedding: nn.Module, parts: DecoderParts, ops: Operations) -> None:
        super().__init__()
        self.source: Any = source
        self.config: Any = source.config
        self.embedding, self.ops = embedding, ops
        self.layers = nn.ModuleList(FusedLayer(i, layer, None, ops) for i, layer in enumerate(parts.layers))
        self.adopt(parts)

    def adopt(self, parts: DecoderParts) -> None:
        """Run by this description of the source from now on."""
        self.parts = parts
        for layer, described, next_norm in zip(self.layers, parts.layers, parts.next_norms, strict=True):
            layer.parts, layer.next_norm = described, next_norm  # type: ignore[assignment]

    def get_input_embeddings(self) -> nn.Module:
        embedding: nn.Module = self.source.get_input_embeddings()
        return embedding

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        *,
        position_ids: torch.Tensor,
        specdec_ctx: LayerContext,
        narrowing: Narrowing | Ending | None = None,
        **unused: Any,
    ) -> BaseModelOutputWithPast:
        """input_ids or inputs_embeds, and position_ids, of any leading shape that packs to T rows -> states of that
        shape; [1, R, H] where the forward goes on with R of the rows, None where it ends with none."""
        walk = self.walk(input_ids, position_ids, specdec_ctx, narrowing, inputs_embeds)
        walk.advance(walk.num_layers)
        return BaseModelOutputWithPast(last_hidden_state=walk.finish())  # type: ignore[arg-type]

    def walk(
        self,
        input_ids: torch.Tensor | None,
        position_ids: torch.Tensor,
        context: LayerContext,
        narrowing: Narrowing | Ending | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> "DecoderWalk":
        """Begins the forward that `forward` runs, and stops before its first layer."""
        if inputs_embeds is None:
            inputs_embeds = self.embedding(input_ids)
        hidden = inputs_embeds.reshape(-1, inputs_embeds.shape[-1])
        layer_inputs = per_layer_inputs(self.parts.embeddings, hidden, input_ids, self.ops)
        states = begin(self.parts, hidden, position_ids.reshape(-1), layer_inputs, self.ops)
        return DecoderWalk(self, context, narrowing, inputs_embeds.shape, *states)


@dataclass(slots=True)
class DecoderWalk:
    """A forward of a `FusedDecoder` over rows that pack to `shape`, between two of its layers: the first `done` have
    run, and `hidden`, `normed` enter the next."""

    decoder: FusedDecoder
    context: LayerContext
    narrowing: Narrowing | Ending | None
    shape: torch.Size
    hidden: torch.Tensor
    normed: torch.Tensor
    shared: Shared
    done: int = 0

    @property
    def num_layers(self) -> int:
        """Layers that run, for some rows at least."""
        return self.narrowing.layer + 1 if isinstance(self.narrowing, Ending) else len(self.decoder.layers)

    def advance(self, end: int) -> None:
        """Run the layers before number `end` that have not run."""
        narrowing = self.narrowing
        while self.done < end:
            layer = self.decoder.layers[self.done]
            narrows = {} if narrowing is None or self.done != narrowing.layer else {"narrowing": narrowing}
            self.hidden, self.normed = layer(self.hidden, self.normed, self.shared, specdec_ctx=self.context, **narrows)
            if narrows and isinstance(narrowing, Narrowing):
                self.shared, self.context = self.shared.of(narrowing.rows), narrowing.context
            self.done += 1

    def finish(self) -> torch.Tensor | None:
        """After the last layer: the states after the final norm; see `FusedDecoder.forward`."""
        if isinstance(self.narrowing, Ending):
            return None
        last: torch.Tensor = self.decoder.ops(norm)(Product.of(self.hidden), pre=self.decoder.parts.final_norm)[1]
        return last.view(self.shape if self.narrowing is None else (1, *last.shape))
