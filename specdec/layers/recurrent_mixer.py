"""What a fused layer runs in the place of attention where the layer is recurrent: `FusedMixer`, which each kind of
recurrent layer implements."""

from typing import Protocol

import torch

from specdec.gpu.operations import Operations
from specdec.kvcache.layer_context import RecurrentContext
from specdec.layers.product import Product


class FusedMixer(Protocol):
    """A recurrent layer between its first product and its last."""

    def run(
        self, product: Product, x: torch.Tensor, layer: int, context: RecurrentContext, ops: Operations
    ) -> tuple[torch.Tensor, ...]:
        """product [T, N] of x [T, H] by the layer's first weight -> tensors of T rows, which `finish` reads."""

    def finish(self, rows: tuple[torch.Tensor, ...], ops: Operations) -> torch.Tensor:
        """Some rows of what `run` returns [R, ...] -> what the last product reads [R, K]."""
