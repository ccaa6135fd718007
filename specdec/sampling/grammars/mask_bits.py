"""Bits of masks over the vocabulary: token v is bit v % 32 of word v // 32. This file knows no grammar."""

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

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
