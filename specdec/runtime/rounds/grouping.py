"""Which prompt chunks share a forward: all are padded to the longest of it, and every forward costs something.

lengths 300 280 10 20 10     ->     (300 280) (20 10 10): 840 positions less, for one forward more
"""

from collections.abc import Callable

import numpy as np

from specdec.gpu.mirrored_array import IntArray

WORTH_A_FORWARD = 256
"""Positions that take about as long as what one more forward costs: its launch, or the weights that it reads."""
WORTH_ON_CPU = 64
"""There: a position is arithmetic. Measured on the bundled target: 20 ms a forward, 0.25 to 0.35 a position."""

Size = Callable[[IntArray, int], IntArray]
"""(numbers of chunks, the longest of each) -> positions that a forward over so many takes."""


def padded_size(counts: IntArray, longest: int) -> IntArray:
    return counts * longest


def group_chunks(chunk_len: IntArray, size: Size = padded_size, worth: int = WORTH_A_FORWARD) -> list[IntArray]:
    """Numbers of the chunks [B] by forward, the longest first, such that all forwards together take least.

    worth: positions that one more forward costs."""
    order = np.argsort(-chunk_len, kind="stable")
    num_chunks = len(order)
    least = np.full(num_chunks + 1, np.iinfo(np.int64).max)  # positions of the first n chunks, in the best groups
    least[0] = 0
    begin = np.zeros(num_chunks + 1, dtype=np.int64)  # of the last group of these
    for first in range(num_chunks):
        counts = np.arange(1, num_chunks - first + 1)
        total = least[first] + size(counts, int(chunk_len[order[first]])) + worth
        better = total < least[first + 1 :]
        least[first + 1 :][better] = total[better]
        begin[first + 1 :][better] = first
    groups: list[IntArray] = []
    end = num_chunks
    while end:
        groups.append(order[begin[end] : end])
        end = int(begin[end])
    return groups[::-1]
