"""The recurrent layers of one forward in plain torch: convolutions and recurrences over the paths of its rows.

    convolve   stores each row's input at its slot, then reads the newest inputs of its path
    recur      stores each row's k and g, then its u, computes its output, and folds certain tokens into the states

The blocks that the rows need are found once per forward, given the states and records of their requests:

    request at S = 37, folded to 32          rows at 37 .. 50 of a chain
    wave 0    block 32 .. 47: records of 32 .. 36, rows of 37 .. 47, from the request's state
    wave 1    block 48 .. 63: rows of 48 .. 50, from this path's own fold of block 32 .. 47, since its rows are drafts

Each path has its own blocks: a row on several paths is computed once in a block of each, with the same bits. A token is
certain if it is committed or in a prompt chunk of this forward; only drafts are not. If all tokens of a folded block
are certain, the fold replaces the request's state. It runs on a CPU and reads lengths on the host. A forward may run in
parts. Invariant: each ancestor of a row is an earlier row of this forward, or its record is stored.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from specdec.attention.plan import KVPlan, PackTables
from specdec.attention.recurrence.blocks import NewPlaces, RecordBlock, convolved, folded, run_blocks
from specdec.gpu.mirrored_array import IntArray
from specdec.kvcache.fp8_pool import FieldPool, read_rows
from specdec.kvcache.frozen import KVView
from specdec.kvcache.layer_context import Recurrence
from specdec.kvcache.layout import NULL_SLOT, GroupId
from specdec.kvcache.recurrent_state import FOLD, RecurrentState
from specdec.kvcache.store import KVStore, LayerKV
from specdec.kvcache.table import RequestTable


class Wave(NamedTuple):
    """X blocks that do not depend on each other.

    base [X]: in the first wave, the row of the request table with whose state a block begins; in a later wave, a number
    in `folds` of the previous wave. slots [X, FOLD]: slot of each place, if present [X, FOLD]. rows [X, R]: the
    forward's rows at places [X, R], if exists [X, R]. folds [Y]: blocks whose state the next wave needs. certain [Z]:
    entries of `folds` that replace the states of rows `into` [Z], with `folded_len` [Z] tokens folded then.
    """

    base: torch.Tensor
    slots: torch.Tensor
    present: torch.Tensor
    rows: torch.Tensor
    place: torch.Tensor
    exists: torch.Tensor
    folds: torch.Tensor
    certain: torch.Tensor
    into: torch.Tensor
    folded_len: torch.Tensor


class RequestPath(NamedTuple):
    """One request of a forward: its row of the request table, the slots of positions from `begin` on that all its paths
    share, and its number of certain tokens."""

    row: int
    begin: int
    slots: IntArray
    certain: int


@dataclass(frozen=True, slots=True)
class ForwardRows:
    """The rows of a forward, or of a part of it, without padding.

    numbers [n]: place of each row in the part. request, position, write slot: [n] each. own: for each row, slots of its
    path from the first uncertain position on; None: all positions are certain. begun: rows of the request table whose
    text begins in this forward (position 0). folded_len: folded tokens by row of the request table at the start of the
    forward; 0 if the text begins here.
    """

    requests: Sequence[RequestPath]
    numbers: torch.Tensor
    request: IntArray
    position: IntArray
    write: torch.Tensor
    own: Sequence[IntArray] | None
    begun: torch.Tensor
    folded_len: IntArray

    def path(self, row: int, begin: int, end: int) -> IntArray:
        """Slots of positions `begin` to `end` on the path of a row."""
        request = self.requests[self.request[row]]
        first, last = begin - request.begin, min(end, request.certain) - request.begin
        assert first >= 0, f"{request} needs the record of position {begin}, which is gone"
        parts = [request.slots[first : max(first, last)]]
        if self.own is not None and end > request.certain:
            parts.append(self.own[row][max(begin - request.certain, 0) : end - request.certain])
        slots = np.concatenate(parts)
        assert len(slots) == end - begin, f"{begin=} {end=} {request=}"
        return slots


def rows_of_plan(plan: KVPlan, group: GroupId, part: tuple[slice, slice], folded_len: torch.Tensor) -> ForwardRows:
    """The rows of a part (requests, columns) of a plan that writes; rows without a slot are padding. folded_len: folded
    tokens by row of the request table."""
    shape = plan.positions.shape
    numbers = np.arange(shape.numel()).reshape(shape)[part].reshape(-1)
    write = _host(plan.write_slots(group))[numbers]
    exists = write != NULL_SLOT
    position = _host(plan.positions).reshape(-1)[numbers]
    rows, start = _host(plan.rows), _host(plan.committed_len)
    if isinstance(plan.prefix, PackTables):
        pack, lines = plan.prefix.pack, plan.prefix.lines[group]
        length, of_run = _host(pack.length), _host(pack.run_of)
        line = _host(lines.slots[lines.line])
        begin = np.zeros_like(rows) if lines.begin is None else _host(lines.begin)
        requests = [RequestPath(*known) for known in zip(rows, begin, line, start + length, strict=True)]
        request, own = of_run[numbers][exists], None
    else:
        assert plan.tree is not None
        table = plan.prefix.table(group)
        slots, begin = _host(table.slots()), _host(table.begin)
        requests = [RequestPath(*known) for known in zip(rows, begin, slots, start, strict=True)]
        request, node = numbers[exists] // shape[1], numbers[exists] % shape[1]
        ancestors = _host(plan.tree.ancestors)  # in order of depth, since parents come before children
        all_written = _host(plan.write_slots(group)).reshape(shape)
        own = [all_written[b][ancestors[b, n]] for b, n in zip(request, node, strict=True)]
    position = position[exists]
    begun = torch.from_numpy(np.unique(rows[request[position == 0]]))
    places, written = torch.from_numpy(np.flatnonzero(exists)), torch.from_numpy(write[exists])
    folded = folded_len.index_fill(0, begun, 0).numpy()
    return ForwardRows(requests, places, request, position, written, own, begun, folded)


class NewestInputs(NamedTuple):
    """Places of the newest inputs of each row's path, its own last: [n, taps] each. Recorded inputs are at `slots`. The
    others are in the state of row `states` of the request table; `back` counts from its end (1: the last)."""

    slots: torch.Tensor
    recorded: torch.Tensor
    states: torch.Tensor
    back: torch.Tensor


def newest_inputs(rows: ForwardRows, taps: int) -> NewestInputs:
    """Locate the inputs."""
    folded_len = rows.folded_len
    states = np.array([rows.requests[request].row for request in rows.request], dtype=np.int64)
    positions = rows.position[:, None] + np.arange(1 - taps, 1)  # [n, taps]
    back = folded_len[states][:, None] - positions
    slots = np.zeros_like(positions)
    for row, (first, last) in enumerate(zip(positions[:, 0].tolist(), positions[:, -1].tolist(), strict=True)):
        begin = max(first, int(folded_len[states[row]]))
        slots[row, begin - first :] = rows.path(row, begin, last + 1)
    found = slots, back <= 0, states[:, None].repeat(taps, axis=1), back.clip(min=1)
    return NewestInputs(*(torch.from_numpy(np.ascontiguousarray(x)) for x in found))


@dataclass(slots=True)
class _Block:
    """A block under construction. base: key of the previous block; None: it begins with the request's state."""

    request: int
    begin: int
    slots: IntArray
    base: int | None
    rows: list[tuple[int, int]] = field(default_factory=list)  # (row of the forward, place)


