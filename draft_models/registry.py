"""From what a user names ("ngram", a module, a checkpoint's config) to a drafter bound to a target."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from transformers import Gemma4TextConfig, Gemma4UnifiedTextConfig

from specdec.draft_models.base import Drafter, TargetInfo
from specdec.draft_models.gemma4_mtp import Gemma4MTPDrafter
from specdec.draft_models.ngram import NgramDrafter
from specdec.errors import UnsupportedModelError

MODEL_FREE_DRAFTERS: dict[str, Callable[[], Drafter]] = {"ngram": NgramDrafter}
"""Drafters named by a word."""

MODULE_DRAFTERS: dict[str, Callable[[nn.Module, TargetInfo], Drafter]] = {
    "gemma4_assistant": Gemma4MTPDrafter,
    "gemma4_unified_assistant": Gemma4MTPDrafter,
}
"""Drafters by the `model_type` of their checkpoint."""


def require_known_drafter(model_type: str, name: str) -> None:
    """Raise UnsupportedModelError unless a checkpoint of this type is a drafter."""
    if model_type not in MODULE_DRAFTERS:
        raise UnsupportedModelError(
            f"drafter {name!r} has model_type {model_type!r}; supported are {', '.join(MODULE_DRAFTERS)}, EAGLE-3 "
            f"heads, and by name {', '.join(MODEL_FREE_DRAFTERS)}"
        )


def drafter_from_module(module: nn.Module, target: TargetInfo) -> Drafter:
    """Bind a loaded drafter module to the target."""
    config: Any = getattr(module, "config", None)
    model_type = str(getattr(config, "model_type", type(module).__name__))
    require_known_drafter(model_type, type(module).__name__)
    return MODULE_DRAFTERS[model_type](module, target)


@contextmanager
def constructible_assistants() -> Iterator[None]:
    """Let transformers build an assistant, all of whose layers are kv-shared.

    Some releases (5.23 among them) compute `kv_sharing_modes` from the layers that are not shared and raise for a model
    that has none; an assistant is one. There the answer is plainly that every layer reuses.
    """
    with ExitStack() as stack:
        for config_class in (Gemma4TextConfig, Gemma4UnifiedTextConfig):
            stack.enter_context(_all_layers_may_share(config_class))
        yield


@contextmanager
def _all_layers_may_share(config_class: Any) -> Iterator[None]:
    stock = vars(config_class).get("kv_sharing_modes")
    if stock is None:
        yield
        return

    def kv_sharing_modes(config: Any) -> list[str | None]:
        if config.num_kv_shared_layers >= config.num_hidden_layers:
            return ["reuse"] * config.num_hidden_layers
        modes: list[str | None] = stock.fget(config)
        return modes

    config_class.kv_sharing_modes = property(kv_sharing_modes)
    try:
        yield
    finally:
        config_class.kv_sharing_modes = stock
