"""The FROZEN_KV protocol: lend the target's pools, read-only, for the length of a block; and the five known defects."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch

from specdec.attention.plan import plan_frozen, plan_prefill, plan_verify
from specdec.attention.tree import DraftTree
from specdec.errors import FrozenKVError, KVStateError
from specdec.kvcache.frozen import KVView, frozen_kv, target_view
from specdec.kvcache.hybrid import HybridAllocator
from specdec.kvcache.layout import KVLayout, LayerSpec
from specdec.kvcache.spaces import FullLoc, Space, SwaLoc
from specdec.kvcache.table import RequestTable

from snapshots import kv_contents

WINDOW, RESERVE = 4, 3


def spec(layer: int, owner: int, window: int | None) -> LayerSpec:
    layer_type = "full_attention" if window is None else "sliding_attention"
    return LayerSpec(layer=layer, owner=owner, layer_type=layer_type, num_kv_heads=1, head_dim=1, window=window)


# layers 0 and 1 store K/V; layer 2 reads 0, layer 3 reads 1
LAYOUT = KVLayout((spec(0, 0, WINDOW), spec(1, 1, None), spec(2, 0, WINDOW), spec(3, 1, None)))


class Worker:
    view: KVView | None = None


class OtherWorker(Worker):
    pass


def make(page_size: int = 1, pages: int = 32) -> RequestTable:
    allocator = HybridAllocator(
        LAYOUT,
        full_pages=pages,
        swa_pages=pages,
        page_size=page_size,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    return RequestTable(allocator, max_requests=3, max_len=24, reserve=RESERVE)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def opened(table: RequestTable, length: int, first: float = 0.0) -> int:
    """A row of `length` committed tokens; position p holds first + p in the full space, and 0.5 more in SWA."""
    row = table.open()
    table.ensure(row, length + RESERVE)
    if length:
        plan = plan_prefill(table, ints(row), ints(length))
        k = first + torch.arange(length, dtype=torch.float32).view(-1, 1, 1)
        target_view(table.allocator).write(1, plan.write_full, plan.write_swa, k, -k)
        target_view(table.allocator).write(0, plan.write_full, plan.write_swa, k + 0.5, -k)
        table.commit(ints(row), ints(length))
    return row


def owned(table: RequestTable, row: int) -> FullLoc:
    """The first page of a row."""
    return FullLoc(torch.from_numpy(table.slots.host[row, : table.allocator.page_size].copy()))


def chain(table: RequestTable, rows: np.ndarray, nodes: int = RESERVE):
    return plan_verify(table, rows, DraftTree.chain(torch.zeros(len(rows), nodes, dtype=torch.int64)))


# the protocol


def test_detached_outside_lent_inside():
    table, worker = make(), Worker()
    assert not table.allocator.frozen
    with frozen_kv(table.allocator, worker, [0, 1]) as view:
        assert worker.view is view
        assert table.allocator.frozen
        assert not view.writable
        assert view.layer_map == (0, 1)
    assert worker.view is None
    assert not table.allocator.frozen


def test_restored_after_an_exception():
    table, worker = make(), Worker()
    row = opened(table, 5)
    with pytest.raises(ZeroDivisionError), frozen_kv(table.allocator, worker, [0]) as view:
        raise ZeroDivisionError
    assert worker.view is None
    assert not table.allocator.frozen
    with pytest.raises(FrozenKVError, match="layer 0 read through a view whose frozen_kv block has ended"):
        view.layer(0)
    table.ensure(row, 10)
    table.check()


def test_a_worker_gets_back_the_view_it_had():
    table, worker = make(), Worker()
    worker.view = own = target_view(table.allocator)
    with frozen_kv(table.allocator, worker, [0]) as view:
        assert worker.view is view
    assert worker.view is own
    assert own.layer(0).space is Space.SWA


def test_a_view_reads_the_pools_of_the_owners():
    table = make()
    full, swa = table.allocator.pools[Space.FULL], table.allocator.pools[Space.SWA]
    own = target_view(table.allocator)
    assert own.layer_map == (0, 1, 0, 1)
    assert [own.owns(layer) for layer in range(4)] == [True, True, False, False]
    for layer, (pool, owner) in enumerate([(swa, 0), (full, 1), (swa, 0), (full, 1)]):
        k, v, space = own.layer(layer)
        assert (k is pool.k[owner], v is pool.v[owner], space) == (True, True, pool.space)
    with frozen_kv(table.allocator, Worker(), [1, 0, 1]) as lent:
        for layer, (pool, owner) in enumerate([(full, 1), (swa, 0), (full, 1)]):
            k, v, space = lent.layer(layer)
            assert (k is pool.k[owner], v is pool.v[owner], space) == (True, True, pool.space)
            assert not lent.owns(layer)


def test_write_goes_to_the_space_of_the_layer():
    table = make()
    row = opened(table, 0)
    opened(table, 0)
    table.allocator.evict(owned(table, row))  # from here on the numbers of the two spaces differ
    other = table.open()
    table.ensure(other, 1)
    full = FullLoc(table.slots.tensor[other, :1])
    swa = table.allocator.translate(full)
    assert full.item() != swa.item()
    view = target_view(table.allocator)
    one = torch.ones(1, 1, 1)
    view.write(0, full, swa, one, 2 * one)
    view.write(1, full, swa, 3 * one, 4 * one)
    pools = table.allocator.pools
    assert torch.nonzero(pools[Space.SWA].k[0]).tolist() == [[swa.item(), 0, 0]]
    assert torch.nonzero(pools[Space.FULL].v[1]).tolist() == [[full.item(), 0, 0]]
    with pytest.raises(AssertionError, match="layer 0 is sliding, but the plan holds no SWA locations"):
        view.write(0, full, None, one, one)


def test_views_do_not_nest_on_one_worker():
    table, worker = make(), Worker()
    with frozen_kv(table.allocator, worker, [0]) as outer:
        with (
            pytest.raises(FrozenKVError, match="Worker already holds a frozen view; views do not nest on one worker"),
            frozen_kv(table.allocator, worker, [1]),
        ):
            pytest.fail("entered")
        assert worker.view is outer
        assert outer.layer(0).space is Space.SWA
        assert table.allocator.frozen
    assert worker.view is None
    with frozen_kv(table.allocator, worker, [1]):  # one after the other is fine
        pass


def test_two_workers_may_hold_views_at_once():
    table, first, second = make(), Worker(), OtherWorker()
    with frozen_kv(table.allocator, first, [0]) as one:
        with frozen_kv(table.allocator, second, [1]) as two:
            assert (first.view, second.view) == (one, two)
            with pytest.raises(FrozenKVError, match="alloc while the KV cache is frozen for Worker, OtherWorker:"):
                table.allocator.alloc(1)
        assert second.view is None
        assert one.layer(0).space is Space.SWA
        with pytest.raises(FrozenKVError, match="frozen for Worker:"):
            table.allocator.alloc(1)
    assert not table.allocator.frozen


def test_views_may_be_left_in_any_order():
    table, first, second = make(), Worker(), Worker()
    one, two = frozen_kv(table.allocator, first, [0]), frozen_kv(table.allocator, second, [1])
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    assert (first.view, table.allocator.frozen) == (None, True)
    assert second.view.layer(0).space is Space.FULL
    with frozen_kv(table.allocator, first, [0]):  # has none now
        pass
    with pytest.raises(FrozenKVError, match="already holds"):
        frozen_kv(table.allocator, second, [0]).__enter__()
    two.__exit__(None, None, None)
    assert (second.view, table.allocator.frozen) == (None, False)


@pytest.mark.parametrize(
    ("layer_map", "message"),
    [
        ([0, 3], "drafter layer 1 reads target layer 3, which stores no K/V of its own; its owner is layer 1"),
        ([2], "drafter layer 0 reads target layer 2, which stores no K/V of its own; its owner is layer 0"),
        ([0, 1, 4], "drafter layer 2 reads target layer 4, but the target has 4 layers"),
        ([-1], "drafter layer 0 reads target layer -1, but the target has 4 layers"),
    ],
    ids=["shared", "shared-sliding", "beyond", "negative"],
)
def test_a_layer_map_must_name_owners(layer_map: list[int], message: str):
    table, worker = make(), Worker()
    with pytest.raises(KVStateError, match=message), frozen_kv(table.allocator, worker, layer_map):
        pytest.fail("entered")
    assert worker.view is None
    assert not table.allocator.frozen


def test_keys_tell_views_apart():
    table, other = make(), make()
    with frozen_kv(table.allocator, Worker(), [0, 1]) as lent, frozen_kv(table.allocator, Worker(), [1, 0]) as swapped:
        with frozen_kv(other.allocator, Worker(), [0, 1]) as elsewhere:
            own = [target_view(a.allocator) for a in (table, other)]
            views = [*own, KVView(table.allocator, [0, 1], writable=True), lent, swapped, elsewhere]
            assert len({view.key for view in views}) == len(views)
        with frozen_kv(table.allocator, Worker(), [0, 1]) as again:
            assert again.key == lent.key  # the same pools through the same map: a captured graph may be replayed


# what a frozen cache refuses


def forbidden(table: RequestTable, row: int) -> dict[str, Callable[[], object]]:
    a, slots = table.allocator, owned(table, row)
    rows = ints(row)
    k = torch.full((len(slots), 1, 1), 99.0)
    return {
        "alloc": lambda: a.alloc(1),
        "alloc of nothing": lambda: a.alloc(0),
        "free": lambda: a.free(slots),
        "allocator evict": lambda: a.evict(slots),
        "move": lambda: a.move(slots, slots),
        "ensure": lambda: table.ensure(row, int(table.capacity[row]) + 1),
        "commit": lambda: table.commit(rows, ints(1)),
        "commit of a path": lambda: table.commit(rows, ints(2), np.array([[0, 2]])),
        "truncate": lambda: table.truncate(row, 1),
        "evict": lambda: table.evict(rows),
        "close": lambda: table.close(row),
        "write": lambda: target_view(a).write(1, slots, None, k, k),
        "sliding write": lambda: target_view(a).write(0, slots, a.translate(slots), k, k),
    }


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("name", forbidden(make(), 0))
def test_frozen_refuses_and_changes_nothing(name: str, page_size: int):
    table, worker = make(page_size), Worker()
    row = opened(table, 12)
    before = kv_contents(table)
    with frozen_kv(table.allocator, worker, [0, 1]) as view:
        with pytest.raises(FrozenKVError, match="while the KV cache is frozen for Worker"):
            forbidden(table, row)[name]()
        assert worker.view is view
        assert view.layer(1).space is Space.FULL
    assert kv_contents(table) == before
    table.check()


@pytest.mark.parametrize("name", forbidden(make(), 0))
def test_and_allows_it_again_afterwards(name: str):
    table = make()
    row = opened(table, 4)
    with frozen_kv(table.allocator, Worker(), [0, 1]):
        pass
    forbidden(table, row)[name]()


@pytest.mark.parametrize("layer", [0, 1])
def test_a_lent_view_refuses_to_write(layer: int):
    table, worker = make(), Worker()
    row = opened(table, 5)
    before = kv_contents(table)
    slots = owned(table, row)
    k = torch.full((1, 1, 1), 99.0)
    message = f"write to layer {layer} through a frozen view"
    with frozen_kv(table.allocator, worker, [0, 1]) as view, pytest.raises(FrozenKVError, match=message):
        view.write(layer, slots, table.allocator.translate(slots), k, k)
    with pytest.raises(FrozenKVError):  # nor afterwards
        view.write(layer, slots, table.allocator.translate(slots), k, k)
    assert kv_contents(table) == before


def test_the_targets_own_view_reads_but_does_not_write_while_frozen():
    table = make()
    row = opened(table, 5, first=10.0)
    own = target_view(table.allocator)
    slots, k = owned(table, row), torch.full((1, 1, 1), 99.0)
    with frozen_kv(table.allocator, Worker(), [0, 1]):
        assert own.layer(1).k[slots].item() == 10.0
        with pytest.raises(FrozenKVError, match="KV write to layer 3 while the KV cache is frozen"):
            own.write(3, slots, None, k, k)
        assert own.layer(1).k[slots].item() == 10.0
    own.write(1, slots, None, k, k)
    assert own.layer(1).k[slots].item() == 99.0


def test_a_frozen_plan_sees_the_committed_prefix_and_writes_nothing():
    table = make()
    row = opened(table, 5, first=10.0)
    plan = chain(table, ints(row))  # rejected drafts in the reserve
    k = torch.full((RESERVE, 1, 1), 77.0)
    for layer in (0, 1):
        target_view(table.allocator).write(layer, plan.write_full, plan.write_swa, k, k)
    with frozen_kv(table.allocator, Worker(), [0, 1]) as view:
        plan = plan_frozen(table, ints(row), position_offset=0, window_shift=2)
        assert (plan.write_full, plan.write_swa, plan.ancestors) == (None, None, None)
        assert plan.positions.tolist() == [[5]]
        assert view.layer(1).k[plan.prefix_full.slots[0], 0, 0].tolist() == [10.0, 11.0, 12.0, 13.0, 14.0]
        assert view.layer(0).k[plan.prefix_swa.slots[0], 0, 0].tolist() == [10.5, 11.5, 12.5, 13.5, 14.5]


# Regressions: one for each known defect of a neighbouring engine


def test_locations_of_the_two_spaces_are_never_one_tensor():
    """#24395: extend rows were read with full ids where the layer had written SWA ids."""
    table = make()
    row = opened(table, 12)
    table.evict(ints(row))  # frees SWA slots 1-6, so that the next row's numbers differ between the spaces
    other = opened(table, 2, first=50.0)
    for plan in (plan_prefill(table, ints(other), ints(2)), chain(table, ints(other))):
        assert not set(plan.write_full.tolist()) & set(plan.write_swa.tolist())
        assert plan.write_swa.tolist() == table.allocator.translate(plan.write_full).tolist()
        assert not set(plan.prefix_full.slots[0].tolist()) & set(plan.prefix_swa.slots[0].tolist())
        view = target_view(table.allocator)
        assert view.layer(1).k[plan.prefix_full.slots[0], 0, 0].tolist() == [50.0, 51.0]
        assert view.layer(0).k[plan.prefix_swa.slots[0], 0, 0].tolist() == [50.5, 51.5]


