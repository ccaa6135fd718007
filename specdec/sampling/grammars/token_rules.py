"""Masks over the vocabulary, and rules about tokens that do not depend on the text: `allowed_token_ids`, and no end
before `min_tokens`. In a mask, token v is bit v % 32 of word v // 32.

    output token        0 ... min_tokens - 1        min_tokens ...
    may be drawn        allowed, but no end         allowed

The masks of rules are applied at every node of a tree, like a grammar's and together with it. A request with a grammar
has no `allowed_token_ids`.
"""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specdec.config import SamplingParams
from specdec.errors import ConfigError

Words = npt.NDArray[np.int32]


def token_bits(tokens: Collection[int], num_words: int) -> Words:
    """A mask with the bits of these tokens, [num_words]. All tokens must be below 32 * num_words."""
    ids = np.fromiter(tokens, dtype=np.int64, count=len(tokens))
    bits = np.zeros(num_words, dtype=np.uint32)
    np.bitwise_or.at(bits, ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32))
    return bits.view(np.int32)


def only_bit(mask: Words) -> int | None:
    """The token whose bit is set; None if there is not exactly one."""
    [words] = np.nonzero(mask)
    if len(words) != 1:
        return None
    word = int(mask[words[0]]) & 0xFFFFFFFF
    return None if word & (word - 1) else 32 * int(words[0]) + word.bit_length() - 1


class TokenRules(NamedTuple):
    """The rules of one request.

    open: mask of the tokens that are allowed where the output may end, [words]. closed: the mask before `min_tokens`,
    [words]. ends: tokens that end the output. min_tokens: 0 if no token does. anything: does `open` have every token?
    """

    open: Words
    closed: Words
    ends: frozenset[int]
    min_tokens: int
    anything: bool

    @classmethod
    def from_params(cls, params: SamplingParams, ends: frozenset[int], vocab_size: int) -> "TokenRules | None":
        """The rules of `params`; None: nothing is restricted. Raises ConfigError if no token could be drawn."""
        allowed = params.allowed_token_ids
        min_tokens = params.min_tokens if ends else 0
        if allowed is None and not min_tokens:
            return None
        num_words = -(-vocab_size // 32)
        open = np.full(num_words, -1, dtype=np.int32) if allowed is None else token_bits(allowed, num_words)
        # end tokens that a checkpoint or request names may be outside the vocabulary
        closed = open & ~token_bits([token for token in ends if 0 <= token < 32 * num_words], num_words)
        if min_tokens and ends.issuperset(range(vocab_size) if allowed is None else allowed):
            named = "those of the vocabulary" if allowed is None else f"allowed_token_ids={list(allowed)[:8]}"
            raise ConfigError(
                f"{named} are all tokens that end the output, and "
                f"min_tokens={min_tokens} forbids those; allow another token, or lower min_tokens"
            )
        return cls(open, closed, ends, min_tokens, allowed is None)
