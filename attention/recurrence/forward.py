"""The recurrent layers of one forward in plain torch: convolutions and recurrences over the paths of its rows.

    convolve   stores each row's input at its slot, then reads the newest inputs of its path
    recur      stores each row's k and g, then its u, computes its output, and folds certain tokens into the states

It runs on a CPU and reads lengths on the host. A forward may run in parts, as long as a row's ancestors run before it:
the next part reads the records and states of the earlier ones.
"""

from functools import cached_property

import torch

from specdec.attention.plan import KVPlan
from specdec.attention.recurrence.blocks import NewPlaces, RecordBlock, convolved, folded, run_blocks
from specdec.attention.recurrence.paths import ForwardRows, NewestInputs, Wave, newest_inputs, rows_of_plan, waves_of
from specdec.kvcache.fp8_pool import FieldPool, read_rows
from specdec.kvcache.frozen import KVView
from specdec.kvcache.layer_context import Recurrence
from specdec.kvcache.recurrent_state import FOLD, RecurrentState
from specdec.kvcache.store import KVStore, LayerKV
from specdec.kvcache.table import RequestTable

EVERYTHING = slice(None), slice(None)


class RecurrentForward:
    """The rows of a plan or of a part of it. `part`: a slice of requests and a slice of columns."""

    def __init__(self, plan: KVPlan, view: KVView, part: tuple[slice, slice] = EVERYTHING) -> None:
        self._plan = plan
        self._view = view
        self._part = part
        self._newest: dict[int, NewestInputs] = {}  # keyed by taps

    @cached_property
    def _rows(self) -> ForwardRows:
        """Rows of the forward. All recurrent layers have the slots of one group, and the same folded tokens when the
        first of them runs."""
        layer_kv = self._view.recurrent[0].layers[0]
        assert layer_kv.state is not None
        return rows_of_plan(self._plan, layer_kv.group, self._part, layer_kv.state.folded_len)

    @cached_property
    def _waves(self) -> list[Wave]:
        return waves_of(self._rows)

    def part(self, requests: slice, columns: slice) -> "RecurrentForward":
        return RecurrentForward(self._plan, self._view, (requests, columns))

    def convolve(
        self, layer: int, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Convolve inputs [T, C] with weight [C, K] -> [T, C], 0 on padding."""
        layer_kv, mine = self._view.writable_layer(layer), self._rows
        state, pool, taps = layer_kv.state, layer_kv.fields[0], weight.shape[1]
        assert state is not None
        state.clear(mine.begun)
        pool.index_copy_(0, mine.write, inputs[mine.numbers][:, None])
        if taps not in self._newest:
            self._newest[taps] = newest_inputs(mine, taps)
        newest = self._newest[taps]
        before = state.inputs[newest.states, state.inputs.shape[1] - newest.back]
        path = torch.where(newest.recorded[:, :, None], rows_at(pool, newest.slots)[:, :, 0], before)  # [n, K, C]
        if not state.matrices.shape[1]:
            self._fold_inputs(layer_kv, state)
        return _spread(convolved(path, weight, bias), mine.numbers, len(inputs))

    def _fold_inputs(self, layer_kv: LayerKV, state: RecurrentState) -> None:
        """Fold certain tokens into the states of a layer that is only a convolution."""
        for wave in self._waves:
            if len(wave.into):
                matrices = state.matrices[wave.into]
                state.fold(wave.into, matrices, last_inputs(layer_kv, wave, state), wave.folded_len)

    def recur(self, layer: int, rows: Recurrence) -> torch.Tensor:
        """Run the recurrence -> [T, HV, DV] in float32, 0 on padding."""
        layer_kv, mine = self._view.writable_layer(layer), self._rows
        state = layer_kv.state
        assert state is not None
        new = rows.map(lambda x: x[mine.numbers].float())
        _, pool_k, pool_u, pool_g = layer_kv.fields
        pool_k.index_copy_(0, mine.write, new.k)
        pool_g.index_copy_(0, mine.write, new.g[:, :, None])
        out = new.v.new_zeros(new.v.shape)
        before: torch.Tensor | None = None
        for wave in self._waves:
            base = state.matrices[wave.base] if before is None else before[wave.base]
            block = _stored(layer_kv, wave, base)
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
                before = folded(RecordBlock(*(x[wave.folds] for x in block)))
                if len(wave.into):
                    inputs = last_inputs(layer_kv, wave, state)
                    state.fold(wave.into, before[wave.certain], inputs, wave.folded_len)
        return _spread(out, mine.numbers, len(rows.v))


def fold_committed(table: RequestTable, store: KVStore, row: int, length: int) -> None:
    """See `KVOperations.fold`."""
    for layer_kv in (layer_kv for each in store.by_rank for layer_kv in each.layers.values()):
        if (state := layer_kv.state) is None:
            continue
        rows = torch.tensor([row])
        for begin in range(int(state.folded_len[row]), length, FOLD):
            slots = table.allocator.peer_slots(layer_kv.group, table.slots.host[row, begin : begin + FOLD])
            inputs, *records = (rows_at(pool, torch.from_numpy(slots)[None]) for pool in layer_kv.fields)
            matrices = state.matrices[rows]
            if records:
                k, u, g = records
                matrices = folded(RecordBlock(matrices, k, u, g[..., 0]))
            newest = inputs[:, FOLD - state.inputs.shape[1] :, 0]
            state.fold(rows, matrices, newest, torch.tensor([begin + FOLD]))


def _stored(layer_kv: LayerKV, wave: Wave, base: torch.Tensor) -> RecordBlock:
    """The blocks of a wave, with their stored records."""
    absent = ~wave.present[:, :, None, None]
    k, u, g = (rows_at(pool, wave.slots).masked_fill(absent, 0.0) for pool in layer_kv.fields[1:])
    return RecordBlock(base, k, u, g[..., 0])


def last_inputs(layer_kv: LayerKV, wave: Wave, state: RecurrentState) -> torch.Tensor:
    """Inputs [Z, taps, C] of the last places of those blocks whose folds are final (`Wave.certain`)."""
    slots = wave.slots[wave.folds][wave.certain][:, FOLD - state.inputs.shape[1] :]
    return rows_at(layer_kv.fields[0], slots)[:, :, 0]


def rows_at(pool: FieldPool, slots: torch.Tensor) -> torch.Tensor:
    """Rows of a pool at slots [X, Y] -> [X, Y, heads, D]."""
    return read_rows(pool, slots.flatten()).view(*slots.shape, *pool.shape[1:])


def _spread(values: torch.Tensor, numbers: torch.Tensor, count: int) -> torch.Tensor:
    """values [n, ...] at places `numbers` [n] of [count, ...], 0 elsewhere."""
    return values.new_zeros((count, *values.shape[1:])).index_copy_(0, numbers, values)
