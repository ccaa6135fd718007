"""How many prompt tokens a step reads, and of which requests. It bounds the time that decoding requests wait.

    step      a round of all that decode | prompts: at most GAP_SHARE of a round for each request without a token
    prompts   the largest size of `token_buckets` whose forward is expected to take no longer

So one long prompt lengthens each step by at most half a round, while a queue of prompts is read in large steps, for
throughput. Rounds are timed whenever they run. Prompts are timed when the engine is made (GPU), or whenever they run,
host work included (CPU).

    in a step    the first by rank: at least half of the budget | short prompts that pass it | the others, by rank

Prompts are read by rank, with one exception: a prompt with at most half as many unread tokens as the first one passes
it. So a short prompt does not wait for a long one. The first prompt keeps half of the budget, so it always advances. A
prompt that passes it waits for at most twice its own tokens, and for prompts shorter than itself.

This file knows no request and no page, and reads no clock: if pages are short, a prompt gets less than its share.
"""

from bisect import bisect
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specdec.config import EngineConfig
from specdec.gpu.mirrored_array import IntArray
from specdec.runtime.rounds.prompt_sizes import SIZES_IN_PARTS, PartShare, token_buckets

IDLE_STEPS = 4
"""While no request decodes, prompts that would take at most this many steps are read in one."""

MAX_BUDGET = 8192
"""Upper bound on the prompt tokens of a step. More tokens take memory for activations and do not raise throughput."""

STATE_CHUNK = 2048
"""Upper bound on the default chunk of a target with recurrent layers: prefixes are shared up to the end of a chunk."""

GAP_SHARE = 0.5
"""Time that a step may spend on prompts, as a share of a round's time, for each request that waits for its first token
(or for its next after a preemption). With one such request, streams run at two thirds of their speed."""

PROMISED_GAP = 0.25
"""Upper bound, in seconds, on the time between two tokens of a decoding request, however many prompts wait. A reader
needs twice as long for a dozen words; an H200 prefills 8,192 tokens of a 10B model in it."""

PART_SHARE = 0.4
"""GAP_SHARE for parts of a divided forward. It is smaller, since the step's other work must fit into half a round
too."""

MAX_STEPS = 8
"""Most steps among which a forward is divided, by its expected time: prompts that arrive meanwhile wait for its end."""

MIN_CAP = 512
"""Lower bound on the cap of a step, in prompt tokens: with fewer, a GPU spends its time on reading weights."""

ROUND_DECAY = 0.8
"""Weight of earlier rounds in the average time of a round, after one more."""

LEARNING_RATE = 0.25
"""Share of a forward's surprise (its time over the expected one, less 1) that the learned times take over at once."""

FIRST_GUESS = np.array([8.0, 1.0, 1 / 4096])
"""Times of a forward, a token and a pair of tokens, as multiples of a token's, before forwards have shown them."""

MAX_SURPRISE = 2.0
"""A measured time above this multiple of the expected time is clipped to it: the forward was probably interrupted. If
the device has really become slower, the expectation follows within a few forwards."""


class PromptBudget(NamedTuple):
    """Upper bounds on the prompt tokens of a step: `while_decoding` while other requests decode, `while_idle` while
    none does, and `chunk` for one request.

    sizes_in_parts: tokens of a forward that is divided among steps. The smallest is also the lower bound of a step
    while other requests decode. user_set: the user set `max_prefill_tokens`.
    """

    while_decoding: int
    while_idle: int
    chunk: int = 512
    sizes_in_parts: tuple[int, ...] = (16, 32)
    user_set: bool = False

    @classmethod
    def from_config(cls, config: EngineConfig, device_type: str, *, recurrent: bool = False) -> "PromptBudget":
        """Bounds from the user's settings, or the defaults of the device. recurrent: the target has such layers.

        A GPU reads thousands of tokens in the time of a few rounds, and is more efficient with more tokens per forward;
        it takes as long for one token as for 64, and reads 256 in two or three steps. On a CPU every token takes time,
        so a step reads about as many tokens as a round of twenty requests verifies.
        """
        chunk = STATE_CHUNK if recurrent else MAX_BUDGET
        usual = cls(96, 384) if device_type == "cpu" else cls(MAX_BUDGET, MAX_BUDGET, chunk, SIZES_IN_PARTS)
        if (most := config.max_prefill_tokens) is not None:
            usual = usual._replace(while_decoding=most, while_idle=most, user_set=True)
        return usual if config.prefill_chunk is None else usual._replace(chunk=config.prefill_chunk)

    def idle_tokens(self, to_come: int) -> int:
        """Prompt tokens of a step while no request decodes. to_come: unread tokens of all running prompts."""
        few = to_come <= min(IDLE_STEPS * self.while_decoding, max(self.while_idle, MAX_BUDGET))
        return to_come if few else self.while_idle


