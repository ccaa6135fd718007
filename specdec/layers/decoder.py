"""A decoder of fused layers: the order of products, norms and residuals, for every family of `FAMILIES`.

A layer takes the residual stream h and its normed form x, and passes both on: the first norm of a layer is computed at
the end of the previous layer. Steps of a layer; those in [..] exist only in some families:

    y = x W_qkv                        linear           [q/k norm over all heads]              qk_norm
                                                        [y = queries, keys, values of latents] expand_latent
    y sum, [q/k/v norm], rotary, store rope_store       a = attention                          the context
    [a = a sigmoid(x W_g) by head      linear, gate_heads]
    [a = a sigmoid(gates in y)         gate_channels]
    or of a recurrent layer:           its mixer, in the place of all between y and a
    o = a W_o                          linear           h, x = h + [f] [norm](o), [norm](h)    norm
    m = act(x W_gate) (x W_up)         gated_linear     d = m W_down                           linear
                                       x of attention's own norm where the two are parallel (Cohere)
    h = h + [f] [norm](d)              norm
    or the experts' weighted sum:      route, apply_experts
    or with a shared expert:           mlp_and_experts  d = [sigmoid(x w)] d + experts         [gate_heads], norm
    or both: d = norm(d) + norm(experts)                  fork_norm, mlp_and_experts, join_norm
    [p = W_proj (act(W_gate h) e)      linear, ple      h = h + norm(p)]                       norm, the same launch as
    h, x = [c] h, [norm] of the next layer(h)

A family is a description (`LayerParts`) made from the Hugging Face modules, whose weights it uses.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from specdec.gpu.operations import Operations
from specdec.kvcache.layer_context import EarlyExit, LayerContext, Narrowing, RecurrentContext
from specdec.layers.description.decoder_parts import DecoderParts, LayerParts, MoeParts, SumShare, WideNorms
from specdec.layers.gemm.linear import Mlp, gated_linear, linear, linear_parts
from specdec.layers.gemm.product import Product, RankShare, finish
from specdec.layers.head_gates import gate_channels, gate_heads
from specdec.layers.latent import expand_latent
from specdec.layers.moe.dense_and_moe import mlp_and_experts
from specdec.layers.moe.experts import apply_experts
from specdec.layers.moe.fork_join import BranchInputs, fork_norm, join_norm
from specdec.layers.moe.routing import route
from specdec.layers.norm import Norm, norm, qk_norm
from specdec.layers.packed.packed_weight import Weight
from specdec.layers.per_layer_embedding import gated_projection, per_layer_inputs
from specdec.layers.rope_store import Rotary, RotatedQKV, rope_store, rotary
from specdec.modules.weight_watch import RepointableModule


class SharedInputs(NamedTuple):
    """Tensors that a forward computes once for all layers: rotary tables by kind; per-layer embeddings [T, L, P], or
    None."""

    rotary: dict[str, Rotary]
    layer_inputs: torch.Tensor | None

    def select_rows(self, rows: torch.Tensor) -> "SharedInputs":
        tables = {kind: Rotary(table.cos[rows], table.sin[rows]) for kind, table in self.rotary.items()}
        return SharedInputs(tables, None if self.layer_inputs is None else self.layer_inputs[rows])


LayerState = tuple[torch.Tensor, torch.Tensor, SharedInputs]
"""State of a forward between two layers: the residual stream [T, H], its normed form for the next layer, and the
tensors that all layers share."""


def embed_inputs(
    parts: DecoderParts, embedded: torch.Tensor, positions: torch.Tensor, inputs: torch.Tensor | None, ops: Operations
) -> LayerState:
    """Begin a forward. Embeddings [T, H], positions [T], per-layer embeddings [T, L, P] or None -> its state."""
    dtype = torch.float32 if parts.float_rotary else embedded.dtype
    tables = {
        kind: ops(rotary)(positions, frequencies, factor, dtype) for kind, (frequencies, factor) in parts.rotary.items()
    }
    hidden, normed = ops(norm)(Product.from_value(embedded), factor=parts.factor, pre=parts.layers[0].input_norm)
    return hidden, normed, SharedInputs(tables, inputs)


LayerRun = Generator[RankShare, Product, tuple[torch.Tensor, torch.Tensor]]
"""A layer in progress, as a generator. It yields each product of which other ranks may have parts, is sent the complete
product, and returns the residual stream and its normed form for the next layer."""


class FusedLayer(nn.Module):
    """One decoder layer. `next_norm` is the first norm of the next layer."""

    def __init__(self, index: int, parts: LayerParts, next_norm: Norm | None, ops: Operations) -> None:
        super().__init__()
        self.index, self.parts, self.next_norm, self.ops = index, parts, next_norm, ops

    def forward(
        self, *state: *LayerState, specdec_ctx: LayerContext, narrowing: Narrowing | EarlyExit | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the whole layer on one device; see `begin`."""
        run = self.begin(*state, specdec_ctx, narrowing)
        try:
            share = next(run)
            while True:  # there are no other ranks
                share = run.send(share.product)
        except StopIteration as end:
            ended: tuple[torch.Tensor, torch.Tensor] = end.value
            return ended

    def begin(
        self,
        hidden: torch.Tensor,
        normed: torch.Tensor,
        shared: SharedInputs,
        context: LayerContext,
        narrowing: Narrowing | EarlyExit | None = None,
    ) -> LayerRun:
        """Returns the next layer's inputs (hidden, normed [T, H]) for the rows that continue; on an early exit, its own
        inputs. A generator, so that several ranks can run it with a share of the layer each."""
        parts, ops = self.parts, self.ops
        product = ops(linear)(normed, parts.qkv, parts.qkv_bias, parts.split_ks.qkv)
        if parts.mixer is not None:  # every row changes the state, even if it does not continue
            rows = parts.mixer.run(product, normed, self.index, cast(RecurrentContext, context), ops)
        else:
            if parts.wide_norms is not None:
                product = yield from self._norm_all_heads(product, parts.wide_norms)
            if parts.latent is not None:
                product = expand_latent(product, parts.latent, parts.heads, ops)
            qkv = ops(rope_store)(product, parts.heads, shared.rotary[parts.kind], context.destination(self.index))
        if isinstance(narrowing, EarlyExit):
            return hidden, normed
        layer_inputs = shared.layer_inputs
        if narrowing is not None:  # the states and the K/V of all rows are stored; only the chosen rows continue
            chosen, context = narrowing.rows, narrowing.context
            hidden, normed = hidden[chosen], normed[chosen]
            layer_inputs = None if layer_inputs is None else layer_inputs[chosen]
            if parts.mixer is not None:
                rows = tuple(row[chosen] for row in rows)
            else:
                qkv = RotatedQKV(qkv.q[chosen], None, None)
                product = product._replace(parts=product.parts[:, chosen]) if parts.heads.gated else product
        if parts.mixer is not None:
            mixed = parts.mixer.finish(rows, ops)
        else:
            mixed = self._attend(qkv, product, normed, context)
        out = yield from self._sum_product(mixed, parts.out, parts.out_bias, parts.split_ks.out)
        end: dict[str, Any] = {"scale": parts.scale, "pre": self.next_norm}
        if parts.ple is None or layer_inputs is None:
            return (yield from self._feed_forward(out, hidden, normed, **end))
        hidden, _ = yield from self._feed_forward(out, hidden, normed)
        gate = ops(linear)(hidden, parts.ple.gate)
        layer_input = layer_inputs[:, self.index]
        added = ops(gated_projection)(gate, layer_input, parts.ple.projection, parts.ple.activation)
        return ops(norm)(added, post=parts.ple.norm, residual=hidden, late=parts.norms_late, **end)

    def _attend(self, qkv: RotatedQKV, product: Product, normed: torch.Tensor, context: LayerContext) -> torch.Tensor:
        """Attention of some rows -> [R, Hq D], gated if the model does so: by the rows' product or by their normed
        states."""
        parts, ops = self.parts, self.ops
        attended = context.attend_tokens(
            self.index, *qkv, scaling=parts.scaling, softcap=parts.softcap, sinks=parts.sinks
        )
        if parts.head_gates is not None:
            attended = ops(gate_heads)(attended, ops(linear)(normed, parts.head_gates))
        if parts.heads.gated:
            attended = ops(gate_channels)(attended, product)
        return attended.flatten(1)

    def _norm_all_heads(self, qkv: Product, norms: WideNorms) -> Generator[RankShare, Product, Product]:
        """Norm over all heads: a rank gets the heads of all ranks, then keeps its own."""
        heads, count = self.parts.heads, norms.num_ranks
        if count == 1:
            return self.ops(qk_norm)(qkv, norms.q, norms.k)
        by_rank = yield RankShare(Product.from_value(self.ops(finish)(qkv)), columns=True)
        widths = [number * heads.head_dim for number in (heads.num_q, heads.num_kv, heads.num_kv)]
        shares = [count, norms.kv_shares, norms.kv_shares]
        kinds = by_rank.parts[0].unflatten(1, (count, -1)).split(widths, dim=2)  # q, k, v: [T, R, heads]
        distinct = [kind[:, :: count // share].flatten(1) for kind, share in zip(kinds, shares, strict=True)]
        whole = self.ops(qk_norm)(Product.from_value(torch.cat(distinct, 1)), norms.q, norms.k)
        kinds = whole.parts[0].split([kind.shape[1] for kind in distinct], dim=1)
        own = [kind.chunk(share, 1)[norms.rank * share // count] for kind, share in zip(kinds, shares, strict=True)]
        return Product.from_value(torch.cat(own, 1))

    def _sum_product(
        self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, share: SumShare | None
    ) -> Generator[RankShare, Product, Product]:
        """Finish a product of which this rank may have only a share."""
        if share is None:
            return (yield RankShare(self.ops(linear)(x, weight, bias)))
        if share.by_rows:
            whole = yield RankShare(Product.from_value(x), columns=True)
            own = self.ops(linear)(whole.parts[0], weight, bias, share.split_k)
            return (yield RankShare(Product.from_value(self.ops(finish)(own)), columns=True))
        assert isinstance(weight, torch.Tensor), "a packed weight is shared by rows"
        return (yield RankShare(self.ops(linear_parts)(x, weight, share.split_k)._replace(bias=bias)))

    def _feed_forward(self, out: Product, hidden: torch.Tensor, x: torch.Tensor, **end: Any) -> LayerRun:
        """Add attention's output to the residual, then the output of the MLP or experts. These read the sum, or x
        (attention's input) if they run in parallel.

        end: further arguments of the norm after them.
        """
        parts, moe, ops = self.parts, self.parts.moe, self.ops
        if moe is not None and moe.input_norm is not None:
            return (yield from self._run_branches(moe, out, hidden, **end))
        options: dict[str, Any] = {"factor": parts.factor, "late": parts.norms_late}
        hidden, normed = ops(norm)(out, post=parts.attention_norm, residual=hidden, pre=parts.mlp_input_norm, **options)
        if parts.parallel:
            normed = x
        if moe is not None and parts.mlp is not None:
            shared, added = yield from self._mlp_and_experts(
                BranchInputs(hidden, normed, normed, normed), parts.mlp, moe
            )
            end["addend"] = shared
        elif moe is not None:
            added = yield from self._run_experts(normed, normed, moe)
        else:
            assert parts.mlp is not None
            gated = ops(gated_linear)(normed, parts.mlp.gate_up, parts.mlp.activation, parts.mlp.limit)
            added = yield from self._sum_product(gated, parts.mlp.down, None, parts.split_ks.down)
        return ops(norm)(added, post=parts.mlp_norm, residual=hidden, **options, **end)

    def _run_experts(
        self, x: torch.Tensor, router_x: torch.Tensor, moe: MoeParts
    ) -> Generator[RankShare, Product, Product]:
        routing = self.ops(route)(router_x, moe.router)
        product = self.ops(apply_experts)(x, routing, moe.experts)
        return (yield RankShare(product, owners=routing.experts)) if moe.experts.shared else product

    def _run_branches(self, moe: MoeParts, out: Product, hidden: torch.Tensor, **end: Any) -> LayerRun:
        parts, ops = self.parts, self.ops
        assert parts.mlp is not None and parts.attention_norm is not None and parts.factor == 1.0
        norms: dict[str, Any] = {"mlp": parts.mlp_input_norm, "experts": moe.input_norm, "router": moe.router.gain}
        inputs = ops(fork_norm)(out, post=parts.attention_norm, residual=hidden, **norms, factor=moe.router.factor)
        dense, chosen = yield from self._mlp_and_experts(inputs, parts.mlp, moe)
        gains: dict[str, Any] = {"dense_gain": moe.mlp_norm, "chosen_gain": moe.norm, "post": parts.mlp_norm}
        return ops(join_norm)(dense, chosen, **gains, residual=inputs.hidden, **end)

    def _mlp_and_experts(
        self, inputs: BranchInputs, mlp: Mlp, moe: MoeParts
    ) -> Generator[RankShare, Product, tuple[Product, Product]]:
        ops, share = self.ops, self.parts.split_ks.down
        if share is None:
            dense, chosen = ops(mlp_and_experts)(inputs, mlp, moe.router, moe.experts)
        else:
            gated = ops(gated_linear)(inputs.mlp, mlp.gate_up, mlp.activation, mlp.limit)
            dense = yield from self._sum_product(gated, mlp.down, None, share)
            dense = Product.from_value(ops(finish)(dense))  # copied before a later exchange may overwrite it
            chosen = yield from self._run_experts(inputs.experts, inputs.router, moe)
        if moe.shared_gate is not None:
            whole = ops(finish)(dense)[:, None]  # [T, 1, H]
            dense = Product.from_value(ops(gate_heads)(whole, ops(linear)(inputs.mlp, moe.shared_gate))[:, 0])
        return dense, chosen


def described_layers(parts: DecoderParts, ops: Operations) -> list[FusedLayer]:
    layers = zip(parts.layers, parts.next_norms, strict=True)
    return [FusedLayer(i, layer, next_norm, ops) for i, (layer, next_norm) in enumerate(layers)]


class FusedDecoder(RepointableModule):
    """Replaces a Hugging Face text model. It takes the same keywords, but ignores masks and caches.

    `source` is that model, whose parameters the layers read; `embedding` replaces its embedding. describe: makes the
    description of the source. If parameters were re-pointed, `describe_again` replaces the whole description: a forward
    never reads both old and new weights.
    """

    def __init__(
        self, source: nn.Module, embedding: nn.Module, describe: Callable[[nn.Module], DecoderParts], ops: Operations
    ) -> None:
        super().__init__()
        self.source: Any = source
        self.config: Any = source.config
        self.embedding, self.ops, self._describe = embedding, ops, describe
        self.parts = parts = describe(source)
        self.layers = nn.ModuleList(described_layers(parts, ops))

    def describe_again(self) -> None:
        self.parts = parts = self._describe(self.source)
        for layer, described, next_norm in zip(self.layers, parts.layers, parts.next_norms, strict=True):
            layer.parts, layer.next_norm = described, next_norm  # type: ignore[assignment]

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        *,
        position_ids: torch.Tensor,
        specdec_ctx: LayerContext,
        narrowing: Narrowing | EarlyExit | None = None,
        **unused: Any,
    ) -> BaseModelOutputWithPast:
        """Run the model: input_ids or inputs_embeds, and position_ids, of any leading shape with T rows -> states of
        that shape. If only R rows continue: [1, R, H]; if none does: None."""
        paused = self.begin_forward(input_ids, position_ids, specdec_ctx, narrowing, inputs_embeds)
        paused.advance(paused.num_layers)
        return BaseModelOutputWithPast(last_hidden_state=paused.finish())  # type: ignore[arg-type]

    def begin_forward(
        self,
        input_ids: torch.Tensor | None,
        position_ids: torch.Tensor,
        context: LayerContext,
        narrowing: Narrowing | EarlyExit | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> "PausedDecoder":
        """Begin the forward of `forward`, stopped before the first layer."""
        if inputs_embeds is None:
            inputs_embeds = self.embedding(input_ids)
        hidden = inputs_embeds.reshape(-1, inputs_embeds.shape[-1])
        tables = self.parts.embeddings
        layer_inputs = None if tables is None else per_layer_inputs(tables, hidden, input_ids, self.ops)
        states = embed_inputs(self.parts, hidden, position_ids.reshape(-1), layer_inputs, self.ops)
        return PausedDecoder(self, context, narrowing, inputs_embeds.shape, *states)


@dataclass(slots=True)
class PausedDecoder:
    """A paused forward of a `FusedDecoder` over rows of shape `shape`: its first `done` layers have run, and `hidden`,
    `normed` enter the next layer."""

    decoder: FusedDecoder
    context: LayerContext
    narrowing: Narrowing | EarlyExit | None
    shape: torch.Size
    hidden: torch.Tensor
    normed: torch.Tensor
    shared: SharedInputs
    done: int = 0

    @property
    def num_layers(self) -> int:
        """Number of layers that run for at least some rows."""
        return self.narrowing.layer + 1 if isinstance(self.narrowing, EarlyExit) else len(self.decoder.layers)

    def advance(self, end: int) -> None:
        """Run the remaining layers before number `end`."""
        narrowing = self.narrowing
        while self.done < end:
            layer = self.decoder.layers[self.done]
            here = narrowing if narrowing is not None and narrowing.layer == self.done else None
            state = self.hidden, self.normed, self.shared
            self.hidden, self.normed = layer(*state, specdec_ctx=self.context, narrowing=here)
            if isinstance(here, Narrowing):
                self.shared, self.context = self.shared.select_rows(here.rows), here.context
            self.done += 1

    def finish(self) -> torch.Tensor | None:
        """After the last layer, return the states after the final norm; see `FusedDecoder.forward`."""
        if isinstance(self.narrowing, EarlyExit):
            return None
        last = self.decoder.ops(norm)(Product.from_value(self.hidden), pre=self.decoder.parts.final_norm)[1]
        return last.view(self.shape if self.narrowing is None else (1, *last.shape))
