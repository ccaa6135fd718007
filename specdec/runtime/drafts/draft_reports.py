"""Reports on drafts: as one sentence, for the log, benchmarks, command line and examples; as counts, for statistics,
metrics and the doctor; and as counts under vLLM's names, for clients and benchmarks that read those.

vLLM's counts skip rounds without drafts. A tree counts by its depth, not by its nodes.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from specdec.runtime.request_output import RequestStats
from specdec.runtime.rounds.result import DraftShape

UNDISTURBED_SHARE = 0.9
"""Minimum share of a core that a computing process gets while no other program uses the processor."""


class DraftStats(NamedTuple):
    """An engine's drafts, and why its newest round had none.

    shapes: each draft (levels, branches, nodes with the root, does a lookup draft); the first is no draft.
    rounds: rounds with each draft.
    tried: trials among these rounds.
        milliseconds: by batch size, milliseconds of a round with each draft, measured or guessed.
        chance: by depth, how often a chain's draft is accepted if the previous one was.
    last: the newest choice: rows, expected tokens and milliseconds of each draft.
    best: index of the best draft.
    judged: settled drafts.
    begun: settled drafts with an accepted token.
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
            f"{each} {gained:.2f} tokens in {took:.2f} ms, {gained / took:.2f} a ms" for each, gained, took in table
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
            return f"the first token was accepted in {self.begun} of {self.judged} drafts that were tried"
        plain, *rates = np.divide(tokens, milliseconds).tolist()
        best = 1 + rates.index(max(rates))
        found = (
            f"{self.shapes[best]} is expected to bring {tokens[best]:.2f} tokens in {milliseconds[best]:.2f} ms, "
            f"no draft 1 in {milliseconds[0]:.2f} ms, with {rows} running"
        )
        return found if max(rates) <= plain else f"{found}, and what earlier drafts gained does not cover its risk"


def acceptance_in_words(stats: RequestStats, off: str = "") -> str:
    """State the acceptance length, and the number of rounds with drafts if more than a tenth had none; or that no
    drafts were made. off: why rounds have no drafts now (`Engine.drafts_off`), included if most rounds had none."""
    if not stats.drafted_rounds:
        return f"no drafts were made: {off or 'no round had a choice'}"
    found = f"acceptance length {stats.acceptance_length:.2f}"
    if 10 * stats.drafted_rounds < 9 * stats.rounds:
        found += f" in the {stats.drafted_rounds} of {stats.rounds} rounds that drafted"
    return found + (f" ({off})" if off and 2 * stats.drafted_rounds < stats.rounds else "")


def why_no_drafts(rounds: int, adaptive: bool, off: str = "") -> str:
    """State that a measurement made no drafts, and why. off: as in `acceptance_in_words`."""
    if not adaptive or not rounds:
        return "no drafts were made: no answer was long enough for one"
    return f"no drafts were made: none pays here; `--fixed-drafts` measures the drafter{off and f' ({off})'}"


def depths_in_words(accepted: Sequence[float], drafted: Sequence[int]) -> str:
    """State, for each depth, the share of rounds that accepted the draft there. drafted: rounds with a draft at each
    depth."""
    if len(set(drafted)) <= 1:
        return ", ".join(f"{share:.2f}" for share in accepted)
    pairs = zip(accepted, drafted, strict=False)
    return f"{', '.join(f'{share:.2f} of {count}' for share, count in pairs)} rounds"


def why_slower(speed_up: float, stats: RequestStats, *, off: str = "") -> str:
    """Why drafts were slower than plain decoding; empty if they were not.

    stats: figures of the run with drafts. off: why rounds have no drafts now (`Engine.drafts_off`).
    """
    if speed_up >= 1 or not stats.rounds:
        return ""
    mean_tokens = stats.round_tokens / stats.rounds
    reason = (
        f"a round brought {mean_tokens:.2f} tokens and took {mean_tokens / speed_up:.2f} times as long as a plain one"
    )
    return reason + (f"; drafts are off: {off}" if off else "")


def busy_in_words(processor_share: float | None) -> str:
    """Says that other programs used the processor during the measurement; empty if not, or if unknown."""
    if processor_share is None or processor_share >= UNDISTURBED_SHARE:
        return ""
    return f"other programs took the processor: this one had {processor_share:.2f} of a core"


def vllm_figures(stats: RequestStats, max_drafts: int) -> dict[str, Any]:
    """`metrics.speculative_decoding` of vLLM. max_drafts: drafts that a round can accept.

    acceptance_histogram[j]: rounds that accepted j drafts. The mean length is 1 + accepted / rounds, so the bonus token
    counts in every round, also in the last one of an output that ends within the drafts.
    """
    steps, accepted = stats.drafted_rounds, sum(stats.accepted_counts)
    at_least = [steps, *stats.accepted_counts, *[0] * (max_drafts + 1 - len(stats.accepted_counts))]
    return {
        "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
        "draft_acceptance_rate": accepted / stats.draft_tokens if stats.draft_tokens else 0.0,
        "acceptance_histogram": [more - fewer for more, fewer in pairwise(at_least)],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": stats.draft_tokens,
        "num_spec_tokens": len(at_least) - 2,
    }
