"""Why a drafter is accepted less than it could be: one row a cause, and how each is recognised.

    seen       a look at config, weights and names; what it says is certain, costs no generation, and may warn at load
    changes    the pair with one setting changed; the one that raises acceptance clearly names the cause

A new kind of drafter adds its rows to `CAUSES` and, for `changes` of its drafter, its dense form to `DENSE_FORMS`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.doctor import changes as change
from specdec.doctor import signs
from specdec.doctor.acceptance import MIN_GAIN
from specdec.doctor.pair_in_question import PairInQuestion
from specdec.doctor.signs import Sign, Subject
from specdec.draft_models.base import Drafter
from specdec.draft_models.block.block_drafter import BlockDrafter
from specdec.draft_models.eagle3.eagle3_drafter import Eagle3Drafter
from specdec.draft_models.gemma4_mtp import Gemma4MTPDrafter

Seen = Callable[[Any, Subject], Sign | None]
Changes = Callable[[Any, PairInQuestion], Iterator[change.Change]]
"""Each is given a drafter of the kind that its cause is about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """name: as reports name it. kinds: drafters that it applies to. warns: what `seen` says is also said at load.
    least: share of the accepted length that a change must gain."""

    name: str
    kinds: tuple[type, ...]
    seen: Seen | None = None
    warns: bool = False
    changes: Changes | None = None
    least: float = MIN_GAIN

    def applies_to(self, drafter: Drafter) -> bool:
        return isinstance(drafter, self.kinds)


HEADS, ASSISTANTS, BLOCKS, ANY = (Eagle3Drafter,), (Gemma4MTPDrafter,), (BlockDrafter,), (object,)

CAUSES = (
    Cause(name="taps", kinds=HEADS, changes=change.taps_of_heads),
    Cause(name="taps", kinds=BLOCKS, changes=change.taps_of_blocks),
    Cause(name="MASK id", kinds=BLOCKS, changes=change.mask_ids),
    Cause(name="norm", kinds=HEADS, changes=change.norms),
    Cause(name="norm", kinds=(*HEADS, *ASSISTANTS), seen=signs.norm_of_ones),
    Cause(name="rope base", kinds=HEADS, changes=change.rope_bases),
    Cause(name="rope base", kinds=ASSISTANTS, seen=signs.rope_of_assistant, warns=True),
    Cause(name="embedding", kinds=HEADS, changes=change.embeddings),
    Cause(name="window", kinds=HEADS, changes=change.windows_of_heads),
    Cause(name="window", kinds=ASSISTANTS, seen=signs.window_of_assistant, warns=True),
    Cause(name="window", kinds=ASSISTANTS, changes=change.windows_of_assistants),
    Cause(name="frozen position", kinds=ASSISTANTS, changes=change.positions),
    Cause(name="dtype", kinds=(*HEADS, *ASSISTANTS), seen=signs.rounded_weights, warns=True),
    Cause(name="QAT pair", kinds=ASSISTANTS, seen=signs.qat_with_plain, warns=True),
    Cause(name="template", kinds=ANY, seen=signs.no_template),
    Cause(name="template", kinds=ANY, changes=change.templates, least=change.MIN_GAIN_OF_PROMPTS),
    Cause(name="thinking mode", kinds=ANY, changes=change.thinking, least=change.MIN_GAIN_OF_PROMPTS),
)


def what_is_seen(
    subject: Subject, causes: Sequence[Cause] = CAUSES, *, at_load: bool = False
) -> Iterator[tuple[Cause, Sign]]:
    """Every cause with a sign of it, without generating. at_load: of those causes alone that warn at load."""
    for cause in causes:
        if cause.seen is not None and cause.applies_to(subject.drafter) and (cause.warns or not at_load):
            sign = cause.seen(subject.drafter, subject)
            if sign is not None:
                yield cause, sign
