"""Does the engine's worker compute what the drafter's modules do? Its first logits, against the dense reference's.

`Watched` is a drafter that notes what its worker draws from, and changes nothing.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from specdec.attention.trees.tree import DraftTree
from specdec.doctor.dense_drafts import Drafts
from specdec.draft_models.base import Binding, DraftBatch, Drafter, DraftWorker

EXACT, COARSE = 1e-3, 0.1
"""Largest relative difference in float32 on a CPU; elsewhere products of another shape round otherwise."""


class Watched:
    """A drafter whose workers' first logits are kept in `seen`: of each row at its first round, [V] float32."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.seen: dict[int, torch.Tensor] = {}  # by the position of the root

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def bind(self, binding: Binding) -> DraftWorker:
        worker = self._drafter.bind(binding)
        propose, seen = worker.propose, self.seen

        def watched(batch: DraftBatch) -> DraftTree:
            def first(logits: torch.Tensor) -> None:
                roots = (batch.history_len - 1).tolist()
                if len(roots) == 1:
                    seen.setdefault(roots[0], logits[0, 0].float().clone())

            def sample(logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
                first(logits)
                return batch.sample(logits, positions)

            def best(logits: torch.Tensor, positions: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
                first(logits)
                return batch.best(logits, positions, count)

            return propose(replace(batch, sample=sample, best=best, params=None))

        worker.propose = watched  # type: ignore[method-assign]
        return worker


class ReferenceCheck(NamedTuple):
    """difference: of the logits' deviations from their mean, relative to the reference's. bound: what rounding
    explains. same_token: is the likeliest token the same?"""

    difference: float
    bound: float
    same_token: bool

    @property
    def holds(self) -> bool:
        return self.difference <= self.bound  # NaN does not hold

    @classmethod
    def of(cls, proposed: torch.Tensor, dense: Drafts, exact: bool) -> "ReferenceCheck":
        """proposed [V]: of the worker, at the root that is the first of `dense`."""
        finite = dense.first_logits.isfinite()
        if not torch.equal(finite, proposed.isfinite()):
            both = finite & proposed.isfinite()
            if exact or float(both.sum()) < 0.9 * float(finite.sum()):
                return cls(float("inf"), EXACT if exact else COARSE, False)
            finite = both
        expected, found = (x[finite] - x[finite].mean() for x in (dense.first_logits, proposed))
        difference = float((found - expected).norm() / expected.norm().clamp(min=1e-12))
        same = int(proposed.argmax()) == int(dense.first_logits.argmax())
        return cls(difference, EXACT if exact else COARSE, same)