class PromptLoad(NamedTuple):
    """Work of a forward over prompts. pairs: number of (token, earlier token) pairs, counted without windows."""

    tokens: int
    pairs: float

    @classmethod
    def from_runs(cls, start: IntArray, length: IntArray) -> "PromptLoad":
        """Load of runs of `length` [R] tokens, each after `start` [R] earlier ones."""
        return cls(int(length.sum()), float((length * (start + length / 2)).sum()))

    @classmethod
    def after_prefix(cls, tokens: int, prefix: int, chunk: int | None = None) -> "PromptLoad":
        """Load of this many tokens after `prefix` earlier ones; at most `chunk` of each request, if it is given."""
        return cls(tokens, tokens * (prefix + min(tokens, chunk or tokens) / 2))


class PromptCost:
    """Expected seconds of a forward over prompts.

    timed     a line through the measured sizes, in proportion beyond them;   + pair * (pairs after a prefix)
    learned   forward + token * (tokens) + pair * (pairs)                     if no forward was timed alone
    """

    def __init__(self) -> None:
        self._sizes: list[int] = [0]
        self._seconds: list[float] = [0.0]
        self._pair = 0.0
        self._learned = np.zeros(3)  # seconds of a forward, a token and a pair

    @property
    def is_timed(self) -> bool:
        return len(self._sizes) > 1

    @property
    def is_known(self) -> bool:
        return self.is_timed or bool(self._learned.any())

    def time(self, tokens: int, seconds: float, prefix: int = 0) -> None:
        """Add a forward over `tokens` tokens of a prompt, after `prefix` earlier ones, that was timed with nothing else
        on the device. Forwards without a prefix come first."""
        if prefix:
            self._pair = max(self._pair, (seconds - self._without_prefix(tokens)) / (tokens * prefix))
            return
        place = bisect(self._sizes, tokens)
        self._sizes.insert(place, tokens)
        self._seconds.insert(place, seconds)

    def learn(self, load: PromptLoad, seconds: float) -> None:
        """Learn from a forward over prompts of requests. Ignored if forwards were timed alone.

        Each of the three times takes its share of the surprise: its share of the expected time. So none becomes
        negative, and one that hardly matters for this load hardly changes.
        """
        if self.is_timed or load.tokens == 0 or seconds <= 0:
            return
        counts = np.array([1.0, *load])
        if not self.is_known:
            self._learned = FIRST_GUESS * seconds / (FIRST_GUESS @ counts)
        expected = self._learned * counts
        surprise = min(seconds / expected.sum(), MAX_SURPRISE) - 1
        self._learned *= 1 + LEARNING_RATE * surprise * expected / expected.sum()

    def seconds(self, load: PromptLoad) -> float:
        """Expected seconds of a forward over this load. Requires `is_known`."""
        if self.is_timed:
            return self._without_prefix(load.tokens) + self._pair * max(0.0, load.pairs - load.tokens**2 / 2)
        forward, token, pair = self._learned.tolist()
        return float(forward + token * load.tokens + pair * load.pairs)

    def _without_prefix(self, tokens: int) -> float:
        most = self._sizes[-1]
        return float(np.interp(min(tokens, most), self._sizes, self._seconds)) * max(1.0, tokens / most)


