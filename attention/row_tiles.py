"""A forward in tiles of ROWS rows, so that a library's operators always see the same number of rows.

    tile     columns [c, c') of requests [b, b'), at most ROWS rows, packed, and padded to ROWS
    order    by columns first: when a row runs, its ancestors have run, or run in the same tile

    3 requests of 20 columns     |0: 0..15|  |1: 0..15|  |2: 0..15|  |0..2: 16..19|

For modules of other libraries, whose order of summation may depend on the shape. With one shape, what remains to be
shown is that a row's bits depend neither on its place in the tile nor on the other rows: `models/batch_invariance.py`
tests the model itself.
"""

from collections.abc import Iterator
from typing import NamedTuple, Unpack

import torch
from torch.nn.functional import pad

from specdec.attention.bridge import AttentionCall, ForwardContext
from specdec.attention.path_attention import part_of
from specdec.kvcache.index_spaces import FullLoc, Space, SwaLoc
from specdec.kvcache.layer_context import Destination, ScoreOptions

ROWS = 16


class Tile(NamedTuple):
    """These columns of these requests."""

    requests: slice
    columns: slice

    def rows(self, packed: torch.Tensor, num_columns: int) -> torch.Tensor:
        """Its rows of [B * N, ...], packed and padded: [ROWS, ...]."""
        return pad_rows(packed.unflatten(0, (-1, num_columns))[self].flatten(0, 1))


def row_tiles(batch: int, num_columns: int) -> Iterator[Tile]:
    """The tiles of a forward of `num_columns` rows a request, in the order in which they are to run."""
    for first in range(0, num_columns, ROWS):
        columns = slice(first, min(first + ROWS, num_columns))
        requests = ROWS // (columns.stop - first)
        for request in range(0, batch, requests):
            yield Tile(slice(request, min(request + requests, batch)), columns)


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """x [T, ...], T <= ROWS -> [ROWS, ...], zeros after them: token 0, position 0, the null slot."""
    return pad(x, (0, 0) * (x.dim() - 1) + (0, ROWS - len(x)))


class TileContext:
    """The `LayerContext` of one tile of a forward. `states`: see `ForwardContext`."""

    def __init__(self, whole: ForwardContext, tile: Tile) -> None:
        self.whole, self.tile = whole, tile
        self.states: dict[int, torch.Tensor | None] = dict.fromkeys(whole.states)
        self._shape = whole.plan.positions[tile].shape  # [B', N']
        self._attention = {kind: part_of(attend, *tile) for kind, attend in whole.attention.items()}
        plan, width = whole.plan, whole.plan.positions.shape[1]
        self._full = None if plan.write_full is None else FullLoc(tile.rows(plan.write_full, width))
        self._swa = None if plan.write_swa is None else SwaLoc(tile.rows(plan.write_swa, width))

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """For a layer of Hugging Face: its K/V are stored here, unless they are another layer's."""
        q, k, v = call.rows()
        destination = self.destination(call.layer)
        if destination is not None:
            self.whole.plan.backend.store(self.whole.view.writable_layer(call.layer), destination.slots, k, v)
        return call.answer(self, q, k, v)

    def destination(self, layer: int) -> Destination | None:
        """See `LayerContext`; padding goes to the null slot."""
        if not self.whole.view.owns(layer):
            return None
        kept = self.whole.view.writable_layer(layer)
        slots = self._full if kept.space is Space.FULL else self._swa
        return None if slots is None else Destination(kept.k, kept.v, slots)

    def attend_rows(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        **options: Unpack[ScoreOptions],
    ) -> torch.Tensor:
        """q [ROWS, Hq, D] -> [ROWS, Hq, D]; k, v: the rows' own, stored already."""
        kept_k, kept_v, space = self.whole.view.layer(layer)
        attend = self._attention[space, self.whole.windows[layer]]
        query = q[: self._shape.numel()].unflatten(0, self._shape).transpose(1, 2)  # [B', Hq, N', D]
        out = attend(query, None, None, kept_k, kept_v, **options)
        return pad_rows(out.flatten(0, 1))
