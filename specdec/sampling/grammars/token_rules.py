"""Rules about tokens that do not depend on the text: `allowed_token_ids`, and no end before `min_tokens`.

    output token        0 ... min_tokens - 1        min_tokens ...
    may be drawn        allowed, but no end         allowed

A request with such rules has a `RuledState`, which may contain its state in a grammar. Its masks are applied at every
node of a tree, like a grammar's. If the grammar can only end, the text ends, even before min_tokens. Once a state
restricts nothing, it is `free`, and its request costs no more than one without rules.
"""

from functools import cached_property
from typing import NamedTuple

import numpy as np

from specdec.config import SamplingParams
from specdec.errors import ConfigError
from specdec.sampling.grammars.grammar import GrammarState
from specdec.sampling.grammars.mask_bits import Words, token_bits


class TokenRules(NamedTuple):
    """The rules of one request.

    open: mask of the tokens that are allowed where the output may end, [words]. closed: the mask before `min_tokens`,
    [words]. anything: does `open` have every token?
    """

    open: Words
    closed: Words
    ends: frozenset[int]
    anything: bool


class RuledState(GrammarState):
    """The state after some output tokens. remaining: tokens before the output may end. inner: the state in the grammar;
    None: there is no grammar. A request with a grammar has no `allowed_token_ids`."""

    def __init__(self, rules: TokenRules, remaining: int, inner: GrammarState | None, *, over: bool = False) -> None:
        super().__init__(None if inner is None else inner.matcher, None, rules.ends, over=over)
        self.rules = rules
        self.remaining = remaining
        self.inner = inner

    @property
    def free(self) -> bool:
        return self.inner is None and self.rules.anything and self.remaining == 0

    @property
    def grammar(self) -> GrammarState | None:
        return self.inner

    @cached_property
    def mask(self) -> Words:
        own = self.rules.closed if self.remaining else self.rules.open
        if self.inner is None:
            return own
        both: Words = self.inner.mask & own
        return both if both.any() else self.inner.mask

    @cached_property
    def forced(self) -> tuple[int, ...]:
        return () if self.inner is None else self.inner.forced

    def after(self, token: int) -> GrammarState | None:
        if self.over:
            return None
        if (self.inner is None or token in self.ends) and not self.mask[token // 32] >> token % 32 & 1:
            return None
        inner = None if self.inner is None else self.inner.after(token)
        if self.inner is not None and (inner is None or self.remaining <= 1):
            return inner  # None if the grammar forbids the token; otherwise only the grammar restricts from here on
        return RuledState(self.rules, max(0, self.remaining - 1), inner, over=token in self.ends)


def rules_state(
    state: GrammarState | None, params: SamplingParams, ends: frozenset[int], vocab_size: int
) -> GrammarState | None:
    """The state before the first token under the rules of `params`; None: nothing is restricted.

    state: the state in the grammar, if there is one. Raises ConfigError if no token could be drawn.
    """
    allowed = params.allowed_token_ids
    remaining = params.min_tokens if ends else 0
    if allowed is None and not remaining:
        return state
    num_words = -(-vocab_size // 32)
    open = np.full(num_words, -1, dtype=np.int32) if allowed is None else token_bits(allowed, num_words)
    # end tokens that a checkpoint or request names may be outside the vocabulary
    closed = open & ~token_bits([token for token in ends if 0 <= token < 32 * num_words], num_words)
    if remaining and allowed is not None and not closed.any():
        raise ConfigError(
            f"allowed_token_ids={list(allowed)[:8]} are all tokens that end the output, and min_tokens={remaining} "
            "forbids those; allow another token, or lower min_tokens"
        )
    return RuledState(TokenRules(open, closed, ends, allowed is None), remaining, state)
