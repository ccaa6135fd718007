"""Which draft a round has: the one of most tokens a second, none included, as far as may be hoped.

    rate[draft] = tokens[draft] / seconds[draft]

Both are known by what was settled, a round or two ago, and only as well as a draft was seen. So the draft of the
highest *hopeful* rate is chosen: it is the best, or it will soon be known better. Where none is expected to be best,
the hopeful source tries its smallest draft. A source that was never tried is tried first. Each choice but these first
ones must be covered by the account (`draft_account.py`).

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

EDGE = 0.02
"""Share by which the rate of a draft must be above that of none: as far as the times of both are known."""


class DraftChoice:
    """Chooses and learns for one engine. shapes: its drafts, the first is none."""

    def __init__(self, shapes: Sequence[DraftShape], num_rows: int, *, captured: bool = True) -> None:
        self.shapes = shapes
        self.times = RoundTimes(len(shapes))
        self.acceptance = Acceptance(shapes, num_rows)
        self.account = DraftAccount(captured=captured)
        self._numbers = {shape: number for number, shape in enumerate(shapes)}
        self._by_model = np.array([shape.num_steps > 0 and not shape.by_lookup for shape in shapes], dtype=np.float64)
        self._untried = {shape.by_lookup for shape in shapes[1:]}
        self._rounds = [0] * len(shapes), [0] * len(shapes)  # chosen as the best, and tried
        self._batches: set[int] = set()
        self._judged = self._begun = 0  # drafts of rows, and those whose first token was accepted
        self._last: tuple[int, Sequence[float], Sequence[float]] = (0, (), ())
        self._best = 0  # of the newest choice, a trial apart
        self._is_timed = False
        self._edge = np.array([1.0, *[1 + EDGE] * (len(shapes) - 1)])

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
        reading = self._by_model * (self.times.catching_up.get(batch, 0.0) if unread else 0.0)
        believed = self.times.seconds(batch)  # [2, K]
        taken, is_timed = believed[0], not self.times.plain_is_due(batch)
        tokens = self.acceptance.tokens(rows, most)  # [2, K]
        # it is read after KEPT tokens anyway; a round that was never timed takes one
        seconds = np.where(believed > 0, believed, 1.0) + reading / KEPT
        rate, hope = (tokens / seconds / self._edge).tolist()
        lost = (taken - taken[0] + reading).tolist()  # if nothing is accepted
        drafts = range(1, len(self.shapes))
        if least.num_nodes > 1:
            allowed = [number for number in drafts if covers(self.shapes[number], least)]
            best = chosen = max(allowed, key=rate.__getitem__)
        elif not is_timed:
            best = chosen = 0
        else:
            self.account.credit_plain(float(taken[0]))
            balance = self.account.balance - sum(lost[self._numbers.get(shape, 0)] for shape in unsettled)
            allowed = [0, *(number for number in drafts if lost[number] <= balance)]
            best = max(allowed, key=rate.__getitem__)
            chosen = self._trial(best, hope, lost, allowed)
        self._rounds[int(chosen != best)][chosen] += 1
        self._batches.add(batch)
        self._last = len(rows), tokens[0].tolist(), (1e3 * seconds[0]).tolist()
        self._best, self._is_timed = best, is_timed
        return self.shapes[chosen]

    def _trial(self, best: int, hope: Sequence[float], lost: Sequence[float], allowed: Sequence[int]) -> int:
        """The best draft, or one that may be better."""
        drafts = range(1, len(self.shapes))
        if self._untried:
            source = min(self._untried)
            self._untried.remove(source)
            return min((number for number in drafts if self.shapes[number].by_lookup == source), key=lost.__getitem__)
        trial = max(range(len(self.shapes)), key=hope.__getitem__)
        if best == 0 and trial:  # the source of most hope for what its smallest hopeful draft may lose
            worth: dict[int, float] = {}
            for source in (False, True):
                hopeful = [each for each in drafts if self.shapes[each].by_lookup == source and hope[each] > hope[0]]
                if hopeful:
                    smallest = min(hopeful, key=lost.__getitem__)
                    worth[smallest] = (max(hope[each] for each in hopeful) - hope[0]) / max(lost[smallest], 1e-9)
            trial = max(worth, key=worth.__getitem__)
        return trial if trial in allowed else best

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
        number = self._numbers.get(shape) if shape.num_steps else 0
        if number is None:  # shortened, since no request could use more
            number, seconds = self._whole_of(shape, batch, seconds)
        self.times.learn(number, batch, seconds)
        if number and len(rows):
            self.acceptance.learn(number, rows, accepted, most)
            self._judged += len(rows)
            self._begun += int(np.count_nonzero(accepted))
        taken = self.times.seconds(batch)[0].tolist()
        if number == 0 or brought:
            self.account.settle(taken[number], taken[0], brought if number else 1.0)

    def _whole_of(self, shape: DraftShape, batch: int, seconds: float) -> tuple[int, float]:
        """The number of the draft that was shortened to this one, and the seconds of a round with all its nodes."""
        number = next(number for number, each in enumerate(self.shapes) if covers(each, shape))
        plain = float(self.times.seconds(batch)[0, 0])
        longer = (self.shapes[number].num_nodes - 1) / (shape.num_nodes - 1)
        return number, plain + max(0.0, seconds - plain) * longer

    def caught_up(self, batch: int, draft: DraftShape, seconds: float | None) -> None:
        """The model has read unread tokens before a round with this draft. seconds: None, as long as was timed."""
        if seconds is not None:
            self.times.catching_up[batch] = seconds
        by_model = draft.num_steps > 0 and not draft.by_lookup
        self.account.charge(self.times.catching_up.get(batch, 0.0), due=not by_model)

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
        milliseconds = {batch: (1e3 * self.times.seconds(batch)[0]).tolist() for batch in sorted(self._batches)}
        best, tried = self._rounds
        rounds = [sum(counts) for counts in zip(best, tried, strict=True)]
        chance = self.acceptance.chance[0].tolist()
        return DraftUse(self.shapes, rounds, list(tried), milliseconds, chance, self._last, self.off)


def covers(shape: DraftShape, least: DraftShape) -> bool:
    """Has it all that `least` has, from the same drafter?"""
    return shape.by_lookup == least.by_lookup and all(has >= wants for has, wants in zip(shape, least, strict=True))
