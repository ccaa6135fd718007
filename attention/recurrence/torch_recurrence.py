"""The recurrent layers of one forward in plain torch: convolutions and recurrences over the paths of its rows.

    convolve   stores each row's input at its slot, then reads the newest inputs of its path
    recur      stores each row's k and g, then its u, computes its output, and folds certain tokens into the states

The blocks that the rows need are found once per forward, given the states and records of their requests:

    request at S = 37, folded to 32          rows at 37 .. 50 of a chain
    wave 0    block 32 .. 47: records of 32 .. 36, rows of 37 .. 47, from the request's state
    wave 1    block 48 .. 63: rows of 48 .. 50, from this path's own fold of block 32 .. 47, since its rows are drafts

Each path has its own blocks: a row on several paths is computed once in a block of each, with the same bits. A token is
certain if it is committed or in a prompt chunk of this forward; only drafts are not. If all tokens of a folded block
are certain, the fold replaces the request's state. It runs on a CPU and reads lengths on the host. Invariant: each
ancestor of a row is an earlier row of this forward, or its record is stored.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from specdec.attention.dense import VisibleKeys
from specdec.attention.plan import KVPlan, PackTables
from specdec.attention.recurrence.blocks import NewPlaces, RecordBlock, convolved, folded, run_blocks
from specdec.gpu.mirrored_array import IntArray
from specdec.kvcache.fp8_pool import read_rows
from specdec.kvcache.frozen import KVView
from specdec.kvcache.layer_context import Recurrence
from specdec.kvcache.layout import NULL_SLOT, GroupId
from specdec.kvcache.recurrent_state import FOLD, RecurrentState
from specdec.kvcache.store import KVStore, LayerKV
from specdec.kvcache.table import RequestTable


class ForwardRows(NamedTuple):
    """The rows of a forward without padding.

    numbers [n]: place of each row.
    write [n]: its slot.
    begun: rows of the request table whose text begins in this forward (position 0).
    table_row, certain, folded_len [n]: the request of each row by its row of the request table, its number of certain
        tokens, and of tokens folded before this forward.
    paths [n]: slots of each row's path, from position `folded_len` up to its own.
    """

    numbers: torch.Tensor
    write: torch.Tensor
    begun: torch.Tensor
    table_row: IntArray
    certain: IntArray
    folded_len: IntArray
    paths: Sequence[IntArray]


def rows_of_plan(plan: KVPlan, group: GroupId, folded_len: torch.Tensor) -> ForwardRows:
    """The rows of a plan that writes; rows without a slot are padding. folded_len: folded tokens by row of the request
    table."""
    write = _host(plan.write_slots(group))
    numbers = np.flatnonzero(write != NULL_SLOT)
    position, certain = _host(plan.positions).reshape(-1)[numbers], _host(plan.committed_len)
    if isinstance(plan.prefix, PackTables):
        pack, lines = plan.prefix.pack, plan.prefix.lines[group]
        request, slots = _host(pack.run_of)[numbers], _host(lines.slots[lines.line])
        begin = np.zeros_like(certain) if lines.begin is None else _host(lines.begin)
        ends = position + 1 - begin[request]
        paths = [slots[run, :end] for run, end in zip(request, ends, strict=True)]
        certain = certain + _host(pack.length)
    else:
        request, node = np.divmod(numbers, plan.positions.shape[1])
        begin, keys = _host(plan.prefix.table(group).begin), VisibleKeys.from_plan(plan, group, None)
        slots, seen = _host(keys.slots), _host(keys.seen)
        paths = [slots[b, seen[b, n]] for b, n in zip(request, node, strict=True)]  # by position
    table_row = _host(plan.rows)[request]
    begun = torch.from_numpy(np.unique(table_row[position == 0]))
    before = folded_len.index_fill(0, begun, 0).numpy()[table_row]
    first = before - begin[request]
    assert (first >= 0).all(), f"records of unfolded tokens are gone: {begin=} {before=}"
    unfolded = [path[i:] for path, i in zip(paths, first, strict=True)]
    assert all(len(path) == size for path, size in zip(unfolded, position + 1 - before, strict=True)), f"{position=}"
    places, written = torch.from_numpy(numbers), torch.from_numpy(write[numbers])
    return ForwardRows(places, written, begun, table_row, certain[request], before, unfolded)


def newest_inputs(rows: ForwardRows, taps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Locate the newest inputs of each row's path, its own last -> slots and back, [n, taps] each. An input lies
    in the record at its slot; where back > 0, it lies in the state instead, `back` places before its end."""
    slots = np.zeros((len(rows.paths), taps), dtype=np.int64)
    for line, path in zip(slots, rows.paths, strict=True):
        line[taps - len(path[-taps:]) :] = path[-taps:]
    unfolded = torch.from_numpy(np.array([len(path) for path in rows.paths], dtype=np.int64))
    return torch.from_numpy(slots), taps - torch.arange(taps, device="cpu") - unfolded[:, None]


