"""A forward in tiles of ROWS rows, so that a library's operators always see the same number of rows.

    tile     columns [c, c') of requests [b, b'), at most ROWS rows, packed, and padded to ROWS
    order    by columns first: when a row runs, its ancestors have run, or run in the same tile

    3 requests of 20 columns     |0: 0..15|  |1: 0..15|  |2: 0..15|  |0..2: 16..19|

For modules of other libraries, whose order of summation may depend on the shape. With one shape, what remains to be
shown is that a row's bits depend neither on its place in the tile nor on the other rows: `models/batch_invariance.py`
tests the model itself.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from specdec.attention.bridge import ForwardContext
from specdec.attention.path_attention import part_of
from specdec.kvcache.index_spaces import GroupLoc

ROWS = 16


class RowTile(NamedTuple):
    """These columns of these requests."""

    requests: slice
    columns: slice

    def rows(self, packed: torch.Tensor, num_columns: int) -> torch.Tensor:
        """Its rows of [B * N, ...], packed and padded: [ROWS, ...]."""
        return pad_rows(packed.unflatten(0, (-1, num_columns))[self].flatten(0, 1))


def row_tiles(batch: int, num_columns: int) -> Iterator[RowTile]:
    """The tiles of a forward of `num_columns` rows a request, in the order in which they are to run."""
    for first in range(0, num_columns, ROWS):
        columns = slice(first, min(first + ROWS, num_columns))
        requests = ROWS // (columns.stop - first)
        for request in range(0, batch, requests):
            yield RowTile(slice(request, min(request + requests, batch)), columns)


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """x [T, ...], T <= ROWS -> [ROWS, ...], zeros after them: token 0, position 0, the null slot."""
    return pad(x, (0, 0) * (x.dim() - 1) + (0, ROWS - len(x)))


def tile_context(whole: ForwardContext, tile: RowTile) -> ForwardContext:
    """A forward of one tile, over ROWS packed rows: its own come first, and what padding writes goes to the null slot.

    Attention is part of the whole forward's, so the K/V of ancestors in other tiles are found.
    """
    plan, width = whole.plan, whole.plan.positions.shape[1]
    write = None if plan.write is None else plan.write.map(lambda slots: GroupLoc(tile.rows(slots, width)))
    return replace(
        whole,
        plan=replace(plan, positions=plan.positions[tile], write=write),
        attention={kind: part_of(attend, *tile) for kind, attend in whole.attention.items()},
        states=dict.fromkeys(whole.states),
        other_ranks=tuple(tile_context(other, tile) for other in whole.other_ranks),
        recurrent=None if whole.recurrent is None else whole.recurrent.part(*tile),
    )
