"""The load-time check of a pair: logs faults that config, weights or names show for certain.

It generates nothing and guesses nothing: every reported sign is true. The doctor, a layer above the engine, measures
further causes and knows more signs.
"""

import copy
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from specdec.config import SpecConfig
from specdec.draft_models.base import Drafter
from specdec.draft_models.eagle3.eagle3_drafter import Eagle3Drafter
from specdec.draft_models.gemma4_mtp import Gemma4MTPDrafter
from specdec.draft_models.lookup import model_of
from specdec.kvcache.layout import SLIDING_ATTENTION
from specdec.models.published import last_part, published_steps
from specdec.models.target import TargetModel
from specdec.models.weight_storage import rounded_to

logger = logging.getLogger("specdec")


class CheckedPair(NamedTuple):
    """The pair to check."""

    target: TargetModel
    drafter: Drafter
    tokenizer: Any | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """A fault that a pair's config, weights or names show.

    what: the fault. do: advice, one sentence each. repaired: the drafter without the fault, if it can be made here.
    """

    what: str
    do: str
    repaired: Callable[[], Drafter] | None = None


Check = tuple[str, tuple[type, ...], Callable[[Any, CheckedPair], Symptom | None]]
"""A cause's name, the drafters that it applies to, and the function that looks for its symptom."""


def rope_of_assistant(drafter: Gemma4MTPDrafter, subject: CheckedPair) -> Symptom | None:
    """Check RoPE: an assistant reads keys that the target has rotated, so its queries need the same angles."""
    target = subject.target
    config = drafter.assistant.config.get_text_config()
    own, theirs = (getattr(each, "rope_parameters", None) or {} for each in (config, target.config))
    wrong: dict[str, Any] = {}
    for kind in sorted(set(config.layer_types)):
        one, other = own.get(kind), theirs.get(kind)
        if isinstance(one, dict) and isinstance(other, dict):
            keys = one.keys() & other.keys() & {"rope_theta", "rope_type", "partial_rotary_factor", "factor"}
            wrong |= {kind: other} if any(one[key] != other[key] for key in keys) else {}
    if not wrong:
        return None
    kind = next(iter(wrong))
    return Symptom(
        what=f"its rope_parameters of {kind} are {own[kind]}, the target's {theirs[kind]}; it reads the target's keys",
        do="copy rope_parameters from the target's config.json into the assistant's text_config",
        repaired=lambda: assistant_with_rope(drafter, target, wrong),
    )


def window_of_assistant(drafter: Gemma4MTPDrafter, subject: CheckedPair) -> Symptom | None:
    """Check windows: an assistant's sliding layers read the target's sliding layers."""
    target = subject.target
    owner = target.layout.last_owner(SLIDING_ATTENTION)
    windows = {window for window in drafter.windows if window is not None}
    if owner is None or owner.window is None or not windows or windows == {owner.window}:
        return None
    window = min(windows)
    shift = drafter.window_shift + owner.window - window
    return Symptom(
        what=f"its sliding_window is {window}, the target's {owner.window}",
        do=f"write sliding_window: {owner.window} into the text_config of the assistant's config.json",
        repaired=lambda: changed_assistant(drafter, target, window_shift=shift),
    )


def rounded_weights(drafter: Drafter, subject: CheckedPair) -> Symptom | None:
    """Check for weights that a quantiser rounded, stored in 16 bits."""
    form = rounded_to(module_of(drafter))
    if form is None:
        return None
    return Symptom(
        what=f"the drafter's weights are numbers of {form} times a scale: they were rounded before they were stored",
        do="load the drafter's original checkpoint in 16 bits; a drafter is small, and a rounded one is accepted less",
    )