class Wave(NamedTuple):
    """X blocks that do not depend on each other.

    base [X]: in the first wave, the row of the request table with whose state a block begins; in a later wave, the
        number of a block of the previous wave.
    slots [X, FOLD]: slot of each place, if present [X, FOLD].
    rows [X, FOLD]: the forward's row at each place, if is_new [X, FOLD].
    certain [Z]: blocks whose folds replace the states of rows `into` [Z], with `folded_len` [Z] tokens folded then.
    """

    base: torch.Tensor
    slots: torch.Tensor
    present: torch.Tensor
    rows: torch.Tensor
    is_new: torch.Tensor
    certain: torch.Tensor
    into: torch.Tensor
    folded_len: torch.Tensor


class _Block(NamedTuple):
    """A block of the path of `row`, with its number in its wave. base: see `Wave`. rows: the forward's row at each of
    `slots`; -1: none."""

    number: int
    row: int
    base: int
    slots: Sequence[int]
    rows: Sequence[int]


def waves_of(rows: ForwardRows) -> list[Wave]:
    """Cut the paths into blocks; paths with a common beginning share its blocks."""
    waves: list[dict[int, _Block]] = []  # blocks by the slot of their last place
    row_at = {slot: row for row, slot in enumerate(rows.write.tolist())}
    covered = set[int]()
    for row in reversed(range(len(rows.paths))):  # an ancestor comes after its descendants, whose blocks have it
        if row in covered:
            continue
        path, base = rows.paths[row].tolist(), int(rows.table_row[row])
        for number, begin in enumerate(range(0, len(path), FOLD)):
            slots = path[begin : begin + FOLD]
            if number == len(waves):
                waves.append({})
            if (block := waves[number].get(slots[-1])) is None:
                found = [row_at.get(slot, -1) for slot in slots]
                covered.update(found)
                block = waves[number][slots[-1]] = _Block(len(waves[number]), row, base, slots, found)
            base = block.number
    return [_wave(rows, (number + 1) * FOLD, list(blocks.values())) for number, blocks in enumerate(waves)]


def _wave(rows: ForwardRows, end: int, blocks: Sequence[_Block]) -> Wave:
    """Make a wave of blocks that end `end` places after the folded tokens."""
    slots, new = np.full((2, len(blocks), FOLD), -1, dtype=np.int64)
    for block in blocks:
        slots[block.number, : len(block.slots)] = block.slots
        new[block.number, : len(block.slots)] = block.rows
    present = slots >= 0
    row_of = np.array([block.row for block in blocks])
    length = rows.folded_len[row_of] + end
    certain = np.flatnonzero(present[:, -1] & (length <= rows.certain[row_of]))
    base = np.array([block.base for block in blocks])
    replaced = certain, rows.table_row[row_of[certain]], length[certain]
    parts = base, slots.clip(min=0), present, new.clip(min=0), new >= 0, *replaced
    return Wave(*(torch.from_numpy(np.ascontiguousarray(part)) for part in parts))


def _host(x: torch.Tensor) -> IntArray:
    return x.cpu().numpy()


