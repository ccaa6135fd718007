"""One forward over the rows of several plans: layers run once over all of them, attention under each plan by itself.

    rows        nodes of a round, under `plan_verify` | places of a pack, under `plan_packed`
    layers      all rows, packed
    attention   the rows of each plan, with its own page tables

Where layers are transformers' modules a forward over few rows takes nearly as long as one over many: as many operators
are called, and the weights are read once. The requests of the plans are distinct, so none reads what another writes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch

from specdec.attention.bridge import AttentionCall, ForwardContext
from specdec.attention.plan import KVPlan
from specdec.kvcache.frozen import KVView
from specdec.kvcache.index_spaces import FullLoc, Space, SwaLoc
from specdec.kvcache.layer_context import ScoreOptions
from specdec.layers.decoder import FusedDecoder
from specdec.models.target import TargetModel

States = tuple[torch.Tensor, torch.Tensor | None]
"""What `TargetModel.forward` returns: [B, N, H], and [B, N, A * H] or None."""


class Part(NamedTuple):
    """Tokens [B, N] under a plan of theirs."""

    tokens: torch.Tensor
    plan: KVPlan


@dataclass(frozen=True, slots=True)
class JoinedContext:
    """An `AttentionContext` over the rows of `parts`, one after the other. slots: by space, where their K/V go; states:
    see `ForwardContext`."""

    parts: Sequence[ForwardContext]
    slots: dict[Space, FullLoc | SwaLoc]
    states: dict[int, torch.Tensor | None]

    @classmethod
    def of(cls, parts: Sequence[ForwardContext], aux_layers: Sequence[int]) -> "JoinedContext":
        first, slots = parts[0], {}
        for space in {space for space, _ in first.attention}:
            own: list[torch.Tensor] = [part.plan.write_slots(space) for part in parts]
            slots[space] = cast(FullLoc | SwaLoc, torch.cat(own))
        return cls(parts, slots, dict.fromkeys(aux_layers))

    def attend(self, call: AttentionCall) -> torch.Tensor:
        (q, k, v), first = call.rows(), self.parts[0]
        if first.view.owns(call.layer):
            kept = first.view.writable_layer(call.layer)
            first.plan.backend.store(kept, self.slots[kept.space], k, v)
        options: ScoreOptions = {"scaling": call.scaling, "softcap": call.softcap, "sinks": call.sinks}
        rows = q.split([part.plan.positions.numel() for part in self.parts])
        attended = [
            part.attend_rows(call.layer, own, None, None, **options) for part, own in zip(self.parts, rows, strict=True)
        ]
        out = torch.cat(attended)  # [T, Hq, D]
        return out.view(len(call.query), -1, *out.shape[1:])


def can_join(target: TargetModel) -> bool:
    """Whether `forward_joined` runs this target. Fused layers read prompts by fewer layers (`narrows_at`), rows that
    run in tiles are laid out otherwise, and ranks have contexts of their own."""
    target.weights.generation()  # modules that have changed are copied now
    return not target.in_tiles and target.ranks is None and not isinstance(target.decoder, FusedDecoder)


def forward_joined(
    target: TargetModel, parts: Sequence[Part], view: KVView, aux_layers: Sequence[int] = ()
) -> list[States]:
    """`TargetModel.forward` of each part, by one forward. Requires `can_join`."""
    contexts = [ForwardContext.of(part.plan, view, target.windows) for part in parts]
    context = JoinedContext.of(contexts, aux_layers)
    tokens = torch.cat([part.tokens.reshape(-1) for part in parts])[None]
    positions = torch.cat([part.plan.positions.reshape(-1) for part in parts])[None]
    hidden = target.run(tokens, positions, context)  # [1, T, H]
    states = [state.view(*tokens.shape, -1) for layer in aux_layers if (state := context.states[layer]) is not None]
    assert len(states) == len(aux_layers), f"{len(states)} states of layers {aux_layers}"
    shapes = [part.tokens.shape for part in parts]
    sizes = [shape.numel() for shape in shapes]
    own = [x.view(*shape, -1) for x, shape in zip(hidden[0].split(sizes), shapes, strict=True)]
    if not states:
        return [(x, None) for x in own]
    aux = torch.cat(states, dim=-1)[0].split(sizes)
    return [(x, each.view(*shape, -1)) for x, each, shape in zip(own, aux, shapes, strict=True)]
