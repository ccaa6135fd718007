"""Recurrent layers outside an engine: in a probe, and over one whole text.

A probe computes each row from the earlier rows of the same text. Its texts fit the block of the first FOLD positions,
so there is no earlier state. A whole text may have any length: its rows are in order, and its state is folded from
block to block.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from specdec.attention.recurrence.blocks import NewPlaces, RecordBlock, convolved, folded, run_blocks
from specdec.kvcache.layer_context import Recurrence
from specdec.kvcache.recurrent_state import FOLD
from specdec.models.batch_invariance import ROWS


class TextPaths(NamedTuple):
    """Paths of T rows. The path of a row is the rows of its text up to it, as indices into all rows seen, in order [T,
    FOLD], with a mask of those that exist."""

    cells: torch.Tensor
    exist: torch.Tensor

    @classmethod
    def of(
        cls, text: torch.Tensor, positions: torch.Tensor, seen_text: torch.Tensor, seen_positions: torch.Tensor
    ) -> "TextPaths":
        """Make the paths. text, positions: [T]; seen: of all rows seen, including these [L]."""
        mine = (text[:, None] == seen_text) & (seen_positions <= positions[:, None])  # [T, L]
        assert int(mine.sum(1).max()) <= FOLD, "a text of a probe is one block"
        order = torch.where(mine, seen_positions, FOLD).argsort(dim=1, stable=True)[:, :FOLD]
        order = pad(order, (0, FOLD - order.shape[1]))
        return cls(order, torch.arange(FOLD, device=order.device) < mine.sum(1)[:, None])

    def gather(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Gather rows [L, ...] of the forwards seen -> [T, FOLD, ...], 0 for absent rows."""
        found = torch.cat([*rows])[self.cells]
        return found.masked_fill(~self.exist.view(*self.exist.shape, *[1] * (found.dim() - 2)), 0.0)

    def convolved(
        self, inputs: Sequence[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """`RecurrentContext.convolve` for these rows. inputs: of the forwards seen."""
        path = self.gather(inputs)  # [T, FOLD, C]
        path = torch.cat([path.new_zeros((len(path), weight.shape[1], path.shape[2])), path], dim=1)
        taps = self.exist.sum(1)[:, None] + torch.arange(weight.shape[1], device=path.device)
        return convolved(path[torch.arange(len(path), device=path.device)[:, None], taps], weight, bias)

    def recurred(self, rows: Sequence[Recurrence]) -> torch.Tensor:
        """`RecurrentContext.recur` for these rows. rows: of the forwards seen, float32. Blocks run in tiles, since a
        GPU's library chooses products by their number."""
        found = [None if None in part else self.gather(part) for part in zip(*rows, strict=True)]
        tiles = []  # the last row pads the last of them
        for tile in torch.arange(-(-len(self.exist) // ROWS) * ROWS).clamp(max=len(self.exist) - 1).split(ROWS):
            exist, q, k, v, g, beta = (None if x is None else x[tile] for x in (self.exist, *found))
            assert exist is not None and q is not None and k is not None and v is not None and g is not None
            state = k.new_zeros((len(k), v.shape[2], k.shape[3], v.shape[3]))
            out, _ = run_blocks(RecordBlock(state, k, torch.zeros_like(v), g), NewPlaces(exist, q, v, beta))
            tiles.append(out[torch.arange(len(out), device=out.device), exist.sum(1) - 1])
        return torch.cat(tiles)[: len(self.exist)]


def convolved_text(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`RecurrentContext.convolve` for the rows of one whole text."""
    taps = weight.shape[1]
    path = pad(inputs, (0, 0, taps - 1, 0)).unfold(0, taps, 1).transpose(1, 2)  # [T, K, C]
    return convolved(path, weight, bias)


def recurred_text(rows: Recurrence) -> torch.Tensor:
    """`RecurrentContext.recur` for the rows of one whole text."""
    length, heads, v_dim = rows.v.shape
    state = rows.v.new_zeros((1, heads, rows.k.shape[2], v_dim), dtype=torch.float32)
    places = torch.arange(FOLD, device=rows.v.device)[None]
    outs = []
    for begin in range(0, length, FOLD):
        count = min(FOLD, length - begin)
        part = rows.map(lambda x: x.new_zeros((1, FOLD, *x.shape[1:]), dtype=torch.float32))
        for whole, own in zip(rows, part, strict=True):
            if whole is not None and own is not None:
                own[0, :count] = whole[begin : begin + count]
        block = RecordBlock(state, part.k, torch.zeros_like(part.v), part.g)
        out, u = run_blocks(block, NewPlaces(places < count, part.q, part.v, part.beta))
        state = folded(block._replace(u=u))
        outs.append(out[0, :count])
    return torch.cat(outs)
