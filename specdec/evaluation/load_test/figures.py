"""From answers to figures: pure functions of what came when.

A chunk may bring several tokens (with speculation it mostly does), so chunks are no measure of tokens. How many each
brought is taken from the server's own count, in this order:

    usage in every chunk    the difference to the chunk before
    usage at the end        the first chunk brought one, the others share the rest by their characters
    no usage                chunks are counted as tokens, for want of anything better, and the report says so

A chunk of k tokens that comes g seconds behind the one before is k gaps of g / k: the gaps of an answer sum up to the
time between its first and its last chunk.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

from specdec.evaluation.load_test.load_client import Answer


class Counted(Enum):
    """How the tokens of chunks are known, the best first."""

    EVERY_CHUNK = "usage in every chunk"
    AT_THE_END = "usage at the end, shared out by characters"
    CHUNKS = "no usage: chunks counted as tokens"


class Gap(NamedTuple):
    """So many tokens came so many seconds each behind the one before."""

    seconds: float
    tokens: float


@dataclass(frozen=True, slots=True)
class Spread:
    """Of some times, in milliseconds."""

    mean: float
    median: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, gaps: Iterable[Gap]) -> "Spread | None":
        """None of nothing. A quantile is the smallest time that covers its share of all tokens."""
        ranked = sorted(gap for gap in gaps if gap.tokens > 0)
        if not ranked:
            return None
        total = math.fsum(gap.tokens for gap in ranked)
        mean = math.fsum(gap.seconds * gap.tokens for gap in ranked) / total
        return cls(*(1e3 * value for value in (mean, *(quantile(ranked, q) for q in (0.5, 0.9, 0.99, 1.0)))))


def quantile(ranked: Sequence[Gap], share: float) -> float:
    """The smallest time such that at least `share` of the tokens took no longer; `ranked` ascends."""
    wanted = share * math.fsum(gap.tokens for gap in ranked)
    covered = 0.0
    for gap in ranked:
        covered += gap.tokens
        if covered >= wanted * (1 - 1e-9):  # sums of shares are not exact
            return gap.seconds
    return ranked[-1].seconds


def counted(answer: Answer) -> Counted:
    if answer.chunks and all(chunk.tokens is not None for chunk in answer.chunks):
        return Counted.EVERY_CHUNK
    return Counted.CHUNKS if answer.output_tokens is None else Counted.AT_THE_END


def output_tokens(answer: Answer) -> int:
    return len(answer.chunks) if answer.output_tokens is None else answer.output_tokens


def tokens_of_chunks(answer: Answer) -> list[float]:
    """How many tokens each chunk brought."""
    chunks, known = answer.chunks, counted(answer)
    if known is Counted.EVERY_CHUNK:
        so_far = [0, *(chunk.tokens or 0 for chunk in chunks)]
        return [float(after - before) for before, after in pairwise(so_far)]
    if known is Counted.CHUNKS or len(chunks) < 2:
        return [1.0] * len(chunks)
    chars = sum(chunk.chars for chunk in chunks[1:])
    rest = max(output_tokens(answer) - 1, 0)
    return [1.0, *(rest * chunk.chars / chars if chars else rest / (len(chunks) - 1) for chunk in chunks[1:])]


def token_gaps(answer: Answer) -> list[Gap]:
    """Of every token behind the first chunk. Time of chunks that brought no token goes to the next that did."""
    gaps, since = [], answer.chunks[0].at if answer.chunks else 0.0
    for chunk, tokens in zip(answer.chunks[1:], tokens_of_chunks(answer)[1:], strict=True):
        if tokens > 0:
            gaps.append(Gap((chunk.at - since) / tokens, tokens))
            since = chunk.at
    return gaps


def time_per_token(answer: Answer) -> float | None:
    """Seconds per token behind the first chunk; None where there is none."""
    gaps = token_gaps(answer)
    tokens = math.fsum(gap.tokens for gap in gaps)
    return math.fsum(gap.seconds * gap.tokens for gap in gaps) / tokens if tokens else None


def time_to_first_token(answer: Answer) -> float | None:
    """Seconds from sending the request; None of an answer without a token."""
    return answer.chunks[0].at - answer.sent if answer.chunks else None


def spreads(answers: Sequence[Answer], scheduled: bool) -> dict[str, Spread]:
    """By figure, in the order of the report; figures of which there is nothing are left out."""

    def each(seconds: Iterable[float | None]) -> Spread | None:
        return Spread.of(Gap(value, 1.0) for value in seconds if value is not None)

    chunk_gaps = (after.at - before.at for answer in answers for before, after in pairwise(answer.chunks))
    found = {
        "time to first token": each(time_to_first_token(answer) for answer in answers),
        "time per token, by request": each(time_per_token(answer) for answer in answers),
        "time between tokens": Spread.of(gap for answer in answers for gap in token_gaps(answer)),
        "time between chunks": each(chunk_gaps),
        "end to end": each(answer.ended - answer.sent for answer in answers),
        "sent behind schedule": each(answer.sent - answer.due for answer in answers) if scheduled else None,
    }
    return {name: spread for name, spread in found.items() if spread is not None}
