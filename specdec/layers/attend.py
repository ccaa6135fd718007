"""What a fused layer asks of the forward that it runs in, and how today's `ForwardContext` answers.

A fused layer stores its own K/V while it rotates them, so it needs to know where; then it hands over queries. It knows
no requests, plans or tables.
"""

from typing import Protocol

import torch

from specdec.attention.bridge import ForwardContext
from specdec.kvcache.spaces import FullLoc, Space, SwaLoc
from specdec.layers.rope_store import Attended, Destination


class FusedContext(Protocol):
    """One forward over T packed rows."""

    def destination(self, layer: int) -> Destination | None:
        """Where this layer's new K/V go; None when it stores none: it shares another's, or reads a frozen cache."""

    def attend_fused(self, layer: int, rows: Attended, *, scaling: float) -> torch.Tensor:
        """-> [T, Hq, D], contiguous. The rows' keys and values, where the layer has its own, are stored already."""


class PlannedContext:
    """A `FusedContext` over a plan and a view."""

    def __init__(self, forward: ForwardContext) -> None:
        self._forward = forward

    def destination(self, layer: int) -> Destination | None:
        plan, view = self._forward.plan, self._forward.view
        if plan.write_full is None or not view.owns(layer):
            return None
        pool_k, pool_v, space = view.layer(layer)
        slots: FullLoc | SwaLoc | None = plan.write_full if space is Space.FULL else plan.write_swa
        assert slots is not None, f"layer {layer} is sliding, but the plan holds no SWA locations"
        return Destination(pool_k, pool_v, slots)

    def attend_fused(self, layer: int, rows: Attended, *, scaling: float) -> torch.Tensor:
        forward = self._forward
        block: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        if forward.plan.write_full is not None:
            if rows.k is not None and rows.v is not None:
                own = self._by_request(rows.k), self._by_request(rows.v)
                if layer in forward.lent:
                    forward.lent[layer] = own
                block = own
            else:
                block = forward.lent[forward.view.layer_map[layer]] or block
        pool_k, pool_v, _ = forward.view.layer(layer)
        attend = forward.by_window[forward.windows[layer]]
        out = attend(self._by_request(rows.q), *block, pool_k, pool_v, scaling=scaling, softcap=None, sinks=None)
        return out.reshape(rows.q.shape)

    def _by_request(self, rows: torch.Tensor) -> torch.Tensor:
        """[B*N, H, D] -> [B, H, N, D], a view."""
        return rows.view(*self._forward.plan.positions.shape, *rows.shape[1:]).transpose(1, 2)
