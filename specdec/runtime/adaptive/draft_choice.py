"""Which draft a round has: the one of most expected tokens a second, no draft included.

    rate[k] = mean over rows of tokens[k, row] / seconds[k]

The mean is the geometric one. Where every request has a text to finish, hard ones stay longest, and a draft that is
good for easy ones alone holds them up: to first order, what ends them soonest is the most relative gain, over all rows.

What seldom runs cannot be learned from, so a share of the time is kept to try what would be best if chances were as
high as they may still be: where plain rounds are best, the draft that loses least if it is wrong. A trial is paid from
what was kept, by what it is expected to lose. New requests, whose odds nobody knows, are tried soonest.

Expectations may be wrong, so no draft is chosen, for its rate or as a trial, unless the account of what drafts have
gained and lost pays for all of it (`draft_account.py`).

Any choice is exact: the target draws the same tokens behind any draft. Nothing waits for the device: what is known is
what was settled, a round or two ago.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from specdec.gpu.mirrored_array import IntArray
from specdec.runtime.adaptive.cost_table import CostTable
from specdec.runtime.adaptive.draft_account import DraftAccount
from specdec.runtime.adaptive.draft_chances import DraftChances, FloatArray
from specdec.runtime.rounds.result import DraftShape

STAYS = 8
"""Rounds for which what drafts are expected to bring the same rows is not computed again, if nothing is learned of it:
a drafter that is never right costs the host little then."""

EDGE = 0.005
"""Tokens of a row that a draft must bring more than its time is worth."""

LEAST_TRIAL = 0.05
"""Share of a round without a draft, where that is best, that a trial loses at least: with times that seem equal it
would cost nothing, and be in every round."""

HOPELESS = 0.05
"""A first draft that is right more seldom pays nowhere: a round with one takes more than that longer."""

IN_A_ROW = 8
"""Rounds with drafts, about, that catching up once is good for."""


class DraftUse(NamedTuple):
    """What an engine has made of its drafts.

    shapes: (levels, branches, nodes with the root, whether it is a lookup's) of each draft there is, the first is none.
    rounds: that had it; tried: those of them that were trials. milliseconds: of a round with each, by batch size,
    nothing committed, as far as it was timed or guessed. chance: by depth, of a chain's draft where the one before was
    accepted. last: of the newest choice, how many rows, and of each draft the tokens and the milliseconds that it was
    expected to bring and take. off: why that choice was no draft, in words; empty where it was one.
    """

    shapes: Sequence[DraftShape] = ()
    rounds: Sequence[int] = ()
    tried: Sequence[int] = ()
    milliseconds: Mapping[int, Sequence[float]] = {}
    chance: Sequence[float] = ()
    last: tuple[int, Sequence[float], Sequence[float]] = (0, (), ())
    off: str = ""

    @property
    def why(self) -> str:
        """One line: what the newest choice was between."""
        rows, tokens, milliseconds = self.last
        named = [
            f"{name(shape)} {brought:.2f} tokens in {took:.2f} ms, {brought / took:.2f} a ms"
            for shape, brought, took in zip(self.shapes, tokens, milliseconds, strict=False)
        ]
        return f"{rows} running: " + "; ".join(named) if named else "no round has had a choice yet"

    def best_chain(self, batch: int, accepted: Sequence[float]) -> str:
        """A sentence about the chain (or no draft) that brings most tokens a millisecond to `batch` requests. accepted:
        shares of the rounds in which drafts 1, 2, ... are accepted."""
        tokens = np.cumsum([1.0, *accepted])
        chains = [
            (tokens[min(shape.num_steps, len(accepted))] / took, shape)
            for shape, took in zip(self.shapes, self.milliseconds[batch], strict=True)
            if shape.topk == 1 and not shape.by_lookup
        ]
        plain, (rate, best) = chains[0][0], max(chains)
        return f"{name(best)}, {rate / plain:.2f} times the tokens a second of none"


NO_CHOICE = DraftUse()


class DraftChoice:
    """Chooses and learns for one engine."""

    def __init__(self, shapes: Sequence[DraftShape], num_rows: int) -> None:
        self.shapes = shapes
        self.cost = CostTable(shapes)
        self.chances = DraftChances(shapes, num_rows)
        self._numbers = {shape: number for number, shape in enumerate(shapes)}
        self.account = DraftAccount()
        self._by_model = np.array([shape.num_steps > 0 and not shape.by_lookup for shape in shapes], dtype=np.float64)
        self._rounds = [0] * len(shapes), [0] * len(shapes)  # chosen for its rate, and tried
        self._batches: set[int] = set()
        self._brought = np.ones((2, len(shapes)))  # the newest means over rows, expected and hoped for,
        self._brought_to: tuple[bytes, bytes] | None = None  # rows and the most they accept; None: they have changed,
        self._stayed = 0  # and for how many rounds
        self._last: tuple[int, Sequence[float], Sequence[float]] = (0, (), ())
        self._best = 0  # of the newest choice, a trial apart
        self._knows_plain = False
        self._judged = self._begun = 0  # drafts of rows, and those whose first token was accepted

    def begin(self, rows: IntArray) -> None:
        """These rows have new requests."""
        self.chances.begin(rows)
        self._brought_to = None

    def choose(
        self,
        rows: IntArray,
        most: IntArray,
        batch: int,
        context: int,
        least: DraftShape,
        *,
        unread: int = 0,
        unsettled: Sequence[DraftShape] = (),
    ) -> DraftShape:
        """For a round of these rows [B], which can accept at most `most` [B] drafts each.

        batch: seats of the round, those of padding included. context: committed tokens of all rows together. least:
        what some row must have, whatever it costs. unread: tokens of a row that the drafter has to read first.
        unsettled: drafts of rounds that are launched and not learned from yet.
        """
        catching_up = self.cost.catch_up(batch, unread)
        taken = self.cost.seconds(batch, context)
        of_round = taken + self._by_model * (catching_up / IN_A_ROW)
        self.chances.fade()
        # a few numbers, which plain Python compares sooner
        tokens, hoped = self._tokens(rows, most).tolist()
        seconds, hopeful = of_round.tolist(), self.cost.hopeful(batch, of_round).tolist()
        plain = seconds[0] if self.cost.knows_plain(batch) else 0.0
        if plain:
            self.account.begin(plain)
        # of each draft, if nothing of it is accepted
        lost = (taken - taken[0] + self._by_model * catching_up).tolist()
        if least.num_nodes > 1:
            allowed = [number for number, shape in enumerate(self.shapes) if covers(shape, least)]
        else:
            balance = self.account.balance - sum(lost[self._numbers.get(shape, 0)] for shape in unsettled)
            allowed = [number for number, worst in enumerate(lost) if not number or (plain and worst <= balance)]
        # a draft that brings hardly more than none in as much time, as far as is known, is none
        best = max(allowed, key=lambda number: (tokens[number] - EDGE * (number > 0)) / seconds[number])
        rate = tokens[best] / seconds[best]
        trial = self._trial(allowed, best, [brought / took for brought, took in zip(hoped, hopeful, strict=True)], lost)
        # the best draft brings these tokens in less time
        missed = seconds[trial] - tokens[trial] / rate + self._by_model[trial] * catching_up
        if best == 0:
            missed = max(missed, LEAST_TRIAL * seconds[0])
        tried = trial != best and missed <= self.account.spare
        if tried:
            self.account.spare -= missed
        chosen = trial if tried else best
        self.account.balance -= self._by_model[chosen] * catching_up
        self._rounds[int(tried)][chosen] += 1
        self._batches.add(batch)
        self._last = len(rows), tokens, [1e3 * each for each in seconds]
        self._best, self._knows_plain = best, plain > 0
        return self.shapes[chosen]

    @staticmethod
    def _trial(allowed: Sequence[int], best: int, hoped: Sequence[float], lost: Sequence[float]) -> int:
        """What may be better than the best: where that is no draft, the one of those that may be which risks least."""
        trial = max(allowed, key=hoped.__getitem__)
        if best or trial == best:
            return trial
        return min((number for number in allowed if hoped[number] > hoped[best]), key=lost.__getitem__)

    def learn(
        self,
        shape: DraftShape,
        batch: int,
        context: int,
        seconds: Mapping[str, float],
        rows: IntArray,
        accepted: IntArray,
        most: IntArray,
        since: tuple[float, float] | None = None,
        *,
        brought: float | None = None,
    ) -> None:
        """A round with this draft is settled. accepted, most: drafts of each row [B]. since: seconds for which the
        device stood still before it, and from the end of the round before to its own; None: something else came before.
        brought: tokens that requests gained by it, on average; 0: a request had fixed its draft, so that the round is
        no gain or loss of the choice; None: those that were accepted, and one.
        """
        number = self._numbers.get(shape)
        if number is None:  # shortened, or another's
            return
        spent = self.cost.note(number, batch, context, seconds)
        if since is not None:
            self.cost.note_host(number, batch, *since)
        if number and len(rows):
            self.chances.learn(number, rows, accepted, most)
            self._judged += len(rows)
            self._begun += int(np.count_nonzero(accepted))
            self._brought_to = None
        if number == 0:
            self.account.settle(spent, spent)
        elif brought != 0:
            brought = 1.0 + float(np.minimum(accepted, shape.depth).mean()) if brought is None else brought
            self.account.settle(spent, float(self.cost.seconds(batch, context)[0]), brought)

    def reads_along(self, batch: int, tokens: int) -> bool:
        """Should the drafter read so many tokens of each row, though no draft is its own? It could not be later. Where
        none of its drafts can pay, whatever the batch, only if there is time left for it."""
        return self.chances.highest > HOPELESS or self.account.affords(self.cost.catch_up(batch, tokens))

    def caught_up(self, batch: int, tokens: int, seconds: float | None, draft: DraftShape) -> None:
        """The drafter has read so many tokens of each row at most, before a round of this batch with this draft, which
        took so long; None: as long as was timed when the engine was made."""
        if seconds is not None:
            self.cost.note_catching_up(batch, tokens, seconds)
        if not self._by_model[self._numbers.get(draft, 0)]:  # it was chosen otherwise, and paid
            self.account.read_along(self.cost.catch_up(batch, tokens))

    def _tokens(self, rows: IntArray, most: IntArray) -> FloatArray:
        """[2, K]: means over these rows of what each draft is expected to bring, and may be hoped to."""
        brought_to = rows.tobytes(), most.clip(max=self.shapes[-1].depth).tobytes()
        self._stayed += 1
        if brought_to != self._brought_to or self._stayed >= STAYS:
            self._brought = np.exp(np.log(self.chances.tokens(rows, most)).mean(axis=-1))  # geometric
            self._brought_to, self._stayed = brought_to, 0
        return self._brought

    @property
    def off(self) -> str:
        """Why the newest choice was no draft, in words; empty where it was one. Any thread may ask."""
        rows, tokens, milliseconds = self._last
        if self._best or not rows:
            return ""
        if not self._knows_plain:
            return "the first rounds are timed without"
        if self._judged and self._begun < HOPELESS * self._judged:
            return f"of {self._judged} drafts that were tried {self._begun} began with a token that was accepted"
        rates = [brought / took for brought, took in zip(tokens, milliseconds, strict=True)]
        best = max(range(1, len(rates)), key=rates.__getitem__)
        found = (
            f"{name(self.shapes[best])} is expected to bring {tokens[best]:.2f} tokens in {milliseconds[best]:.2f} ms, "
            f"no draft 1 in {milliseconds[0]:.2f} ms, with {rows} running"
        )
        return found if rates[best] <= rates[0] else f"{found}, and what earlier drafts gained does not cover its risk"

    def use(self) -> DraftUse:
        """The use of drafts, as it is now."""
        milliseconds = {batch: (1e3 * self.cost.seconds(batch, 0)).tolist() for batch in sorted(self._batches)}
        best, tried = self._rounds
        rounds = [sum(counts) for counts in zip(best, tried, strict=True)]
        chance = self.chances.chance[0].tolist()
        return DraftUse(self.shapes, rounds, list(tried), milliseconds, chance, self._last, self.off)


def covers(shape: DraftShape, least: DraftShape) -> bool:
    """Has it all that `least` has, from the same drafter?"""
    return shape.by_lookup == least.by_lookup and all(has >= wants for has, wants in zip(shape, least, strict=True))


def name(shape: DraftShape) -> str:
    """In words."""
    if shape.num_nodes == 1:
        return "no draft"
    drafted = f"a chain of {shape.num_steps}" if shape.topk == 1 else f"a tree of {shape.num_nodes} nodes"
    return f"{drafted} by lookup" if shape.by_lookup else drafted
