"""The head with fused layers: the same weights in few launches.

    committed positions    fc, hidden_norm; then each layer's K and V rows of its merged QKV weight, and one launch that
                           norms, rotates and stores
    a block                `FusedLayer`: merged QKV, rotary and store in one launch, gated MLP, residual norms

A head that fused layers cannot express raises `Unfusable`: it runs as a `PlainBlock`.
"""

from typing import Any

import torch
from torch import nn

from specdec.draft_models.block.block_head import BlockHead, PlainBlock, TapContext
from specdec.draft_models.eagle3.fused_head import fused_layers, gain_of, layer_parts
from specdec.draft_models.fused_form import Echo, proved_form
from specdec.draft_models.head_spec import HeadContext
from specdec.gpu.operations import Operations
from specdec.kvcache.layer_context import Destination
from specdec.layers.decoder import FusedLayer, Shared
from specdec.layers.families import Unfusable
from specdec.layers.fuse import Weights, fuse_linear
from specdec.layers.linear import linear
from specdec.layers.merge import MERGING
from specdec.layers.norm import norm
from specdec.layers.product import Product
from specdec.layers.rope_store import Rotary, rope_store, rotary
from specdec.modules.weights_lock import holds_weights_lock


class FusedBlock(PlainBlock):
    """The fused form of a head. Raises Unfusable, with the reason as a clause."""

    def __init__(
        self, head: BlockHead, table: nn.Module, lm_head: nn.Module, weights: Weights, ops: Operations
    ) -> None:
        super().__init__(head, table, lm_head)
        if head.spec.is_gemma4:
            raise Unfusable("its layers are of Gemma 4's kind")
        self.ops, self.weights = ops, weights
        self.lm_head = fuse_linear(self.lm_head, ops)
        self._describe()

    def observe(self, states: torch.Tensor, positions: torch.Tensor, context: TapContext) -> None:
        self._describe_again()
        head, ops = self.head, self.ops
        product = ops(linear)(states.flatten(0, 1), head.fc.weight)
        _, taps = ops(norm)(product, pre=gain_of(head.hidden_norm))
        angles = self._angles(positions, taps.dtype)
        for layer in self.layers:
            self.store_keys(layer, taps, angles, context.destination(layer.index))

    def store_keys(self, layer: FusedLayer, taps: torch.Tensor, angles: Rotary, destination: Destination) -> None:
        """K/V of taps [T, H]: the last rows of the layer's merged weight make them."""
        parts = layer.parts
        heads, first = parts.heads._replace(num_q=0), parts.heads.num_q * parts.heads.head_dim
        weight: Any = parts.qkv
        bias = None if parts.qkv_bias is None else parts.qkv_bias[first:]
        self.ops(rope_store)(self.ops(linear)(taps, weight[first:], bias), heads, angles, destination)

    def run(self, tokens: torch.Tensor, positions: torch.Tensor, context: HeadContext) -> torch.Tensor:
        self._describe_again()
        embeds = self.table(tokens).flatten(0, 1)
        angles = self._angles(positions, embeds.dtype)
        first: Any = self.head.layers[0]
        state, x = self.ops(norm)(Product.of(embeds), pre=gain_of(first.input_layernorm))
        for layer in self.layers:
            state, x = layer(state, x, Shared({"": angles}, None), specdec_ctx=context)
        return x.view(*tokens.shape, -1)

    def _angles(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotary:
        rope: Any = self.head.rotary_emb
        return self.ops(rotary)(positions.reshape(-1), rope.inv_freq, float(rope.attention_scaling), dtype)

    def _describe_again(self) -> None:
        """If weights have moved."""
        if self.weights.generation() != self.generation:
            self._describe()

    @holds_weights_lock()
    def _describe(self) -> None:
        """Merge the weights and note their addresses, which may have changed."""
        # outside inference mode, where a parameter cannot be given other data
        with MERGING, torch.inference_mode(False), torch.no_grad():
            parts = [layer_parts(self.head.spec, layer) for layer in self.head.layers]
        self.layers = fused_layers(parts, gain_of(self.head.norm), self.ops)
        self.generation = self.weights.generation()  # after the merge, which moves weights


def choose_block_form(plain: PlainBlock, weights: Weights, ops: Operations) -> tuple[PlainBlock, str | None]:
    """The fused form if it computes what the plain one does; else the plain one, and the reason."""
    return proved_form(
        "block", plain, lambda: FusedBlock(plain.head, plain.table, plain.lm_head, weights, ops), _probed
    )


class KeptTaps:
    """A `TapContext` that keeps K/V in tensors of its own."""

    def __init__(self, form: PlainBlock, num_rows: int) -> None:
        spec, weight = form.head.spec, form.head.fc.weight
        shape = (2, spec.num_layers, num_rows, spec.num_kv_heads, spec.head_dim)
        self.kept = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self.slots: Any = torch.arange(num_rows, device=weight.device)

    def destination(self, layer: int) -> Destination:
        return Destination(self.kept[0, layer], self.kept[1, layer], self.slots)

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self.kept[:, layer] = torch.stack([x.transpose(1, 2).flatten(0, 1) for x in (k, v)])

    def rows(self) -> torch.Tensor:
        """[T, everything of a row]."""
        return self.kept.permute(2, 0, 1, 3, 4).flatten(1)


@torch.inference_mode()
def _probed(form: PlainBlock) -> torch.Tensor:
    """Of six rows: K/V of random states, states and logits of a block, [6, ...] float32."""
    spec, weight = form.head.spec, form.head.fc.weight
    random = torch.Generator().manual_seed(0)
    states = torch.randn((2, 3, weight.shape[1]), generator=random).to(weight.device, weight.dtype)
    tokens = torch.arange(6, device=weight.device).view(2, 3) % spec.vocab_size
    taps: Any = KeptTaps(form, 6)
    with torch.autocast(weight.device.type, enabled=False):
        form.observe(states, tokens * 100, taps)
        block = form.run(tokens, tokens * 100, Echo())
        out = torch.cat([block, form.logits(block)], dim=-1).flatten(0, 1)
    parts = [x.float() for x in (taps.rows(), out)]
    # each part counts alike; a padding token's embedding may be 0, and then so is its row
    return torch.cat([x / x.norm(dim=-1, keepdim=True).clamp(min=1e-12) for x in parts], dim=-1)
