"""A drafter in training: its inputs from the frozen target, and the loss of all kinds of drafters.

Row i of draft step t predicts token i + ahead + t from the inputs of a draft that begins after position i. The target's
distribution of that token comes from its row i + ahead + t - 1.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Unpack

import torch
from accelerate.utils import reduce
from torch import nn

from specdec.attention.dense import dense_attention
from specdec.errors import UnsupportedModelError
from specdec.kvcache.layer_context import OwnRows, ScoreOptions
from specdec.models.paused_forward import collected
from specdec.models.probe_context import ProbeContext
from specdec.models.target import TargetModel
from specdec.training.packed_rows import ANSWER, PackedRows, causal_mask, predicted_rows

STEP_DECAY = 0.8  # weight of a draft step relative to the step before it

TargetStates = dict[str, torch.Tensor]
"""The target's states that a drafter reads over a batch; "hidden" [B, T, H], after the final norm, is always among
them."""


@dataclass
class TrainableDrafter(ABC):
    """The weights that are trained, and the frozen target that they learn from.

    ahead: distance from a row to the token that it predicts in the first draft step.
    """

    module: nn.Module
    target: TargetModel
    ahead: ClassVar[int]

    @property
    def target_ids(self) -> torch.Tensor | None:
        """The drafter's vocabulary as token ids of the target, [draft V], ascending; None: the target's."""
        return getattr(self.module, "target_ids", None)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Target states that the drafter reads besides the final one, each named by the layer it enters."""
        layers: tuple[int, ...] = self.module.spec.aux_layers  # type: ignore[union-attr, assignment]
        return layers

    @property
    def trained(self) -> dict[str, nn.Module]:
        """The parts with weights to learn, by name."""
        return dict(self.module.named_children())

    def target_states(self, batch: PackedRows) -> TargetStates:
        """Run the target over a batch and keep the states that the drafter reads."""
        hidden, states, _ = run_target(self.target, batch, aux_layers=self.aux_layers)
        return {"hidden": hidden, "states": hidden if states is None else states}

    def learnt_rows(self, batch: PackedRows) -> torch.Tensor | None:
        """[B, T] the rows from which this batch's drafts begin; called once before `drafts`; None: all rows."""
        return None

    @abstractmethod
    def drafts(self, batch: PackedRows, known: TargetStates, steps: int) -> Iterator[torch.Tensor]:
        """States [B, T, H] of each draft step, with the true tokens as input (teacher forcing)."""

    @abstractmethod
    def score(self, states: torch.Tensor) -> torch.Tensor:
        """States [..., H] -> logits [..., draft V]."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write a checkpoint that `Engine.from_pretrained(target, drafter=folder)` reads."""


@dataclass
class PackedContext(ProbeContext):
    """The forward of packed rows [B, T], in which a token sees earlier ones of its document. masks: additive [B, 1, T,
    T] by window. kept: layers whose K and V are read later."""

    masks: Mapping[int | None, torch.Tensor] = field(default_factory=dict)
    kept: Collection[int] = ()

    def attend_tokens(
        self, layer: int, q: torch.Tensor, k: OwnRows, v: OwnRows, **options: Unpack[ScoreOptions]
    ) -> torch.Tensor:
        spec = self.layout.layers[layer]
        if k is None or v is None:
            _, k, v = self.rows[spec.owner]
        if layer in self.kept:
            self.rows[layer] = q, k, v
        mask = self.masks[spec.window]
        query, keys, values = (x.unflatten(0, (len(mask), -1)).transpose(1, 2) for x in (q, k, v))  # [B, heads, T, D]
        return dense_attention(query, keys, values, mask, **options).flatten(0, 1)


@torch.no_grad()
def run_target(
    target: TargetModel, batch: PackedRows, aux_layers: tuple[int, ...] = (), owners: tuple[int, ...] = ()
) -> tuple[torch.Tensor, torch.Tensor | None, list[tuple[torch.Tensor, torch.Tensor]]]:
    """(hidden [B, T, H], states that enter `aux_layers` side by side [B, T, A * H], K and V [B, Hkv, T, D] of layers
    `owners`). Raises UnsupportedModelError for a target with recurrent layers, whose states would carry over between
    documents."""
    if target.recurrent:
        raise UnsupportedModelError(
            f"{target.name} has recurrent layers, and training reads texts without their states; it needs a target of "
            "attention layers alone"
        )
    layers, positions, shape = target.layout.layers, batch.pos.flatten(), batch.pos.shape
    context = PackedContext(target.layout, torch.zeros_like(positions), positions, states=dict.fromkeys(aux_layers))
    context.masks = {window: causal_mask(batch.pos, window, target.dtype) for window in {x.window for x in layers}}
    context.kept = {*owners, *(spec.owner for spec in layers if spec.owner != spec.layer)}
    hidden = target.run(batch.ids, batch.pos, context)
    kv = [
        (k.unflatten(0, shape).transpose(1, 2), v.unflatten(0, shape).transpose(1, 2))
        for _, k, v in (context.rows[owner] for owner in owners)
    ]
    return hidden, collected(context, aux_layers, shape), kv


def draft_loss(drafter: TrainableDrafter, batch: PackedRows, known: TargetStates, steps: int) -> torch.Tensor:
    """Cross-entropy with the target's distribution over the drafter's vocabulary: mean over rows, weighted over steps.

    A row counts only if it predicts a token of an answer and the target's likeliest token is in the drafter's
    vocabulary. The mean of this loss over processes is the loss of all their rows.
    """
    device = batch.ids.device
    answers = (batch.kind == ANSWER) & (batch.pos > 0)  # row j - 1 has the distribution of token j
    places = torch.full(batch.ids.shape, -1, device=device)
    places[answers] = torch.arange(int(answers.sum()), device=device)
    with torch.no_grad():
        logits = drafter.target.logits(known["hidden"].roll(1, 1)[answers].to(drafter.target.dtype))  # [M, V]
        best = logits.argmax(-1)
        inside = torch.ones_like(best, dtype=torch.bool)
        if drafter.target_ids is not None:
            inside = torch.isin(best, drafter.target_ids)
            logits = logits[:, drafter.target_ids]
        expected = logits.float().softmax(-1)  # [M, draft V]
    predicted = predicted_rows(batch, steps, drafter.ahead)
    if (chosen := drafter.learnt_rows(batch)) is not None:
        predicted = [rows & chosen for rows in predicted]
    learnt: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # [L] row, column, place of each draft step
    for step in range(steps):
        rows, columns = predicted[step].nonzero(as_tuple=True)
        place = places[rows, columns + drafter.ahead + step]
        counted = inside[place]
        learnt.append((rows[counted], columns[counted], place[counted]))
    counts = reduce(torch.tensor([float(len(place)) for _, _, place in learnt], device=device), "mean").tolist()
    loss, total = torch.zeros((), dtype=torch.float32, device=device), 0.0
    for step, states in enumerate(drafter.drafts(batch, known, steps)):
        rows, columns, place = learnt[step]
        scores = drafter.score(states[rows, columns]).float()
        losses = scores.logsumexp(-1) - (expected[place] * scores).sum(-1)
        weight = STEP_DECAY**step
        loss, total = loss + weight * losses.sum() / (counts[step] or 1.0), total + weight
    return loss / total
