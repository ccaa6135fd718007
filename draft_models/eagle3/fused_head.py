"""An EAGLE-3 head with fused layers: the same weights in few launches.

    x = cat[norm(embed), norm(g)]    embed_and_norm, which looks the token up and finishes fc's split sum
    layers                           `FusedLayer`: merged QKV, rotary and store in one launch, gated MLP, residual norms
    a, norm(a)                       one launch of the last layer

If fused layers cannot express a head (biases in the MLP, other activations), `Unfusable` is raised and the head runs as
a `PlainHead`.
"""

from typing import Any

import torch
from torch import nn

from specdec.draft_models.eagle3.head import Eagle3Head, HeadOutput, PlainHead
from specdec.draft_models.heads.fused_layers import LLAMA, FusedLayers
from specdec.draft_models.heads.head_spec import HeadContext
from specdec.gpu.operations import Operations
from specdec.layers.embedding import embed_and_norm
from specdec.layers.fuse import fuse_linear
from specdec.layers.gemm.linear import linear
from specdec.layers.gemm.product import Product
from specdec.layers.norm import Norm, norm
from specdec.modules.weight_watch import Weights


class FusedHead(PlainHead):
    """The fused form of a head. Raises Unfusable, with the reason as a clause."""

    def __init__(
        self, head: Eagle3Head, table: nn.Module, lm_head: nn.Module, weights: Weights, ops: Operations
    ) -> None:
        super().__init__(head, table, lm_head)
        self.ops = ops
        self.lm_head = fuse_linear(self.lm_head, ops)
        first: Any = head.layers[0]
        self.token_gain, self.state_gain = LLAMA.gain_of(first.input_layernorm), LLAMA.gain_of(first.hidden_norm)
        self.final_gain = LLAMA.gain_of(head.norm) if head.spec.final_norm else None
        self.layers = FusedLayers(head, self.final_gain, weights, ops, beside=list(head.fc_norm or ()))

    def extend(
        self, tokens: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, context: HeadContext
    ) -> HeadOutput:
        self.layers.keep_in_step()
        return self._run(tokens, self._features(states.flatten(0, 1)), positions, context)

    def step(
        self, tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, context: HeadContext
    ) -> HeadOutput:
        self.layers.keep_in_step()
        return self._run(tokens, Product.from_value(hidden.flatten(0, 1)), positions, context)

    def norm(self, state: torch.Tensor) -> torch.Tensor:
        return self.ops(norm)(Product.from_value(state.flatten(0, -2)), pre=self.final_gain)[1].view_as(state)

    def _features(self, states: torch.Tensor) -> Product:
        """g [T, H] of states [T, A * Ht], before fc's split sum is finished."""
        head, ops = self.head, self.ops
        if self.layers.gain is not None:
            rows = states.view(-1, head.spec.target_hidden_size)  # each state is normed separately
            _, normed = ops(norm)(Product.from_value(rows), pre=Norm(None, head.spec.rms_norm_eps))
            states = self.layers.gain * normed.view_as(states)
        if head.input_norm is not None:
            _, states = ops(norm)(Product.from_value(states), pre=LLAMA.gain_of(head.input_norm))
        return Product.from_value(states) if head.fc is None else ops(linear)(states, head.fc.weight, head.fc.bias)

    def _run(self, tokens: torch.Tensor, hidden: Product, positions: torch.Tensor, context: HeadContext) -> HeadOutput:
        spec = self.head.spec
        table: torch.Tensor = self.table.weight  # type: ignore[assignment]
        angles = self.layers.angles(positions, hidden.dtype)
        inputs = tokens.reshape(-1), table, hidden, self.token_gain, self.state_gain
        state, x = self.ops(embed_and_norm)(*inputs)  # [T, H], [T, 2H]
        if spec.norm_before_residual:
            state = x[:, spec.hidden_size :]
        state, x = self.layers.run(state, x, angles, context)
        return HeadOutput(state.view(*tokens.shape, -1), x.view(*tokens.shape, -1))
