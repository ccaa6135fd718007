"""Drafters that have a config.json or a word of their own: how each is recognised, and how it is made.

To add one, add a line to `DRAFTER_FAMILIES` (with checkpoints) or to `WORDS` (without).
`specdec/loading/drafter_loading.py` recognises MTP modules, language models, and drafters that depend on the target.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

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
from specdec.errors import ConfigError, UnsupportedModelError, shown


class DrafterFamily(NamedTuple):
    """A kind of drafter that has checkpoints. matches: does this config.json belong to it? load: makes the drafter for
    a target, from the folder of its files; if `is_module`, from the module that transformers loads."""

    title: str
    matches: Callable[[Mapping[str, Any]], bool]
    load: Callable[[Any, TargetInfo], Drafter]
    is_module: bool = False


ASSISTANTS = f"Gemma 4 MTP assistants ({', '.join(ASSISTANT_TYPES)})"
DRAFTER_FAMILIES = (
    DrafterFamily(ASSISTANTS, is_assistant_config, Gemma4MTPDrafter, is_module=True),
    DrafterFamily("block drafters (DFlash, DSpark, JetSpec)", is_block_config, block_drafter),
    DrafterFamily("EAGLE-3 heads", is_eagle3_config, eagle3_drafter),
)

WORDS: dict[str, Callable[[], Drafter]] = {"ngram": NgramDrafter, "suffix": SuffixDrafter}
"""Drafters that a word selects."""
MTP, AUTO, NONE = "mtp", "auto", "none"
"""Words whose meaning depends on the target, and the word for no drafter. mtp: the modules in the target's checkpoint.
auto: those modules, else the target's published drafter if it is on disk, else "suffix". none: no drafter."""
NAMES = (*WORDS, MTP, AUTO, NONE)


def drafter_parts(drafter: Any) -> tuple[Any, str | None]:
    """The model and the lookup in a user's drafter argument: a name, an object, None, [model, word] or "NAME,WORD".

    model: "mtp", "auto", a checkpoint's name, a module or a drafter; lookup: a word of `WORDS`; None: there is none.
    Raises ConfigError for a pair of other things.
    """
    given = drafter
    if isinstance(drafter, str):
        name, comma, word = drafter.rpartition(",")
        if word in WORDS and not comma:
            return None, word
        given = (name or None, word) if word in WORDS else None if drafter == NONE else drafter
    if not isinstance(given, (list, tuple)):
        return given, None
    parts = [drafter_parts(each) for each in given]
    (model, other), (no_model, lookup) = parts if len(parts) == 2 else [(None, None)] * 2
    is_model = model is not None and other is None and not getattr(model, "has_lookup", False)
    if not is_model or no_model is not None or lookup is None:
        raise ConfigError(
            f"drafter is {shown(drafter)}; of two the first is a model that drafts, and the second one of "
            f"{', '.join(map(repr, WORDS))}, such as ['google/gemma-4-E4B-it-assistant', 'suffix']"
        )
    return model, lookup


def drafter_family(config: Mapping[str, Any]) -> DrafterFamily | None:
    """The family of a config.json; None: it is no drafter's."""
    return next((family for family in DRAFTER_FAMILIES if family.matches(config)), None)


def is_drafter_config(config: Mapping[str, Any]) -> bool:
    return drafter_family(config) is not None


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
        f"{', '.join(family.title for family in DRAFTER_FAMILIES)}, MTP modules, causal language models, "
        f"and by name {', '.join(NAMES)}"
    )
