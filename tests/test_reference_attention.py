"""The reference attention and the plans against dense loops in float64, and the shape of the page tables.

`Scene` keeps, next to the pools, the plain list of keys and values of every request, for `dense_oracle.py`.
"""

import math

import numpy as np
import pytest
import torch
from kv_rig import SWA, KVRig, ints, layer_spec

from specdec.attention.dense import VisibleKeys, attend_together
from specdec.attention.plan import KVPlan
from specdec.attention.trees.tree import DraftTree
from specdec.kvcache.layout import PRIMARY, GroupId, KVLayout, LayerSpec, PrimaryLoc

from dense_oracle import attend

NODES = 6
SLIDING_LAYER, FULL_LAYER = 0, 1
HEADS = {SLIDING_LAYER: (4, 2, 8), FULL_LAYER: (4, 1, 16)}  # query heads, kv heads, head size
SCALING, SOFTCAP = 0.3, 1.5
PAGE_SIZES = pytest.mark.parametrize("page_size", [1, 3, 4])
POISONED = float("nan")


def layer_of(layer: int, window: int | None) -> LayerSpec:
    _, heads, size = HEADS[layer]
    return layer_spec(layer, window, head_dim=size, heads=heads)


def visible_keys(plan: KVPlan, window: int | None) -> VisibleKeys:
    """What a layer sees that slides, or does not."""
    group = PRIMARY if window is None else SWA
    return VisibleKeys.from_plan(plan, group, window)


def prefix_slots(plan: KVPlan, group: GroupId) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots [B, L] of the prefixes in one group, and the position [B] of the first column."""
    table = plan.prefix.table(group)
    return table.slots(), table.begin


class Scene:
    """Requests of the given committed lengths, one row each, over a sliding and a full layer."""

    def __init__(self, lengths: list[int], *, page_size: int, window: int, fill: float = 0.0, evict: bool = True):
        self.window = window
        self.generator = torch.Generator().manual_seed(0)
        pages = sum(-(-(length + NODES) // page_size) for length in lengths) + 8
        self.table = KVRig(
            KVLayout((layer_of(SLIDING_LAYER, window), layer_of(FULL_LAYER, None))),
            pages=pages,
            page_size=page_size,
            max_requests=len(lengths) + 1,
            max_len=max(lengths) + 12,
            lookahead=NODES,
        )
        allocator = self.table.allocator
        for kept in self.table.store.layers.values():
            kept.k.fill_(fill)
            kept.v.fill_(fill)
        # a row opened first and evicted shifts the numbers of the two groups against each other
        shift = self.table.open_row()
        self.table.ensure_slots(shift, 5 * page_size)
        allocator.evict(SWA, self.table.pages(shift, 3))
        self.rows = ints(*(self.table.open_row() for _ in lengths))
        self.lengths = lengths
        self.k, self.v = {}, {}  # layer -> request -> [S, Hkv, D], kept next to the pools
        for layer, (_, heads, size) in HEADS.items():
            self.k[layer] = [self.random(length, heads, size) for length in lengths]
            self.v[layer] = [self.random(length, heads, size) for length in lengths]
        for i, (row, length) in enumerate(zip(self.rows.tolist(), lengths, strict=True)):
            self.table.ensure_slots(row, length + NODES)
            slots = PrimaryLoc(torch.from_numpy(self.table.slots.host[row, :length].copy()))
            for layer in HEADS:
                self.table.write(layer, self.table.allocator.located(slots), self.k[layer][i], self.v[layer][i])
            self.table.commit(ints(row), ints(length))
        if evict:
            self.table.evict_unseen(self.rows)
            if fill:  # what was evicted is not to be read either
                free = ~np.isin(np.arange(len(allocator.maps.host[SWA])), allocator.maps.host[SWA])
                kept = self.table.store.layers[SLIDING_LAYER]
                for rows in (kept.k, kept.v):
                    rows[torch.from_numpy(np.flatnonzero(free))] = fill

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def attend(
        self,
        plan: KVPlan,
        layer: int,
        *,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        broken: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(what `VisibleKeys` says, what the loops say), both [B, N, Hq, D]; request `broken` brings NaN keys."""
        query_heads, heads, size = HEADS[layer]
        batch, rows = plan.positions.shape
        query = self.random(batch, rows, query_heads, size)
        block_k, block_v = self.random(batch, rows, heads, size), self.random(batch, rows, heads, size)
        if broken is not None:
            block_k[broken] = block_v[broken] = POISONED
        if plan.write is not None:  # as a layer does: first written, then read back
            self.table.write(layer, plan.write, block_k.flatten(0, 1), block_v.flatten(0, 1))
        window = self.window if layer == SLIDING_LAYER else None
        kept = self.table.view.layer(layer)
        keys = visible_keys(plan, window)
        options = {"scaling": SCALING, "softcap": softcap, "sinks": sinks}
        out = attend_together(keys)(query.transpose(1, 2), kept.k, kept.v, **options)
        assert (out.shape, out.dtype) == (query.shape, query.dtype)
        window = math.inf if window is None else window + plan.window_shift
        expected = torch.zeros(query.shape, dtype=torch.float64)
        for b in range(batch):
            for i in range(rows):
                position = int(plan.positions[b, i])
                seen = [
                    (self.k[layer][b][p], self.v[layer][b][p]) for p in range(self.lengths[b]) if position - p < window
                ]
                if plan.write is not None:
                    own = torch.ones(batch, rows, rows).tril() if plan.tree is None else plan.tree.ancestors
                    seen += [
                        (block_k[b, j], block_v[b, j])
                        for j in range(rows)
                        if own[b, i, j] and position - int(plan.positions[b, j]) < window
                    ]
                if seen:
                    expected[b, i] = attend(query[b, i], *map(torch.stack, zip(*seen, strict=True)), **options)
        return out, expected

    def agree(self, plan: KVPlan, **options: object) -> None:
        for layer in HEADS:
            out, expected = self.attend(plan, layer, **options)
            torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def tree_of(parents: list[list[int]]) -> DraftTree:
    tokens = torch.arange(len(parents[0])).repeat(len(parents), 1)
    tree = DraftTree.from_parents(tokens, torch.tensor(parents))
    tree.check()
    return tree


