"""Random histories of the whole KV cache against what every position must hold, which follows from its text alone.

Each machine opens rows with texts of two tokens, which often begin alike, and adopts what the prefix cache has of them;
writes the K/V of prefill chunks and trees where the plan says, commits, evicts, keeps what is committed, closes, clears
the cache, and lends the pools to a frozen drafter (what that may not do: `test_frozen_kv.py`). K/V are the number of
the text so far; a drafter's own are that of the text with one token more. After every step each committed position of a
row and each page of the cache reads, in every group, what its text says, and `table.check()` holds.
"""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_rig import (
    PRIMARY,
    DraftTree,
    GroupId,
    KVLayout,
    KVPlan,
    KVRig,
    PrefixCache,
    PrimaryLoc,
    Worker,
    ints,
    layer_spec,
)

from specdec.errors import FrozenKVError, KVStateError, OutOfSlotsError

from marks import examples, usual_cases
from snapshots import kv_contents

NODES, ROWS, MAX_LEN = 4, 3, 40
STEP = 0.125  # by which the values of two layers differ
SEED = st.integers(0, 2**32 - 1)


class KVMachine(RuleBasedStateMachine):
    page_size: int
    windows: tuple[int, ...]  # layer n is that of group n
    pairs: bool

    @initialize(full_tokens=st.integers(24, 96), window_tokens=st.lists(st.integers(16, 72), min_size=4, max_size=4))
    def start(self, full_tokens: int, window_tokens: list[int]) -> None:
        self.table = KVRig(
            KVLayout(tuple(layer_spec(layer, window) for layer, window in enumerate((None, *self.windows)))),
            pages=full_tokens // self.page_size,
            window_pages=[tokens // self.page_size for tokens in window_tokens[: len(self.windows)]],
            page_size=self.page_size,
            max_requests=ROWS,
            max_len=MAX_LEN,
            lookahead=NODES,
            dtype=torch.float64,  # holds every value written below exactly
        )
        self.allocator = self.table.allocator
        self.own = self.table.add_store(
            KVLayout.from_windows([None], 1, 1), torch.float64
        )  # of a drafter that looks ahead
        self.cache = PrefixCache(self.table.table, needs_next_token=self.pairs)
        self.worker = Worker()
        self.texts: dict[int, list[int]] = {}  # row -> its tokens; one more than are committed, or the rest of a prompt
        self.ended: list[list[int]] = [[]]
        self.numbers: dict[tuple[int, ...], float] = {}
        self.hits = 0

    # helpers

    @property
    def expected(self) -> dict[int, list[float]]:
        """Row -> the value of each committed position."""
        return {row: self.of(text, int(self.table.committed_len.host[row])) for row, text in self.texts.items()}

    def of(self, text: list[int], length: int, ahead: int = 0) -> list[float]:
        """The values at the first positions of a text; `ahead`: of what sees more tokens than its own."""
        return [self.number(text[: i + 1 + ahead]) for i in range(length)]

    def number(self, text: list[int]) -> float:
        return self.numbers.setdefault(tuple(text), float(len(self.numbers) + 1))

    def some_rows(self, seed: int) -> np.ndarray:
        rng = np.random.default_rng(seed)
        rows = rng.permutation(sorted(self.texts))
        return rows[: rng.integers(1, len(rows) + 1)].astype(np.int64)

    def make_room(self, rows: np.ndarray, extra: np.ndarray) -> np.ndarray:
        """The rows that got their slots. One that finds none is left exactly as it was."""
        done = []
        for row, more in zip(rows.tolist(), extra.tolist(), strict=True):
            before = kv_contents(self.table)
            wanted = int(self.table.committed_len.host[row]) + more
            fits = self.table.pages_needed(row, wanted) <= self.allocator.available_pages
            if fits and wanted <= self.table.slots.host.shape[1]:
                self.table.ensure_slots(row, wanted)
                done.append(row)
            else:
                with pytest.raises(OutOfSlotsError):
                    self.table.ensure_slots(row, wanted)
                assert kv_contents(self.table) == before
        return ints(*done)

    def write(self, plan: KVPlan, values: list[list[float]]) -> None:
        """Write values, by request and node, where the plan says, in every layer."""
        assert plan.positions.shape == (len(values), len(values[0]))
        k = torch.tensor(values, dtype=torch.float64).view(-1, 1, 1)
        for layer in self.table.store.layers:
            self.table.write(layer, plan.write, k + STEP * layer, -k - STEP * layer)

    def observe(self, rows: np.ndarray, start: np.ndarray) -> None:
        """What a drafter with K/V of its own does once tokens are committed: each sees the token after it."""
        for row, first in zip(rows.tolist(), start.tolist(), strict=True):
            end = int(self.table.committed_len.host[row])
            if len(self.texts[row]) == end:
                self.texts[row].append(len(self.numbers) % 2)  # drawn
            slots = torch.from_numpy(self.table.slots.host[row, first:end].copy())
            values = self.of(self.texts[row], end, ahead=1)[first:]
            self.own.layers[0].k[slots, 0, 0] = torch.tensor(values, dtype=torch.float64)

    def read_prefix(self, plan: KVPlan, rows: np.ndarray) -> None:
        """The plan's page tables lead to the committed values, in each group from what it retains on."""
        every = self.expected
        for i, row in enumerate(rows.tolist()):
            expected = every[row]
            assert plan.committed_len[i] == len(expected)
            for group, window in enumerate((len(expected), *self.windows)):
                start = int(plan.prefix.start[group][i])
                assert start <= max(0, len(expected) - window - 1)  # what a frozen drafter sees
                slots = plan.prefix.table(GroupId(group)).slots()[i, : len(expected) - start]
                assert self.at(GroupId(group), slots) == expected[start:]

    def at(self, group: GroupId, slots: torch.Tensor) -> list[float]:
        kept = self.table.store.layers[group]
        assert kept.group == group
        values = kept.k[slots, 0, 0]
        torch.testing.assert_close(kept.v[slots, 0, 0], -values, rtol=0, atol=0)
        return (values - STEP * group).tolist()

    def verify_once(self, rng: np.random.Generator, rows: np.ndarray) -> None:
        start = self.table.committed_len.host
        rows = rows[[start[r] + NODES <= MAX_LEN and start[r] + 1 == len(self.texts[r]) for r in rows.tolist()]]
        rows = self.make_room(rows, np.full(len(rows), NODES))
        if len(rows) == 0:
            return
        parents = np.array([[-1, *(rng.integers(0, node) for node in range(1, NODES))] for _ in rows])
        tokens = np.array([[self.texts[r][-1], *rng.integers(0, 2, NODES - 1)] for r in rows.tolist()])
        tree = DraftTree.from_parents(torch.from_numpy(tokens), torch.from_numpy(parents))
        plan = self.table.verify(rows, tree)
        self.read_prefix(plan, rows)
        paths = [[walk_to(parents[i], node) for node in range(NODES)] for i in range(len(rows))]
        of_node = [
            [self.number(self.texts[row][:-1] + tokens[i, walk].tolist()) for walk in paths[i]]
            for i, row in enumerate(rows.tolist())
        ]
        self.write(plan, of_node)
        path = np.zeros((len(rows), NODES), dtype=np.int64)
        lengths = np.zeros(len(rows), dtype=np.int64)
        for i in range(len(rows)):
            walk = [0]
            while (children := np.flatnonzero(parents[i] == walk[-1])).size and rng.random() < 0.9:
                walk.append(int(rng.choice(children)))
            path[i, : len(walk)] = walk
            lengths[i] = len(walk) if rng.random() < 0.7 else rng.integers(0, len(walk))
        before = self.table.committed_len.host[rows]
        self.table.commit(rows, lengths, path)
        for i, row in enumerate(rows.tolist()):
            self.texts[row] += tokens[i, path[i, 1 : lengths[i]]].tolist() if lengths[i] else []
        self.observe(rows, before)

    # what may happen

    @precondition(lambda self: len(self.texts) < ROWS)
    @rule(seed=SEED)
    def open(self, seed: int) -> None:
        """A new text, or one that begins as another did; the cache may have some of it."""
        rng = np.random.default_rng(seed)
        known = [*self.ended, *self.texts.values()]
        begin = known[rng.integers(0, len(known))]
        text = begin[: rng.integers(0, len(begin) + 1)][: MAX_LEN - 8] + rng.integers(0, 2, rng.integers(1, 9)).tolist()
        row = self.table.open_row()
        assert row not in self.texts
        key = self.cache.key(text)[: len(text) - 1]
        assert len(key) == len(text) - 1
        whole = len(self.cache.match_prefix(key)) * self.page_size
        taken = self.cache.adopt(row, key)
        assert taken == whole == self.table.committed_len.host[row] < len(text)
        self.hits += taken
        self.texts[row] = text

    @precondition(lambda self: self.texts)
    @rule(seed=SEED)
    def prefill(self, seed: int) -> None:
        rows = self.some_rows(seed)
        chunk = np.random.default_rng(seed + 1).integers(1, 9, len(rows))
        start = self.table.committed_len.host[rows]
        chunk = np.minimum(chunk, [min(MAX_LEN, len(self.texts[row])) for row in rows.tolist()] - start)
        keep = np.isin(rows, self.make_room(rows, chunk)) & (chunk > 0)
        rows, chunk, start = rows[keep], chunk[keep], start[keep]
        if len(rows) == 0:
            return
        plan = self.table.chunk(rows, chunk)
        self.read_prefix(plan, rows)
        padded = [self.texts[row] + [0] * 9 for row in rows.tolist()]
        values = [self.of(text, s + int(chunk.max()))[s:] for text, s in zip(padded, start.tolist(), strict=True)]
        self.write(plan, values)
        self.table.commit(rows, chunk)
        self.observe(rows, start)

    @precondition(lambda self: self.texts)
    @rule(seed=SEED)
    def keep(self, seed: int) -> None:
        rows = self.some_rows(seed).tolist()
        self.cache.insert(rows, [self.cache.key(self.texts[row]) for row in rows])

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        assert self.allocator.primary.evictable_pages == self.allocator.primary.cached_pages == 0

    @precondition(lambda self: self.texts)
    @rule(seed=SEED, rounds=st.integers(1, 4))
    def verify(self, seed: int, rounds: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(rounds):
            self.verify_once(rng, self.some_rows(seed))

    @precondition(lambda self: self.texts)
    @rule(seed=SEED)
    def evict(self, seed: int) -> None:
        rows = self.some_rows(seed)
        self.table.evict_unseen(rows)
        for group, window in enumerate(self.windows, 1):
            slack = self.table.committed_len.host[rows] - window - 1 - self.table.evicted_len[group, rows]
            assert (slack < 2 * self.page_size).all()  # each windowed pool stays O(window)

    @precondition(lambda self: self.texts)
    @rule(seed=SEED, kept=st.booleans())
    def close(self, seed: int, kept: bool) -> None:
        rows = self.some_rows(seed)[: 1 + seed % 2]  # at least one row stays open
        if kept:
            self.cache.insert(rows.tolist(), [self.cache.key(self.texts[row]) for row in rows.tolist()])
        self.table.close_rows(rows)
        self.ended += [self.texts.pop(row) for row in rows.tolist()]

    @precondition(lambda self: self.texts)
    @rule(seed=SEED)
    def ask_too_much(self, seed: int) -> None:
        rows = self.some_rows(seed)
        lengths = np.zeros(len(rows), dtype=np.int64)
        lengths[-1] = self.table.capacity[rows[-1]] - self.table.committed_len.host[rows[-1]] + 1
        before = kv_contents(self.table)
        with pytest.raises(KVStateError, match="goes past the slots they own"):
            self.table.commit(rows, lengths)
        with pytest.raises(OutOfSlotsError):
            self.allocator.alloc(self.allocator.available_pages + 1)
        if len(self.texts) == ROWS:
            with pytest.raises(KVStateError, match="rows of the request table are in use"):
                self.table.open_row()
        assert kv_contents(self.table) == before

    @precondition(lambda self: self.texts)
    @rule(seed=SEED, fails=st.booleans())
    def freeze(self, seed: int, fails: bool) -> None:
        rows = self.some_rows(seed)
        before = kv_contents(self.table)
        try:
            with self.table.lend(self.worker, list(self.table.store.layers)) as view:
                assert self.worker.view is view
                self.read_prefix(self.table.frozen(rows, position_offset=0, window_shift=2), rows)
                if fails:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            assert fails
        assert self.worker.view is None
        assert not self.allocator.frozen
        assert kv_contents(self.table) == before
        with pytest.raises(FrozenKVError, match="has ended"):
            view.layer(0)

    # what must hold after every step

    @invariant()
    def all_is_well(self) -> None:
        self.table.check()
        assert self.table.active_rows.tolist() == sorted(self.texts)
        for row, expected in self.expected.items():
            slots = PrimaryLoc(torch.from_numpy(self.table.slots.host[row, : len(expected)]))
            self.read(slots, self.texts[row], expected, self.table.evicted_len[:, row])

    @invariant()
    def the_cache_holds_what_its_keys_say(self) -> None:
        for node in list(self.cache._by_age):
            keys, pages, above = [node.key], [node.pages], node.parent
            while above is not None:
                keys, pages, above = [above.key, *keys], [above.pages, *pages], above.parent
            key, page = np.concatenate(keys), np.concatenate(pages)
            text = [*(key >> 32), key[-1] & 1] if self.pairs else key
            slots = (page[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1)
            tokens = [int(token) for token in text]
            self.read(PrimaryLoc(torch.from_numpy(slots)), tokens, self.of(tokens, len(slots)), None)

    def read(self, slots: PrimaryLoc, text: list[int], expected: list[float], mapped_from: np.ndarray | None) -> None:
        """What lies at `slots`: nothing is asked of a peer that is gone, unless after `mapped_from` [groups]."""
        assert self.at(PRIMARY, slots) == expected
        if self.pairs:
            assert self.own.layers[0].k[slots, 0, 0].tolist() == self.of(text, len(expected), ahead=1)
        for group in self.allocator.windowed:
            peers = self.allocator.translate(group, slots)
            assert mapped_from is None or (peers[mapped_from[group] :] != 0).all()
            there = [i for i, slot in enumerate(peers.tolist()) if slot]
            assert self.at(group, peers[there]) == [expected[i] for i in there]


def walk_to(parents: np.ndarray, node: int) -> list[int]:
    """Root to node."""
    return [*walk_to(parents, int(parents[node])), node] if node else [0]


@usual_cases("windows0-False-1", "windows2-True-4")
@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("windows", [(4,), (), (2, 9), (1, 4, 9, 30)])
def test_random_histories(page_size: int, pairs: bool, windows: tuple[int, ...]):
    name = f"KVMachine{page_size}Windows{'_'.join(map(str, windows))}{'Pairs' if pairs else ''}"
    machine = type(name, (KVMachine,), {"page_size": page_size, "windows": windows, "pairs": pairs})
    machine.TestCase.settings = settings(
        max_examples=examples(4, 40) if windows else examples(3, 20),
        stateful_step_count=50,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    machine.TestCase().runTest()