class RecurrentForward:
    """The recurrent layers of a forward under a plan."""

    def __init__(self, plan: KVPlan, view: KVView) -> None:
        self._plan = plan
        self._view = view
        self._newest: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # keyed by taps

    @cached_property
    def _rows(self) -> ForwardRows:
        """Rows of the forward. All recurrent layers have the slots of one group, and the same folded tokens when the
        first of them runs."""
        first = self._view.recurrent[0]
        return rows_of_plan(self._plan, first.layers[0].group, first.sample.folded_len)

    @cached_property
    def _waves(self) -> list[Wave]:
        return waves_of(self._rows)

    def convolve(
        self, layer: int, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Convolve inputs [T, C] with weight [C, K] -> [T, C], 0 on padding."""
        layer_kv, mine = self._view.writable_layer(layer), self._rows
        state, pool, taps = layer_kv.recurrent_state, layer_kv.fields[0], weight.shape[1]
        state.clear(mine.begun)
        pool.index_copy_(0, mine.write, inputs[mine.numbers][:, None])
        if taps not in self._newest:
            self._newest[taps] = newest_inputs(mine, taps)
        slots, back = self._newest[taps]
        folded_inputs = state.inputs[mine.table_row[:, None], state.inputs.shape[1] - back.clamp(min=1)]
        path = torch.where((back > 0)[:, :, None], folded_inputs, read_rows(pool, slots)[:, :, 0])  # [n, K, C]
        if not state.matrices.shape[1]:  # the layer is only a convolution
            for wave in self._waves:
                if len(wave.into):
                    newest = last_inputs(layer_kv, wave, state)
                    state.fold(wave.into, state.matrices[wave.into], newest, wave.folded_len)
        return _spread(convolved(path, weight, bias), mine.numbers, len(inputs))

    def recur(self, layer: int, rows: Recurrence) -> torch.Tensor:
        """Run the recurrence -> [T, HV, DV] in float32, 0 on padding."""
        layer_kv, mine = self._view.writable_layer(layer), self._rows
        state = layer_kv.recurrent_state
        new = rows.map(lambda x: x[mine.numbers].float())
        _, pool_k, pool_u, pool_g = layer_kv.fields
        pool_k.index_copy_(0, mine.write, new.k)
        pool_g.index_copy_(0, mine.write, new.g[:, :, None])
        out = new.v.new_zeros(new.v.shape)
        before: torch.Tensor | None = None
        for wave in self._waves:
            base = state.matrices[wave.base] if before is None else before[wave.base]
            absent = ~wave.present[:, :, None, None]
            k, u, g = (read_rows(pool, wave.slots).masked_fill(absent, 0.0) for pool in layer_kv.fields[1:])
            block = RecordBlock(base, k, u, g[..., 0])
            if wave.is_new.any():
                beta = None if new.beta is None else new.beta[wave.rows]
                answers, u = run_blocks(block, NewPlaces(wave.is_new, new.q[wave.rows], new.v[wave.rows], beta))
                block = block._replace(u=u)
                done = wave.rows[wave.is_new]
                out[done] = answers[wave.is_new]
                pool_u.index_copy_(0, mine.write[done], u[wave.is_new])
            if wave is not self._waves[-1] or len(wave.into):
                before = folded(block)
            if len(wave.into):
                assert before is not None
                inputs = last_inputs(layer_kv, wave, state)
                state.fold(wave.into, before[wave.certain], inputs, wave.folded_len)
        return _spread(out, mine.numbers, len(rows.v))


def fold_committed(table: RequestTable, store: KVStore, row: int, length: int) -> None:
    """See `KVOperations.fold`."""
    for layer_kv in (layer_kv for each in store.by_rank for layer_kv in each.layers.values()):
        if (state := layer_kv.state) is None:
            continue
        rows = torch.tensor([row], device=state.folded_len.device)
        for begin in range(int(state.folded_len[row]), length, FOLD):
            slots = table.allocator.peer_slots(layer_kv.group, table.slots.host[row, begin : begin + FOLD])
            inputs, *records = (read_rows(pool, torch.from_numpy(slots)[None]) for pool in layer_kv.fields)
            matrices = state.matrices[rows]
            if records:
                k, u, g = records
                matrices = folded(RecordBlock(matrices, k, u, g[..., 0]))
            newest = inputs[:, FOLD - state.inputs.shape[1] :, 0]
            state.fold(rows, matrices, newest, torch.full_like(rows, begin + FOLD))


def last_inputs(layer_kv: LayerKV, wave: Wave, state: RecurrentState) -> torch.Tensor:
    """Inputs [Z, taps, C] of the last places of the certain blocks."""
    slots = wave.slots[wave.certain][:, FOLD - state.inputs.shape[1] :]
    return read_rows(layer_kv.fields[0], slots)[:, :, 0]


def _spread(values: torch.Tensor, numbers: torch.Tensor, count: int) -> torch.Tensor:
    """Put values [n, ...] at places `numbers` [n] of [count, ...], 0 elsewhere."""
    return values.new_zeros((count, *values.shape[1:])).index_copy_(0, numbers, values)
