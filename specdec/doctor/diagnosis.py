"""The doctor's findings, as plain text for a reader and as a dictionary for JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from specdec.doctor.acceptance import Acceptance
from specdec.doctor.dense_drafts import ReferenceCheck
from specdec.models.published import PublishedAcceptance


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
    standard errors over the prompts."""

    cause: str
    what: str
    gain: float
    greedy: float
    t: float
    named: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The doctor's result for one pair.

    read: facts of the pair, in words. acceptance: acceptance in the engine's rounds on `prompts` prompts. reference:
    None if the drafter has no dense form. conventions: fields of `mtp_conventions.json`, if better ones were found for
    MTP modules. memory: bytes of K/V by pool. seconds: duration.
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
        """All fields, as JSON types."""
        record = asdict(self)
        del record["acceptance"]
        return record | {
            "healthy": self.healthy,
            "acceptance_length": self.acceptance.length,
            "acceptance_lengths": self.acceptance.lengths,
            "accepted_by_depth": self.acceptance.by_depth,
            "reference": None if self.reference is None else self.reference._asdict() | {"holds": self.reference.holds},
        }