def qat_with_plain(drafter: Gemma4MTPDrafter, subject: CheckedPair) -> Symptom | None:
    """Check that a target trained for int4 has its own assistant. Compares published names only."""
    target, assistant = subject.target.name, str(getattr(drafter.assistant.config, "_name_or_path", "") or "")
    is_qat, drafts_for_qat = (bool(re.search(r"(^|[-_])qat([-_]|$)", last_part(name))) for name in (target, assistant))
    published = "gemma" in last_part(target) and "assistant" in last_part(assistant)
    if not published or is_qat == drafts_for_qat:
        return None
    wanted, given = ("QAT", "plain") if is_qat else ("plain", "QAT")
    return Symptom(
        what=f"the target {last_part(target)} is {'a QAT' if is_qat else 'no QAT'} model, and "
        f"{last_part(assistant)} the {given} assistant",
        do=f"use the {wanted} target's own assistant; `specdec models` lists the pairs",
    )


HEADS, ASSISTANTS = (Eagle3Drafter,), (Gemma4MTPDrafter,)
LOAD_SYMPTOMS: tuple[Check, ...] = (
    ("rope base", ASSISTANTS, rope_of_assistant),
    ("window", ASSISTANTS, window_of_assistant),
    ("dtype", (*HEADS, *ASSISTANTS), rounded_weights),
    ("QAT pair", ASSISTANTS, qat_with_plain),
)
"""Causes of low acceptance that are visible at load."""


def warn_at_load(target: TargetModel, drafter: Drafter | None, tokenizer: Any | None, spec: SpecConfig) -> None:
    """Log certain faults of a pair, and how a request for deeper drafts than the drafter's is handled."""
    if drafter is None:
        return
    path, asked = drafter_path(model_of(drafter)), spec.num_steps
    own = None if path is None else published_steps(path)
    if path is not None and own is not None and asked > own:
        each = f"a round drafts up to {asked} where that pays" if spec.adaptive else f"every round drafts {asked}"
        message = "num_steps=%d, and %s is published for %d: %s; drafts beyond %d are mostly accepted less"
        logger.warning(message, asked, last_part(path), own, each, own)
    for name, symptom in visible_symptoms(CheckedPair(target, model_of(drafter), tokenizer)):
        message = "the drafter will be accepted less than it could be (%s): %s; %s"
        logger.warning(message, name, symptom.what, symptom.do)


def visible_symptoms(subject: CheckedPair, checks: Sequence[Check] = LOAD_SYMPTOMS) -> Iterator[tuple[str, Symptom]]:
    """Name and symptom of every cause that a check sees."""
    for name, kinds, see in checks:
        if isinstance(subject.drafter, kinds) and (symptom := see(subject.drafter, subject)) is not None:
            yield name, symptom


def changed_assistant(drafter: Gemma4MTPDrafter, target: TargetModel, **conventions: int) -> Gemma4MTPDrafter:
    """The assistant with another `query_offset` or `window_shift`."""
    kept = {"query_offset": drafter.query_offset, "window_shift": drafter.window_shift}
    return Gemma4MTPDrafter(drafter.assistant, target, **{**kept, **conventions})


def assistant_with_rope(
    drafter: Gemma4MTPDrafter, target: TargetModel, rope: Mapping[str, Mapping[str, Any]]
) -> Gemma4MTPDrafter:
    """The assistant with these `rope_parameters` per layer type."""
    assistant = copy.deepcopy(drafter.assistant)
    config = assistant.config.get_text_config()
    config.rope_parameters = {**config.rope_parameters, **copy.deepcopy(dict(rope))}
    rotary = assistant.model.rotary_emb
    assistant.model.rotary_emb = type(rotary)(config).to(target.device)
    return Gemma4MTPDrafter(assistant, target, query_offset=drafter.query_offset, window_shift=drafter.window_shift)


def drafter_path(drafter: Drafter) -> str | None:
    """Name from which the drafter was loaded, if known."""
    if isinstance(drafter, Gemma4MTPDrafter):
        return str(getattr(drafter.assistant.config, "_name_or_path", "") or "") or None
    return drafter.source if isinstance(drafter, Eagle3Drafter) else None


def module_of(drafter: Drafter) -> nn.Module:
    if isinstance(drafter, Eagle3Drafter):
        return drafter.head
    assert isinstance(drafter, Gemma4MTPDrafter)
    module: nn.Module = drafter.assistant
    return module
