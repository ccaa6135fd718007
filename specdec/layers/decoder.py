"""A decoder of fused layers: the order of products, norms and residuals, for every family that `fuse` knows.

A layer takes the residual stream h and its normed form x, and hands both to the next: the norm that begins a layer is
computed where the one before ends. Per layer, with [..] where the family has it:

    y = x W_qkv                        linear           y sum, [q/k/v norm], rotary, store     rope_store
    a = attention                      the context      o = a W_o                              linear
    h, x = h + [norm](o), norm(h)      norm             m = act(x W_gate) (x W_up)             gated_linear
    d = m W_down                       linear           h = h + [norm](d)                      norm
    [p = W_proj (act(W_gate h) e)      linear, ple      h = h + norm(p)]                       norm, the same launch as
    h, x = [c] h, norm of the next layer(h)

The families are descriptions (`LayerParts`) read off the Hugging Face modules; the weights are theirs.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from specdec.layers.attend import FusedContext
from specdec.layers.linear import Product
from specdec.layers.norm import Gain
from specdec.layers.operations import Operations
from specdec.layers.rope_store import Heads
from specdec.layers.rotary import Rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class PleParts:
    """Gemma 4's per-layer embedding in one layer: W_gate [P, H], W_proj [H, P], the norm behind them."""

    gate: torch.Tensor
    projection: torch.Tensor
    norm: Gain


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """One decoder layer. `qkv` and `gate_up` are merged weights; `kind` names its rotary table."""

    kind: str
    heads: Heads
    scaling: float
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    input_norm: Gain
    attention_norm: Gain | None  # on what attention adds
    mlp_input_norm: Gain
    gate_up: torch.Tensor
    activation: str
    down: torch.Tensor
    mlp_norm: Gain | None  # on what the MLP adds
    ple: PleParts | None = None
    scale: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingParts:
    """Gemma 4's per-layer embeddings, what is computed once a forward (`reference_layer_inputs`)."""

    context: torch.Tensor
    table: torch.Tensor
    norm: Gain
    context_scale: float
    table_scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderParts:
    """`rotary`: kind of layer -> (frequencies, attention factor). `merged`: parameters that share a storage now."""

    layers: tuple[LayerParts, ...]
    final_norm: Gain
    rotary: dict[str, tuple[torch.Tensor, float]]
    merged: tuple[tuple[torch.Tensor, ...], ...]
    embeddings: EmbeddingParts | None = None


class FusedNorm(nn.Module):
    """The norm behind the last layer."""

    def __init__(self, gain: Gain, ops: Operations) -> None:
        super().__init__()
        self.gain, self.ops = gain, ops

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.ops.norm(Product.of(hidden), pre=self.gain)[1]


class FusedLayer(nn.Module):
    """One decoder layer; `next_norm` is how the next one begins."""

    def __init__(self, index: int, parts: LayerParts, next_norm: Gain | None, ops: Operations) -> None:
        super().__init__()
        self.index, self.parts, self.next_norm, self.ops = index, parts, next_norm, ops

    def forward(
        self,
        hidden: torch.Tensor,
        normed: torch.Tensor,
        rotary: Rotary,
        layer_input: torch.Tensor | None,
        *,
        specdec_ctx: FusedContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden, normed [T, H], layer_input [T, P] -> the next layer's hidden and normed."""
        parts, ops = self.parts, self.ops
        qkv = ops.linear(normed, parts.qkv, parts.qkv_bias)
        rows = ops.rope_store(qkv, parts.heads, rotary, specdec_ctx.destination(self.index))
        attended = specdec_ctx.attend_fused(self.index, rows, scaling=parts.scaling)
        out = ops.linear(attended.flatten(1), parts.out, parts.out_bias)
        hidden, normed = ops.norm(out, post=parts.attention_norm, residual=hidden, pre=parts.mlp_input_norm)
        down = ops.linear(ops.gated_linear(normed, parts.gate_up, parts.activation), parts.down)
        if parts.ple is None:
            return ops.norm(down, post=parts.mlp_norm, residual=hidden, scale=parts.scale, pre=self.next_norm)
        hidden, _ = ops.norm(down, post=parts.mlp_norm, residual=hidden)
        gate = ops.linear(hidden, parts.ple.gate)
        added = ops.gated_projection(gate, layer_input, parts.ple.projection, parts.activation)
        return ops.norm(added, post=parts.ple.norm, residual=hidden, scale=parts.scale, pre=self.next_norm)


class FusedDecoder(nn.Module):
    """Stands where a Hugging Face text model stood: called with the same keywords, it ignores masks and caches.

    `source` is that module; its embedding is used, its parameters are those that the layers read.
    """

    def __init__(self, source: nn.Module, parts: DecoderParts, ops: Operations) -> None:
        super().__init__()
        self.source: Any = source
        self.config: Any = source.config
        self.parts, self.ops = parts, ops
        following = [*(layer.input_norm for layer in parts.layers[1:]), None]
        layers = zip(parts.layers, following, strict=True)
        self.layers = nn.ModuleList(FusedLayer(i, layer, norm, ops) for i, (layer, norm) in enumerate(layers))
        self.norm = FusedNorm(parts.final_norm, ops)

    def get_input_embeddings(self) -> nn.Module:
        embedding: nn.Module = self.source.get_input_embeddings()
        return embedding

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        specdec_ctx: FusedContext | None = None,
        **unused: Any,
    ) -> BaseModelOutputWithPast:
        """input_ids or inputs_embeds, and position_ids, of any leading shape that packs to T rows."""
        assert position_ids is not None and specdec_ctx is not None
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        hidden = inputs_embeds.reshape(-1, inputs_embeds.shape[-1])
        positions = position_ids.reshape(-1)
        tables = {
            kind: self.ops.rotary(positions, frequencies, factor, hidden.dtype)
            for kind, (frequencies, factor) in self.parts.rotary.items()
        }
        inputs = self._layer_inputs(hidden, input_ids)
        _, normed = self.ops.norm(Product.of(hidden), pre=self.parts.layers[0].input_norm)
        for i, layer in enumerate(self.layers):
            layer_input = None if inputs is None else inputs[:, i]
            table = tables[self.parts.layers[i].kind]
            hidden, normed = layer(hidden, normed, table, layer_input, specdec_ctx=specdec_ctx)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden).view(inputs_embeds.shape))

    def _layer_inputs(self, hidden: torch.Tensor, input_ids: torch.Tensor | None) -> torch.Tensor | None:
        parts = self.parts.embeddings
        if parts is None:
            return None
        assert input_ids is not None, "per-layer embeddings are looked up by token"
        scales = {"context_scale": parts.context_scale, "table_scale": parts.table_scale}
        context = self.ops.linear(hidden, parts.context)
        return self.ops.layer_inputs(context, input_ids.reshape(-1), parts.table, parts.norm, **scales)
