"""What pairs are published to accept, with the source of each figure. Figures of servers are on their own data.

Lengths count the bonus token. A figure of other prompts or another temperature than the doctor's is there to be looked
at; only bundled pairs are measured on what their figure was measured on.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedAcceptance:
    """target, drafter: the last part of a hub id, in lower case. num_steps: drafts a round. length: accepted, with the
    bonus. by_depth: share of the rounds, where it is known. data, source: what it was measured on, and who says so."""

    target: str
    drafter: str
    num_steps: int
    length: float
    data: str
    source: str
    by_depth: tuple[float, ...] = ()


PUBLISHED = (
    PublishedAcceptance(
        target="tiny-gemma4",
        drafter="tiny-gemma4-mtp",
        num_steps=4,
        length=4.85,
        by_depth=(0.991, 0.985, 0.978, 0.970),
        data="200 held-out word problems, greedy",
        source="specdec/bundled/tiny-gemma4-mtp/README.md",
    ),
    PublishedAcceptance(
        target="tiny-gemma4",
        drafter="tiny-gemma4-eagle3",
        num_steps=4,
        length=3.01,
        by_depth=(0.72, 0.58, 0.43, 0.31),
        data="200 held-out word problems, greedy",
        source="specdec/bundled/tiny-gemma4-eagle3/README.md",
    ),
    PublishedAcceptance(
        target="gemma-4-31b-it",
        drafter="gemma-4-31b-it-assistant",
        num_steps=7,
        length=5.37,
        data="coding, temperature 1, bfloat16, B300",
        source="users' reports of vLLM, read 2026-11",
    ),
    PublishedAcceptance(
        target="gemma-4-26b-a4b-it",
        drafter="gemma-4-26b-a4b-it-assistant",
        num_steps=4,
        length=3.68,
        data="DGX Spark",
        source="users' reports, read 2026-11",
    ),
    PublishedAcceptance(
        target="llama-3.1-8b-instruct",
        drafter="eagle3-llama3.1-instruct-8b",
        num_steps=7,
        length=3.34,
        data="GSM8K, temperature 1 (MT-bench 2.77, HumanEval 3.49)",
        source="published figures of yuhuili's head in chains of 7, read 2026-11",
    ),
    PublishedAcceptance(
        target="qwen3-8b",
        drafter="qwen3-8b-speculator.eagle3",
        num_steps=5,
        length=3.48,
        data="math, temperature 0.6 (HumanEval 3.24, all 2.82)",
        source="speculators, pull request 610, read 2026-11",
    ),
)


def published_for(target: str, drafter: str | None) -> PublishedAcceptance | None:
    """By the last parts of both names, whatever their case; None: nothing is known."""
    if drafter is None:
        return None
    pair = _last(target), _last(drafter)
    return next((figure for figure in PUBLISHED if (figure.target, figure.drafter) == pair), None)


def _last(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()
