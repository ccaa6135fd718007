"""Runs a forward in tiles of ROWS rows, so that library operators always see the same number of rows.

    tile     columns [c, c') of requests [b, b'), at most ROWS rows, packed, and padded to ROWS
    order    by columns first: a row's ancestors run before it or in the same tile

    3 requests of 20 columns     |0: 0..15|  |1: 0..15|  |2: 0..15|  |0..2: 16..19|

Operators of other libraries may sum in an order that depends on the shape; tiles give them one shape. A row's bits must
then depend neither on its place in the tile nor on the other rows: `models/batch_invariance.py` tests this on the model
itself.
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
    """A tile: these columns of these requests."""

    requests: slice
    columns: slice

    def rows(self, packed: torch.Tensor, num_columns: int) -> torch.Tensor:
        """Take the tile's rows of [B * N, ...], packed and padded: [ROWS, ...]."""
        return pad_rows(packed.unflatten(0, (-1, num_columns))[self].flatten(0, 1))


def row_tiles(batch: int, num_columns: int) -> Iterator[RowTile]:
    """The tiles of a forward with `num_columns` rows per request, in the order in which they must run."""
    for first in range(0, num_columns, ROWS):
        columns = slice(first, min(first + ROWS, num_columns))
        requests = ROWS // (columns.stop - first)
        for request in range(0, batch, requests):
            yield RowTile(slice(request, min(request + requests, batch)), columns)


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """Pad x [T, ...], T <= ROWS, with zeros to [ROWS, ...]: token 0, position 0, the null slot."""
    return pad(x, (0, 0) * (x.dim() - 1) + (0, ROWS - len(x)))


def tile_context(whole: ForwardContext, tile: RowTile) -> ForwardContext:
    """The context of one tile: ROWS packed rows, its own rows first. Padding rows write to the null slot.

    Its attention is a part of the whole forward's attention, so it finds the K/V of ancestors in other tiles.
    """
    plan, width = whole.plan, whole.plan.positions.shape[1]
    write = None if plan.write is None else plan.write.map(lambda slots: GroupLoc(tile.rows(slots, width)))
    return replace(
        whole,
        plan=replace(plan, positions=plan.positions[tile], write=write),
        attention={kind: part_of(attend, *tile) for kind, attend in whole.attention.items()},
        states=dict.fromkeys(whole.states),
        other_ranks=tuple(tile_context(other, tile) for other in whole.other_ranks),
        recurrent=None if whole.recurrent is None else part_of(whole.recurrent, *tile),
    )
