"""The drafters there are, in one list: how each is recognised, and how a checkpoint or a loaded module becomes one.

To add a drafter, add a line to `FAMILIES` (checkpoints and modules) or to `WORDS` (drafters without a checkpoint).
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import nn
from transformers import Gemma4TextConfig, Gemma4UnifiedTextConfig

from specdec.draft_models.base import Drafter, TargetInfo
from specdec.draft_models.eagle3.checkpoint_formats import is_eagle3_config
from specdec.draft_models.eagle3.eagle3_drafter import eagle3_drafter
from specdec.draft_models.gemma4_mtp import Gemma4MTPDrafter
from specdec.draft_models.ngram import NgramDrafter
from specdec.errors import UnsupportedModelError

ASSISTANT_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")


class DrafterCheckpoint(Protocol):
    """A checkpoint that a user named, not loaded yet: its name, and what its config.json holds."""

    @property
    def name(self) -> str: ...
    @property
    def config(self) -> Mapping[str, Any]: ...

    def folder(self) -> Path:
        """All its files, on disk."""

    def module(self, target: TargetInfo) -> nn.Module:
        """Loaded by transformers, in the dtype and on the device of the target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterFamily:
    """One kind of drafter. `matches` a config.json; `load` a checkpoint; `wrap` a loaded module, where there are
    any."""

    title: str
    matches: Callable[[Mapping[str, Any]], bool]
    load: Callable[[DrafterCheckpoint, TargetInfo], Drafter]
    wrap: Callable[[nn.Module, TargetInfo], Drafter] | None = None


def is_assistant_config(config: Mapping[str, Any]) -> bool:
    """Is this the config of a Gemma 4 MTP assistant?"""
    return config.get("model_type") in ASSISTANT_TYPES


FAMILIES = (
    DrafterFamily(
        title=f"Gemma 4 MTP assistants ({', '.join(ASSISTANT_TYPES)})",
        matches=is_assistant_config,
        load=lambda checkpoint, target: Gemma4MTPDrafter(checkpoint.module(target), target),
        wrap=Gemma4MTPDrafter,
    ),
    DrafterFamily(
        title="EAGLE-3 heads",
        matches=is_eagle3_config,
        load=lambda checkpoint, target: eagle3_drafter(checkpoint.folder(), target),
    ),
)

WORDS: dict[str, Callable[[], Drafter]] = {"ngram": NgramDrafter}
"""Drafters named by a word."""


def load_drafter(checkpoint: DrafterCheckpoint, target: TargetInfo) -> Drafter:
    """The drafter in a checkpoint. Raises UnsupportedModelError for a checkpoint that is none."""
    for family in FAMILIES:
        if family.matches(checkpoint.config):
            return family.load(checkpoint, target)
    raise _not_a_drafter(f"drafter {checkpoint.name!r}", checkpoint.config)


def wrap_drafter(module: nn.Module, target: TargetInfo) -> Drafter:
    """A drafter from a loaded module. Raises UnsupportedModelError for a module that is none."""
    config: Any = getattr(module, "config", None)
    described: Mapping[str, Any] = config.to_dict() if hasattr(config, "to_dict") else {}
    for family in FAMILIES:
        if family.wrap is not None and family.matches(described):
            return family.wrap(module, target)
    raise _not_a_drafter(f"drafter of class {type(module).__name__}", described)


def is_drafter_config(config: Mapping[str, Any]) -> bool:
    """Does this config.json belong to a drafter of any family?"""
    return any(family.matches(config) for family in FAMILIES)


def _not_a_drafter(what: str, config: Mapping[str, Any]) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{what} has model_type {config.get('model_type')!r}; supported are "
        f"{', '.join(family.title for family in FAMILIES)}, and by name {', '.join(WORDS)}"
    )


_LOADING = threading.RLock()


@contextmanager
def constructible_assistants() -> Iterator[None]:
    """Let transformers build an assistant, all of whose layers are kv-shared.

    Some releases (5.23 among them) compute `kv_sharing_modes` from the layers that are not shared and raise for a model
    that has none; an assistant is one. There the answer is plainly that every layer reuses. The property of the class
    is replaced for the length of the block, one block at a time, and answers so in its thread alone.
    """
    with ExitStack() as stack:
        stack.enter_context(_LOADING)
        for config_class in (Gemma4TextConfig, Gemma4UnifiedTextConfig):
            stack.enter_context(_all_layers_may_share(config_class))
        yield


@contextmanager
def _all_layers_may_share(config_class: Any) -> Iterator[None]:
    stock = vars(config_class).get("kv_sharing_modes")
    if stock is None:
        yield
        return

    loader = threading.get_ident()

    def kv_sharing_modes(config: Any) -> list[str | None]:
        if threading.get_ident() == loader and config.num_kv_shared_layers >= config.num_hidden_layers:
            return ["reuse"] * config.num_hidden_layers
        modes: list[str | None] = stock.fget(config)
        return modes

    config_class.kv_sharing_modes = property(kv_sharing_modes)
    try:
        yield
    finally:
        config_class.kv_sharing_modes = stock
