"""Recurrent layers of one forward: their convolutions and recurrences over the paths of its rows.

    convolve   stores each row's input at its slot, and reads the newest of its path back
    recur      stores each row's k and g, then its u, computes its output, and folds what is certain into the states

It runs on a CPU, where lengths are read back. A forward may run in parts, in any order in which a row's ancestors have
run before it: what is stored and folded by then is what the next part reads.
"""

from typing import NamedTuple

import torch

from specdec.attention.plan import KVPlan
from specdec.attention.recurrence.blocks import Block, NewPlaces, convolved, folded, run_blocks
from specdec.attention.recurrence.paths import ForwardRows, Wave, convolution_slots, rows_of_plan, waves_of
from specdec.kvcache.frozen import KVView
from specdec.kvcache.index_spaces import NULL_SLOT
from specdec.kvcache.layer_context import Recurrence
from specdec.kvcache.rounded import Pool, read_rows
from specdec.kvcache.store import LayerKV

EVERYTHING = slice(None), slice(None)


class _Rows(NamedTuple):
    """What all layers read of the forward. numbers, write: [n]."""

    rows: ForwardRows
    numbers: torch.Tensor
    write: torch.Tensor
    begun: torch.Tensor


class RecurrentForward:
    """The rows of a plan, or of a part of it: `part` are columns of requests."""

    def __init__(self, plan: KVPlan, view: KVView, part: tuple[slice, slice] = EVERYTHING) -> None:
        self._plan = plan
        self._view = view
        self._part = part
        self._rows: _Rows | None = None
        self._taps: dict[int, torch.Tensor] = {}
        self._waves: list[Wave] | None = None

    def part(self, requests: slice, columns: slice) -> "RecurrentForward":
        return RecurrentForward(self._plan, self._view, (requests, columns))

    def convolve(
        self, layer: int, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """inputs [T, C], weight [C, K] -> [T, C], 0 on padding."""
        kept, mine = self._view.writable_layer(layer), self._found(layer)
        pool, taps = kept.fields[0], weight.shape[1]
        own = inputs[mine.numbers]
        pool.index_copy_(0, mine.write, own[:, None])
        if taps not in self._taps:
            self._taps[taps] = convolution_slots(mine.rows, taps)
        slots = self._taps[taps]
        path = rows_at(pool, slots)[:, :, 0].masked_fill((slots == NULL_SLOT)[:, :, None], 0.0)  # [n, K, C]
        return _spread(convolved(path, weight, bias), mine.numbers, len(inputs))

    def recur(self, layer: int, rows: Recurrence) -> torch.Tensor:
        """-> [T, HV, DV] in float32, 0 on padding."""
        kept, mine = self._view.writable_layer(layer), self._found(layer)
        state = kept.state
        assert state is not None
        new = rows.map(lambda x: x[mine.numbers].float())
        _, pool_k, pool_u, pool_g = kept.fields
        pool_k.index_copy_(0, mine.write, new.k)
        pool_g.index_copy_(0, mine.write, new.g[:, :, None])
        if len(mine.begun):
            state.clear(mine.begun)
        if self._waves is None:
            self._waves = waves_of(mine.rows, state.folded_len.numpy())
        out = new.v.new_zeros(new.v.shape)
        before: torch.Tensor | None = None
        for wave in self._waves:
            base = state.tensor[wave.base] if before is None else before[wave.base]
            block = _stored(kept, wave, base)
            if wave.rows.shape[1]:
                beta = None if new.beta is None else new.beta[wave.rows]
                places = NewPlaces(wave.place, wave.exists, new.q[wave.rows], new.v[wave.rows], beta)
                answers, u = run_blocks(block, places)
                block = block._replace(u=u)
                done = wave.rows[wave.exists]
                out[done] = answers[wave.exists]
                blocks = torch.arange(len(u))[:, None].expand_as(wave.place)[wave.exists]
                pool_u.index_copy_(0, mine.write[done], u[blocks, wave.place[wave.exists]])
            if len(wave.folds):
                before = folded(Block(*(x[wave.folds] for x in block)))
                if len(wave.into):
                    state.fold(wave.into, before[wave.certain], wave.folded_len)
        return _spread(out, mine.numbers, len(rows.v))

    def _found(self, layer: int) -> _Rows:
        """Rows of the forward, whose records all lie at the slots of one group."""
        if self._rows is None:
            found = rows_of_plan(self._plan, self._view.layer(layer).group, self._part)
            numbers, write, begun = (torch.from_numpy(x) for x in (found.numbers, found.write, found.begun))
            self._rows = _Rows(found, numbers, write, begun)
        return self._rows


def _stored(kept: LayerKV, wave: Wave, base: torch.Tensor) -> Block:
    """The blocks of a wave, with what is stored of their records."""
    absent = ~wave.present[:, :, None, None]
    k, u, g = (rows_at(pool, wave.slots).masked_fill(absent, 0.0) for pool in kept.fields[1:])
    return Block(base, k, u, g[..., 0])


def rows_at(pool: Pool, slots: torch.Tensor) -> torch.Tensor:
    """Rows of a pool at slots [X, Y] -> [X, Y, heads, D]."""
    return read_rows(pool, slots.flatten()).view(*slots.shape, *pool.shape[1:])


def _spread(values: torch.Tensor, numbers: torch.Tensor, count: int) -> torch.Tensor:
    """values [n, ...] at places `numbers` [n] of [count, ...], 0 elsewhere."""
    return values.new_zeros((count, *values.shape[1:])).index_copy_(0, numbers, values)
