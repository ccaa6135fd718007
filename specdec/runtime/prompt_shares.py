"""How many prompt tokens a step reads, and whose.

    in a step    the first by rank: half of the room at least | short prompts that pass it | the others, by rank

Prompts go by rank, but one with at most half as much to read as the first passes it: who asks for a word does not wait
for books, and nobody waits for more than twice what it has to read itself, but for what passes it in turn. The first
keeps half of the room, so that it always advances. It knows no pages: a prompt that finds none for its share gets
less. How large the room is while others decode: `prompt_gap`.
"""

from collections.abc import Sequence
from typing import NamedTuple

IDLE_STEPS = 4
"""Prompts that would take so many steps at most are read in one, where nobody decodes who would wait for it."""

MAX_ROOM = 8192
"""But no more tokens than this: of more, activations take memory and nothing gets quicker."""


class PromptRoom(NamedTuple):
    """Most prompt tokens of a step while others decode, and while no request does; and of one request, `chunk`.
    fixed: `max_prefill_tokens` is set. least: where others decode, a step reads so many in any case, if there are."""

    busy: int
    idle: int
    chunk: int = 512
    fixed: bool = False
    least: int = 16

    @classmethod
    def of(cls, max_prefill_tokens: int | None, prefill_chunk: int | None, device_type: str) -> "PromptRoom":
        """None: what suits the device. A GPU reads thousands in the time of a few rounds, and chunks of 2,048 at a
        fifth less than four of 512; a CPU, to which every token is arithmetic, reads about as many as a round of twenty
        requests verifies."""
        usual = cls(96, 384, 512) if device_type == "cpu" else cls(MAX_ROOM, MAX_ROOM, 2048, least=64)
        if max_prefill_tokens is not None:
            usual = usual._replace(busy=max_prefill_tokens, idle=max_prefill_tokens, fixed=True)
        return usual if prefill_chunk is None else usual._replace(chunk=prefill_chunk)

    def idle_tokens(self, to_come: int) -> int:
        """Prompt tokens of a step while no request decodes. to_come: tokens that all running prompts together have yet
        to read."""
        return to_come if to_come <= min(IDLE_STEPS * self.busy, max(self.idle, MAX_ROOM)) else self.idle


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
