"""One change of a pair: what it is, the pair that has it, and what a user does to have it for good."""

from dataclasses import dataclass

from specdec.doctor.pair_in_question import PairInQuestion


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """what: in a few words, "taps 3, 16, 28 -> 2, 15, 27". do: a sentence for the user. pair: as changed. prompts: it
    changes what is asked, not the drafter."""

    what: str
    do: str
    pair: PairInQuestion
    prompts: bool = False
