"""The Drafter protocol, the drafters, and their checkpoint formats."""

from specdec.draft_models.base import (
    Binding,
    DraftBatch,
    Drafter,
    DraftWorker,
    Observation,
    PromptObservation,
    StatelessDrafter,
)
from specdec.draft_models.conformance import check_drafter
from specdec.draft_models.eagle3.eagle3_drafter import Eagle3Drafter
from specdec.draft_models.gemma4_mtp import Gemma4MTPDrafter
from specdec.draft_models.ngram import NgramDrafter
from specdec.draft_models.suffix import SuffixDrafter

assert __name__ == "specdec.draft_models", "import specdec.draft_models, not draft_models"

__all__ = [
    "Binding",
    "DraftBatch",
    "DraftWorker",
    "Drafter",
    "Eagle3Drafter",
    "Gemma4MTPDrafter",
    "NgramDrafter",
    "Observation",
    "PromptObservation",
    "StatelessDrafter",
    "SuffixDrafter",
    "check_drafter",
]
