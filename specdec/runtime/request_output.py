"""What a user gets of a request: its output, the deltas of a stream, and its figures; and how figures are counted.

A request's figures are those that it had when it got its row, plus the sums of its row since then. `RowTotals` keeps
the sums and adds a settled round for all rows at once. Settling a round makes new sums and leaves the old ones as they
are, so a request has the figures of a round as soon as it has the round's tokens.
"""

import copy
import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from operator import attrgetter

import numpy as np

from specdec.gpu.mirrored_array import IntArray
from specdec.runtime.rounds.result import RoundResult
from specdec.sampling.log_probs import TokenLogprob

DRAFTED = ("drafted_rounds", "drafted_round_tokens", "draft_tokens", "draft_nodes")
COUNTS = ("rounds", "round_tokens", *DRAFTED, "forced_tokens", "forced_rounds")
SECONDS = ("draft_seconds", "verify_seconds", "other_seconds")
"""Seconds of a round, which its requests share."""


@dataclass(slots=True)
class RequestStats:
    """Figures of one request, or (summed) of many: speculation, cache hits and times.

    drafted_rounds: rounds with drafts.
    drafted_round_tokens: tokens emitted in rounds with drafts, the bonus included.
        draft_tokens: sum of the depths of drafts. draft_nodes: verified nodes, without roots.
    drafted_counts: at i, rounds with drafts at least i + 1 deep.
    accepted_counts: at i, rounds of these that emitted draft i + 1. A round that ends the output counts only as deep as
        it emitted.
    forced_tokens: tokens that a grammar forced, verified in the place of drafts in `forced_rounds`.
    cached_tokens: prompt tokens whose K/V were found in the prefix cache.

    Seconds are a request's share of its batch's time, with three exceptions: queue, from its submission to its row;
    first_token, from its submission to its first token; decode, from its first to its newest token.
    """

    rounds: int = 0
    round_tokens: int = 0
    drafted_rounds: int = 0
    drafted_round_tokens: int = 0
    draft_tokens: int = 0
    draft_nodes: int = 0
    accepted_counts: list[int] = field(default_factory=list)
    drafted_counts: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    cached_tokens: int = 0
    forced_tokens: int = 0
    forced_rounds: int = 0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    other_seconds: float = 0.0
    queue_seconds: float = 0.0
    first_token_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per round with drafts, the bonus included. Other rounds do not count: it is 1 if no round had
        drafts, and 0 before the first round."""
        return self.drafted_round_tokens / self.drafted_rounds if self.drafted_rounds else float(self.rounds > 0)

    @property
    def accepted_per_position(self) -> list[float]:
        """For each depth, the share of accepted drafts among the rounds that had a draft at this depth."""
        by_depth = zip(self.accepted_counts, self.drafted_counts, strict=False)  # older records lack the second
        return [accepted / drafted for accepted, drafted in by_depth if drafted]  # `add` may leave zeros at the end

    def copy(self) -> "RequestStats":
        """Copy these figures; lists are replaced, never changed, so they are shared."""
        return RequestStats(*_FIGURES(self))

    @classmethod
    def total(cls, requests: Iterable["RequestStats"]) -> "RequestStats":
        """Sum these figures."""
        found = cls()
        for one in requests:
            found.add(one)
        return found

    def add(self, other: "RequestStats", sign: int = 1) -> None:
        """Sum another request's figures into this one (`sign=-1` takes them out again)."""
        for name in _BY_DEPTH:
            pairs = itertools.zip_longest(getattr(self, name), getattr(other, name), fillvalue=0)
            setattr(self, name, [mine + sign * theirs for mine, theirs in pairs])
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + sign * getattr(other, name))


_NAMES = tuple(each.name for each in fields(RequestStats))
_FIGURES = attrgetter(*_NAMES)
_BY_DEPTH = ("accepted_counts", "drafted_counts")
_SUMS = tuple(name for name in _NAMES if name not in _BY_DEPTH)


