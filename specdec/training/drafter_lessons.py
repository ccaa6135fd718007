"""What the frozen target says about packed rows, and the loss that both kinds of drafters learn from it.

Row i of draft step t predicts token i + ahead + t from what a draft begun behind position i would see; the target's law
of that token is that of its own row i + ahead + t - 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn
from transformers import DynamicCache

from specdec.models.target import TargetModel
from specdec.training.training_data import ANSWER, PackedRows, causal_masks, predicted_rows

STEP_DECAY = 0.8  # weight of each draft step against the one before it

Lesson = dict[str, torch.Tensor]
"""Tensors over the rows of a batch; "hidden" [B, T, H] after the target's final norm is always among them."""


class Recipe(Protocol):
    """A drafter in training."""

    target: TargetModel
    target_ids: torch.Tensor | None  # its vocabulary [draft V], ascending; None: the target's
    ahead: int

    @property
    def module(self) -> nn.Module:
        """What is trained."""

    def teach(self, batch: PackedRows) -> Lesson:
        """What it needs to know of the target about a batch."""

    def drafts(self, batch: PackedRows, lesson: Lesson, steps: int) -> Iterator[torch.Tensor]:
        """States [B, T, H] of each draft step, the true tokens fed."""

    def score(self, states: torch.Tensor) -> torch.Tensor:
        """States [..., H] -> logits [..., draft V]."""

    def save(self, folder: Any) -> None:
        """Write a checkpoint that `Engine.from_pretrained(target, drafter=folder)` reads."""


@torch.no_grad()
def run_target(
    target: TargetModel, batch: PackedRows, aux_layers: tuple[int, ...] = (), owners: tuple[int, ...] = ()
) -> tuple[torch.Tensor, list[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
    """(hidden [B, T, H], states that enter `aux_layers`, K and V [B, Hkv, T, D] of layers `owners`)."""
    seen: dict[int, torch.Tensor] = {}

    def keep(layer: int) -> Callable[..., None]:
        return lambda module, args, kwargs: seen.__setitem__(layer, args[0] if args else kwargs["hidden_states"])

    decoder: Any = target.user_decoder
    entered = [*decoder.layers, decoder.norm]
    hooks = [entered[i].register_forward_pre_hook(keep(i), with_kwargs=True) for i in set(aux_layers)]
    window = target.layout.window
    mask: Any = causal_masks(batch.pos, window or batch.pos.shape[1], target.dtype)
    if getattr(target.config, "layer_types", None) is None:
        mask = mask["full_attention" if window is None else "sliding_attention"]
    cache: Any = DynamicCache() if owners else None  # without a config it drops no key of a sliding layer
    try:
        hidden = decoder(
            input_ids=batch.ids,
            position_ids=batch.pos,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=cache is not None,
        ).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    kv = [(cache.layers[i].keys, cache.layers[i].values) for i in owners] if cache is not None else []
    return hidden, [seen[i] for i in aux_layers], kv


def draft_loss(recipe: Recipe, target: TargetModel, batch: PackedRows, lesson: Lesson, steps: int) -> torch.Tensor:
    """Cross-entropy with the target's law over the drafter's vocabulary, mean over rows, weighted over steps.

    Rows whose token is outside that vocabulary do not count. Only rows that predict a token of an answer are scored.
    """
    device = batch.ids.device
    answers = (batch.kind == ANSWER) & (batch.pos > 0)  # token j of an answer: its law is that of row j - 1
    places = torch.full(batch.ids.shape, -1, device=device)
    places[answers] = torch.arange(int(answers.sum()), device=device)
    with torch.no_grad():
        logits = target.logits(lesson["hidden"].roll(1, 1)[answers].to(target.dtype))  # [M, V]
        best = logits.argmax(-1)
        inside = torch.ones_like(best, dtype=torch.bool)
        if recipe.target_ids is not None:
            inside = torch.isin(best, recipe.target_ids)
            logits = logits[:, recipe.target_ids]
        law = logits.float().softmax(-1)  # [M, draft V]
    loss, total = torch.zeros((), device=device), 0.0
    goods = predicted_rows(batch, steps, recipe.ahead)
    for step, states in enumerate(recipe.drafts(batch, lesson, steps)):
        rows, columns = goods[step].nonzero(as_tuple=True)
        place = places[rows, columns + recipe.ahead + step]
        counted = inside[place]
        scores = recipe.score(states[rows[counted], columns[counted]]).float()
        losses = scores.logsumexp(-1) - (law[place[counted]] * scores).sum(-1)
        weight = STEP_DECAY**step
        loss, total = loss + weight * losses.sum() / max(1, len(losses)), total + weight
    return loss / total
