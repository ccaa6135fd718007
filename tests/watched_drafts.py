"""Records what an engine's drafter proposes, and the tensors that operators make."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specdec import DraftTree, Engine
from specdec.draft_models.base import DraftBatch


class Made(TorchDispatchMode):
    """Records the results of operators: the last tensor in each storage, by address."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.seen[out.untyped_storage().data_ptr()] = out
        return out


class Proposal(NamedTuple):
    """A draft for one request. text: its tokens; the last is the root. logits: [levels, V] of a chain; [M, V] of the
    nodes of all levels of a tree."""

    text: list[int]
    tokens: list[int]
    parents: list[int]
    logits: torch.Tensor


def watch_proposals(engine: Engine) -> list[Proposal]:
    """Return a list to which all later drafts of the engine are added."""
    worker, own, seen = engine.state.worker, engine.state.worker.propose, list[Proposal]()

    def propose(batch: DraftBatch) -> DraftTree:
        drawn: list[torch.Tensor] = []

        def noting(draw: Callable[..., Any]) -> Callable[..., Any]:
            return lambda logits, *rest: drawn.append(logits.clone()) or draw(logits, *rest)  # type: ignore[func-returns-value]

        tree = own(replace(batch, sample=noting(batch.sample), best=noting(batch.best), params=None))
        for i, (row, length) in enumerate(zip(batch.rows.index.tolist(), batch.history_len.tolist(), strict=True)):
            if row != engine.table.padding_row:
                text, logits = batch.history[i, :length].tolist(), torch.cat([level[i] for level in drawn])
                seen.append(Proposal(text, tree.tokens[i].tolist(), tree.parents[i].tolist(), logits))
        return tree

    worker.propose = propose
    return seen
