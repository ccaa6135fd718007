"""The FROZEN_KV protocol: lend the target's pools, read-only, for the length of a block; and the five known defects."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from kv_rig import (
    PRIMARY,
    SWA,
    DraftTree,
    GroupId,
    GroupLoc,
    KVLayout,
    KVPlan,
    KVRig,
    KVView,
    Move,
    PrefixCache,
    PrimaryLoc,
    Worker,
    ints,
    layer_spec,
)

from specdec.errors import FrozenKVError, KVStateError

from snapshots import kv_contents

WINDOW, LOOKAHEAD = 4, 3


# layers 0 and 1 store K/V; layer 2 reads 0, layer 3 reads 1
LAYOUT = KVLayout(
    (layer_spec(0, WINDOW), layer_spec(1, None), layer_spec(2, WINDOW, owner=0), layer_spec(3, None, owner=1))
)


class OtherWorker(Worker):
    pass


def make(page_size: int = 1, pages: int = 32) -> KVRig:
    return KVRig(LAYOUT, pages=pages, page_size=page_size, max_requests=3, max_len=24, lookahead=LOOKAHEAD)


def opened(table: KVRig, length: int, first: float = 0.0) -> int:
    """A row of `length` committed tokens; position p holds first + p in the full group, and 0.5 more in SWA."""
    row = table.open_row()
    table.ensure_slots(row, length + LOOKAHEAD)
    if length:
        plan = table.chunk(ints(row), ints(length))
        k = first + torch.arange(length, dtype=torch.float32).view(-1, 1, 1)
        table.write(1, plan.write, k, -k)
        table.write(0, plan.write, k + 0.5, -k)
        table.commit(ints(row), ints(length))
    return row


def owned(table: KVRig, row: int) -> PrimaryLoc:
    """The first page of a row."""
    return PrimaryLoc(torch.from_numpy(table.slots.host[row, : table.allocator.page_size].copy()))


def chain(table: KVRig, rows: np.ndarray, nodes: int = LOOKAHEAD):
    return table.verify(rows, DraftTree.chain(torch.zeros(len(rows), nodes, dtype=torch.int64)))


def prefix_slots(plan: KVPlan, group: GroupId) -> torch.Tensor:
    """Slots of the only request's prefix in one group, by position; in SWA from the first page of the window on."""
    table = plan.prefix.table(group)
    return table.slots()[0, : int(plan.committed_len[0] - table.begin[0])]


# the protocol


def test_restored_after_an_exception():
    """The worker has the view again that it had."""
    table, worker = make(), Worker()
    row, worker.view = opened(table, 5), table.view
    with pytest.raises(ZeroDivisionError), table.lend(worker, [0]) as view:
        raise ZeroDivisionError
    assert worker.view is table.view
    assert not table.allocator.frozen
    with pytest.raises(FrozenKVError, match="layer 0 read through a view whose frozen_kv block has ended"):
        view.layer(0)
    with pytest.raises(FrozenKVError, match="recurrent layers read through a view whose frozen_kv block has ended"):
        _ = view.recurrent
    table.ensure_slots(row, 10)
    table.check()


def test_each_worker_may_hold_a_view_and_leave_it_in_any_order():
    table, first, second = make(), Worker(), OtherWorker()
    one, two = table.lend(first, [0]), table.lend(second, [1])
    with one as lent:
        two.__enter__()
        assert first.view is lent and second.view is not lent
        with pytest.raises(FrozenKVError, match="alloc while the KV cache is frozen for Worker, OtherWorker:"):
            table.allocator.alloc(1)
    assert (first.view, table.allocator.frozen) == (None, True)
    assert second.view.layer(0).group == PRIMARY
    with table.lend(first, [0]):  # has none now
        pass
    with (
        pytest.raises(FrozenKVError, match="Worker already holds a frozen view; views do not nest on one worker"),
        table.lend(second, [0]),
    ):
        pytest.fail("entered")
    assert second.view.layer(0).group == PRIMARY
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
    with pytest.raises(KVStateError, match=message), table.lend(worker, layer_map):
        pytest.fail("entered")
    assert worker.view is None
    assert not table.allocator.frozen


