"""Makes a drafter from the user's argument: a word, a name, a module, or a drafter."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specdec.draft_models.base import Drafter, with_defaults
from specdec.draft_models.language_model import LanguageModelDrafter
from specdec.draft_models.lookup import ModelAndLookup
from specdec.draft_models.native_mtp.mtp_checkpoint import is_mtp_speculator, module_count, native_mtp_drafter
from specdec.draft_models.registry import (
    AUTO,
    MTP,
    NAMES,
    WORDS,
    drafter_family,
    drafter_parts,
    is_drafter_config,
    not_a_drafter,
)
from specdec.errors import CheckpointError, ConfigError, UnsupportedModelError, shown
from specdec.loading.model_loading import Checkpoint, load_tokenizer, unwrapped
from specdec.models.published import PAIRS, resolve_name
from specdec.models.quantised.packed_quantizer import load_packed
from specdec.models.target import TargetModel

logger = logging.getLogger(__name__)

LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Suffixes of transformers' class names for models that continue a text."""


@torch.inference_mode(False)  # as in `Checkpoint.load`
def load_any_drafter(
    drafter: Any, target: TargetModel, options: Mapping[str, Any] | None = None, tokenizer: Any | None = None
) -> Drafter | None:
    """Make a drafter from an argument (see `drafter_parts`); None: the argument names none.

    tokenizer: the target's; a language model's tokenizer is compared with it. Raises CheckpointError, ConfigError, and
    UnsupportedModelError if the drafter does not fit.
    """
    model, lookup = drafter_parts(drafter)
    if model is None:
        return None if lookup is None else WORDS[lookup]()
    fitted = _drafting_model(model, target, options or {}, tokenizer)
    if fitted is None:
        return WORDS[lookup or "suffix"]()
    return fitted if lookup is None else ModelAndLookup(fitted, WORDS[lookup]())


def _drafting_model(
    drafter: Any, target: TargetModel, options: Mapping[str, Any], tokenizer: Any | None
) -> Drafter | None:
    """Make the model of a drafter argument; None: "auto" found none."""
    if isinstance(drafter, str) and drafter in (MTP, AUTO):
        of_target = Checkpoint.from_name(getattr(target.model.config, "name_or_path", None) or "", options)
        if drafter == MTP:
            return _own_modules(of_target, target)
        return _first_of_auto(of_target, target, options, tokenizer)
    if isinstance(drafter, (str, os.PathLike)):
        try:
            checkpoint = Checkpoint.from_name(drafter, options)
            if drafts_by_modules(checkpoint.config, target, checkpoint.folder):
                return _modules_of(checkpoint, target)
            if (family := drafter_family(checkpoint.config)) is not None:
                source = checkpoint.load(target.dtype, target.device) if family.is_module else checkpoint.folder()
                return family.load(source, target)
            require_drafter(f"drafter {checkpoint.name!r}", checkpoint.config)
            own = None if tokenizer is None else load_tokenizer(drafter, options)
            return _language_model(checkpoint.load(target.dtype, target.device), target, tokenizer, own)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; drafters by name: {', '.join(NAMES)}") from error
    if callable(getattr(drafter, "bind", None)):
        return with_defaults(drafter)
    module, described = unwrapped(drafter, "drafter"), dict[str, Any]()
    if isinstance(module, PreTrainedModel):
        described = {**module.config.to_dict(), "architectures": [type(module).__name__]}
        family = drafter_family(described)
        if family is not None and family.is_module:
            return family.load(module, target)
        if family is None and continues_text(described):
            return _language_model(module, target, None, None)
    if isinstance(module, nn.Module):
        raise not_a_drafter(f"drafter of class {type(module).__name__}", described)
    raise ConfigError(
        f"drafter is {shown(drafter)}; expected a hub id, a folder, a bundled name, {', '.join(map(repr, NAMES))}, "
        "a module or None"
    )


def require_options_used(drafter: Any, options: Mapping[str, Any] | None) -> None:
    """Raise ConfigError if loading arguments are given for a drafter that is not loaded."""
    if options and not isinstance(drafter_parts(drafter)[0], (str, os.PathLike)):
        raise ConfigError(
            f"drafter_options={shown(dict(options))}: they are for drafters that are loaded, and drafter is "
            f"{shown(drafter)}; leave them out"
        )


def _first_of_auto(
    checkpoint: Checkpoint, target: TargetModel, options: Mapping[str, Any], tokenizer: Any | None
) -> Drafter | None:
    """Make the first drafter that "auto" means and that can be used. checkpoint: the target's."""
    here = {**options, "local_files_only": True}
    for found in meant_by_auto(checkpoint, len(target.layout.layers), here):
        try:
            return _drafting_model(found, target, here, tokenizer)
        except (CheckpointError, ConfigError, UnsupportedModelError) as error:
            what = "its MTP modules are" if found == MTP else f"drafter {found} is"
            logger.warning("drafter='auto': %s not used: %s", what, error)
    return None


