"""Attention of one forward in which every row is a function of its own path. Both backends use it.

`own_keys` finds a row's own keys once per forward, group and window; layers then pass only their pools. A forward may
be computed in parts, as long as a row's ancestors are stored before it: all such orders give the same bits.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from specdec.attention.kernels.own_keys import OwnKeys
from specdec.attention.plan import KVPlan
from specdec.kvcache.index_spaces import GroupId


def part_of(whole: Any, requests: slice, columns: slice) -> Any:
    """An `Attend` or the recurrent layers of a forward, for these columns of these requests only. The backend is
    deterministic and runs in plain torch; it may be a checked one."""
    return whole.part(requests, columns)


@dataclass(frozen=True, slots=True)
class PathAttention:
    """An `Attend` of `plan.py`.

    function: `tree_attention` or `deterministic_attention`; the other fields are its arguments.
    """

    function: Callable[..., torch.Tensor]
    own: OwnKeys
    pages: torch.Tensor
    start: torch.Tensor | None
    committed_len: torch.Tensor
    positions: torch.Tensor
    block_len: torch.Tensor | None
    page_size: int
    window: int | None
    first_key: int = 0

    @classmethod
    def from_plan(
        cls,
        function: Callable[..., torch.Tensor],
        find_own_keys: Callable[..., OwnKeys],
        plan: KVPlan,
        table: tuple[torch.Tensor, torch.Tensor | None],
        group: GroupId,
        window: int | None,
    ) -> "PathAttention":
        """Attention under a plan. find_own_keys: `own_keys` or its reference. table: `pages` and `start`, for both
        functions."""
        pages, start = table
        write = None if plan.write is None else plan.write_slots(group).view(plan.positions.shape)
        tree = plan.tree
        parents = None if tree is None or tree.is_chain else tree.parents
        depth = None if tree is None else tree.max_depth
        length, page_size = plan.committed_len, plan.page_size
        own = find_own_keys(pages, start, length, write, parents, page_size=page_size, max_depth=depth)
        if window is not None:
            window += plan.window_shift
        rows = plan.positions, plan.block_len
        return cls(function, own, pages, start, length, *rows, page_size, window, plan.first_key)

    def __call__(self, query: torch.Tensor, pool_k: torch.Tensor, pool_v: torch.Tensor, **options: Any) -> torch.Tensor:
        return self.function(
            *(query, pool_k, pool_v, self.own, self.pages, self.start, self.committed_len, self.positions),
            page_size=self.page_size,
            block_len=self.block_len,
            window=self.window,
            first_key=self.first_key,
            **options,
        )

    def part(self, requests: slice, columns: slice) -> "PathAttention":
        """Attention for these columns of these requests only."""
        slots, run_end = self.own
        if run_end is None:
            own = OwnKeys(slots[requests], None)
        else:  # renumber nodes from the first column; runs end at the last
            ends = run_end[requests, columns].clamp(max=columns.stop - 1) - columns.start
            own = OwnKeys(slots[requests, columns].contiguous(), ends.contiguous())
        block_len = None if self.block_len is None else (self.block_len[requests] - columns.start).clamp(min=0)
        return replace(
            self,
            own=own,
            pages=self.pages[requests],
            start=None if self.start is None else self.start[requests],
            committed_len=self.committed_len[requests],
            positions=self.positions[requests, columns],
            block_len=block_len,
        )
