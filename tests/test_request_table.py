"""Rows of slots: what commit, eviction and closing do to the K/V at each position, in every group."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from kv_rig import FROZEN_EXTRA_KEYS, PRIMARY, SWA, KVLayout, KVRig, Move, PrimaryLoc, ints, layer_spec, make_allocator

from specdec.errors import KVStateError
from specdec.kvcache.table import RequestTable

from snapshots import kv_contents

PAGE_SIZES = pytest.mark.parametrize("page_size", [1, 3, 4])
SLIDING_LAYER, FULL_LAYER = 0, 1


LAYOUT = KVLayout((layer_spec(SLIDING_LAYER, 6), layer_spec(FULL_LAYER, None)))


def make(page_size: int = 1, **sizes: int) -> KVRig:
    sizes = {"pages": 64, "max_requests": 3, "max_len": 40, "lookahead": 5, **sizes}
    return KVRig(LAYOUT, page_size=page_size, **sizes)


def put(table: KVRig, row: int, start: int, values: list[float]) -> None:
    """Write `values` as the K/V (k = value, v = -value) of the slots at positions start..., in every layer."""
    slots = table.allocator.located(
        PrimaryLoc(torch.from_numpy(table.slots.host[row, start : start + len(values)].copy()))
    )
    k = torch.tensor(values).view(-1, 1, 1)
    for layer in (SLIDING_LAYER, FULL_LAYER):
        table.write(layer, slots, k + 0.5 * layer, -k - 0.5 * layer)


def held(table: KVRig, row: int, start: int, end: int, layer: int) -> list[float]:
    """The values at positions start..end-1 as this layer reads them."""
    slots = PrimaryLoc(torch.from_numpy(table.slots.host[row, start:end].copy()))
    kept = table.store.layers[layer]
    where = table.allocator.translate(kept.group, slots)
    assert (where > 0).all()
    torch.testing.assert_close(kept.v[where], -kept.k[where])
    return (kept.k[where, 0, 0] - 0.5 * layer).tolist()


def opened(table: KVRig, prompt: list[float]) -> int:
    """A row whose committed positions hold `prompt`, with the lookahead after it."""
    row = table.open_row()
    table.ensure_slots(row, len(prompt) + table.lookahead)
    put(table, row, 0, prompt)
    table.commit(ints(row), ints(len(prompt)))
    return row


# opening, growing, closing


def test_slots_ahead_are_allocated_only_if_they_fit_next_to_the_requested_ones():
    """The window has 202 free slots of 220, which is ample room, but not for the 192 asked for and 48 more ahead."""
    for wanted, got in ((70, 70), (40, 56)):
        table = make(pages=300, window_pages=220, max_len=100)
        rows = np.array([opened(table, [1.0]) for _ in range(3)])
        table.ensure_slots(rows, np.full(3, wanted), ahead=True)
        assert table.capacity[rows].tolist() == [got] * 3


def test_rows_are_taken_in_order_and_reused():
    table = make(max_requests=2)
    assert (table.open_row(), table.open_row()) == (0, 1)
    with pytest.raises(KVStateError, match="all 2 rows of the request table are in use"):
        table.open_row()
    table.close_rows(0)
    assert table.active_rows.tolist() == [1]
    assert table.open_row() == 0
    assert table.padding_row == 2
    table.check()


def test_of_adopted_tokens_that_all_run_again_none_is_committed():
    """The last two tokens run again, and the prefix has one."""
    device, sizes = torch.device("cpu"), {"max_requests": 2, "max_len": 4, "lookahead": 2}
    table = RequestTable(make_allocator(8, [6], 8, page_size=1, device=device), extra_keys=2, reread=2, **sizes)
    first, row = table.open_row(), table.open_row()
    table.ensure_slots(first, 2)
    table.adopt_pages(row, table.pages(first, 1))
    assert (table.committed_len.host[row], table.shared_len.host[row], table.capacity[row]) == (0, 1, 1)


@PAGE_SIZES
def test_closing_a_row_frees_everything_even_after_eviction(page_size: int):
    table = make(page_size)
    row = opened(table, [float(i) for i in range(30)])
    table.evict_unseen(ints(row))
    assert table.evicted_len[SWA, row] > 0
    table.close_rows(row)
    assert table.allocator.primary.held_pages == table.allocator.pools[SWA].held_pages == 0
    assert not table.slots.host.any()
    table.check()
    with pytest.raises(KVStateError, match="row 0 is not open"):
        table.close_rows(row)


# commit


def test_commit_permutes_the_row_at_page_size_one():
    """Prompt in slots 1, 2; nodes 0-4 in slots 3-7; path 0, 2, 4: the rejected nodes keep their order after it."""
    table = make(page_size=1)
    row = opened(table, [100.0, 101.0])
    assert table.slots.host[row, :8].tolist() == [1, 2, 3, 4, 5, 6, 7, 0]
    table.commit(ints(row), ints(3), np.array([[0, 2, 4, 0, 0]]))
    assert table.slots.host[row, :8].tolist() == [1, 2, 3, 5, 7, 4, 6, 0]
    assert table.committed_len.host[row] == 5
    assert table.capacity[row] == 7
    table.check()


def test_commit_moves_rows_at_larger_pages():
    """For the same tree the slots stay where they are, and the K/V of nodes 2 and 4 come to positions 3 and 4."""
    table = make(page_size=4)
    row = opened(table, [100.0, 101.0])
    assert table.slots.host[row, :9].tolist() == [4, 5, 6, 7, 8, 9, 10, 11, 0]
    put(table, row, 2, [0.0, 1.0, 2.0, 3.0, 4.0])
    table.commit(ints(row), ints(3), np.array([[0, 2, 4, 0, 0]]))
    assert table.slots.host[row, :9].tolist() == [4, 5, 6, 7, 8, 9, 10, 11, 0]
    for layer in (SLIDING_LAYER, FULL_LAYER):
        assert held(table, row, 0, 5, layer) == [100.0, 101.0, 0.0, 2.0, 4.0]
    table.check()


@PAGE_SIZES
def test_chains_are_committed_where_they_lie(page_size: int):
    """On the device, no path and the path of a chain come to the same; nothing moves, and padding stays empty."""
    after = []
    for named in (True, False):
        rig = make(page_size)
        rows = [opened(rig, [100.0]), opened(rig, [100.0, 101.0])]
        rig.flush()
        table = rig.table
        seats = table.rows(ints(rows[1], table.padding_row, rows[0], table.padding_row))
        length = torch.tensor([3, 2, 5, 1])
        path = torch.arange(5).where(torch.arange(5) < length[:, None], 0)
        move = table.commit_on_device(seats, length, path if named else None)
        assert named or move is None
        after.append((table.slots.tensor.tolist(), table.committed_len.tensor.tolist()))
    assert after[0] == after[1]
    assert after[1][1] == [1 + 5, 2 + 3, 0, 0]


@PAGE_SIZES
def test_commit_past_the_slots_a_row_owns_raises(page_size: int):
    table = make(page_size)
    first, second = opened(table, [100.0]), opened(table, [200.0])
    spare = int(table.capacity[second] - 1)
    before = kv_contents(table)
    with pytest.raises(
        KVStateError, match=rf"rows \[0, 1\]: commit of \[1, {spare + 1}\] goes past the slots they own"
    ):
        table.commit(ints(first, second), ints(1, spare + 1))
    assert kv_contents(table) == before
    table.commit(ints(first, second), ints(1, spare))
    table.check()


@pytest.mark.parametrize(
    ("page_size", "node"),
    [(1, 5), (4, 8)],
)
def test_a_path_past_the_slots_a_row_owns_raises(page_size: int, node: int):
    table = make(page_size, lookahead=5)
    row = opened(table, [100.0] * page_size)
    assert table.capacity[row] == page_size + node
    before = kv_contents(table)
    with pytest.raises(KVStateError):
        table.commit(ints(row), ints(2), np.array([[0, node]]))
    assert kv_contents(table) == before


# moving


def test_move_reads_all_before_it_writes_in_every_group_of_every_store():
    rig = make(pages=6, max_len=3, lookahead=0)
    another = rig.add_store(KVLayout.from_windows([None, None], 2, 3), torch.float64)  # all of it in the primary group
    shift, row = rig.open_row(), rig.open_row()
    rig.ensure_slots(shift, 2)
    rig.allocator.evict(SWA, ints(1, 2))
    rig.ensure_slots(row, 3)  # full slots 3, 4, 5 with SWA slots 1, 2, 3: the groups disagree
    assert rig.allocator.translate(SWA, PrimaryLoc(torch.tensor([3, 4, 5]))).tolist() == [1, 2, 3]
    stored = [(kept, 3 if kept.group == PRIMARY else 1) for s in (rig.store, another) for kept in s.layers.values()]
    assert len(stored) == 4
    for number, (kept, first) in enumerate(stored):
        kept.k[first : first + 3] = torch.tensor([10.0, 20.0, 30.0])[:, None, None].to(kept.k.dtype) + number
        kept.v[first : first + 3] = -kept.k[first : first + 3]
    rig.move(Move(PrimaryLoc(torch.tensor([4, 5, 3])), PrimaryLoc(torch.tensor([3, 4, 5]))))  # a rotation
    for number, (kept, first) in enumerate(stored):
        assert kept.k[first : first + 3, 0, 0].tolist() == [20.0 + number, 30.0 + number, 10.0 + number]
        torch.testing.assert_close(kept.v, -kept.k)


# eviction


@PAGE_SIZES
def test_evict_keeps_the_window_and_one_page_of_slack(page_size: int):
    table = make(page_size)
    assert table.retain[SWA] == 6 - 1 + FROZEN_EXTRA_KEYS == 7
    row = opened(table, [float(i) for i in range(30)])
    table.evict_unseen(ints(row))
    evicted = int(table.evicted_len[SWA, row])
    assert evicted == {1: 22, 3: 18, 4: 16}[page_size]  # 30 - 7 = 23, rounded down to a page, less a page
    slots = PrimaryLoc(torch.from_numpy(table.slots.host[row, :30].copy()))
    assert (table.allocator.translate(SWA, slots) == 0).tolist() == [p < evicted for p in range(30)]
    assert held(table, row, evicted, 30, SLIDING_LAYER) == [float(i) for i in range(evicted, 30)]
    assert held(table, row, 0, 30, FULL_LAYER) == [float(i) for i in range(30)]
    before = kv_contents(table)
    table.evict_unseen(ints(row))
    assert kv_contents(table) == before
    table.check()


# `check` itself


def put_slots(row: int, cells: object, value: object) -> Callable[[KVRig], None]:
    return lambda table: table.slots.__setitem__((row, cells), value)


CORRUPTED: dict[str, tuple[Callable[[KVRig], object], str]] = {
    "one page in two rows": (put_slots(1, slice(4), range(28, 32)), "full: .* own pages .*, with .* claims"),
    "slots past the capacity": (put_slots(0, 28, 9), "slots past its capacity"),
    "longer than capacity": (
        lambda table: table.committed_len.__setitem__(0, 29),
        r"evicted=array\(\[0, 8\]\) length=29 capacity=28",
    ),
    "page 0 in a row": (put_slots(0, slice(4), 0), "not whole pages"),
    "closed but owning": (lambda table: table._active.__setitem__(1, False), "slots past its capacity|closed but owns"),
    "leaked page": (lambda table: table.allocator.alloc(1), r"full: \[0\] rows own pages \[10\]"),
    "leaked peer": (lambda table: table.allocator.pools[SWA].alloc(1), "window 6: a page is held but not mapped"),
    "page free without its peer": (
        lambda table: table.allocator.primary.free(ints(7)),
        "window 6: a free page is mapped",
    ),
    "peer of two pages": (
        lambda table: table.allocator.maps.__setitem__((SWA, slice(24, 28)), table.allocator.maps.host[SWA, 20:24]),
        "window 6: a page has two owners",
    ),
    "half a peer": (lambda table: table.allocator.maps.__setitem__((SWA, 25), 0), "the peer of a page is not one page"),
    "freed page": (lambda table: table.allocator.free(table.pages(0, 7)[6:]), "unmapped|full: .* claims"),
    "evicted too far": (
        lambda table: table.evicted_len.__setitem__((SWA, 0), 14),
        r"evicted \[ 0 14\], but the windows start at \[ 0 13\]",
    ),
    "evicted yet mapped": (
        lambda table: table.evicted_len.__setitem__((SWA, 0), 12),
        r"window 6: \[0\] rows own pages \[3\], with \[1\] claims",
    ),
    "in the window but unmapped": (
        lambda table: table.allocator.evict(SWA, table.pages(0, 5)[4:]),
        "a token in the window of group 1 is unmapped",
    ),
    "padding row with slots": (put_slots(3, 0, 4), "row=3: slots past its capacity"),
    "disordered": (put_slots(0, ints(1, 2), ints(6, 5)), "not whole pages in order"),
    "disordered across pages": (put_slots(0, ints(16, 20), ints(24, 20)), "not whole pages in order"),
    "one slot four times": (put_slots(0, slice(16, 20), 20), "not whole pages in order"),
}


@pytest.mark.parametrize(("corrupt", "message"), CORRUPTED.values(), ids=CORRUPTED)
def test_check_finds(corrupt: Callable[[KVRig], object], message: str):
    table = make(page_size=4, lookahead=5)
    opened(table, [float(i) for i in range(20)])  # slots 4 to 31, evicted up to 8
    opened(table, [0.0, 1.0])
    table.evict_unseen(ints(0, 1))
    assert table.evicted_len[SWA, :2].tolist() == [8, 0] and table.slots.host[0, :28].tolist() == [*range(4, 32)]
    table.check()
    corrupt(table)
    with pytest.raises(AssertionError, match=message):
        table.check()