def test_a_frozen_view_resolves_through_the_allocator():
    """#26966: "which pool, which mapping" was derived once, and stayed after the pool was swapped."""
    table, worker = make(), Worker()
    a = table.allocator
    own = target_view(a)
    with frozen_kv(a, worker, [0, 1]) as view:
        before = view.layer(1).k
        other = make().allocator.pools
        mine, a.pools = a.pools, other
        for seen in (view, own):
            assert seen.layer(0).k is other[Space.SWA].k[0]
            assert seen.layer(1).k is other[Space.FULL].k[1]
        a.pools = mine
        assert view.layer(1).k is before
    assert not hasattr(view, "__dict__")  # nowhere to keep a tensor


@pytest.mark.parametrize("page_size", [1, 4])
def test_prefix_and_draft_are_both_translated_exactly_once(page_size: int):
    """#24617: of a table made of prefix ++ draft only one part was translated."""
    table = make(page_size)
    old = opened(table, 16)
    table.evict(ints(old))
    row = opened(table, 6)
    plan = chain(table, ints(row))
    slots = table.slots.host[row]
    once = table.allocator.full_to_swa.host
    assert plan.write_full.tolist() == slots[6:9].tolist()
    assert plan.write_swa.tolist() == once[slots[6:9]].tolist()
    start = int(plan.prefix_swa.start[0])
    assert plan.prefix_swa.slots[0].tolist() == once[slots[start:6]].tolist()
    assert 0 not in plan.write_swa.tolist()
    assert (once[once[slots[6:9]]] != once[slots[6:9]]).any()  # a second translation would show


