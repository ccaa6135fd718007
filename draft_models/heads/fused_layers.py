"""The fused layers of a head, and the proof of any drafter's fused layers.

The layers are described like Llama's, and described again when weights have moved. On a few random rows they must
compute the same as the drafter's own modules.
"""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from specdec.gpu.operations import Operations
from specdec.kvcache.layer_context import LayerContext, OwnRows
from specdec.layers.decoder import FusedLayer, SharedInputs
from specdec.layers.description.decoder_parts import Unfusable
from specdec.layers.description.families import FAMILIES
from specdec.layers.description.merge import held_storages, merge, merging
from specdec.layers.rope_store import Rotary, rotary
from specdec.modules.weight_watch import RepointableModule

logger = logging.getLogger("specdec")

Parts = Sequence[tuple[Any, str, object]]
"""(owner, name of its attribute, new value)."""
LLAMA = FAMILIES["llama.LlamaModel"]

FUSED_BOUND = 0.03
"""Largest allowed relative difference of the median row, per square root of the layers. A wrong layer differs by about
1."""


class EchoContext(LayerContext):
    """A forward context without K/V, in which two forms of a drafter can be compared: its attention returns the
    queries, cut to the width of values."""

    def attend_tokens(self, layer: int, q: torch.Tensor, k: OwnRows, v: OwnRows, **options: Any) -> torch.Tensor:
        if k is None or v is None or k.shape[-1] != q.shape[-1]:  # placeholders for another model's K/V
            return q
        return q[..., : v.shape[-1]]


def fuse_in_place(
    name: str, module: nn.Module, num_layers: int, probed: Callable[[], torch.Tensor], fused: Callable[[], Parts]
) -> str | None:
    """Put fused parts of `module` in place if they compute the same. If not, log and return the reason; else None.

    probed: returns rows [R, W] float32 of the form in place. fused: makes the fused parts, which merges weights.
    """
    held, plain = held_storages(module), list[tuple[Any, str, object]]()
    level = logging.WARNING
    try:
        expected = _undisturbed(probed, module)
        for owner, part, form in fused():
            plain.append((owner, part, getattr(owner, part)))
            setattr(owner, part, form)
        error = (_undisturbed(probed, module) - expected).norm(dim=-1) / expected.norm(dim=-1)
        bound = FUSED_BOUND * math.sqrt(1 + num_layers)
        reason = None if error.median() <= bound else "its fused layers do not compute the same as its modules"
    except torch.OutOfMemoryError:
        raise
    except Exception as refusal:  # of any kind, since kernels are compiled here
        reason = str(refusal) or type(refusal).__name__
        level = logging.INFO if isinstance(refusal, Unfusable) else level
    del held
    if reason is not None:
        for owner, part, form in plain:
            setattr(owner, part, form)
        logger.log(level, "drafter %s runs unfused: %s", name, reason)
    return reason


@torch.inference_mode()
def _undisturbed(probed: Callable[[], torch.Tensor], module: nn.Module) -> torch.Tensor:
    """The rows of a form, whatever the caller's autocast."""
    with torch.autocast(next(module.parameters()).device.type, enabled=False):
        return probed()


class FusedLayers(RepointableModule):
    """The fused layers of a head in order. Each ends with the first norm of the next layer, and the last with the
    head's.

    extra_norms: further norms, whose weights are merged too, into `gain`. Raises Unfusable.
    """

    def __init__(self, head: nn.Module, ops: Operations, extra_norms: Sequence[nn.Module] = ()) -> None:
        super().__init__()
        self.head, self.ops, self.extra_norms = head, ops, extra_norms
        self.describe_again()

    def describe_again(self) -> None:
        with merging():
            parts = LLAMA(self.head)
            self.gain = merge([norm.weight for norm in self.extra_norms]) if self.extra_norms else None  # type: ignore[misc]
        norms = [*parts.next_norms[:-1], parts.final_norm]
        self.layers = [FusedLayer(i, *each, self.ops) for i, each in enumerate(zip(parts.layers, norms, strict=True))]
        self.rope = parts.rotary[""]

    def angles(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotary:
        return self.ops(rotary)(positions.reshape(-1), *self.rope, dtype)

    def run(
        self, state: torch.Tensor, x: torch.Tensor, positions: torch.Tensor, context: LayerContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run all layers from the residual stream [T, H] and the first layer's input. Returns the last residual stream,
        and the head's norm of it."""
        shared = SharedInputs({"": self.angles(positions, x.dtype)}, None)
        for layer in self.layers:
            state, x = layer(state, x, shared, specdec_ctx=context)
        return state, x
