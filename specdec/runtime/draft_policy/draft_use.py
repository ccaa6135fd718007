"""The use of drafts in words and numbers, for statistics, metrics and the doctor."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from specdec.runtime.rounds.result import DraftShape


class DraftUse(NamedTuple):
    """Drafts of an engine, and why its newest round had none.

    shapes: (levels, branches, nodes with the root, whether it is a lookup's) of each draft there is, the first is none.
    rounds: that had it; tried: those of them that were trials. milliseconds: of a round with each, by batch size, as
    far as it was timed or guessed. chance: by depth, of a chain's draft where the one before was accepted. last: of the
    newest choice, how many rows, and of each draft the tokens and the milliseconds that it was expected to bring and
    take. off: why that choice was no draft, in words; empty where it was one.
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
        """One line: the drafts of the newest choice, with their expected tokens and milliseconds."""
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


def why_none(
    shapes: Sequence[DraftShape], last: tuple[int, Sequence[float], Sequence[float]], judged: int, begun: int
) -> str:
    """The reason that no draft was best. last: see `DraftUse`. judged: drafts of rows so far; begun: those whose first
    token was accepted."""
    rows, tokens, milliseconds = last
    if judged > 20 * begun:
        return f"of {judged} drafts that were tried {begun} began with a token that was accepted"
    rates = [brought / took for brought, took in zip(tokens, milliseconds, strict=True)]
    best = max(range(1, len(rates)), key=rates.__getitem__)
    found = (
        f"{name(shapes[best])} is expected to bring {tokens[best]:.2f} tokens in {milliseconds[best]:.2f} ms, "
        f"no draft 1 in {milliseconds[0]:.2f} ms, with {rows} running"
    )
    return found if rates[best] <= rates[0] else f"{found}, and what earlier drafts gained does not cover its risk"


def name(shape: DraftShape) -> str:
    """In words."""
    if shape.num_nodes == 1:
        return "no draft"
    drafted = f"a chain of {shape.num_steps}" if shape.topk == 1 else f"a tree of {shape.num_nodes} nodes"
    return f"{drafted} by lookup" if shape.by_lookup else drafted