def test_two_forwards_with_the_same_pointers_read_fresh_tables():
    """#26152: a translation memoised by address survived into a replay with new contents at that address."""
    table = make(pages=16)
    first, second = opened(table, 5), opened(table, 5)
    pointers = table.slots.tensor.data_ptr(), table.allocator.full_to_swa.tensor.data_ptr()
    before = chain(table, ints(first))
    held = before.write_full.tolist(), before.write_swa.tolist(), before.prefix_swa.slots.tolist()
    table.close(second)
    table.close(first)
    opened(table, 2)  # takes the slots that come first now
    again = opened(table, 5)
    after = chain(table, ints(again))
    assert (table.slots.tensor.data_ptr(), table.allocator.full_to_swa.tensor.data_ptr()) == pointers
    assert after.write_full.tolist() == table.slots.host[again, 5:8].tolist()
    assert after.write_swa.tolist() == table.allocator.translate(after.write_full).tolist()
    assert after.write_full.tolist() != held[0]
    assert after.write_swa.tolist() != held[1]
    # and the earlier plan is what it was when it was made
    assert (before.write_full.tolist(), before.write_swa.tolist(), before.prefix_swa.slots.tolist()) == held


def test_eviction_is_seen_by_the_next_plan():
    """#26152 again, by eviction: the same row, the same full slots, new SWA slots behind them."""
    table = make()
    row = opened(table, 12)
    before = chain(table, ints(row)).prefix_swa
    table.evict(ints(row))
    table.commit(ints(row), ints(3))
    table.ensure(row, 15 + RESERVE)  # reuses the evicted SWA slots
    after = chain(table, ints(row))
    assert set(after.write_swa.tolist()) & set(range(1, 7))
    assert int(after.prefix_swa.start[0]) > int(before.start[0])
    assert 0 not in after.prefix_swa.slots.tolist()[0]


