"""Random histories of the whole KV cache against a dictionary of what every position must hold.

Each machine opens rows, writes the K/V of prefill chunks and trees where the plan says, commits, evicts,
closes, and lends the pools to a frozen drafter that then tries everything it may not do. After every step each
committed position still reads, in both spaces, the value that was written for it, and `table.check()` holds.
"""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_rig import KVRig

from specdec.attention.plan import KVPlan
from specdec.attention.tree import DraftTree
from specdec.errors import FrozenKVError, KVStateError, OutOfSlotsError
from specdec.kvcache.frozen import KVView
from specdec.kvcache.layout import KVLayout, LayerSpec
from specdec.kvcache.spaces import FullLoc, Space
from specdec.kvcache.table import Move

from snapshots import kv_contents

WINDOW, NODES, ROWS, MAX_LEN = 4, 4, 3, 40
SLIDING_LAYER, FULL_LAYER = 0, 1
SEED = st.integers(0, 2**32 - 1)


def spec(layer: int, window: int | None) -> LayerSpec:
    layer_type = "full_attention" if window is None else "sliding_attention"
    return LayerSpec(layer=layer, owner=layer, layer_type=layer_type, num_kv_heads=1, head_dim=1, window=window)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


class Worker:
    view: KVView | None = None


class KVMachine(RuleBasedStateMachine):
    page_size: int
    window: int | None

    @initialize(full_tokens=st.integers(24, 96), swa_tokens=st.integers(16, 72))
    def start(self, full_tokens: int, swa_tokens: int) -> None:
        self.table = KVRig(
            KVLayout((spec(SLIDING_LAYER, self.window), spec(FULL_LAYER, None))),
            full_pages=full_tokens // self.page_size,
            swa_pages=swa_tokens // self.page_size,
            page_size=self.page_size,
            max_requests=ROWS,
            max_len=MAX_LEN,
            lookahead=NODES,
            dtype=torch.float64,  # holds every value written below exactly
        )
        self.allocator = self.table.allocator
        self.worker = Worker()
        self.expected: dict[int, list[float]] = {}  # row -> the value of each committed position
        self.values = itertools.count(1)

    # helpers

    def some_rows(self, seed: int) -> np.ndarray:
        rng = np.random.default_rng(seed)
        rows = rng.permutation(sorted(self.expected))
        return rows[: rng.integers(1, len(rows) + 1)].astype(np.int64)

    def make_room(self, rows: np.ndarray, extra: np.ndarray) -> np.ndarray:
        """The rows that got their slots. One that finds none is left exactly as it was."""
        done = []
        for row, more in zip(rows.tolist(), extra.tolist(), strict=True):
            before = kv_contents(self.table)
            needed = self.table.pages_needed(row, len(self.expected[row]) + more)
            fits = needed <= self.allocator.available_pages
            if fits and len(self.expected[row]) + more <= self.table.slots.host.shape[1]:
                self.table.ensure(row, len(self.expected[row]) + more)
                done.append(row)
            else:
                with pytest.raises(OutOfSlotsError):
                    self.table.ensure(row, len(self.expected[row]) + more)
                assert kv_contents(self.table) == before
        return ints(*done)

    def write(self, plan: KVPlan) -> list[list[float]]:
        """Write fresh values where the plan says, in every layer; the values by request and node."""
        batch, nodes = plan.positions.shape
        fresh = [[float(next(self.values)) for _ in range(nodes)] for _ in range(batch)]
        k = torch.tensor(fresh, dtype=torch.float64).view(-1, 1, 1)
        for layer in (SLIDING_LAYER, FULL_LAYER):
            self.table.write(layer, plan.write_full, plan.write_swa, k + 0.5 * layer, -k - 0.5 * layer)
        return fresh

    def read_prefix(self, plan: KVPlan, rows: np.ndarray) -> None:
        """The plan's page tables lead to the committed values, in SWA from the retained window on."""
        for i, row in enumerate(rows.tolist()):
            expected = self.expected[row]
            assert plan.committed_len[i] == len(expected)
            full_slots = plan.prefix.full.slots[i, : len(expected)]
            assert self.at(Space.FULL, full_slots) == expected
            if plan.prefix.swa is not None:
                start = int(plan.prefix.swa.start[i])
                assert start <= max(0, len(expected) - WINDOW - 1)  # what a frozen drafter sees
                swa_slots = plan.prefix.swa.slots[i, : len(expected) - start]
                assert self.at(Space.SWA, swa_slots) == expected[start:]

    def at(self, space: Space, slots: torch.Tensor) -> list[float]:
        layer = SLIDING_LAYER if self.window is not None and space is Space.SWA else FULL_LAYER
        kept = self.table.store.layers[layer]
        values = kept.k[slots, 0, 0]
        torch.testing.assert_close(kept.v[slots, 0, 0], -values, rtol=0, atol=0)
        return (values - 0.5 * layer).tolist()

    def verify_once(self, rng: np.random.Generator, rows: np.ndarray) -> None:
        rows = rows[[len(self.expected[row]) + NODES <= MAX_LEN for row in rows.tolist()]]
        rows = self.make_room(rows, np.full(len(rows), NODES))
        if len(rows) == 0:
            return
        parents = np.array([[-1, *(rng.integers(0, node) for node in range(1, NODES))] for _ in rows])
        tree = DraftTree.from_parents(torch.arange(NODES).repeat(len(rows), 1), torch.from_numpy(parents))
        tree.check()
        plan = self.table.verify(rows, tree)
        self.read_prefix(plan, rows)
        fresh = self.write(plan)
        path = np.zeros((len(rows), NODES), dtype=np.int64)
        lengths = np.zeros(len(rows), dtype=np.int64)
        for i, row in enumerate(rows.tolist()):
            walk = [0]
            while (children := np.flatnonzero(parents[i] == walk[-1])).size and rng.random() < 0.9:
                walk.append(int(rng.choice(children)))
            path[i, : len(walk)] = walk
            lengths[i] = len(walk) if rng.random() < 0.7 else rng.integers(0, len(walk))
            self.expected[row] += [fresh[i][node] for node in walk[: lengths[i]]]
        self.table.commit(rows, lengths, path)

    # what may happen

    @precondition(lambda self: len(self.expected) < ROWS)
    @rule()
    def open(self) -> None:
        row = self.table.open()
        assert row not in self.expected
        self.expected[row] = []

    @precondition(lambda self: self.expected)
    @rule(seed=SEED)
    def prefill(self, seed: int) -> None:
        rows = self.some_rows(seed)
        chunk = np.random.default_rng(seed + 1).integers(1, 9, len(rows))
        chunk = np.minimum(chunk, [MAX_LEN - len(self.expected[row]) for row in rows.tolist()])
        keep = np.isin(rows, self.make_room(rows, chunk)) & (chunk > 0)
        rows, chunk = rows[keep], chunk[keep]
        if len(rows) == 0:
            return
        plan = self.table.chunk(rows, chunk)
        self.read_prefix(plan, rows)
        fresh = self.write(plan)
        self.table.commit(rows, chunk)
        for row, length, values in zip(rows.tolist(), chunk.tolist(), fresh, strict=True):
            self.expected[row] += values[:length]

    @precondition(lambda self: self.expected)
    @rule(seed=SEED, rounds=st.integers(1, 4))
    def verify(self, seed: int, rounds: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(rounds):
            self.verify_once(rng, self.some_rows(seed))

    @precondition(lambda self: self.expected)
    @rule(seed=SEED)
    def evict(self, seed: int) -> None:
        rows = self.some_rows(seed)
        self.table.evict(rows)
        for row in rows.tolist() if self.window is not None else []:
            slack = len(self.expected[row]) - WINDOW - 1 - int(self.table.evicted_len[row])
            assert slack < 2 * self.page_size  # the SWA pool stays O(window)

    @precondition(lambda self: self.expected)
    @rule(seed=SEED)
    def close(self, seed: int) -> None:
        row = int(np.random.default_rng(seed).choice(list(self.expected)))
        self.table.close(row)
        del self.expected[row]

    @precondition(lambda self: self.expected)
    @rule(seed=SEED)
    def ask_too_much(self, seed: int) -> None:
        rows = self.some_rows(seed)
        lengths = np.zeros(len(rows), dtype=np.int64)
        lengths[-1] = self.table.capacity[rows[-1]] - len(self.expected[int(rows[-1])]) + 1
        before = kv_contents(self.table)
        with pytest.raises(KVStateError, match="goes past the slots they own"):
            self.table.commit(rows, lengths)
        with pytest.raises(OutOfSlotsError):
            self.allocator.alloc(self.allocator.available_pages + 1)
        if len(self.expected) == ROWS:
            with pytest.raises(KVStateError, match="rows of the request table are in use"):
                self.table.open()
        assert kv_contents(self.table) == before

    @precondition(lambda self: self.expected)
    @rule(seed=SEED, fails=st.booleans())
    def freeze(self, seed: int, fails: bool) -> None:
        rows = self.some_rows(seed)
        before = kv_contents(self.table)
        try:
            with self.table.lend(self.worker, [SLIDING_LAYER, FULL_LAYER]) as view:
                assert self.worker.view is view
                self.read_prefix(self.table.frozen(rows, position_offset=0, window_shift=2), rows)
                self.attempt_everything(view, rows)
                if fails:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            assert fails
        assert self.worker.view is None
        assert not self.allocator.frozen
        assert kv_contents(self.table) == before
        with pytest.raises(FrozenKVError, match="has ended"):
            view.layer(0)

    def attempt_everything(self, view: KVView, rows: np.ndarray) -> None:
        a, t, row = self.allocator, self.table, int(rows[0])
        owned = FullLoc(torch.from_numpy(t.slots.host[row, : self.page_size].copy()))
        k = torch.zeros(self.page_size, 1, 1, dtype=torch.float64)
        forbidden = [
            lambda: a.alloc(1),
            lambda: a.alloc(0),
            lambda: a.free(owned),
            lambda: a.evict(owned),
            lambda: t.move(Move(owned, owned)),
            lambda: t.commit(rows, np.zeros(len(rows), dtype=np.int64)),
            lambda: t.commit(rows, np.ones(len(rows), dtype=np.int64), np.zeros((len(rows), 1), dtype=np.int64)),
            lambda: t.evict(rows),
            lambda: t.close(row),
            lambda: t.write(FULL_LAYER, owned, None, k, k),
            lambda: t.write(SLIDING_LAYER, owned, a.translate(owned), k, k),
            lambda: t.write(FULL_LAYER, owned, None, k, k, view),
            lambda: t.write(SLIDING_LAYER, owned, a.translate(owned), k, k, view),
            lambda: t.lend(self.worker, [FULL_LAYER]).__enter__(),
        ]
        if t.capacity[row] < t.slots.host.shape[1]:
            forbidden.append(lambda: t.ensure(row, int(t.capacity[row]) + 1))
        before = kv_contents(self.table)
        for operation in forbidden:
            with pytest.raises(FrozenKVError):
                operation()
        assert kv_contents(self.table) == before
        assert self.worker.view is view

    # what must hold after every step

    @invariant()
    def all_is_well(self) -> None:
        self.table.check()
        assert self.table.active_rows.tolist() == sorted(self.expected)
        for row, expected in self.expected.items():
            length, evicted = len(expected), int(self.table.evicted_len[row])
            assert self.table.committed_len.host[row] == length
            slots = FullLoc(torch.from_numpy(self.table.slots.host[row, :length]))
            assert self.at(Space.FULL, slots) == expected
            swa_slots = self.allocator.translate(slots)
            if self.window is None:
                assert not swa_slots.any()
            else:
                assert not swa_slots[:evicted].any()
                assert self.at(Space.SWA, swa_slots[evicted:]) == expected[evicted:]


@pytest.mark.slow
@pytest.mark.parametrize("window", [WINDOW, None], ids=["swa", "full-only"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_random_histories(page_size: int, window: int | None):
    name = f"KVMachine{page_size}{'Hybrid' if window else 'Full'}"
    machine = type(name, (KVMachine,), {"page_size": page_size, "window": window})
    machine.TestCase.settings = settings(
        max_examples=60 if window else 20,
        stateful_step_count=50,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    machine.TestCase().runTest()
