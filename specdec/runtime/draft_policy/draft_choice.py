"""Which draft a round has: the one of most tokens a second, none included, as far as may be hoped.

    rate[draft] = tokens[draft] / seconds[draft]

Both are known by what was settled, a round or two ago, and only as well as a draft was seen. So the draft of the
highest *hopeful* rate is chosen: it is the best, or it will soon be known better. Its source must have a balance for
that (`draft_account.py`), but for the first trial of each.

Any choice is exact: the target draws the same tokens with any draft.
"""

from collections.abc import Sequence

import numpy as np

from specdec.gpu.mirrored_array import IntArray
from specdec.runtime.draft_policy.draft_acceptance import Acceptance
from specdec.runtime.draft_policy.draft_account import DraftAccount
from specdec.runtime.draft_policy.draft_use import DraftUse, why_none
from specdec.runtime.draft_policy.round_times import RoundTimes
from specdec.runtime.rounds.result import DraftShape
from specdec.runtime.rounds.unread import KEPT

EDGE = 1.02
"""Rate of a draft, to that of none, from which it is better: as far as the times of both are known."""


class DraftChoice:
    """Chooses and learns for one engine. shapes: its drafts, the first is none."""

    def __init__(self, shapes: Sequence[DraftShape], num_rows: int) -> None:
        self.shapes = shapes
        self.times = RoundTimes(len(shapes))
        self.acceptance = Acceptance(shapes, num_rows)
        self._by_model = np.array([shape.num_steps > 0 and not shape.by_lookup for shape in shapes])
        self._edge = np.array([1.0, *[EDGE] * (len(shapes) - 1)])
        sources = sorted({shape.by_lookup for shape in shapes[1:]})
        self._source = [0, *(sources.index(shape.by_lookup) for shape in shapes[1:])]
        self._untried = list(range(len(sources)))
        self.account = DraftAccount(self._source)
        self._rounds = [0] * len(shapes), [0] * len(shapes)  # all, and those that were trials
        self._judged = self._begun = 0  # drafts of rows, and those whose first token was accepted
        self._last: tuple[int, Sequence[float], Sequence[float]] = (0, (), ())
        self._best = 0  # of the newest choice, a trial apart
        self._is_timed = False

    def begin(self, rows: IntArray) -> None:
        """These rows have new requests."""
        self.acceptance.begin_rows(rows)

    def choose(
        self,
        rows: IntArray,
        most: IntArray,
        batch: int,
        least: DraftShape,
        *,
        unread: int = 0,
        unsettled: Sequence[DraftShape] = (),
    ) -> DraftShape:
        """For a round of these rows [B], which can accept at most `most` [B] drafts each.

        batch: seats of the round, those of padding included. least: what some row must have, whatever it costs. unread:
        tokens of a row that the model has to read before it drafts. unsettled: drafts of the rounds in flight.
        """
        self.acceptance.fade()
        times = self.times.of_batch(batch)
        cost = times.seconds[0] - times.seconds[0, 0]
        self._is_timed = bool(times.seconds[0, 0])
        seconds = times.seconds if self._is_timed else np.ones_like(times.seconds)
        if unread:  # read after KEPT tokens anyway
            seconds = seconds + self._by_model * self.times.catching_up.get(batch, 0.0) / KEPT
        tokens = self.acceptance.tokens(rows, most)  # [2, K]
        rate, hope = (tokens / seconds / self._edge).tolist()
        drafts = range(len(self.shapes))
        if least.num_nodes > 1:
            best = chosen = max((k for k in drafts if covers(self.shapes[k], least)), key=rate.__getitem__)
        elif times.plain_is_due and self.shapes[0] not in unsettled:
            best = chosen = 0
        elif self._untried:  # the smallest draft of a source, once, whatever it takes
            best, chosen = 0, self._source.index(self._untried.pop(0), 1)
        else:
            left = self.account.balance + self.times.longest_plain / len(self.account.balance)
            for shape in unsettled:
                number = self._number(shape)
                left[self._source[number]] -= cost[number]
            allowed = [k for k in drafts if k == 0 or cost[k] <= left[self._source[k]]]
            best, chosen = max(allowed, key=rate.__getitem__), max(allowed, key=hope.__getitem__)
            if self.shapes[chosen] in unsettled:  # it will be known better, and one trial is enough for that
                chosen = best
        self._rounds[0][chosen] += 1
        self._rounds[1][chosen] += chosen != best
        self._last = len(rows), tokens[0].tolist(), (1e3 * seconds[0]).tolist()
        self._best = best
        return self.shapes[chosen]

    def _number(self, shape: DraftShape) -> int:
        """The place of this draft in `shapes`; a shortened one, of which no request could use more, has that of the
        smallest that covers it."""
        if not shape.num_steps:
            return 0
        return next(number for number, each in enumerate(self.shapes) if covers(each, shape))

    def learn(
        self,
        shape: DraftShape,
        batch: int,
        seconds: float,
        rows: IntArray,
        accepted: IntArray,
        most: IntArray,
        brought: float,
    ) -> None:
        """A round with this draft is settled. accepted, most: drafts of each row [B]. brought: tokens that requests
        gained by it, on average; 0: a request had fixed its draft, so that it is no gain or loss of the choice."""
        number, times = self._number(shape), self.times.of_batch(batch)
        if number == 0 or shape == self.shapes[number]:
            times.learn(number, seconds)
        if number and len(rows):
            self.acceptance.learn(number, rows, accepted, most)
            self._judged += len(rows)
            self._begun += int(np.count_nonzero(accepted))
        self.account.settle(times, number, brought if number else 1.0)

    def caught_up(self, batch: int, draft: DraftShape, seconds: float | None) -> None:
        """The model has read unread tokens before a round with this draft. seconds: None, as long as was timed."""
        if seconds is not None:
            self.times.catching_up[batch] = seconds
        due = not draft.num_steps or draft.by_lookup
        self.account.charge(self.times.of_batch(batch), self.times.catching_up.get(batch, 0.0), due=due)

    @property
    def off(self) -> str:
        """Why no draft was best in the newest choice, in words; empty where one was. Any thread may ask."""
        last = self._last
        if self._best or not last[0]:
            return ""
        if not self._is_timed:
            return "the first rounds are timed without"
        return why_none(self.shapes, last, self._judged, self._begun)

    def use(self) -> DraftUse:
        """The use of drafts, as it is now."""
        milliseconds = {size: (1e3 * times.seconds[0]).tolist() for size, times in sorted(self.times.by_size.items())}
        rounds, tried = map(list, self._rounds)
        chance = self.acceptance.chance[0].tolist()
        return DraftUse(self.shapes, rounds, tried, milliseconds, chance, self._last, self.off)


def covers(shape: DraftShape, least: DraftShape) -> bool:
    """Has it all that `least` has, from the same drafter?"""
    return shape.by_lookup == least.by_lookup and all(has >= wants for has, wants in zip(shape, least, strict=True))
