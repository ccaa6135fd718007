"""How the prompt tokens of a step are divided among requests.

    in a step    the first by rank: at least half of the budget | short prompts that pass it | the others, by rank

Prompts are read by rank, with one exception: a prompt with at most half as many unread tokens as the first one passes
it. So a short prompt does not wait for a long one. The first prompt keeps half of the budget, so it always advances. A
prompt that passes it waits for at most twice its own tokens, and for prompts shorter than itself. This file knows no
pages: if pages are short, a prompt gets less than its share. `prompt_gap` decides the budget while other requests
decode.
"""

from collections.abc import Sequence
from typing import NamedTuple

IDLE_STEPS = 4
"""While no request decodes, prompts that would take at most this many steps are read in one."""

MAX_BUDGET = 8192
"""Upper bound on the prompt tokens of a step. More tokens take memory for activations and do not raise throughput."""

STATE_CHUNK = 2048
"""Upper bound on the default chunk of a target with recurrent layers: prefixes are shared up to the end of a chunk."""


class PromptBudget(NamedTuple):
    """Upper bounds on the prompt tokens of a step: `while_decoding` while other requests decode, `while_idle` while
    none does, and `chunk` for one request.

    user_set: the user set `max_prefill_tokens`. min_tokens: lower bound while other requests decode.
    """

    while_decoding: int
    while_idle: int
    chunk: int = 512
    user_set: bool = False
    min_tokens: int = 16

    @classmethod
    def from_settings(
        cls, max_prefill_tokens: int | None, prefill_chunk: int | None, device_type: str, *, recurrent: bool = False
    ) -> "PromptBudget":
        """Bounds from the user's settings; None: the default of the device. recurrent: the target has such layers.

        A GPU reads thousands of tokens in the time of a few rounds, and is more efficient with more tokens per forward.
        On a CPU every token takes time, so a step reads about as many tokens as a round of twenty requests verifies.
        """
        chunk = STATE_CHUNK if recurrent else MAX_BUDGET
        usual = cls(96, 384, 512) if device_type == "cpu" else cls(MAX_BUDGET, MAX_BUDGET, chunk, min_tokens=64)
        if max_prefill_tokens is not None:
            usual = usual._replace(while_decoding=max_prefill_tokens, while_idle=max_prefill_tokens, user_set=True)
        return usual if prefill_chunk is None else usual._replace(chunk=prefill_chunk)

    def idle_tokens(self, to_come: int) -> int:
        """Prompt tokens of a step while no request decodes. to_come: unread tokens of all running prompts."""
        return (
            to_come
            if to_come <= min(IDLE_STEPS * self.while_decoding, max(self.while_idle, MAX_BUDGET))
            else self.while_idle
        )


class UnreadPrompt(NamedTuple):
    """A prompt that is being read.

    remaining: its unread tokens. level: priority level of its request; lower levels are read first, whatever their
    length.
    """

    level: int
    remaining: int


def shares(prompts: Sequence[UnreadPrompt], budget: int, chunk: int) -> list[int]:
    """Tokens of each prompt in this step: at most `chunk` per prompt and `budget` in all. prompts: by rank."""
    given = [0] * len(prompts)
    if not prompts:
        return given
    first = prompts[0]
    kept = min(chunk, first.remaining, -(-budget // 2))
    passing = [
        i for i, each in enumerate(prompts) if each.level == first.level and 2 * each.remaining <= first.remaining
    ]
    passing.sort(key=lambda i: prompts[i].remaining)  # equal ones stay in rank order
    left = budget
    for order, others in ((passing, kept), (range(len(prompts)), 0)):
        for i in order:
            more = min(chunk - given[i], prompts[i].remaining - given[i], left - others)
            given[i] += more
            left -= more
            if left == others:
                break
    return given
