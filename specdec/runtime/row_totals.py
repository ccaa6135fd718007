"""Figures of settled rounds, counted for all rows at once.

A request's figures are what it had when it took its row, and the sums of that row here. Settled rounds make new figures
and change none, so a request has the figures of a round from the moment it has the round's tokens.
"""

import copy
import time

import numpy as np

from specdec.gpu.mirrored_array import IntArray
from specdec.runtime.rounds.result import RoundResult

DRAFTED = ("drafted_rounds", "drafted_round_tokens", "draft_tokens", "draft_nodes")
COUNTS = ("rounds", "round_tokens", *DRAFTED, "forced_tokens", "forced_rounds")
SECONDS = ("draft_seconds", "verify_seconds", "other_seconds")
"""Seconds of a round, which its requests share."""


class RowTotals:
    """Sums of each row's rounds. shares: a request's SECONDS of the newest round. num_drafted: its nodes, without the
    root. settled_at: when it was settled, on the host's clock."""

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

    def of_row(self, row: int) -> dict[str, int | float | list[int]]:
        """Sums of one row, by the names that they have in `RequestStats`."""
        sums = self._sums[row].tolist()
        accepted, drafted = self._by_depth[:, row, : np.count_nonzero(self._by_depth[1, row])].tolist()
        counts = dict(zip(COUNTS, map(int, sums), strict=False))
        by_depth = {"accepted_counts": accepted, "drafted_counts": drafted}
        seconds = zip(SECONDS, sums[len(COUNTS) :], strict=True)
        return {**counts, **dict(seconds), **by_depth, "output_tokens": counts["round_tokens"]}