def waves_of(rows: ForwardRows) -> list[Wave]:
    """Make the waves."""
    levels: list[dict[int, _Block]] = []  # keyed by the slot of a block's last place
    row_at = {slot: row for row, slot in enumerate(rows.write.tolist())}
    covered = np.zeros(len(rows.write), dtype=np.bool_)

    def add(row: int, begin: int, end: int) -> int:
        """Add the block at positions `begin` to `end` of a row's path. Returns its key."""
        request = int(rows.request[row])
        level, odd = divmod(begin - int(rows.folded_len[rows.requests[request].row]), FOLD)
        assert level >= 0 and not odd, f"position {begin} of {rows.requests[request]} is folded already"
        slots = rows.path(row, begin, end)
        key = int(slots[-1])
        while len(levels) <= level:
            levels.append({})
        if key not in levels[level]:
            base = None if level == 0 else add(row, begin - FOLD, begin)
            block = levels[level][key] = _Block(request, begin, slots, base)
            for place, slot in enumerate(slots.tolist()):
                if (found := row_at.get(slot)) is not None:
                    block.rows.append((found, place))
                    covered[found] = True
        return key

    for row in reversed(range(len(covered))):
        if not covered[row]:
            position = int(rows.position[row])
            add(row, position // FOLD * FOLD, position + 1)
    waves: list[Wave] = []
    fold_of: dict[int, int] = {}  # key of a block -> its number in `folds` of its wave
    for level, following in zip(levels, [*levels[1:], {}], strict=True):
        needed = {block.base for block in following.values()}
        bases = [
            rows.requests[block.request].row if block.base is None else fold_of[block.base] for block in level.values()
        ]
        folds = [number for number, key in enumerate(level) if key in needed]
        fold_of = {key: i for i, key in enumerate(key for key in level if key in needed)}
        waves.append(_wave(rows, list(level.values()), bases, folds))
    return waves


def _wave(rows: ForwardRows, blocks: Sequence[_Block], bases: Sequence[int], folds: Sequence[int]) -> Wave:
    width = max(len(block.rows) for block in blocks)
    slots = np.zeros((len(blocks), FOLD), dtype=np.int64)
    present = np.zeros((len(blocks), FOLD), dtype=np.bool_)
    cells = np.zeros((3, len(blocks), width), dtype=np.int64)  # row, place, exists
    for number, block in enumerate(blocks):
        slots[number, : len(block.slots)] = block.slots
        present[number, : len(block.slots)] = True
        for i, (row, place) in enumerate(block.rows):
            cells[:, number, i] = row, place, 1
    replaced = np.zeros((3, 0), dtype=np.int64)  # number in `folds`, row of the request table, length
    for i, number in enumerate(folds):
        request, end = rows.requests[blocks[number].request], blocks[number].begin + FOLD
        if end <= request.certain:
            replaced = np.append(replaced, [[i], [request.row], [end]], axis=1)
    parts = (np.array(bases, dtype=np.int64), slots, present, cells[0], cells[1], cells[2] == 1)
    tensors = (*parts, np.array(folds, dtype=np.int64), *replaced)
    return Wave(*(torch.from_numpy(np.ascontiguousarray(part)) for part in tensors))


def _host(x: torch.Tensor) -> IntArray:
    return x.cpu().numpy()


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
        first = self._view.recurrent[0]
        return rows_of_plan(self._plan, first.layers[0].group, self._part, first.sample.folded_len)

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
        state, pool, taps = layer_kv.recurrent_state, layer_kv.fields[0], weight.shape[1]
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
        state = layer_kv.recurrent_state
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
