"""The same questions asked in another way: `changes` of the table of causes.

The answers are other texts then, so a gain says less than one on the same text: it must be larger (MIN_GAIN).
"""

import re
from collections.abc import Iterator

from specdec.doctor.changes.change import Change
from specdec.doctor.pair_in_question import PairInQuestion

MIN_GAIN = 0.15
THINKING = "enable_thinking"


def templates(pair: PairInQuestion) -> Iterator[Change]:
    """Texts that were tokenised as they stand, as turns of a chat. Never the reverse: raw text that repeats itself is
    accepted far, and says nothing about the pair."""
    if not pair.chat and pair.has_template and any(isinstance(question, str) for question in pair.questions):
        do = "put prompts through the chat template: engine.chat_prompt(text), or no --raw"
        yield Change(what="the chat template", do=do, pair=pair.changed(chat=True), prompts=True)


def thinking(pair: PairInQuestion) -> Iterator[Change]:
    """The other value of `enable_thinking`, where the template has that."""
    template = getattr(pair.tokenizer, "chat_template", None)
    texts = any(isinstance(question, str) for question in pair.questions)
    if not (pair.chat and texts and re.search(THINKING, str(template))):
        return
    for value in (True, False):
        if pair.template.get(THINKING) is not value:
            yield Change(
                what=f"{THINKING}={value}",
                do=f"pass {THINKING}={value} to the chat template: engine.chat_prompt(text, {THINKING}={value})",
                pair=pair.changed(template={**pair.template, THINKING: value}),
                prompts=True,
            )
