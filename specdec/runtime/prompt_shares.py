"""How many prompt tokens a step reads, and whose.

    in a step    the first by rank: half of the room at least | short prompts that pass it | the others, by rank

Prompts go by rank, but one with at most half as much to read as the first passes it: who asks for a word does not wait
for books, and nobody waits for more than twice what it has to read itself, but for what passes it in turn. The first
keeps half of the room, so that it always advances. It knows no pages: who finds none for its share gets less.
"""

from collections.abc import Sequence
from typing import NamedTuple

IDLE_STEPS = 4
"""Prompts that would take so many steps at most are read in one, where nobody decodes who would wait for it."""


class PromptRoom(NamedTuple):
    """Most prompt tokens of a step while others decode, and where nobody does."""

    busy: int
    idle: int

    @classmethod
    def of(cls, max_prefill_tokens: int | None, device_type: str) -> "PromptRoom":
        """None: what is few to the device. A GPU reads thousands in the time of a round; a CPU, to which every token
        is arithmetic, about as many as a round of twenty requests verifies."""
        if max_prefill_tokens is not None:
            return cls(max_prefill_tokens, max_prefill_tokens)
        return cls(96, 384) if device_type == "cpu" else cls(2048, 2048)

    def tokens(self, to_come: int, decoding: bool) -> int:
        """Of this step. to_come: of all running prompts together; decoding: others wait for them."""
        if decoding:
            return self.busy
        return to_come if to_come <= IDLE_STEPS * self.busy else self.idle


class Prompt(NamedTuple):
    """What one request has to read yet. level: of its rank; lower ones come first, whatever their length."""

    level: int
    to_go: int


def shares(prompts: Sequence[Prompt], room: int, chunk: int) -> list[int]:
    """Tokens of each prompt in this step, at most `chunk` of one and `room` of all. prompts: by rank."""
    given = [0] * len(prompts)
    if not prompts:
        return given
    first = prompts[0]
    kept = min(chunk, first.to_go, -(-room // 2))
    passing = [i for i, each in enumerate(prompts) if each.level == first.level and 2 * each.to_go <= first.to_go]
    passing.sort(key=lambda i: prompts[i].to_go)  # equals stay by rank
    left = room
    for order, others in ((passing, kept), (range(len(prompts)), 0)):
        for i in order:
            more = min(chunk - given[i], prompts[i].to_go - given[i], left - others)
            given[i] += more
            left -= more
            if left == others:
                break
    return given
