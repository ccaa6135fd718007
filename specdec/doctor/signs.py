"""Signs of a pair that only the doctor reads: `seen` of the table of causes. Those of `load_check.py` are its too."""

import re

import torch

from specdec.draft_models.base import Drafter
from specdec.draft_models.gemma4_mtp import Gemma4MTPDrafter
from specdec.load_check import Sign, Subject, module_of
from specdec.models.published import last_part


def norm_of_ones(drafter: Drafter, subject: Subject) -> Sign | None:
    """A norm that was never loaded has the gains that it was made with."""
    gains = {
        name: bool(torch.all(parameter == 1))
        for name, parameter in module_of(drafter).named_parameters()
        if parameter.dim() == 1 and "norm" in name and name.endswith("weight")
    }
    untrained = [name for name, ones in gains.items() if ones]
    if not untrained or len(untrained) > len(gains) / 2:
        return None  # a drafter whose norms have no gains at all
    return Sign(
        what=f"all gains of its {', '.join(untrained)} are 1, those of its other norms are not: it was not exported",
        do=f"export the drafter again with {untrained[0]}",
    )


def no_template(drafter: Drafter, subject: Subject) -> Sign | None:
    """A target of chats whose tokenizer came without its template."""
    target, _, tokenizer = subject
    chats = isinstance(drafter, Gemma4MTPDrafter) or re.search(r"(?i)[-_](it|instruct|chat)\b", last_part(target.name))
    if tokenizer is None or getattr(tokenizer, "chat_template", None) is not None or not chats:
        return None
    return Sign(
        what=f"the tokenizer of {last_part(target.name)} has no chat template; drafters of chat models learn from "
        "chats",
        do="put chat_template.jinja (or chat_template in tokenizer_config.json) of the published target next to it",
    )
