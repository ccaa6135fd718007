"""Recurrent layers in a probe: what each asks is recorded, and answered row by row, along the rows of its own text.

All of a text is in the block of its first FOLD positions, and no state comes before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from specdec.attention.recurrence.blocks import Block, NewPlaces, convolved, run_blocks
from specdec.kvcache.layer_context import Recurrence
from specdec.kvcache.recurrent_state import FOLD


class TextPaths(NamedTuple):
    """Paths of T rows: the rows of its text up to it, among all rows seen, in order [T, FOLD], and which exist."""

    cells: torch.Tensor
    exist: torch.Tensor

    @classmethod
    def of(cls, text: torch.Tensor, positions: torch.Tensor, seen: Sequence[torch.Tensor]) -> "TextPaths":
        """text, positions [T]; seen: those of all rows seen, these included [L]."""
        seen_text, seen_positions = seen
        mine = (text[:, None] == seen_text) & (seen_positions <= positions[:, None])  # [T, L]
        assert int(mine.sum(1).max()) <= FOLD, "a text of a probe is one block"
        order = torch.where(mine, seen_positions, FOLD).argsort(dim=1, stable=True)[:, :FOLD]
        order = pad(order, (0, FOLD - order.shape[1]))
        return cls(order, torch.arange(FOLD, device=order.device) < mine.sum(1)[:, None])

    def gather(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Rows [L, ...] of the forwards seen -> [T, FOLD, ...], 0 where there are none."""
        found = torch.cat([*rows])[self.cells]
        return found.masked_fill(~self.exist.view(*self.exist.shape, *[1] * (found.dim() - 2)), 0.0)


@dataclass(slots=True)
class RecurrentProbe:
    """What the recurrent layers of one forward asked, by layer."""

    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    rows: dict[int, Recurrence] = field(default_factory=dict)

    def convolve(
        self,
        seen: "Sequence[RecurrentProbe]",
        paths: TextPaths,
        layer: int,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `RecurrentContext`; seen: of earlier forwards too, this the last."""
        self.inputs[layer] = inputs
        path = paths.gather([probe.inputs[layer] for probe in seen])  # [T, FOLD, C]
        path = torch.cat([path.new_zeros((len(path), weight.shape[1], path.shape[2])), path], dim=1)
        taps = paths.exist.sum(1)[:, None] + torch.arange(weight.shape[1], device=path.device)
        return convolved(path[torch.arange(len(path))[:, None], taps], weight, bias)

    def recur(self, seen: "Sequence[RecurrentProbe]", paths: TextPaths, layer: int, rows: Recurrence) -> torch.Tensor:
        """See `RecurrentContext`."""
        self.rows[layer] = rows.map(torch.Tensor.float)
        parts = zip(*(probe.rows[layer] for probe in seen), strict=True)
        q, k, v, g, beta = (None if None in part else paths.gather(part) for part in parts)
        assert q is not None and k is not None and v is not None and g is not None
        places = torch.arange(FOLD, device=k.device).expand_as(paths.cells)
        state = k.new_zeros((len(k), v.shape[2], k.shape[3], v.shape[3]))
        out, _ = run_blocks(Block(state, k, torch.zeros_like(v), g), NewPlaces(places, paths.exist, q, v, beta))
        return out[torch.arange(len(out)), paths.exist.sum(1) - 1]
