"""Use of drafts in words and numbers, for statistics, metrics and the doctor."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from specdec.runtime.rounds.result import DraftShape


class DraftStats(NamedTuple):
    """An engine's drafts, and why its newest round had none.

    shapes: each draft (levels, branches, nodes with the root, does a lookup draft); the first is no draft. rounds:
    rounds with each draft; tried: trials among them. milliseconds: round time with each, by batch size, measured or
    guessed. chance: by depth, acceptance of a chain's draft after an accepted one. last: the newest choice: rows,
    expected tokens and milliseconds of each draft; best: the best draft. judged: settled drafts; begun: at least partly
    accepted.
    """

    shapes: Sequence[DraftShape] = ()
    rounds: Sequence[int] = ()
    tried: Sequence[int] = ()
    milliseconds: Mapping[int, Sequence[float]] = {}
    chance: Sequence[float] = ()
    last: tuple[int, Sequence[float], Sequence[float]] = (0, (), ())
    best: int = 0
    judged: int = 0
    begun: int = 0

    @property
    def why(self) -> str:
        """One line: the drafts of the newest choice, with their expected tokens and milliseconds."""
        rows, tokens, milliseconds = self.last
        table = zip(self.shapes, tokens, milliseconds, strict=False)
        named = [
            f"{each} {brought:.2f} tokens in {took:.2f} ms, {brought / took:.2f} a ms" for each, brought, took in table
        ]
        return f"{rows} running: {'; '.join(named) or self.off}" if rows else "no round has had a choice yet"

    @property
    def off(self) -> str:
        """Why no draft was best in the newest choice; empty if one was."""
        rows, tokens, milliseconds = self.last
        if self.best or not rows:
            return ""
        if not tokens:
            return "the first rounds are timed without"
        if self.judged > 20 * self.begun:
            return f"of {self.judged} drafts that were tried {self.begun} began with a token that was accepted"
        plain, *rates = np.divide(tokens, milliseconds).tolist()
        best = 1 + rates.index(max(rates))
        found = (
            f"{self.shapes[best]} is expected to bring {tokens[best]:.2f} tokens in {milliseconds[best]:.2f} ms, "
            f"no draft 1 in {milliseconds[0]:.2f} ms, with {rows} running"
        )
        return found if max(rates) <= plain else f"{found}, and what earlier drafts gained does not cover its risk"
