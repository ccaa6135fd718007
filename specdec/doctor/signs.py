"""What config, weights and names already say about a pair: `seen` of the table of causes.

Invariant: a sign is true of the pair or is not there; nothing is guessed, since signs are logged when a pair is loaded.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from specdec.doctor.changed_drafters import assistant_with_rope, changed_assistant
from specdec.doctor.rounded_weights import rounded_to
from specdec.draft_models.base import Drafter
from specdec.draft_models.eagle3.eagle3_drafter import Eagle3Drafter
from specdec.draft_models.gemma4_mtp import Gemma4MTPDrafter
from specdec.kvcache.layout import SLIDING_ATTENTION
from specdec.models.target import TargetModel


class Subject(NamedTuple):
    """Where signs are looked for."""

    target: TargetModel
    drafter: Drafter
    tokenizer: Any | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """what: is the matter; do: about it, a sentence each. mended: the drafter without it, where it can be made here."""

    what: str
    do: str
    mended: Callable[[], Drafter] | None = None


def rope_of_assistant(subject: Subject) -> Sign | None:
    """An assistant reads keys that the target has rotated, so its queries must be rotated by the same angles."""
    target, drafter = subject.target, subject.drafter
    assert isinstance(drafter, Gemma4MTPDrafter)
    config = drafter.assistant.config.get_text_config()
    own, theirs = (getattr(each, "rope_parameters", None) or {} for each in (config, target.config))
    wrong = {
        kind: theirs[kind]
        for kind in sorted(set(config.layer_types))
        if isinstance(own.get(kind), dict) and isinstance(theirs.get(kind), dict) and not _same(own[kind], theirs[kind])
    }
    if not wrong:
        return None
    kind = next(iter(wrong))
    return Sign(
        what=f"its rope_parameters of {kind} are {own[kind]}, the target's {theirs[kind]}; it reads the target's keys",
        do="copy rope_parameters from the target's config.json into the assistant's text_config",
        mended=lambda: assistant_with_rope(drafter, target, wrong),
    )


def window_of_assistant(subject: Subject) -> Sign | None:
    """An assistant's sliding layers read the target's sliding layers."""
    target, drafter = subject.target, subject.drafter
    assert isinstance(drafter, Gemma4MTPDrafter)
    owner = target.layout.last_owner(SLIDING_ATTENTION)
    windows = {window for window in drafter.windows if window is not None}
    if owner is None or owner.window is None or not windows or windows == {owner.window}:
        return None
    window = min(windows)
    shift = drafter.window_shift + owner.window - window
    return Sign(
        what=f"its sliding_window is {window}, the target's {owner.window}",
        do=f"write sliding_window: {owner.window} into the text_config of the assistant's config.json",
        mended=lambda: changed_assistant(drafter, target, window_shift=shift),
    )


def rounded_weights(subject: Subject) -> Sign | None:
    """Weights that a quantiser has rounded, in a checkpoint of 16 bits."""
    form = rounded_to(_module(subject.drafter))
    if form is None:
        return None
    return Sign(
        what=f"the drafter's weights lie on the grid of {form}: they were rounded to that before they were stored",
        do="load the drafter's original checkpoint in 16 bits; a drafter is small, and a rounded one is accepted less",
    )


def norm_of_ones(subject: Subject) -> Sign | None:
    """A norm that was never loaded has the gains that it was made with."""
    gains = {
        name: bool(torch.all(parameter == 1))
        for name, parameter in _module(subject.drafter).named_parameters()
        if parameter.dim() == 1 and "norm" in name and name.endswith("weight")
    }
    untrained = [name for name, ones in gains.items() if ones]
    if not untrained or len(untrained) > len(gains) / 2:
        return None  # a drafter whose norms have no gains at all
    return Sign(
        what=f"all gains of its {', '.join(untrained)} are 1, those of its other norms are not: it was not exported",
        do=f"export the drafter again with {untrained[0]}",
    )


def qat_with_plain(subject: Subject) -> Sign | None:
    """Targets trained for int4 have assistants of their own. Only names as they are published are compared: a folder
    may be called anything."""
    assert isinstance(subject.drafter, Gemma4MTPDrafter)
    target = subject.target.name
    drafter = str(getattr(subject.drafter.assistant.config, "_name_or_path", "") or "")
    is_qat, drafts_for_qat = (bool(re.search(r"(^|[-_])qat([-_]|$)", _last(name))) for name in (target, drafter))
    published = "gemma" in _last(target) and "assistant" in _last(drafter)
    if not published or is_qat == drafts_for_qat:
        return None
    wanted, given = ("QAT", "plain") if is_qat else ("plain", "QAT")
    return Sign(
        what=f"the target {_last(target)} is {'a QAT' if is_qat else 'no QAT'} model, and {_last(drafter)} the {given} "
        "assistant",
        do=f"use the {wanted} target's own assistant; `specdec models` lists the pairs",
    )


def no_template(subject: Subject) -> Sign | None:
    """A target of chats whose tokenizer came without its template."""
    target, drafter, tokenizer = subject
    chats = isinstance(drafter, Gemma4MTPDrafter) or re.search(r"(?i)[-_](it|instruct|chat)\b", _last(target.name))
    if tokenizer is None or getattr(tokenizer, "chat_template", None) is not None or not chats:
        return None
    return Sign(
        what=f"the tokenizer of {_last(target.name)} has no chat template; drafters of chat models learn from chats",
        do="put chat_template.jinja (or chat_template in tokenizer_config.json) of the published target next to it",
    )


def _module(drafter: Drafter) -> nn.Module:
    if isinstance(drafter, Eagle3Drafter):
        return drafter.head
    assert isinstance(drafter, Gemma4MTPDrafter)
    module: nn.Module = drafter.assistant
    return module


def _same(own: dict[str, Any], theirs: dict[str, Any]) -> bool:
    keys = own.keys() & theirs.keys() & {"rope_theta", "rope_type", "partial_rotary_factor", "factor"}
    return all(own[key] == theirs[key] for key in keys)


def _last(name: str) -> str:
    """The last part of a path or a hub id."""
    return name.rstrip("/").rpartition("/")[2].lower()
