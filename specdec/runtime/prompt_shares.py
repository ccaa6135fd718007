"""How many prompt tokens a step reads, and whose.

    in a step    the first by rank: half of the room at least | short prompts that pass it | the others, by rank

Prompts go by rank, but one with at most half as much to read as the first passes it: who asks for a word does not wait
for books, and nobody waits for more than twice what it has to read itself, but for what passes it in turn. The first
keeps half of the room, so that it always advances. It knows no pages: who finds none for its share gets less.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

PROMISED_GAP = 0.25
"""Seconds that somebody who decodes waits for the next token at most, where a GPU reads prompts meanwhile: half of what
a reader takes for a dozen words, and on an H200 8,192 tokens of a model of ten billion parameters."""

MIN_ROOM = 512
"""Prompt tokens of a step in any case: of fewer, a GPU reads weights as long as it computes."""

IDLE_STEPS = 4
"""Prompts that would take so many steps at most are read in one, where nobody decodes who would wait for it."""

MAX_ROOM = 8192
"""But no more tokens than this: of more, activations take memory and nothing gets quicker."""


class PromptRoom(NamedTuple):
    """Most prompt tokens of a step while others decode, and where nobody does; and of one request, `chunk`.
    fixed: somebody has said how many."""

    busy: int
    idle: int
    chunk: int = 512
    fixed: bool = False

    @classmethod
    def of(cls, max_prefill_tokens: int | None, prefill_chunk: int | None, device_type: str) -> "PromptRoom":
        """None: what suits the device. A GPU reads thousands in the time of a few rounds, and chunks of 2,048 at a
        fifth less than four of 512; a CPU, to which every token is arithmetic, reads about as many as a round of twenty
        requests verifies."""
        usual = cls(96, 384, 512) if device_type == "cpu" else cls(MAX_ROOM, MAX_ROOM, 2048)
        if max_prefill_tokens is not None:
            usual = usual._replace(busy=max_prefill_tokens, idle=max_prefill_tokens, fixed=True)
        return usual if prefill_chunk is None else usual._replace(chunk=prefill_chunk)

    def within(self, cost: "PromptCost") -> "PromptRoom":
        """No more tokens than are read within the promised gap, a multiple of 256, unless somebody has said it."""
        if self.fixed:
            return self
        fitting = int((PROMISED_GAP - cost.round - cost.forward) / cost.token) // 256 * 256
        most = max(MIN_ROOM, min(fitting, self.busy))
        return self._replace(busy=min(most, self.busy), idle=min(most, self.idle))

    def tokens(self, to_come: int, decoding: bool) -> int:
        """Of this step. to_come: of all running prompts together; decoding: others wait for them."""
        if decoding:
            return self.busy
        return to_come if to_come <= min(IDLE_STEPS * self.busy, max(self.idle, MAX_ROOM)) else self.idle


class PromptCost(NamedTuple):
    """Seconds that a forward over prompts takes: `forward` and `token` for each; and `round`, the longest round."""

    forward: float
    token: float
    round: float

    @classmethod
    def fitted(cls, seconds: Mapping[int, float], round: float) -> "PromptCost":
        """Through what forwards of these numbers of tokens, two or more, take: the line of least squares."""
        tokens, spent = np.array(list(seconds)), np.array(list(seconds.values()))
        slope, level = np.polyfit(tokens, spent, 1)
        return cls(max(float(level), 0.0), max(float(slope), 1e-9), round)

    def gap(self, tokens: int) -> float:
        """Seconds from one token to the next for who decodes, while so many tokens of prompts are read a step."""
        return self.forward + tokens * self.token + self.round


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