def meant_by_auto(checkpoint: Checkpoint, num_layers: int, here: Mapping[str, Any]) -> Iterator[str]:
    """Drafters that "auto" tries for a target of `num_layers`: "mtp", and published names that are on disk. here:
    options of a checkpoint that is not downloaded."""
    with suppress(CheckpointError):  # missing or damaged
        if module_count(checkpoint.config_file.parent, num_layers):
            yield MTP
    for pair in PAIRS:
        if pair.drafter != MTP and resolve_name(pair.target) == checkpoint.path:
            with suppress(CheckpointError):  # not on disk
                if Checkpoint.from_name(pair.drafter, here).config:
                    yield pair.drafter


def _own_modules(checkpoint: Checkpoint, target: TargetModel) -> Drafter:
    try:
        if not checkpoint.name:
            raise CheckpointError(f"{target.name} was not loaded from a checkpoint")
        checkpoint.folder()
    except CheckpointError as error:
        raise CheckpointError(f"drafter='mtp': {error}; give drafter=DIR of a folder with its MTP modules") from error
    return _modules_of(checkpoint, target)


def _modules_of(checkpoint: Checkpoint, target: TargetModel) -> Drafter:
    promised = checkpoint.promised
    load = None if promised is None else partial(load_packed, promised, target.dtype)
    return native_mtp_drafter(checkpoint.folder(), target, load)


def drafts_by_modules(config: Mapping[str, Any], target: Any, folder: Callable[[], Path]) -> bool:
    """Do the MTP modules in a checkpoint draft for the target: of an export of modules, of its base or a finetuned one?

    folder: where the checkpoint's files are, asked for only if its config.json could be the target's.
    """
    if is_mtp_speculator(config):
        return True
    if is_drafter_config(config) or not continues_text(config):
        return False
    text = config.get("text_config") or config
    sizes = ("hidden_size", "num_hidden_layers")
    is_like_target = all(text.get(name) == getattr(target.config, name, None) for name in sizes)
    return is_like_target and module_count(folder(), len(target.layout.layers)) > 0


def require_drafter(what: str, config: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError unless this config.json is a drafter's or a language model's."""
    if not is_drafter_config(config) and not continues_text(config):
        raise not_a_drafter(what, config)


def continues_text(config: Mapping[str, Any]) -> bool:
    """Is its class one that continues a text? Without `architectures`: the class that its type would be loaded in."""
    by_type = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(config.get("model_type")))
    return any(str(name).endswith(LANGUAGE_MODELS) for name in config.get("architectures") or [by_type])


def _language_model(model: PreTrainedModel, target: TargetModel, tokenizer: Any | None, own: Any | None) -> Drafter:
    """Make a drafter from a language model. Raises UnsupportedModelError if it cannot run or its tokens differ from the
    target's."""
    name = getattr(model.config, "_name_or_path", "") or type(model).__name__
    for what, here, there in (("dtype", model.dtype, target.dtype), ("device", model.device, target.device)):
        if here != there:
            raise UnsupportedModelError(f"drafter {name!r} is in {what} {here} and the target in {there}")
    if tokenizer is not None and own is not None:
        _require_same_tokens(name, tokenizer, own)
    elif (size := int(model.config.get_text_config().vocab_size)) != target.vocab_size:
        hint = " (give both by name, and their tokenizers are compared)"
        raise _other_tokens(name, f"{size} tokens and the target {target.vocab_size}", hint)
    return LanguageModelDrafter(TargetModel(model, target.given_ops), target)


def _require_same_tokens(name: str, tokenizer: Any, own: Any) -> None:
    """Raise unless both have the same tokens. Added tokens of only one are allowed, since the other never writes
    them."""
    targets, drafters = tokenizer.get_vocab(), own.get_vocab()
    if targets == drafters:
        return
    at_target, at_drafter = ({number: token for token, number in vocab.items()} for vocab in (targets, drafters))
    for number in sorted(at_target.keys() & at_drafter.keys()):
        if at_target[number] != at_drafter[number]:
            here, there = at_drafter[number], at_target[number]
            differing = f"another vocabulary: token {number} is {here!r} there and {there!r} in the target"
            raise _other_tokens(name, differing)
    smaller, larger = sorted((len(targets), len(drafters)))
    if smaller < 0.99 * larger:
        raise _other_tokens(name, f"{len(drafters)} tokens and the target {len(targets)}")


def _other_tokens(name: str, differing: str, hint: str = "") -> UnsupportedModelError:
    return UnsupportedModelError(
        f"drafter {name!r} has {differing}; a language model drafts for one of the same tokenizer{hint}"
    )
