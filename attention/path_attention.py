"""Attention of one forward in which every row is a function of its own path, and forwards in tiles of rows.

`own_keys` finds a row's own keys once per forward, group and window; layers then pass only their pools. Both backends
use it. A forward may be computed in parts, as long as a row's ancestors are stored before it: all such orders give the
same bits. So it can run in tiles of ROWS rows, and library operators always see the same number of rows:

    tile     columns [c, c') of requests [b, b'), at most ROWS rows, packed, and padded to ROWS
    order    by columns first: a row's ancestors run before it or in the same tile

    3 requests of 20 columns     |0: 0..15|  |1: 0..15|  |2: 0..15|  |0..2: 16..19|

Operators of other libraries may sum in an order that depends on the shape; tiles give them one shape. A row's bits must
then depend neither on its place in the tile nor on the other rows: `models/batch_invariance.py` tests this on the model
itself.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from specdec.attention.bridge import ForwardContext
from specdec.attention.kernels.own_keys import OwnKeys, PathKeys
from specdec.attention.plan import KVPlan, PackTables
from specdec.kvcache.layout import GroupId, GroupLoc


def part_of(whole: Any, requests: slice, columns: slice) -> Any:
    """An `Attend` or the recurrent layers of a forward, for these columns of these requests only. The backend is
    deterministic and runs in plain torch; it may be a checked one."""
    return whole.part(requests, columns)


@dataclass(frozen=True, slots=True)
class PathAttention:
    """An `Attend` of `plan.py`: `tree_attention` or `deterministic_attention` over the keys of `path`."""

    function: Callable[..., torch.Tensor]
    path: PathKeys

    @classmethod
    def from_plan(
        cls,
        function: Callable[..., torch.Tensor],
        find_own_keys: Callable[..., OwnKeys],
        plan: KVPlan,
        group: GroupId,
        window: int | None,
    ) -> "PathAttention":
        """Attention under a plan of trees, runs or frozen queries. find_own_keys: `own_keys` or its reference."""
        assert not isinstance(plan.prefix, PackTables)
        table = plan.prefix.table(group)
        write = None if plan.write is None else plan.write_slots(group).view(plan.positions.shape)
        tree = plan.tree
        parents = None if tree is None or tree.is_chain else tree.parents
        own = find_own_keys(table, write, parents, None if tree is None else tree.max_depth)
        if window is not None:
            window += plan.window_shift
        return cls(function, PathKeys(table, own, plan.positions, plan.block_len, window, plan.first_key))

    def __call__(self, query: torch.Tensor, pool_k: torch.Tensor, pool_v: torch.Tensor, **options: Any) -> torch.Tensor:
        return self.function(query, pool_k, pool_v, self.path, **options)

    def part(self, requests: slice, columns: slice) -> "PathAttention":
        """Attention for these columns of these requests only."""
        (slots, run_end), block_len = self.path.own, self.path.block_len
        own = OwnKeys(slots[requests], None)
        if run_end is not None:  # renumber nodes from the first column; runs end at the last
            ends = run_end[requests, columns].clamp(max=columns.stop - 1) - columns.start
            own = OwnKeys(slots[requests, columns].contiguous(), ends.contiguous())
        path = self.path._replace(
            table=self.path.table.of_requests(requests),
            own=own,
            positions=self.path.positions[requests, columns],
            block_len=None if block_len is None else (block_len[requests] - columns.start).clamp(min=0),
        )
        return replace(self, path=path)


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
