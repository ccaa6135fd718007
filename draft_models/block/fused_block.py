"""A block drafter's head with fused layers: the same weights in few launches.

    committed positions    fc, hidden_norm; then for each layer the K and V rows of its merged QKV weight, and one
                           launch that norms, rotates and stores
    a block                `FusedLayer`: merged QKV, rotary and store in one launch, gated MLP, residual norms

If fused layers cannot express a head, `Unfusable` is raised and the head runs as a `PlainBlock`.
"""

from typing import Any

import torch
from torch import nn

from specdec.draft_models.block.block_head import BlockHead, PlainBlock, TapContext
from specdec.draft_models.heads.fused_layers import LLAMA, FusedLayers
from specdec.draft_models.heads.head_spec import HeadContext
from specdec.gpu.operations import Operations
from specdec.kvcache.layer_context import Destination
from specdec.layers.decoder import FusedLayer
from specdec.layers.description.fusable import Unfusable
from specdec.layers.fuse import fuse_linear
from specdec.layers.gemm.linear import linear
from specdec.layers.gemm.product import Product
from specdec.layers.norm import norm
from specdec.layers.rope_store import Rotary, rope_store
from specdec.modules.weight_watch import Weights


class FusedBlock(PlainBlock):
    """The fused form of a head. Raises Unfusable, with the reason as a clause."""

    def __init__(
        self, head: BlockHead, table: nn.Module, lm_head: nn.Module, weights: Weights, ops: Operations
    ) -> None:
        super().__init__(head, table, lm_head)
        if head.spec.is_gemma4:
            raise Unfusable("its layers are of Gemma 4's kind")
        self.ops = ops
        self.lm_head = fuse_linear(self.lm_head, ops)
        self.layers = FusedLayers(head, LLAMA.gain_of(head.norm), weights, ops)

    def observe(self, states: torch.Tensor, positions: torch.Tensor, context: TapContext) -> None:
        self.layers.keep_in_step()
        product = self.ops(linear)(states.flatten(0, 1), self.head.fc.weight)
        _, taps = self.ops(norm)(product, pre=LLAMA.gain_of(self.head.hidden_norm))
        angles = self.layers.angles(positions, taps.dtype)
        for layer in self.layers.layers:
            self.store_keys(layer, taps, angles, context.destination(layer.index))

    def store_keys(self, layer: FusedLayer, taps: torch.Tensor, angles: Rotary, destination: Destination) -> None:
        """Compute and store K/V of taps [T, H] with the last rows of the layer's merged weight."""
        parts = layer.parts
        heads, first = parts.heads._replace(num_q=0), parts.heads.num_q * parts.heads.head_dim
        weight: Any = parts.qkv
        bias = None if parts.qkv_bias is None else parts.qkv_bias[first:]
        self.ops(rope_store)(self.ops(linear)(taps, weight[first:], bias), heads, angles, destination)

    def run(self, tokens: torch.Tensor, positions: torch.Tensor, context: HeadContext) -> torch.Tensor:
        self.layers.keep_in_step()
        embeds = self.table(tokens).flatten(0, 1)
        angles = self.layers.angles(positions, embeds.dtype)
        first: Any = self.head.layers[0]
        state, x = self.ops(norm)(Product.from_value(embeds), pre=LLAMA.gain_of(first.input_layernorm))
        _, x = self.layers.run(state, x, angles, context)
        return x.view(*tokens.shape, -1)
