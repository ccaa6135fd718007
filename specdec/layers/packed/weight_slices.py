"""Rows and columns of weights (packed or not) for several devices: views until they are joined on a device.

StackedWeights  weights [N_0, K], .. that are read as one [N, K] but stored separately, as in a checkpoint
rank_rows       a rank's rows of each of several sections: of the q, k and v heads, of gate and up
place_weight    one weight again, in new memory if there were several pieces
"""

from collections.abc import Callable, Sequence

import torch

from specdec.layers.packed.packed_weight import PackedWeight, Weight, join_weights

Put = Callable[..., torch.Tensor]
"""put(pieces, dim=0): join tensors along `dim` and place the result on a rank's device."""


class StackedWeights:
    """Weights [N_i, K] of one form, or biases [N_i], with consecutive rows. `map_tensors` does not descend into it."""

    def __init__(self, parts: Sequence[Weight]) -> None:
        self.parts = tuple(parts)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self), *self.parts[0].shape[1:]))

    def __len__(self) -> int:
        return sum(map(len, self.parts))


def rank_rows(
    weight: Weight | StackedWeights, sections: Sequence[int], rank: int, count: int, parts: Sequence[int] | None = None
) -> StackedWeights:
    """The rows of each section that one of `count` ranks has. parts: how many parts each section has: one per rank, or
    fewer, each on several consecutive ranks. None: one per rank."""
    pieces: list[Weight] = []
    first = 0
    for section, num_parts in zip(sections, parts or [count] * len(sections), strict=True):
        own = section // num_parts
        begin = first + rank * num_parts // count * own
        pieces += range_of(weight, slice(begin, begin + own))
        first += section
    assert first == len(weight), f"{sections=} {weight.shape=}"
    return StackedWeights(pieces)


def range_of(weight: Weight | StackedWeights, rows: slice) -> list[Weight]:
    """These rows as pieces: a view of each part that has some of them."""
    found: list[Weight] = []
    begin = 0
    for part in weight.parts if isinstance(weight, StackedWeights) else (weight,):
        first, end = max(rows.start - begin, 0), min(rows.stop - begin, len(part))
        if first < end:
            found.append(part.rows(first, end) if isinstance(part, PackedWeight) else part.detach()[first:end])
        begin += len(part)
    return found


def place_weight(weight: torch.Tensor | StackedWeights, put: Put) -> Weight:
    """The weight in one piece."""
    return join_weights(weight.parts, put) if isinstance(weight, StackedWeights) else put([weight])
