"""The fused layers of a head. They are described like Llama's layers, and described again when weights have moved."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from specdec.draft_models.heads.head_spec import HeadContext
from specdec.gpu.operations import Operations
from specdec.layers.decoder import FusedLayer, SharedInputs
from specdec.layers.description.families import FAMILIES
from specdec.layers.description.merge import WeightGroups, merge, merging
from specdec.layers.norm import Norm
from specdec.layers.rope_store import Rotary, rotary
from specdec.modules.weight_watch import Weights

LLAMA = FAMILIES["llama.LlamaModel"]


class FusedLayers:
    """The fused layers of a head in order. Each ends with the first norm of the next layer, and the last with `final`.

    beside: norms whose weights are merged too, into `gain`. Raises Unfusable.
    """

    def __init__(
        self, head: Any, final: Norm | None, weights: Weights, ops: Operations, beside: Sequence[nn.Module] = ()
    ) -> None:
        self.head, self.final, self.weights, self.ops, self.beside = head, final, weights, ops, beside
        self._describe()

    def keep_in_step(self) -> None:
        if self.weights.generation() != self.generation:
            self._describe()

    def angles(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotary:
        rope: Any = self.head.rotary_emb
        return self.ops(rotary)(positions.reshape(-1), rope.inv_freq, float(rope.attention_scaling), dtype)

    def run(
        self, state: torch.Tensor, x: torch.Tensor, angles: Rotary, context: HeadContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run all layers from the residual stream [T, H] and the first layer's input. Returns the last residual stream,
        and `final` of it."""
        for layer in self.layers:
            state, x = layer(state, x, SharedInputs({"": angles}, None), specdec_ctx=context)
        return state, x

    def _describe(self) -> None:
        """Merge the weights and note their addresses, which may have changed."""
        with merging():
            parts = [LLAMA.layer(layer, self.head, WeightGroups(unmerged=False)) for layer in self.head.layers]
            self.gain = merge([norm.weight for norm in self.beside]) if self.beside else None  # type: ignore[misc]
        norms = [*(part.input_norm for part in parts[1:]), self.final]
        self.layers = [FusedLayer(i, *each, self.ops) for i, each in enumerate(zip(parts, norms, strict=True))]
        self.generation = self.weights.generation()  # read after the merge, which moves weights
