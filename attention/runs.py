"""Attention over a pack in plain torch, run by run: the CPU path, and the reference for `ragged_attention`.

Token t of run r, at position q, sees the keys of its own request at positions p with 0 <= p <= q and q - p < window.
Keys are read by position from the pools, after the forward has stored its own. The host reads the lengths of runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specdec.attention.dense import VisibleKeys, bias_of, visible
from specdec.attention.deterministic_attention import deterministic_attention
from specdec.attention.kernels.own_keys import ALIGN, OwnKeys
from specdec.attention.pack import Pack, RunSlots
from specdec.attention.path_attention import PathAttention, part_of
from specdec.attention.plan import Attend


@dataclass(frozen=True, slots=True)
class RunsAttention:
    """An `Attend` of `plan.py` over T places. runs: the places of each run, and attention over that run alone, as over
    one request. Places of no run are 0."""

    num_places: int
    runs: Sequence[tuple[slice, Attend]]

    @classmethod
    def from_pack(
        cls, make: Callable[..., Attend], pack: Pack, lines: RunSlots, window: int | None, first_key: int = 0
    ) -> "RunsAttention":
        """Make attention over the runs of a pack, one by one. make: `dense_run` or `exact_run`."""
        runs, begin = [], 0
        for number in range(len(pack.rows)):
            length, start = int(pack.length[number]), int(pack.start[number])
            places = slice(begin, begin + length)
            begin += length
            if length and bool(pack.exists[places.start]):
                positions = torch.arange(start, start + length, device=pack.start.device)
                oldest = 0 if window is None else max(0, start - window + 1)
                keys = torch.arange(oldest, start + length, device=positions.device)
                slots = lines.slots_at(torch.full_like(keys, number), keys)[None]
                runs.append((places, make(slots, keys[None], positions[None], window, first_key)))
        return cls(len(pack.run_of), runs)

    def __call__(self, query: torch.Tensor, pool_k: torch.Tensor, pool_v: torch.Tensor, **options: Any) -> torch.Tensor:
        out = query.new_zeros((1, query.shape[2], query.shape[1], pool_v.shape[2]))
        for places, attend in self.runs:
            out[:, places] = attend(query[:, :, places], pool_k, pool_v, **options)
        return out

    def part(self, _requests: slice, columns: slice) -> "RunsAttention":
        """Attention for these places only; there is one row."""
        runs = []
        for places, attend in self.runs:
            first, stop = max(places.start, columns.start), min(places.stop, columns.stop)
            if first < stop:
                some = part_of(attend, slice(0, 1), slice(first - places.start, stop - places.start))
                runs.append((slice(first - columns.start, stop - columns.start), some))
        return RunsAttention(columns.stop - columns.start, runs)


@dataclass(frozen=True, slots=True)
class MaskedRuns:
    """`RunsAttention` without a length read on the host, so it can be captured. All T places attend to every run, and a
    place keeps the result of its own run only; so it takes R times as long."""

    pack: Pack
    lines: RunSlots
    window: int | None
    first_key: int = 0

    def __call__(self, query: torch.Tensor, pool_k: torch.Tensor, pool_v: torch.Tensor, **options: Any) -> torch.Tensor:
        pack, lines = self.pack, self.lines
        out = query.new_zeros((1, query.shape[2], query.shape[1], pool_v.shape[2]))
        columns = torch.arange(lines.slots.shape[1], device=query.device)
        for number in range(len(pack.rows)):
            run = torch.full_like(columns, number)
            keys = columns if lines.begin is None else columns + lines.begin[number]
            first, end = pack.start[number], pack.start[number] + pack.length[number]
            oldest = torch.zeros_like(first) if self.window is None else (first - self.window + 1).clamp(min=0)
            inside = keys.maximum(oldest).minimum((end - 1).clamp(min=0))  # a key that no query sees may be NaN
            mine = pack.exists & (pack.run_of == number)
            back = torch.where(mine, pack.positions, end - 1)[:, None] - keys  # [T, L]
            seen = (back >= 0) & (keys == inside)
            if self.window is not None:
                seen = seen & (back < self.window)
            if self.first_key:
                seen = seen & (keys >= pack.positions.clamp(max=self.first_key)[:, None])
            attend = VisibleKeys(lines.slots_at(run, inside)[None], bias_of(seen[None])).attend
            answer = attend(query, pool_k, pool_v, **options)
            out = torch.where(mine[:, None, None], answer, out)
        return out


def dense_run(
    slots: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, window: int | None, first_key: int = 0
) -> Attend:
    """Attention of one run, from slots and positions of its keys [1, L] and positions [1, N] of its queries."""
    known = positions[:, :, None] >= keys[:, None]
    return VisibleKeys(slots, bias_of(visible(positions, keys, known, window, first_key))).attend


def exact_run(
    slots: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, window: int | None, first_key: int = 0
) -> Attend:
    """Attention of one run, with keys cut by absolute position as in plain decoding. The table has the slots of all
    keys, the run's own too."""
    end = (keys[:, -1] + 1 + ALIGN - 1) // ALIGN * ALIGN  # so that whole tiles hold all keys
    none_apart = OwnKeys(slots.new_zeros((1, 1, ALIGN + 1), dtype=torch.int32), None)
    first = keys[:, 0].clone()
    return PathAttention(deterministic_attention, none_apart, slots, first, end, positions, None, 1, window, first_key)
