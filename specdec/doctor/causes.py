"""The causes of low acceptance, one row each, with the way to recognise it.

    seen       read from config, weights and names: certain, and needs no generation
    changes    the pair with one setting changed; a change that raises acceptance clearly names the cause

A new kind of drafter adds its rows to `CAUSES` and, for `changes` of its drafter, its dense form to `DENSE_FORMS`.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specdec.doctor import changes as change
from specdec.doctor.acceptance import MIN_GAIN
from specdec.doctor.examined_pair import ExaminedPair
from specdec.draft_models.base import Drafter
from specdec.draft_models.block.block_drafter import BlockDrafter
from specdec.draft_models.gemma4_mtp import Gemma4MTPDrafter
from specdec.draft_models.native_mtp.mtp_drafter import NativeMtpDrafter
from specdec.load_check import ASSISTANTS, HEADS, LOAD_SYMPTOMS, CheckedPair, Symptom, module_of
from specdec.models.published import last_part

FindSymptom = Callable[[Any, CheckedPair], Symptom | None]
Changes = Callable[[Any, ExaminedPair], Iterator[change.Change]]
"""Each is called with a drafter of a kind that its cause applies to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One reason for low acceptance, and how it is found.

    name: its name in reports. kinds: drafters that it applies to. least: share of the accepted length that a change
    must gain. by_token: changes are compared token by token (`conventions.py`).
    """

    name: str
    kinds: tuple[type, ...]
    seen: FindSymptom | None = None
    changes: Changes | None = None
    least: float = MIN_GAIN
    by_token: bool = False

    def applies_to(self, drafter: Drafter) -> bool:
        return isinstance(drafter, self.kinds)


def norm_of_ones(drafter: Drafter, subject: CheckedPair) -> Symptom | None:
    """A norm that was never loaded still has its initial gains."""
    gains = {
        name: bool(torch.all(parameter == 1))
        for name, parameter in module_of(drafter).named_parameters()
        if parameter.dim() == 1 and "norm" in name and name.endswith("weight")
    }
    untrained = [name for name, ones in gains.items() if ones]
    if not untrained or len(untrained) > len(gains) / 2:
        return None  # a drafter whose norms have no gains at all
    return Symptom(
        what=f"all gains of its {', '.join(untrained)} are 1, those of its other norms are not: it was not exported",
        do=f"export the drafter again with {untrained[0]}",
    )


def no_template(drafter: Drafter, subject: CheckedPair) -> Symptom | None:
    """A chat model whose tokenizer has no chat template."""
    target, _, tokenizer = subject
    chats = isinstance(drafter, Gemma4MTPDrafter) or re.search(r"(?i)[-_](it|instruct|chat)\b", last_part(target.name))
    if tokenizer is None or getattr(tokenizer, "chat_template", None) is not None or not chats:
        return None
    return Symptom(
        what=f"the tokenizer of {last_part(target.name)} has no chat template; drafters of chat models learn from "
        "chats",
        do="put chat_template.jinja (or chat_template in tokenizer_config.json) of the published target next to it",
    )


BLOCKS, MODULES, ANY = (BlockDrafter,), (NativeMtpDrafter,), (object,)

CAUSES = (
    *(Cause(name=name, kinds=kinds, seen=see) for name, kinds, see in LOAD_SYMPTOMS),
    Cause(name="taps", kinds=HEADS, changes=change.taps_of_heads),
    Cause(name="taps", kinds=BLOCKS, changes=change.taps_of_blocks),
    Cause(name="MASK id", kinds=BLOCKS, changes=change.mask_ids),
    Cause(name="norm", kinds=HEADS, changes=change.norms),
    Cause(name="norm", kinds=(*HEADS, *ASSISTANTS), seen=norm_of_ones),
    Cause(name="rope base", kinds=HEADS, changes=change.rope_bases),
    Cause(name="embedding", kinds=HEADS, changes=change.embeddings),
    Cause(name="window", kinds=HEADS, changes=change.windows_of_heads),
    Cause(name="window", kinds=ASSISTANTS, changes=change.windows_of_assistants),
    Cause(name="frozen position", kinds=ASSISTANTS, changes=change.positions),
    Cause(name="MTP conventions", kinds=MODULES, changes=change.mtp_conventions, by_token=True),
    Cause(name="template", kinds=ANY, seen=no_template),
    Cause(name="template", kinds=ANY, changes=change.templates, least=change.MIN_GAIN_OF_PROMPTS),
    Cause(name="thinking mode", kinds=ANY, changes=change.thinking, least=change.MIN_GAIN_OF_PROMPTS),
)


def visible_symptoms(subject: CheckedPair, causes: Sequence[Cause] = CAUSES) -> Iterator[tuple[Cause, Symptom]]:
    """Every cause that shows a sign, found without generating."""
    for cause in causes:
        if cause.seen is not None and cause.applies_to(subject.drafter):
            symptom = cause.seen(subject.drafter, subject)
            if symptom is not None:
                yield cause, symptom
