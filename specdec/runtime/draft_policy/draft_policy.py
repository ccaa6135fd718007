"""Chooses the draft of each round (or none): the one with the highest hopeful rate in tokens per second.

    rate[draft] = tokens[draft] / seconds[draft]

The rate of a draft that has rarely run is uncertain. So the *hopeful* rate decides, the upper end of the plausible
range: the chosen draft is either the best, or its rate is soon known better. After the first trial of a source (model
or lookup), its account must cover the cost. The target draws the same tokens with any draft.

    draft_ladder.py      the drafts that an engine chooses among: none, chains or trees of a few depths, lookups
    draft_acceptance.py  tokens of a round with each draft, by request
    round_times.py       seconds of a round with each draft, by batch size
    draft_account.py     what each source has saved, and may therefore risk
    this file            one draft for all requests of a round; `Steps` asks for it, and reports the settled round
    draft_stats.py       what was chosen and why, for `Engine.stats()`
"""

from collections.abc import Sequence

import numpy as np

from specdec.gpu.captures import next_power_of_two
from specdec.gpu.mirrored_array import IntArray
from specdec.runtime.draft_policy.draft_acceptance import DraftAcceptance
from specdec.runtime.draft_policy.draft_account import DraftAccount
from specdec.runtime.draft_policy.draft_stats import DraftStats
from specdec.runtime.draft_policy.round_times import RoundTimes
from specdec.runtime.rounds.result import DraftShape


class DraftPolicy:
    """Chooses and learns for one engine. shapes: its drafts; the first is no draft. times: by batch size."""

    def __init__(self, shapes: Sequence[DraftShape], num_rows: int) -> None:
        self.shapes = shapes
        self.times: dict[int, RoundTimes] = {}
        self.acceptance = DraftAcceptance(shapes, num_rows)
        self._source = [int(shape.by_lookup) for shape in shapes]
        self._untried = sorted(set(self._source))
        self.account = DraftAccount(self._source)
        self._rounds, self._tried = [0] * len(shapes), [0] * len(shapes)
        self._stats = DraftStats(shapes)

    def choose(
        self,
        rows: IntArray,
        max_drafts: IntArray,
        batch: int,
        min_draft: DraftShape,
        unsettled: Sequence[DraftShape] = (),
    ) -> DraftShape:
        """Choose for a round of rows [B] that can accept at most `max_drafts` [B] drafts each. batch: seats, padding
        included. min_draft: the smallest allowed draft, that a row has fixed. unsettled: drafts of rounds in flight."""
        times = self.times_of(batch)
        seconds, is_known = times.seconds, bool(times.seconds[0, 0])
        tokens = self.acceptance.tokens(rows, max_drafts)  # [2, K]
        rate, hopeful_rate = (tokens / (seconds if is_known else 1.0)).tolist()
        if min_draft.num_nodes > 1:
            allowed = [index for index, shape in enumerate(self.shapes) if shape.covers(min_draft)]
        elif not is_known:
            allowed = [0]
        elif self._untried:  # try the smallest draft of each source once, whatever it costs
            allowed = [self._source.index(self._untried.pop(0), 1)]
        else:
            cost, left = seconds[0] - seconds[0, 0], self.account.balance(times)
            for index in map(self._index_of, unsettled):
                left[self._source[index]] -= cost[index]
            allowed = [index for index, source in enumerate(self._source) if cost[index] <= max(0.0, left[source])]
        best, chosen = max(allowed, key=rate.__getitem__), max(allowed, key=hopeful_rate.__getitem__)
        if self.shapes[chosen] in unsettled:  # one trial at a time is enough
            chosen = best
        self._rounds[chosen] += 1
        self._tried[chosen] += chosen != best
        expected = (tokens[0].tolist(), (1e3 * seconds[0]).tolist()) if is_known else ((), ())
        self._stats = self._stats._replace(last=(len(rows), *expected), best=best)
        return self.shapes[chosen]

    def learn(self, shape: DraftShape, batch: int, seconds: float, drafted: Sequence[IntArray], brought: float) -> None:
        """Learn from a settled round. seconds: includes a catch-up before it. drafted: see `DraftAcceptance.learn`.
        brought: mean tokens gained per request; 0: a request had fixed the draft, so nothing is charged."""
        index, times = self._index_of(shape), self.times_of(batch)
        if shape == self.shapes[index]:
            times.learn(index, seconds)
        self.acceptance.learn(index, *drafted)
        if index:
            judged, begun = self._stats.judged + len(drafted[0]), self._stats.begun + int(np.count_nonzero(drafted[1]))
            self._stats = self._stats._replace(judged=judged, begun=begun)
        charged = index if brought else 0
        self.account.settle(times, charged, brought if charged else 1.0)

    def times_of(self, batch: int) -> RoundTimes:
        """Times of rounds with this many seats."""
        size = batch if batch in self.times else next_power_of_two(batch)
        if size not in self.times:
            self.times[size] = RoundTimes([0.0] * len(self.shapes))
        return self.times[size]

    def _index_of(self, shape: DraftShape) -> int:
        """Number of the smallest of `shapes` that covers this one, which may be shortened for its requests."""
        return next(index for index, each in enumerate(self.shapes) if each.covers(shape))

    def stats(self) -> DraftStats:
        """The present use of drafts. Any thread may call this."""
        milliseconds = {size: (1e3 * times.seconds[0]).tolist() for size, times in sorted(self.times.items())}
        rounds, tried, chance = list(self._rounds), list(self._tried), self.acceptance.chance[0].tolist()
        return self._stats._replace(rounds=rounds, tried=tried, milliseconds=milliseconds, chance=chance)
