"""The Drafter protocol, the drafters, and their checkpoint formats. Exports the names that a new drafter needs."""

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

assert __name__ == "specdec.draft_models", "import specdec.draft_models, not draft_models"

__all__ = [
    "Binding",
    "DraftBatch",
    "DraftWorker",
    "Drafter",
    "Observation",
    "PromptObservation",
    "StatelessDrafter",
    "check_drafter",
]