def test_nothing_of_a_forward_is_kept_on_a_pool():
    """#24138: per-forward locations stored on the pool were stale when a second forward began before the first read."""
    table = make()
    rows = opened(table, 3), opened(table, 5)
    a = table.allocator
    kept = kv_contents(table).keys()
    first, second = chain(table, ints(rows[0])), chain(table, ints(rows[1]))
    view = target_view(a)
    for value, plan in ((20.0, second), (10.0, first)):  # made in one order, written in the other
        k = torch.full((RESERVE, 1, 1), value)
        for layer in (0, 1):
            view.write(layer, plan.write_full, plan.write_swa, k, k)
    for value, plan in ((10.0, first), (20.0, second)):
        assert view.layer(1).k[plan.write_full].unique().tolist() == [value]
        assert view.layer(0).k[plan.write_swa].unique().tolist() == [value]
    assert kv_contents(table).keys() == kept


def test_plans_are_immutable():
    table = make()
    row = opened(table, 5)
    plan = chain(table, ints(row))
    for name in ("write_full", "write_swa", "prefix_swa", "committed_len"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(plan, name, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.prefix_full.slots = plan.write_full
    with pytest.raises((TypeError, AttributeError)):  # slots: no room for anything else
        object.__setattr__(plan, "swa_loc", None)


@pytest.mark.parametrize("page_size", [1, 4])
def test_padded_rows_write_to_the_sink_in_both_spaces(page_size: int):
    table = make(page_size)
    row = opened(table, 3)
    prefill = plan_prefill(table, ints(row, table.padding_row), ints(3, 1))
    assert prefill.write_full.tolist() == [*table.slots.host[row, 3:6].tolist(), 0, 0, 0]
    assert prefill.write_swa.tolist()[3:] == [0, 0, 0]
    assert 0 not in prefill.write_swa.tolist()[:3]
    verify = chain(table, ints(table.padding_row, row))
    assert verify.write_full.tolist()[:3] == verify.write_swa.tolist()[:3] == [0, 0, 0]
    assert 0 not in verify.write_full.tolist()[3:] + verify.write_swa.tolist()[3:]
    before = kv_contents(table)
    view, k = target_view(table.allocator), torch.full((RESERVE, 1, 1), 99.0)
    sink = FullLoc(verify.write_full[:3]), SwaLoc(verify.write_swa[:3])
    for layer in (0, 1):
        view.write(layer, *sink, k, k)
    for pool in table.allocator.pools.values():
        for rows in (*pool.k.values(), *pool.v.values()):
            rows[0] = 0.0  # only there
    assert kv_contents(table) == before
