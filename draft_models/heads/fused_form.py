"""Proves a drafter's fused layers: on a few random rows they must compute the same as its own modules."""

import logging
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from specdec.attention.bridge import AttentionCall
from specdec.draft_models.heads.head_spec import HeadForm
from specdec.layers.description.fusable import Unfusable
from specdec.layers.description.merge import held_storages

logger = logging.getLogger("specdec")

Form = TypeVar("Form", bound=HeadForm)

FUSED_BOUND = 0.03
"""Largest allowed relative difference of the median row, per square root of the layers. A wrong layer differs by about
1."""


class EchoContext:
    """A forward context without K/V, in which two forms of a drafter can be compared: its attention returns the
    queries, cut to the width of values."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        own = call.key.shape[-1] == call.query.shape[-1]  # else they are placeholders for another model's K/V
        return call.query.transpose(1, 2)[..., : call.value.shape[-1] if own else None]

    def destination(self, layer: int) -> None:
        return None

    def attend_tokens(
        self, layer: int, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, **options: Any
    ) -> torch.Tensor:
        return q if v is None else q[..., : v.shape[-1]]


def why_unfused(
    name: str,
    module: nn.Module,
    num_layers: int,
    plain: Callable[[], torch.Tensor],
    fused: Callable[[], torch.Tensor],
) -> str | None:
    """Compare both forms. If the fused layers of `module` may not run, log and return the reason; None: they may.

    plain: returns rows [R, W] float32 of its own modules; called first. fused: puts fused layers in place, which merges
    weights, and returns the same rows.
    """
    held = held_storages(module)
    level = logging.WARNING
    try:
        expected = plain()
        error = (fused() - expected).norm(dim=-1) / expected.norm(dim=-1)
        bound = FUSED_BOUND * math.sqrt(1 + num_layers)
        reason = None if error.median() <= bound else "its fused layers compute something else than its own"
    except torch.OutOfMemoryError:
        raise
    except Exception as refusal:  # of any kind, since kernels are compiled here
        reason = str(refusal) or type(refusal).__name__
        level = logging.INFO if isinstance(refusal, Unfusable) else level
    del held
    if reason is not None:
        logger.log(level, "drafter %s runs unfused: %s", name, reason)
    return reason


def proved_form(name: str, plain: Form, fused: Callable[[], Form]) -> tuple[Form, str | None]:
    """The fused form if it computes the same as the plain one; else the plain form and the reason."""
    made: list[Form] = []

    def rows_of_fused() -> torch.Tensor:
        made.append(fused())
        return made[0].probed()

    reason = why_unfused(name, plain.head, len(plain.head.layers), plain.probed, rows_of_fused)
    return (made[0], None) if reason is None else (plain, reason)