class RowTotals:
    """Sums of each row's rounds. Of the newest round: shares, one request's part of each of SECONDS; num_drafted, its
    nodes without the root; settled_at, the host's time when it was settled."""

    def __init__(self, num_rows: int) -> None:
        self.shares = [0.0] * len(SECONDS)
        self.num_drafted, self.settled_at = 0, 0.0
        self._sums = np.zeros((num_rows, len(COUNTS) + len(SECONDS)))
        self._by_depth: IntArray = np.zeros((2, num_rows, 0), dtype=np.int64)  # accepted, drafted

    def after_round(self, rows: IntArray, result: RoundResult) -> "RowTotals":
        """These figures and those of a round of these rows, whose requests take all their tokens of it."""
        new, length, drafts, forced = copy.copy(self), result.length, result.draft_depth, result.forced
        new.shares = [result.seconds[name.removesuffix("_seconds")] / len(rows) for name in SECONDS]
        new.num_drafted, new.settled_at = result.path.shape[1] - 1, time.perf_counter()
        new._sums = self._sums.copy()
        if not new.num_drafted:
            new._sums[rows] += [1, 1, *[0] * (len(COUNTS) - 2), *new.shares]
            return new
        is_forced, is_drafted = forced > 0, (drafts > 0) & (forced == 0)
        assert (is_forced | (length - 1 <= drafts)).all(), f"{length=} with {drafts=}"
        one = np.ones_like(length)
        of_drafted = [each * is_drafted for each in (one, length, drafts, one * new.num_drafted)]
        counts = [one, length, *of_drafted, np.minimum(length, forced), is_forced]
        new._sums[rows] += np.stack([*counts, *(one * share for share in new.shares)], axis=1)
        depth = max(self._by_depth.shape[2], int(drafts.max()))
        new._by_depth = np.pad(self._by_depth, ((0, 0), (0, 0), (0, depth - self._by_depth.shape[2])))
        reached = np.stack([length - 1, drafts]) * is_drafted  # [2, B]
        new._by_depth[:, rows] += np.arange(depth) < reached[..., None]
        return new

    def without(self, rows: IntArray) -> "RowTotals":
        """These figures with none of these rows, which have new requests."""
        new = copy.copy(self)
        new._sums, new._by_depth = self._sums.copy(), self._by_depth.copy()
        new._sums[rows], new._by_depth[:, rows] = 0, 0
        return new

    def of_row(self, row: int) -> RequestStats:
        sums = self._sums[row].tolist()
        accepted, drafted = self._by_depth[:, row, : np.count_nonzero(self._by_depth[1, row])].tolist()
        counts = dict(zip(COUNTS, map(int, sums), strict=False))
        seconds = dict(zip(SECONDS, sums[len(COUNTS) :], strict=True))
        stats = RequestStats(**counts, **seconds, accepted_counts=accepted, drafted_counts=drafted)
        stats.output_tokens = stats.round_tokens
        return stats

    def of_last_round(self, taken: int, num_drafts: int, num_forced: int) -> RequestStats:
        """Figures of the newest round for a request that ended with its first `taken` tokens: see `Request.settle`."""
        seconds = dict(zip(SECONDS, self.shares, strict=True))
        last = RequestStats(rounds=1, round_tokens=taken, **seconds)  # type: ignore[arg-type]
        if num_forced:
            last.forced_tokens, last.forced_rounds = min(taken, num_forced), 1
        elif num_drafts:
            last.draft_nodes = self.num_drafted
            if taken:  # its output ends within the accepted drafts, so later ones do not count
                last.drafted_rounds, last.drafted_round_tokens, last.draft_tokens = 1, taken, taken
                last.accepted_counts = last.drafted_counts = [1] * taken
        return last


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """One finished request.

    token_ids end with the stop token if there was one, or with the token that completes a stop string; `text` has
    special tokens removed and ends before a stop string.
    finish_reason: "stop" (an end token or string), "length" (max_new_tokens), "abort" (the caller aborted it, the
    engine was closed, or its grammar allows no next token).
    drafted: for each token, whether it was an accepted draft.
    prompt_logprobs: of each prompt token, if the request asks for them; None for the first, and for tokens that an
    aborted request has not read.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    stats: RequestStats
    drafted: list[bool]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None


@dataclass(frozen=True, slots=True)
class StreamDelta:
    """Tokens and text that a streamed request gained since the last delta; the last delta carries `output`.

    logprobs: of its tokens, if the request asks for them.
    """

    text: str
    token_ids: list[int]
    drafted: list[bool]
    output: GenerationOutput | None = None
    logprobs: list[TokenLogprob] | None = None

    @property
    def finish_reason(self) -> str | None:
        return self.output.finish_reason if self.output else None
