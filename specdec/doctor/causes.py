"""Why a drafter is accepted less than it could be: one row a cause, and how each is recognised.

    seen       a look at config, weights and names; what it says is certain, costs no generation, and may warn at load
    changes    the pair with one setting changed; the one that raises acceptance clearly names the cause

A new kind of drafter adds its rows to `CAUSES` and, for `changes` of its drafter, its dense form to `DENSE_FORMS`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from specdec.doctor import signs
from specdec.doctor.changes import changes_of_assistants, changes_of_blocks, changes_of_heads, changes_of_prompts
from specdec.doctor.changes.change import Change
from specdec.doctor.pair_in_question import PairInQuestion
from specdec.doctor.signs import Sign, Subject
from specdec.draft_models.base import Drafter
from specdec.draft_models.block.block_drafter import BlockDrafter
from specdec.draft_models.eagle3.eagle3_drafter import Eagle3Drafter
from specdec.draft_models.gemma4_mtp import Gemma4MTPDrafter

Seen = Callable[[Subject], Sign | None]
Changes = Callable[[PairInQuestion], Iterator[Change]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """name: as reports name it. kinds: drafters that it applies to. warns: what `seen` says is also said at load.
    least: share of the accepted length that a change must gain, where it is not the usual one."""

    name: str
    kinds: tuple[type, ...]
    seen: Seen | None = None
    warns: bool = False
    changes: Changes | None = None
    least: float | None = None

    def applies_to(self, drafter: Drafter) -> bool:
        return isinstance(drafter, self.kinds)


HEADS, ASSISTANTS, BLOCKS, ANY = (Eagle3Drafter,), (Gemma4MTPDrafter,), (BlockDrafter,), (object,)

CAUSES = (
    Cause(name="taps", kinds=HEADS, changes=changes_of_heads.taps),
    Cause(name="taps", kinds=BLOCKS, changes=changes_of_blocks.taps),
    Cause(name="MASK id", kinds=BLOCKS, changes=changes_of_blocks.mask_ids),
    Cause(name="norm", kinds=HEADS, changes=changes_of_heads.norms),
    Cause(name="norm", kinds=(*HEADS, *ASSISTANTS), seen=signs.norm_of_ones),
    Cause(name="rope base", kinds=HEADS, changes=changes_of_heads.rope_bases),
    Cause(name="rope base", kinds=ASSISTANTS, seen=signs.rope_of_assistant, warns=True),
    Cause(name="embedding", kinds=HEADS, changes=changes_of_heads.embeddings),
    Cause(name="window", kinds=HEADS, changes=changes_of_heads.windows),
    Cause(name="window", kinds=ASSISTANTS, seen=signs.window_of_assistant, warns=True),
    Cause(name="window", kinds=ASSISTANTS, changes=changes_of_assistants.windows),
    Cause(name="frozen position", kinds=ASSISTANTS, changes=changes_of_assistants.positions),
    Cause(name="dtype", kinds=(*HEADS, *ASSISTANTS), seen=signs.rounded_weights, warns=True),
    Cause(name="QAT pair", kinds=ASSISTANTS, seen=signs.qat_with_plain, warns=True),
    Cause(name="template", kinds=ANY, seen=signs.no_template),
    Cause(name="template", kinds=ANY, changes=changes_of_prompts.templates, least=changes_of_prompts.MIN_GAIN),
    Cause(name="thinking mode", kinds=ANY, changes=changes_of_prompts.thinking, least=changes_of_prompts.MIN_GAIN),
)


class Seeing(NamedTuple):
    """A cause and what was seen of it."""

    cause: Cause
    sign: Sign


def what_is_seen(subject: Subject, causes: tuple[Cause, ...] = CAUSES, *, at_load: bool = False) -> list[Seeing]:
    """Every sign of a cause, without generating. at_load: of those causes alone that warn at load."""
    found = []
    for cause in causes:
        if cause.seen is not None and cause.applies_to(subject.drafter) and (cause.warns or not at_load):
            sign = cause.seen(subject)
            if sign is not None:
                found.append(Seeing(cause, sign))
    return found


def subject_of(target: Any, drafter: Drafter, tokenizer: Any | None) -> Subject:
    """What signs are looked for in."""
    return Subject(target, drafter, tokenizer)