CHAIN = [-1, 0, 1, 2, 3, 4]
BUSHY = [-1, 0, 0, 1, 3, 2]
DEEP = [-1, 0, 1, 2, 3, 1]


@PAGE_SIZES
@pytest.mark.parametrize("window", [1, 2, 3, 7, 50], ids=lambda window: f"window-{window}")
def test_verify(page_size: int, window: int):
    """Windows smaller than the tree is deep: an ancestor can leave the window before its descendant is reached."""
    scene = Scene([17, 3, 0, 30], page_size=page_size, window=window)
    scene.agree(scene.table.verify(scene.rows, tree_of([CHAIN, BUSHY, DEEP, BUSHY])))


@PAGE_SIZES
@pytest.mark.parametrize("window", [2, 5])
def test_prefill_of_different_lengths(page_size: int, window: int):
    """Rows past a chunk's end are padding: nothing is asked of their values but that they are numbers."""
    scene = Scene([11, 0, 4], page_size=page_size, window=window)
    chunk = ints(3, 6, 1)
    plan = scene.table.chunk(scene.rows, chunk)
    for layer in HEADS:
        out, expected = scene.attend(plan, layer)
        for b, length in enumerate(chunk.tolist()):
            torch.testing.assert_close(out[b, :length].double(), expected[b, :length], rtol=1e-5, atol=1e-5)
        assert out.isfinite().all()


@PAGE_SIZES
@pytest.mark.parametrize(("offset", "shift"), [(0, 2), (0, 0), (-1, 0), (-1, 1)])
def test_frozen(page_size: int, offset: int, shift: int):
    """A query on an empty prefix is zero, also if all are empty."""
    for lengths in ([17, 3, 30, 1, 0], [0, 0]):
        scene = Scene(lengths, page_size=page_size, window=4)
        scene.agree(scene.table.frozen(scene.rows, position_offset=offset, window_shift=shift))


def test_frozen_queries_do_not_see_each_other_or_the_lookahead():
    scene = Scene([5, 8], page_size=1, window=4)
    plan = scene.table.frozen(scene.rows, position_offset=0, window_shift=2)
    assert plan.tree is None and plan.write is None
    seen = visible_keys(plan, None).seen
    assert seen.shape == (2, 1, 8)
    assert seen[:, 0].sum(-1).tolist() == [5, 8]


