"""Results of drafts in words: the same sentence in the log, the benchmarks, the command line and the examples."""

from collections.abc import Sequence

from specdec.runtime.request import RequestStats

UNKNOWN = "no round had a choice"

BUSY = 0.9
"""Share of a core that a process has while it computes on a CPU, at least, if others leave it alone."""


def acceptance_in_words(stats: RequestStats, off: str = "") -> str:
    """The acceptance length of the rounds that drafted, and how many these are where a tenth of all or more did not; or
    that no drafts were made. off: why there are none now (`Engine.drafts_off`), said where most rounds had none."""
    if not stats.drafted_rounds:
        return f"no drafts were made: {off or UNKNOWN}"
    found = f"acceptance length {stats.acceptance_length:.2f}"
    if 10 * stats.drafted_rounds < 9 * stats.rounds:
        found += f" in the {stats.drafted_rounds} of {stats.rounds} rounds that drafted"
    return found + (f" ({off})" if off and 2 * stats.drafted_rounds < stats.rounds else "")


def depths_in_words(accepted: Sequence[float], drafted: Sequence[int]) -> str:
    """Shares of the rounds that drafted so deep which accepted each draft. drafted: these rounds, by depth."""
    if len(set(drafted)) <= 1:
        return ", ".join(f"{share:.2f}" for share in accepted)
    pairs = zip(accepted, drafted, strict=False)
    return f"{', '.join(f'{share:.2f} of {count}' for share, count in pairs)} rounds"


def why_slower(speed_up: float, stats: RequestStats, *, off: str = "", processor_share: float | None = None) -> str:
    """Why drafts were slower than plain decoding; empty where they were not.

    stats: of the rounds with drafts. off: why these have none now (`Engine.drafts_off`). processor_share: seconds of a
    core for each second of the comparison, on a CPU.
    """
    if speed_up >= 1 or not stats.rounds:
        return ""
    brought = stats.round_tokens / stats.rounds
    reason = f"a round brought {brought:.2f} tokens and took {brought / speed_up:.2f} times as long as a plain one"
    if off:
        reason += f"; drafts are off: {off}"
    if processor_share is not None and processor_share < BUSY:
        reason += f"; other programs took the processor: this one had {processor_share:.2f} of a core"
    return reason
