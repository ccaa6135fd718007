"""What a fused layer asks of the forward that it runs in, and how a `ForwardContext` answers.

A fused layer stores its own K/V while it rotates them, so it needs to know where; then it hands over queries. It knows
no requests, plans or tables.
"""

from typing import Protocol

import torch

from specdec.attention.bridge import ForwardContext
from specdec.layers.rope_store import Attended, Destination


class FusedContext(Protocol):
    """One forward over T packed rows."""

    def destination(self, layer: int) -> Destination | None:
        """Where this layer's new K/V go; None when it stores none: it shares another's, or reads a frozen cache."""

    def attend_fused(self, layer: int, rows: Attended, *, scaling: float) -> torch.Tensor:
        """-> [T, Hq, D], contiguous. The rows' keys and values, where the layer has its own, are stored already."""


class PlannedContext(ForwardContext):
    """A forward under a plan, for fused layers and for others."""

    __slots__ = ()

    def destination(self, layer: int) -> Destination | None:
        if self.plan.write_full is None or not self.view.owns(layer):
            return None
        kept = self.view.writable_layer(layer)
        return Destination(kept.k, kept.v, self.plan.write_slots(kept.space))

    def attend_fused(self, layer: int, rows: Attended, *, scaling: float) -> torch.Tensor:
        block: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        if self.plan.write_full is not None:
            if rows.k is not None and rows.v is not None:
                own = self._by_request(rows.k), self._by_request(rows.v)
                if layer in self.lent:
                    self.lent[layer] = own
                block = own
            else:
                block = self.lent[self.view.layer_map[layer]] or block
        kept = self.view.layer(layer)
        attend = self.attention[kept.space, self.windows[layer]]
        out = attend(self._by_request(rows.q), *block, kept.k, kept.v, scaling=scaling, softcap=None, sinks=None)
        return out.reshape(rows.q.shape)
