"""Sizes of forwards over prompts: the numbers of tokens that are captured, and the parts in which layers run.

These are numbers only. So the host's policies use them without a look at the device.
"""

from typing import NamedTuple

MIN_LONG_TOKENS = 2048
"""From this size on, sizes are closer together, since a forward over padding takes as long as one over tokens. Larger
forwards are captured only if there is memory to spare."""

MIN_TOKENS = 16
"""Smallest size: this few tokens take as long as one, since the weights are read in any case."""

SIZES_IN_PARTS = 64, 128, 256
"""Sizes that are also captured in parts. While other requests decode, a step runs more tokens as a whole forward; fewer
tokens take as long as the smallest of these sizes."""


class PartShare(NamedTuple):
    """A part's share of a forward's time: `forward`, everything but attention over the prefix; `pairs`, that attention;
    `ending`, the layers that run only for last tokens."""

    forward: float = 1.0
    pairs: float = 1.0
    ending: float = 0.0


def token_buckets(limit: int) -> list[int]:
    """Sizes 16, 24, 32, 48, 64, 96, ..., `limit`: powers of two with one size between, or three from MIN_LONG_TOKENS
    on."""
    sizes, size = [], MIN_TOKENS
    while size <= limit:
        sizes += [size * quarters // 4 for quarters in ((4, 6) if size < MIN_LONG_TOKENS else (4, 5, 6, 7))]
        size *= 2
    return [size for size in sizes if size <= limit]


def captured_size(tokens: int) -> int:
    """Round down to a power of two, or from MIN_LONG_TOKENS on to a quarter step between two. Few shapes are captured,
    but padding takes as long as tokens."""
    step = 1 << max(0, tokens.bit_length() - (3 if tokens >= MIN_LONG_TOKENS else 1))
    return tokens // step * step
