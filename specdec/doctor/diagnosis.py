"""What the doctor measures and finds: accepted lengths prompt by prompt, when a change is clearly better, findings.

Greedy answers do not depend on the drafter, so two drafters are compared on the same texts, prompt by prompt, by two
lengths: the accepted length of greedy drafts, and the expected one of drawn drafts (`Drafts.expected`). A change is
clearly better if

    mean(d) >= MIN_GAIN * old mean    d_i: new expected length minus old, prompt by prompt
    mean(d) >= T_LIMIT * error        its standard error (0.003 by chance)
    d_i > 0                           on at least 7 of 8 prompts
    greedy length                     not shorter
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean, stdev
from typing import Any, NamedTuple

import torch

from specdec.models.published import PublishedAcceptance
from specdec.runtime.drafts.dense_drafts import Drafts
from specdec.runtime.request_output import GenerationOutput, RequestStats

MIN_GAIN = 0.01
"""Least mean gain of a clear change, as a share of the expected length before it."""
MIN_GAIN_OF_PROMPTS = 0.15
"""Least mean gain of changed prompts. Their answers are other texts, so that a gain says less."""
T_LIMIT = 4.0
"""Least mean gain of a clear change, in standard errors."""
POSITIVE = 0.87
"""Least share of the prompts that gain from a clear change."""
EXACT = 1e-3
"""Largest relative difference of logits in float32 on a CPU."""
COARSE = 0.1
"""Largest relative difference of logits elsewhere, since products of other shapes round differently, and 8-bit K/V."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance in an engine's rounds. lengths: tokens per round on each prompt, the bonus token included. by_depth:
    share of the rounds in which drafts 1, 2, ... were accepted, over all prompts."""

    lengths: tuple[float, ...]
    by_depth: tuple[float, ...]

    @property
    def length(self) -> float:
        return mean(self.lengths)

    @classmethod
    def from_outputs(cls, outputs: Sequence[GenerationOutput]) -> "Acceptance":
        total = RequestStats.total(output.stats for output in outputs)
        return cls(tuple(output.stats.acceptance_length for output in outputs), tuple(total.accepted_per_position))


class Measured(NamedTuple):
    """Accepted lengths on each prompt, the bonus token included: expected, and greedy. by_token [N]: probability of
    each token of the texts, mean over its drafts (`conventions.py`); [0] if an engine measured the lengths."""

    expected: tuple[float, ...]
    greedy: tuple[float, ...]
    by_token: torch.Tensor = torch.empty(0, device="cpu")

    @property
    def length(self) -> float:
        """The expected length, over all prompts."""
        return mean(self.expected)


class ReferenceCheck(NamedTuple):
    """Comparison of the worker's logits with the dense reference.

    difference: relative difference of the logits, their means subtracted. bound: the largest that rounding explains.
    same_token: is the likeliest token the same?
    """

    difference: float
    bound: float
    same_token: bool

    @property
    def holds(self) -> bool:
        return self.difference <= self.bound  # NaN does not hold

    @classmethod
    def from_drafts(cls, proposed: torch.Tensor, dense: Drafts, exact: bool) -> "ReferenceCheck":
        """proposed [V]: the worker's logits at the first root of `dense`."""
        first, bound = dense.first_logits, EXACT if exact else COARSE
        both, either = first.isfinite() & proposed.isfinite(), first.isfinite() | proposed.isfinite()
        if both.sum() < (1.0 if exact else 0.9) * either.sum():
            return cls(float("inf"), bound, False)
        expected, found = (x[both] - x[both].mean() for x in (first, proposed))
        difference = float((found - expected).norm() / expected.norm().clamp(min=1e-12))
        return cls(difference, bound, int(proposed.argmax()) == int(first.argmax()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A named cause. what: the fault; do: the remedy. before, after: expected accepted length without and with the
    change; None if the change cannot be made here. certain: it was read, not measured."""

    cause: str
    what: str
    do: str
    certain: bool
    before: float | None = None
    after: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A change that was tried. gain: in expected accepted length; greedy: in greedy accepted length; t: the gain in
    standard errors over the prompts; named: is it clearly better (of conventions: the best)?"""

    cause: str
    what: str
    gain: float
    greedy: float
    t: float
    named: bool

    @classmethod
    def compare(cls, cause: str, what: str, now: Measured, before: Measured, least: float = MIN_GAIN) -> "Trial":
        """Compare lengths on the same prompts, by the rule at the head of this file; `least` replaces MIN_GAIN."""
        d = [a - b for a, b in zip(now.expected, before.expected, strict=True)]
        greedy = mean(a - b for a, b in zip(now.greedy, before.greedy, strict=True))
        t = mean(d) / max(stdev(d) / len(d) ** 0.5, 1e-9)
        gains = sum(x > 0 for x in d) / len(d)
        clear = mean(d) >= least * before.length and t >= T_LIMIT and gains >= POSITIVE and greedy >= 0
        return cls(cause=cause, what=what, gain=mean(d), greedy=greedy, t=t, named=clear)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The doctor's result for one pair.

    read: facts of the pair, in words.
    acceptance: acceptance in the engine's rounds on `prompts` prompts.
    reference: None if the drafter has no dense form.
    conventions: fields of `mtp_conventions.json`, if better ones were found for MTP modules.
    memory: bytes of K/V by pool.
    seconds: duration.
    """

    read: Mapping[str, str]
    prompts: int
    acceptance: Acceptance
    published: PublishedAcceptance | None
    reference: ReferenceCheck | None
    findings: tuple[Finding, ...]
    trials: tuple[Trial, ...]
    memory: Mapping[str, int]
    seconds: float
    conventions: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def healthy(self) -> bool:
        """No cause is named, the worker agrees with the reference, and drafts are accepted."""
        return not self.findings

    def as_json(self) -> dict[str, Any]:
        record = asdict(self)
        del record["acceptance"]
        return record | {
            "healthy": self.healthy,
            "acceptance_length": self.acceptance.length,
            "acceptance_lengths": self.acceptance.lengths,
            "accepted_by_depth": self.acceptance.by_depth,
            "reference": None if self.reference is None else self.reference._asdict() | {"holds": self.reference.holds},
        }
