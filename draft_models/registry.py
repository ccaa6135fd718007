"""The list of all drafters: how each is recognised, and how it is made from a checkpoint.

To add a drafter, add a line to `FAMILIES` (with checkpoints) or to `WORDS` (without).
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import nn

from specdec.draft_models.base import Drafter, TargetInfo
from specdec.draft_models.block.block_drafter import block_drafter
from specdec.draft_models.checkpoints.drafter_formats import is_block_config, is_eagle3_config
from specdec.draft_models.eagle3.eagle3_drafter import eagle3_drafter
from specdec.draft_models.gemma4_mtp import (
    ASSISTANT_TYPES,
    Gemma4MTPDrafter,
    constructible_assistants,
    is_assistant_config,
)
from specdec.draft_models.lookup import NgramDrafter, SuffixDrafter
from specdec.errors import ConfigError, UnsupportedModelError


class DrafterCheckpoint(Protocol):
    """A checkpoint that a user named but that is not loaded yet: its name, and the content of its config.json."""

    @property
    def name(self) -> str: ...
    @property
    def config(self) -> Mapping[str, Any]: ...

    def folder(self) -> Path:
        """The folder with all its files; a hub checkpoint is downloaded."""

    def module(self, target: TargetInfo) -> nn.Module:
        """Load it by transformers, in the dtype and on the device of the target."""


class DrafterFamily(NamedTuple):
    """A kind of drafter that has checkpoints. matches: does this config.json belong to it? load: makes the drafter."""

    title: str
    matches: Callable[[Mapping[str, Any]], bool]
    load: Callable[[DrafterCheckpoint, TargetInfo], Drafter]


FAMILIES = (
    DrafterFamily(
        f"Gemma 4 MTP assistants ({', '.join(ASSISTANT_TYPES)})",
        is_assistant_config,
        lambda checkpoint, target: Gemma4MTPDrafter(checkpoint.module(target), target),
    ),
    DrafterFamily(
        "block drafters (DFlash, DSpark, JetSpec)",
        is_block_config,
        lambda checkpoint, target: block_drafter(checkpoint.folder(), target),
    ),
    DrafterFamily(
        "EAGLE-3 heads",
        is_eagle3_config,
        lambda checkpoint, target: eagle3_drafter(checkpoint.folder(), target),
    ),
)

WORDS: dict[str, Callable[[], Drafter]] = {"ngram": NgramDrafter, "suffix": SuffixDrafter}
"""Drafters that a word selects."""


def load_drafter(checkpoint: DrafterCheckpoint, target: TargetInfo) -> Drafter:
    """Load the drafter in a checkpoint. Raises UnsupportedModelError if the checkpoint is no drafter."""
    for family in FAMILIES:
        if family.matches(checkpoint.config):
            return family.load(checkpoint, target)
    raise not_a_drafter(f"drafter {checkpoint.name!r}", checkpoint.config)


def is_drafter_config(config: Mapping[str, Any]) -> bool:
    return any(family.matches(config) for family in FAMILIES)


def require_target(what: str, config: Mapping[str, Any]) -> None:
    """Raise ConfigError if this config.json is a drafter's. what: the beginning of the message."""
    if is_drafter_config(config):
        raise ConfigError(
            f"{what} is a drafter ({config.get('model_type')}); give the model that it drafts for as the target, and "
            "this as drafter=..."
        )


def building(config: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Context in which transformers can build the model of this config.json, drafter or not."""
    return constructible_assistants() if is_assistant_config(config) else nullcontext()


def not_a_drafter(what: str, config: Mapping[str, Any]) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{what} has model_type {config.get('model_type')!r}; supported are "
        f"{', '.join(family.title for family in FAMILIES)}, causal language models, and by name {', '.join(WORDS)}"
    )