def test_keys_tell_views_apart():
    table, other = make(), make()
    with table.lend(Worker(), [0, 1]) as lent, table.lend(Worker(), [1, 0]) as swapped:
        with other.lend(Worker(), [0, 1]) as elsewhere:
            own = [table.view, other.view]
            views = [*own, KVView(table.allocator, table.store, [0, 1], writable=True), lent, swapped, elsewhere]
            assert len({view.key for view in views}) == len(views)
        with table.lend(Worker(), [0, 1]) as again:
            assert again.key == lent.key  # the same pools through the same map: a captured graph may be replayed


# what a frozen cache refuses


def forbidden(table: KVRig, row: int) -> dict[str, Callable[[], object]]:
    a, slots, rows = table.allocator, owned(table, row), ints(row)
    page, k = ints(int(slots[0]) // a.page_size), torch.full((len(slots), 1, 1), 99.0)
    cache = table.allocator.cache
    return {
        "alloc": lambda: a.alloc(1),
        "alloc of nothing": lambda: a.alloc(0),
        "free": lambda: a.free(page),
        "allocator evict": lambda: a.evict(SWA, page),
        "share": lambda: a.share(page, ints(0, 0)),
        "cache pages": lambda: a.cache_pages(PRIMARY, page),
        "cache peers": lambda: a.cache_pages(SWA, page),
        "insert": lambda: cache.insert([row], [cache.key(range(12))]),
        "clear the cache": lambda: cache.clear(),
        "move": lambda: table.move(Move(slots, slots)),
        "ensure": lambda: table.ensure_slots(row, int(table.capacity[row]) + 1),
        "commit": lambda: table.commit(rows, ints(1)),
        "commit of a path": lambda: table.commit(rows, ints(2), np.array([[0, 2]])),
        "evict": lambda: table.evict_unseen(rows),
        "close": lambda: table.close_rows(row),
        "write": lambda: table.write(1, table.allocator.located(slots), k, k),
        "sliding write": lambda: table.write(0, table.allocator.located(slots), k, k),
    }


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("name", forbidden(make(), 0))
def test_frozen_refuses_and_changes_nothing(name: str, page_size: int):
    table, worker = make(page_size), Worker()
    cache, ended = PrefixCache(table.table), opened(table, 12)
    cache.insert([ended], [cache.key(range(40, 52))])
    table.close_rows(ended)
    row = opened(table, 12)
    before = kv_contents(table)
    with table.lend(worker, [0, 1]) as view:
        with pytest.raises(FrozenKVError, match="while the KV cache is frozen for Worker"):
            forbidden(table, row)[name]()
        assert worker.view is view
        assert view.layer(1).group == PRIMARY
    assert kv_contents(table) == before and len(cache.match_prefix(cache.key(range(40, 52)))) == 12 // page_size
    table.check()
    forbidden(table, row)[name]()


@pytest.mark.parametrize("layer", [0, 1])
def test_a_lent_view_refuses_to_write(layer: int):
    table, worker = make(), Worker()
    row = opened(table, 5)
    before = kv_contents(table)
    slots = owned(table, row)
    k = torch.full((1, 1, 1), 99.0)
    message = f"write to layer {layer} through a frozen view"
    with table.lend(worker, [0, 1]) as view, pytest.raises(FrozenKVError, match=message):
        table.write(layer, table.allocator.located(slots), k, k, view)
    with pytest.raises(FrozenKVError):  # nor afterwards
        table.write(layer, table.allocator.located(slots), k, k, view)
    assert kv_contents(table) == before


def test_the_targets_own_view_reads_but_does_not_write_while_frozen():
    table = make()
    row = opened(table, 5, first=10.0)
    own = table.view
    slots, k = owned(table, row), torch.full((1, 1, 1), 99.0)
    with table.lend(Worker(), [0, 1]):
        assert own.layer(1).k[slots].item() == 10.0
        with pytest.raises(FrozenKVError, match="KV write to layer 3 while the KV cache is frozen"):
            table.write(3, table.allocator.located(slots), k, k, own)
        assert own.layer(1).k[slots].item() == 10.0
    table.write(1, table.allocator.located(slots), k, k, own)
    assert own.layer(1).k[slots].item() == 99.0


def test_a_frozen_plan_sees_the_committed_prefix_and_writes_nothing():
    table = make()
    row = opened(table, 5, first=10.0)
    plan = chain(table, ints(row))  # rejected drafts in the lookahead
    k = torch.full((LOOKAHEAD, 1, 1), 77.0)
    for layer in (0, 1):
        table.write(layer, plan.write, k, k)
    with table.lend(Worker(), [0, 1]) as view:
        plan = table.frozen(ints(row), position_offset=0, window_shift=2)
        assert (plan.write, plan.tree) == (None, None)
        with pytest.raises(AssertionError, match="a plan that writes nothing"):
            plan.write_slots(SWA)
        assert plan.positions.tolist() == [[5]]
        assert view.layer(1).k[prefix_slots(plan, PRIMARY), 0, 0].tolist() == [10.0, 11.0, 12.0, 13.0, 14.0]
        assert view.layer(0).k[prefix_slots(plan, SWA), 0, 0].tolist() == [10.5, 11.5, 12.5, 13.5, 14.5]


# Regressions: one for each known defect of a neighbouring engine


def test_locations_of_two_groups_are_never_one_tensor():
    """#24395: extend rows were read with full ids where the layer had written SWA ids."""
    table = make()
    row = opened(table, 12)
    table.evict_unseen(ints(row))  # frees SWA slots 1-6, so that the next row's numbers differ between the groups
    other = opened(table, 2, first=50.0)
    for plan in (table.chunk(ints(other), ints(2)), chain(table, ints(other))):
        assert not set(plan.write[PRIMARY].tolist()) & set(plan.write[SWA].tolist())
        assert plan.write[SWA].tolist() == table.allocator.translate(SWA, plan.write[PRIMARY]).tolist()
        assert not set(prefix_slots(plan, PRIMARY).tolist()) & set(prefix_slots(plan, SWA).tolist())
        view = table.view
        assert view.layer(1).k[prefix_slots(plan, PRIMARY), 0, 0].tolist() == [50.0, 51.0]
        assert view.layer(0).k[prefix_slots(plan, SWA), 0, 0].tolist() == [50.5, 51.5]


def test_a_view_keeps_no_tensor():
    """#26966: "which pool, which mapping" was derived once, and stayed after the pool was swapped."""
    table, other = make(), make()
    with table.lend(Worker(), [0, 1]) as view:
        mine = dict(table.store.layers)
        table.store.layers.update(other.store.layers)  # as if the pools had been made again
        for seen in (view, table.view):
            assert seen.layer(0) is other.store.layers[0]
            assert seen.layer(1) is other.store.layers[1]
        table.store.layers.update(mine)
        assert view.layer(1) is mine[1]
    assert not hasattr(view, "__dict__")  # nowhere to keep a tensor


@pytest.mark.parametrize("page_size", [1, 4])
def test_prefix_and_draft_are_both_translated_exactly_once(page_size: int):
    """#24617: of a table made of prefix ++ draft only one part was translated."""
    table = make(page_size)
    old = opened(table, 16)
    table.evict_unseen(ints(old))
    row = opened(table, 6)
    plan = chain(table, ints(row))
    slots = table.slots.host[row]
    once = table.allocator.maps.host[SWA]
    assert plan.write[PRIMARY].tolist() == slots[6:9].tolist()
    assert plan.write[SWA].tolist() == once[slots[6:9]].tolist()
    start = int(plan.prefix.start[SWA][0])
    assert prefix_slots(plan, SWA).tolist() == once[slots[start:6]].tolist()
    assert 0 not in plan.write[SWA].tolist()
    assert (once[once[slots[6:9]]] != once[slots[6:9]]).any()  # a second translation would show


def test_two_forwards_with_the_same_pointers_read_fresh_tables():
    """#26152: a translation memoised by address survived into a replay with new contents at that address."""
    table = make(pages=16)
    first, second = opened(table, 5), opened(table, 5)
    pointers = table.slots.tensor.data_ptr(), table.allocator.maps.tensor[SWA].data_ptr()
    before = chain(table, ints(first))
    held = before.write[PRIMARY].tolist(), before.write[SWA].tolist(), before.prefix.tables[SWA].tolist()
    table.close_rows(second)
    table.close_rows(first)
    opened(table, 2)  # takes the slots that come first now
    again = opened(table, 5)
    after = chain(table, ints(again))
    assert (table.slots.tensor.data_ptr(), table.allocator.maps.tensor[SWA].data_ptr()) == pointers
    assert after.write[PRIMARY].tolist() == table.slots.host[again, 5:8].tolist()
    assert after.write[SWA].tolist() == table.allocator.translate(SWA, after.write[PRIMARY]).tolist()
    assert after.write[PRIMARY].tolist() != held[0]
    assert after.write[SWA].tolist() != held[1]
    # and the earlier plan is what it was when it was made
    assert (before.write[PRIMARY].tolist(), before.write[SWA].tolist(), before.prefix.tables[SWA].tolist()) == held


def test_eviction_is_seen_by_the_next_plan():
    """#26152 again, by eviction: the same row, the same full slots, new SWA slots after them."""
    table = make()
    row = opened(table, 12)
    before = chain(table, ints(row)).prefix
    table.evict_unseen(ints(row))
    table.commit(ints(row), ints(3))
    table.ensure_slots(row, 15 + LOOKAHEAD)  # reuses the evicted SWA slots
    after = chain(table, ints(row))
    assert set(after.write[SWA].tolist()) & set(range(1, 7))
    assert int(after.prefix.start[SWA][0]) > int(before.start[SWA][0])
    assert 0 not in prefix_slots(after, SWA).tolist()


def test_nothing_of_a_forward_is_kept_on_a_pool():
    """#24138: per-forward locations stored on the pool were stale when a second forward began before the first read."""
    table = make()
    rows = opened(table, 3), opened(table, 5)
    kept = kv_contents(table).keys()
    first, second = chain(table, ints(rows[0])), chain(table, ints(rows[1]))
    view = table.view
    for value, plan in ((20.0, second), (10.0, first)):  # made in one order, written in the other
        k = torch.full((LOOKAHEAD, 1, 1), value)
        for layer in (0, 1):
            table.write(layer, plan.write, k, k)
    for value, plan in ((10.0, first), (20.0, second)):
        assert view.layer(1).k[plan.write[PRIMARY]].unique().tolist() == [value]
        assert view.layer(0).k[plan.write[SWA]].unique().tolist() == [value]
    assert kv_contents(table).keys() == kept


def test_plans_are_immutable():
    table = make()
    row = opened(table, 5)
    plan = chain(table, ints(row))
    for name in ("write", "prefix", "positions"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(plan, name, None)
    with pytest.raises(AttributeError):
        plan.prefix.tables = plan.write
    for values in (plan.write, plan.prefix.tables):
        with pytest.raises(TypeError):
            values[PRIMARY] = plan.committed_len
    with pytest.raises((TypeError, AttributeError)):  # slots: no room for anything else
        object.__setattr__(plan, "swa_loc", None)


@pytest.mark.parametrize("page_size", [1, 4])
def test_padded_rows_write_to_the_null_slot_in_every_group(page_size: int):
    table = make(page_size)
    row = opened(table, 3)
    prefill = table.chunk(ints(row, table.padding_row), ints(3, 1))
    assert prefill.write[PRIMARY].tolist() == [*table.slots.host[row, 3:6].tolist(), 0, 0, 0]
    assert prefill.write[SWA].tolist()[3:] == [0, 0, 0]
    assert 0 not in prefill.write[SWA].tolist()[:3]
    verify = chain(table, ints(table.padding_row, row))
    assert verify.write[PRIMARY].tolist()[:3] == verify.write[SWA].tolist()[:3] == [0, 0, 0]
    assert 0 not in verify.write[PRIMARY].tolist()[3:] + verify.write[SWA].tolist()[3:]
    before = kv_contents(table)
    k = torch.full((LOOKAHEAD, 1, 1), 99.0)
    nowhere = verify.write.map(lambda slots: GroupLoc(slots[:3]))
    for layer in (0, 1):
        table.write(layer, nowhere, k, k)
    for kept in table.store.layers.values():
        kept.k[0] = kept.v[0] = 0.0  # only there
    assert kv_contents(table) == before


@pytest.mark.parametrize("page_size", [1, 2])
def test_padding_after_a_shorter_chunk_writes_to_the_null_slot_in_every_group(page_size: int):
    """A row owns slots for its lookahead, and the padding after its chunk writes to none of them."""
    table = make(page_size)
    longer, shorter = opened(table, 2), opened(table, 2)
    plan = table.chunk(ints(longer, shorter), ints(3, 1))
    slots = table.slots.host
    assert plan.write[PRIMARY].tolist() == [*slots[longer, 2:5].tolist(), slots[shorter, 2], 0, 0]
    assert slots[shorter, 3:5].all()
    assert [slot != 0 for slot in plan.write[SWA].tolist()] == [True, True, True, True, False, False]
