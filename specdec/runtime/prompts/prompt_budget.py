"""How many prompt tokens a step reads, and of which requests. It bounds the time that decoding requests wait.

    step      a round of all that decode | prompts: at most GAP_SHARE of a round for each request without a token
    prompts   seconds = forward + token * T + pair * X           T tokens that see X earlier tokens in all

So one long prompt lengthens each step by half a round (by more if `min_tokens` take longer), while a queue of prompts
is read in large steps, for throughput. Rounds are timed whenever they run. Prompts are timed when the engine is made
(GPU), or whenever they run, host work included (CPU).

    in a step    the first by rank: at least half of the budget | short prompts that pass it | the others, by rank

Prompts are read by rank, with one exception: a prompt with at most half as many unread tokens as the first one passes
it. So a short prompt does not wait for a long one. The first prompt keeps half of the budget, so it always advances. A
prompt that passes it waits for at most twice its own tokens, and for prompts shorter than itself.

This file knows no request and no page, and reads no clock: if pages are short, a prompt gets less than its share.
"""

import math
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from specdec.config import EngineConfig
from specdec.gpu.mirrored_array import IntArray
from specdec.runtime.rounds.prompt_sizes import MIN_LONG_TOKENS, PartShare, captured_size

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
takes about as long for one word; an H200 prefills 8,192 tokens of a 10B model in that time."""

PART_SHARE = 0.4
"""GAP_SHARE for parts of a divided forward. It is smaller, since the step's other work must fit into half a round
too."""

MAX_STEPS = 8
"""Maximum steps among which a forward is divided, by its expected time: prompts that arrive meanwhile wait for its
end."""

MIN_CAP = 512
"""Lower bound on the cap of a step, in prompt tokens: with fewer, a GPU spends its time on reading weights."""

ROUND_DECAY = 0.8
"""Weight of earlier rounds in the average time of a round, after one more."""

COST_DECAY = 0.97
"""Weight of earlier forwards in the fitted cost of prompts, after one more."""

Numbers = npt.NDArray[np.float64]
UNITS = np.array([1.0, 1e3, 1e6])  # scale of the three unknowns: per forward, token, pair


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
    def from_config(cls, config: EngineConfig, device_type: str, *, recurrent: bool = False) -> "PromptBudget":
        """Bounds from the user's settings, or the defaults of the device. recurrent: the target has such layers.

        A GPU reads thousands of tokens in the time of a few rounds, and is more efficient with more tokens per forward.
        On a CPU every token takes time, so a step reads about as many tokens as a round of twenty requests verifies.
        """
        chunk = STATE_CHUNK if recurrent else MAX_BUDGET
        usual = cls(96, 384, 512) if device_type == "cpu" else cls(MAX_BUDGET, MAX_BUDGET, chunk, min_tokens=64)
        if (most := config.max_prefill_tokens) is not None:
            usual = usual._replace(while_decoding=most, while_idle=most, user_set=True)
        return usual if config.prefill_chunk is None else usual._replace(chunk=config.prefill_chunk)

    def idle_tokens(self, to_come: int) -> int:
        """Prompt tokens of a step while no request decodes. to_come: unread tokens of all running prompts."""
        few = to_come <= min(IDLE_STEPS * self.while_decoding, MAX_BUDGET)
        return to_come if few else self.while_idle


class PromptLoad(NamedTuple):
    """Work of a forward over prompts. pairs: number of (token, earlier token) pairs, counted without windows."""

    tokens: int
    pairs: float

    @classmethod
    def from_runs(cls, start: IntArray, length: IntArray) -> "PromptLoad":
        """Load of runs of `length` [R] tokens, each after `start` [R] earlier ones."""
        return cls(int(length.sum()), float((length * (start + length / 2)).sum()))


class Division(NamedTuple):
    """How forwards over few prompt tokens are divided among steps.

    max_tokens: forwards over more tokens are not divided. min_tokens: fewer tokens take as long as this many.
    """

    shares: Sequence[PartShare]
    max_tokens: int
    min_tokens: int


class PromptCost:
    """Seconds of a forward over prompts, as three non-negative numbers: least squares of the relative error, so a
    forward that was interrupted counts little.

    They are fitted to forwards that were timed alone (`time`), or, if there are none, to all forwards of requests
    (`learn`), with less weight for old ones.
    """

    def __init__(self) -> None:
        self._equations = np.zeros((3, 4))  # normal equations: [3, 3] and the right side
        self._seconds = np.zeros(3)  # solution, per unit
        self._is_fitted = True
        self._whole: dict[int, float] = {}  # seconds of timed whole prompts, by their tokens

    @property
    def is_known(self) -> bool:
        return bool(self._equations.any())

    def time(self, load: PromptLoad, seconds: float) -> None:
        """Fit a forward that was timed with nothing else on the device."""
        self._add(load, seconds)
        if load.pairs <= load.tokens**2:
            self._whole[load.tokens] = seconds

    def learn(self, load: PromptLoad, seconds: float) -> None:
        """Fit a forward over prompts of requests. Ignored if forwards were timed alone."""
        if self._whole or load.tokens == 0 or seconds <= 0:
            return
        self._fitted()  # solved before older forwards lose weight
        self._equations *= COST_DECAY
        self._add(load, seconds)

    def seconds(self, load: PromptLoad) -> float:
        """Expected seconds of a forward over this load. Requires `is_known`."""
        whole = self._whole.get(load.tokens)
        if whole is None:
            return float(self._fitted() @ _counts(load))
        pair = float(self._fitted()[2] / UNITS[2])
        return whole + pair * max(0.0, load.pairs - load.tokens**2 / 2)

    def tokens_within(self, seconds: float, prefix: int, chunk: int) -> int:
        """How many prompt tokens can be read in this time: at most `chunk` of each request, after `prefix` tokens each.

        A forward over few tokens takes as long as one over a single token, but the fitted line does not show it. So the
        result is at least the largest timed forward that fits.
        """
        forward, token, pair = (self._fitted() / UNITS).tolist()
        left, each = max(0.0, seconds - forward), token + pair * prefix
        tokens = 2 * left / max(each + math.sqrt(each**2 + 2 * pair * left), 1e-12)  # each * T + pair * T**2 / 2 = left
        if tokens > chunk:
            tokens = left / max(each + pair * chunk / 2, 1e-12)
        timed = (count for count, spent in self._whole.items() if spent + pair * count * prefix <= seconds)
        return int(min(max(tokens, max(timed, default=0)), 1e9))

    def _add(self, load: PromptLoad, seconds: float) -> None:
        row = _counts(load) / seconds  # so that errors are relative
        self._equations += np.outer(row, np.append(row, 1.0))
        self._is_fitted = False

    def _fitted(self) -> Numbers:
        if not self._is_fitted:
            self._seconds, self._is_fitted = _least_squares(self._equations, self._seconds), True
        return self._seconds


class PromptGap:
    """Measured times of one engine's rounds and prompts, and the prompt tokens per step that follow from them.

    budget: upper bounds on these tokens.
    division: how forwards over few tokens are divided among steps; None: they are not.
    round: decaying average of recent rounds, 0.0 before the first.
    longest_round: the longest one timed when the engine was made, 0.0 if none was.
    ending: additional seconds of a forward that ends a prompt, if only such a forward runs the last layers.
    """

    def __init__(self, budget: PromptBudget, division: Division | None = None) -> None:
        self.budget = budget
        self.division = division
        self.cost = PromptCost()
        self.round = 0.0
        self.longest_round = 0.0
        self.ending = 0.0

    def learn_round(self, seconds: float) -> None:
        self.round = seconds if self.round == 0.0 else ROUND_DECAY * self.round + (1 - ROUND_DECAY) * seconds

    def cap_budget(self) -> None:
        """Cap the budget to the tokens that can be read within PROMISED_GAP minus the longest round. The cap is at
        least MIN_CAP, and rounded to few sizes."""
        budget = self.budget
        if budget.user_set:
            return
        fitting = self.cost.tokens_within(PROMISED_GAP - self.longest_round, 0, budget.chunk)
        cap = max(MIN_CAP, min(fitting, MIN_LONG_TOKENS) // 256 * 256, captured_size(fitting))
        self.budget = budget._replace(
            while_decoding=min(cap, budget.while_decoding), while_idle=min(cap, budget.while_idle)
        )

    def tokens(self, num_waiting: int, prefix: int) -> int:
        """How many prompt tokens a step may read while other requests decode.

        num_waiting: requests that wait for their first token, with or without a row. prefix: the most tokens already
        read of any prompt in the step.
        """
        budget = self.budget
        if budget.user_set or self.round == 0.0 or not self.cost.is_known:
            return budget.while_decoding
        fitting = self.cost.tokens_within(self._seconds_allowed(GAP_SHARE, num_waiting), prefix, budget.chunk)
        if fitting >= budget.while_decoding:
            return budget.while_decoding
        if self.division is not None and fitting < self.division.max_tokens:
            return self._tokens_in_parts(self.division, num_waiting, prefix)
        return min(max(budget.min_tokens, captured_size(fitting)), budget.while_decoding)

    def seconds_allowed(self, num_waiting: int, load: PromptLoad) -> float | None:
        """Seconds of a step that a divided forward over this load may take while other requests decode; None: the
        forward is not divided."""
        if self.budget.user_set or self.round == 0.0 or not self.cost.is_known or self.division is None:
            return None
        fits_whole = self.cost.seconds(load) <= self._seconds_allowed(GAP_SHARE, num_waiting)
        if fits_whole or load.tokens > self.division.max_tokens:
            return None
        return self._seconds_allowed(PART_SHARE, num_waiting)

    def part_seconds(self, load: PromptLoad, share: PartShare) -> float:
        """Expected seconds of a part of a forward over this load."""
        whole = self.cost.seconds(load)
        forward = min(whole, self.cost.seconds(PromptLoad(load.tokens, load.tokens**2 / 2)))  # without prefixes
        return forward * share.forward + (whole - forward) * share.pairs + self.ending * share.ending

    def _seconds_allowed(self, share: float, num_waiting: int) -> float:
        return min(share * max(1, num_waiting) * self.round, PROMISED_GAP - self.round)

    def _tokens_in_parts(self, division: Division, num_waiting: int, prefix: int) -> int:
        """Most tokens of a divided forward whose parts each fit a step and together fit MAX_STEPS."""
        seconds = self._seconds_allowed(PART_SHARE, num_waiting)
        tokens = division.max_tokens
        while tokens > division.min_tokens:
            load = PromptLoad(tokens, tokens * (prefix + tokens / 2))
            parts = [self.part_seconds(load, share) for share in division.shares]
            if max(parts) <= seconds and sum(parts) <= MAX_STEPS * seconds:
                break
            tokens //= 2
        return tokens

    def longest_gap(self, longest: int) -> float:
        """The longest time between two tokens of a decoding request, in seconds, while one prompt of up to `longest`
        tokens is read. 0.0 until rounds and prompts have been timed."""
        if self.round == 0.0 or not self.cost.is_known:
            return 0.0
        spent = 0.0
        for prefix in (0, longest):
            tokens = min(self.tokens(1, prefix), longest)
            if not self.budget.user_set:
                tokens = min(tokens, self.budget.chunk)
            load = PromptLoad(tokens, tokens * (prefix + tokens / 2))
            seconds = self.seconds_allowed(1, load)
            if seconds is None or self.division is None:
                spent = max(spent, self.cost.seconds(load) + self.ending)
            else:
                parts = [self.part_seconds(load, share) for share in self.division.shares]
                spent = max(spent, seconds, self.ending, *parts)
        return max(self.round, self.longest_round) + spent


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


def _counts(load: PromptLoad) -> Numbers:
    counts: Numbers = np.array([1.0, load.tokens, load.pairs]) / UNITS
    return counts


def _least_squares(equations: Numbers, before: Numbers) -> Numbers:
    """Non-negative least squares of three unknowns: the best solution over all subsets. Unknowns that the equations do
    not determine (for example if all loads were alike) stay near `before`.

    It avoids np.linalg, which sets numpy's error state while it runs: an interrupt could leave it set."""
    square, right = equations[:, :3], equations[:, 3]
    damping = np.diag(1e-6 * square.diagonal() + 1e-12 * np.trace(square))
    square, right = square + damping, right + damping @ before
    best, found = 0.0, np.zeros(3)
    for kept in _SUBSETS:
        part = square[np.ix_(kept, kept)]
        some = torch.linalg.solve(torch.from_numpy(part), torch.from_numpy(right[kept])).numpy()
        error = float(some @ part @ some - 2 * right[kept] @ some)
        if (some >= 0).all() and error < best:
            best, found = error, np.zeros(3)
            found[kept] = some
    return found


_SUBSETS: Sequence[list[int]] = [list(kept) for size in (1, 2, 3) for kept in combinations(range(3), size)]