@PAGE_SIZES
def test_visible_keys_of_the_worked_tree(page_size: int):
    """Three committed keys, the tree of attention/trees/tree.py, a window of 3: node 4 no longer sees the root."""
    scene = Scene([3], page_size=page_size, window=3)
    plan = scene.table.verify(scene.rows, tree_of([[-1, 0, 0, 1, 3]]))
    assert plan.positions.tolist() == [[3, 4, 4, 5, 6]]
    past = torch.arange(3, -(-3 // page_size) * page_size)  # the rest of the last page
    seen = {window: visible_keys(plan, window).seen[0] for window in (None, 3)}
    assert not any(rows[:, past].any() for rows in seen.values())
    seen = {window: torch.cat([rows[:, :3], rows[:, -5:]], 1) for window, rows in seen.items()}
    draw = {window: ["".join("T" if x else "F" for x in row) for row in rows] for window, rows in seen.items()}
    assert draw[None] == ["TTTTFFFF", "TTTTTFFF", "TTTTFTFF", "TTTTTFTF", "TTTTTFTT"]
    assert draw[3] == ["FTTTFFFF", "FFTTTFFF", "FFTTFTFF", "FFFTTFTF", "FFFFTFTT"]


def test_random_trees_and_lengths():
    """With and without a softcap and sinks."""
    rng, logits = np.random.default_rng(0), torch.tensor([0.5, -1.0, 2.0, 0.0])
    for case in range(16):
        lengths = rng.integers(0, 24, 4).tolist()
        scene = Scene(lengths, page_size=int(rng.integers(1, 6)), window=int(rng.integers(1, 9)), evict=case % 2 == 0)
        parents = [[-1, *(int(rng.integers(0, node)) for node in range(1, NODES))] for _ in lengths]
        extras = {"softcap": SOFTCAP if case % 4 > 1 else None, "sinks": logits if case % 3 else None}
        scene.agree(scene.table.verify(scene.rows, tree_of(parents)), **extras)


# what is not committed does not matter


@PAGE_SIZES
@pytest.mark.parametrize("fill", [1e4, -1e4, POISONED])
@pytest.mark.parametrize("softcap", [None, SOFTCAP], ids=["fused", "with-extras"])
def test_values_outside_committed_slots_do_not_leak(page_size: int, softcap: float | None, fill: float):
    """A shorter request's table is padded to the longest: what it gathers there has weight 0, and 0 * NaN is NaN."""
    scene = Scene([17, 3, 0, 30], page_size=page_size, window=4, fill=fill)
    scene.agree(scene.table.verify(scene.rows, tree_of([CHAIN, BUSHY, DEEP, BUSHY])), softcap=softcap)
    scene = Scene([17, 3, 30], page_size=page_size, window=4, fill=fill)
    scene.agree(scene.table.frozen(scene.rows, position_offset=0, window_shift=2), softcap=softcap)


@pytest.mark.parametrize("kind", ["chunk", "verify"])
def test_a_request_that_overflows_stays_alone(kind):
    """Request 1 computes NaN; in a prefill its padded rows and those of request 0 share the null slot."""
    scene = Scene([4, 3, 5], page_size=1, window=4)
    argument = ints(1, 1, 2) if kind == "chunk" else tree_of([[-1, 0]] * 3)
    plan = getattr(scene.table, kind)(scene.rows, argument)
    for layer in HEADS:
        out, expected = scene.attend(plan, layer, broken=1)
        for b in (0, 2):
            valid = 1 if kind == "chunk" and b == 0 else 2
            torch.testing.assert_close(out[b, :valid].double(), expected[b, :valid], rtol=1e-5, atol=1e-5)


# page tables


@PAGE_SIZES
@pytest.mark.parametrize("evict", [True, False], ids=["evicted", "not-evicted"])
def test_the_swa_table_is_as_wide_as_the_window(page_size: int, evict: bool):
    widths = []
    for length in (2, 20, 200, 2000):
        scene = Scene([length], page_size=page_size, window=6, evict=evict)
        plan = scene.table.verify(scene.rows, tree_of([CHAIN]))
        widths.append(prefix_slots(plan, SWA)[0].shape[1])
        assert length <= prefix_slots(plan, PRIMARY)[0].shape[1] < length + page_size
    assert widths[0] == -(-2 // page_size) * page_size
    assert max(widths) < scene.table.retain[SWA] + 2 * page_size
