"""A drafting model with a lookup (suffixes, n-grams) next to it. The lookup drafts if that is expected to pay more.

    engine        chooses one of the two for each round, by their accepted tokens and the time of their rounds
    model         reads the committed tokens of every round, at once or before its next draft
    lookup        needs only the text in each batch

With `SpecConfig(adaptive=False)` the model makes all drafts.
"""

from specdec.attention.trees.tree import DraftTree
from specdec.draft_models.base import (
    Binding,
    DraftBatch,
    Drafter,
    DraftWorker,
    Observation,
    PromptObservation,
    with_defaults,
)
from specdec.draft_models.finished_texts import FinishedTexts
from specdec.kvcache.frozen import KVView


class ModelAndLookup(Drafter):
    """Two drafters in one. model: any drafter. lookup: a drafter whose worker ignores observations."""

    def __init__(self, model: Drafter, lookup: Drafter) -> None:
        self.model, self.lookup = with_defaults(model), lookup
        for name in Drafter.__annotations__:  # what concerns layers and depths concerns the model only
            setattr(self, name, getattr(self.model, name))
        self.name, self.has_lookup = f"{model.name} or {lookup.name}", True
        self.reads_finished = lookup.reads_finished

    def bind(self, binding: Binding) -> DraftWorker:
        return ModelOrLookupWorker(self.model.bind(binding), self.lookup.bind(binding))


class ModelOrLookupWorker(DraftWorker):
    """Proposes with the worker that the batch selects. Only the model's worker has a view and observes."""

    def __init__(self, model: DraftWorker, lookup: DraftWorker) -> None:
        self.model, self.lookup = model, lookup
        self.finished: FinishedTexts | None = getattr(lookup, "finished", None)

    @property
    def view(self) -> KVView | None:
        return self.model.view

    @view.setter
    def view(self, view: KVView | None) -> None:
        self.model.view = view

    def propose(self, batch: DraftBatch) -> DraftTree:
        return (self.lookup if batch.by_lookup else self.model).propose(batch)

    def observe(self, seen: Observation) -> None:
        self.model.observe(seen)

    def observe_prompts(self, seen: PromptObservation) -> None:
        self.model.observe_prompts(seen)


def model_of(drafter: Drafter) -> Drafter:
    """The drafter that is fitted to the target: the model of a `ModelAndLookup`, or the drafter itself."""
    return drafter.model if isinstance(drafter, ModelAndLookup) else drafter