class PromptGap:
    """Measured times of one engine's rounds and prompts, and the prompt tokens per step that follow from them.

    budget: upper bounds on these tokens. shares: the parts in which forwards over few tokens are divided among steps;
    empty: they are not. round: decaying average of recent rounds, 0.0 before the first. longest_round: the longest one
    timed when the engine was made, 0.0 if none was. ending: additional seconds of a forward that ends a prompt, if only
    such a forward runs the last layers.
    """

    def __init__(self, budget: PromptBudget, shares: Sequence[PartShare] = ()) -> None:
        self.budget = budget
        self.shares = shares
        self.cost = PromptCost()
        self.round = 0.0
        self.longest_round = 0.0
        self.ending = 0.0

    @property
    def is_known(self) -> bool:
        """Have rounds and prompts been timed?"""
        return self.round > 0.0 and self.cost.is_known

    def learn_round(self, seconds: float) -> None:
        """Update the average with the seconds of a round."""
        self.round = seconds if self.round == 0.0 else ROUND_DECAY * self.round + (1 - ROUND_DECAY) * seconds

    def cap_budget(self) -> None:
        """Cap the budget to the tokens that can be read within PROMISED_GAP minus the longest round, but not below
        MIN_CAP."""
        budget = self.budget
        if not budget.user_set:
            cap = max(MIN_CAP, self._fitting(PROMISED_GAP - self.longest_round, 0, MAX_BUDGET))
            self.budget = budget._replace(
                while_decoding=min(cap, budget.while_decoding), while_idle=min(cap, budget.while_idle)
            )

    def tokens(self, num_waiting: int, prefix: int) -> int:
        """How many prompt tokens a step may read while other requests decode.

        num_waiting: requests that wait for their first token, with or without a row. prefix: the most tokens already
        read of any prompt in the step.
        """
        budget = self.budget
        if budget.user_set or not self.is_known:
            return budget.while_decoding
        fewest, *_, most = budget.sizes_in_parts
        tokens = self._fitting(self._seconds_within(GAP_SHARE, num_waiting), prefix, budget.while_decoding)
        if tokens < most and self.shares:
            fitting = [size for size in budget.sizes_in_parts if self._fits_in_parts(size, prefix, num_waiting)]
            tokens = max(fitting, default=fewest)
        return min(max(tokens, fewest), budget.while_decoding)

    def seconds_allowed(self, num_waiting: int, load: PromptLoad) -> float | None:
        """Seconds of a step that a divided forward over this load may take while other requests decode; None: the
        forward is not divided."""
        if self.budget.user_set or not self.is_known or not self.shares:
            return None
        fits_whole = self.cost.seconds(load) <= self._seconds_within(GAP_SHARE, num_waiting)
        if fits_whole or load.tokens > self.budget.sizes_in_parts[-1]:
            return None
        return self._seconds_within(PART_SHARE, num_waiting)

    def part_seconds(self, load: PromptLoad, share: PartShare) -> float:
        """Expected seconds of a part of a forward over this load."""
        whole = self.cost.seconds(load)
        forward = min(whole, self.cost.seconds(PromptLoad.after_prefix(load.tokens, 0)))
        return forward * share.forward + (whole - forward) * share.pairs + self.ending * share.ending

    def longest_gap(self, longest: int) -> float:
        """The longest time between two tokens of a decoding request, in seconds, while one prompt of up to `longest`
        tokens is read. 0.0 until rounds and prompts have been timed."""
        if not self.is_known:
            return 0.0
        spent = 0.0
        for prefix in (0, longest):
            load = PromptLoad.after_prefix(min(self.tokens(1, prefix), longest, self.budget.chunk), prefix)
            seconds = self.seconds_allowed(1, load)
            if seconds is None:
                spent = max(spent, self.cost.seconds(load) + self.ending)
            else:
                spent = max(spent, seconds, self.ending, *(self.part_seconds(load, share) for share in self.shares))
        return max(self.round, self.longest_round) + spent

    def _seconds_within(self, share: float, num_waiting: int) -> float:
        return min(share * max(1, num_waiting) * self.round, PROMISED_GAP - self.round)

    def _fitting(self, seconds: float, prefix: int, limit: int) -> int:
        """The largest size up to `limit` whose forward after `prefix` tokens takes at most this time; 0: none."""
        for tokens in (limit, *reversed(token_buckets(limit))):
            if self.cost.seconds(PromptLoad.after_prefix(tokens, prefix, self.budget.chunk)) <= seconds:
                return tokens
        return 0

    def _fits_in_parts(self, tokens: int, prefix: int, num_waiting: int) -> bool:
        """Does each part of a forward over these tokens fit a step, and do all together fit MAX_STEPS?"""
        load, seconds = PromptLoad.after_prefix(tokens, prefix), self._seconds_within(PART_SHARE, num_waiting)
        parts = [self.part_seconds(load, share) for share in self.shares]
        return max(parts) <= seconds and sum(parts) <= MAX_STEPS * seconds


class UnreadPrompt(NamedTuple):
    """A prompt that is being read.

    remaining: its unread tokens. level: priority level of its request; lower levels are read first, whatever their
    length.
    """

    level: int
    remaining: int


def share_tokens(prompts: Sequence[UnreadPrompt], budget: int, chunk: int) -> list[int]:
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
