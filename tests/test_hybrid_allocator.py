"""One allocator over several pools: freeing once, and eviction from one of them.

Conservation over random histories is shown by `test_kv_state_machine.py`, all or none by `test_cache_groups.py`, and
`check` itself by `test_request_table.py`.
"""

import pytest
import torch
from kv_rig import SWA, HybridAllocator, PrimaryLoc, make_allocator

from specdec.errors import DoubleFreeError, OutOfSlotsError

from snapshots import contents


def make(full: int = 4, swa: int = 3, page_size: int = 2) -> HybridAllocator:
    return make_allocator(full, [4], swa, page_size=page_size)


def loc(*slots: int) -> PrimaryLoc:
    return PrimaryLoc(torch.tensor(slots, dtype=torch.int64))


def mapping(allocator: HybridAllocator) -> list[int]:
    return allocator.translate(SWA, PrimaryLoc(torch.arange(len(allocator.maps.host[SWA])))).tolist()


def test_worked_example():
    """Pages of two slots; page 0 of each pool is never given out."""
    a = make(full=4, swa=3, page_size=2)
    assert a.alloc(2).tolist() == [2, 3, 4, 5]
    assert mapping(a) == [0, 0, 2, 3, 4, 5, 0, 0, 0, 0]
    a.evict(SWA, loc(2, 3))
    assert mapping(a) == [0, 0, 0, 0, 4, 5, 0, 0, 0, 0]
    assert (a.primary.held_pages, a.pools[SWA].held_pages) == (2, 1)
    assert a.alloc(1).tolist() == [6, 7]  # a full page never used before, the SWA page just evicted
    assert mapping(a) == [0, 0, 0, 0, 4, 5, 2, 3, 0, 0]
    a.check()
    a.free(loc(2, 3, 4, 5))
    assert mapping(a) == [0, 0, 0, 0, 0, 0, 2, 3, 0, 0]
    assert (a.primary.held_pages, a.pools[SWA].held_pages) == (1, 1)
    a.free(loc(6, 7))
    assert (a.primary.free_pages, a.pools[SWA].free_pages) == (4, 3)
    a.check()


def test_eviction_makes_room_in_swa_only():
    a = make(full=4, swa=2)
    first = a.alloc(2)
    with pytest.raises(OutOfSlotsError):
        a.alloc(1)
    a.evict(SWA, first)
    assert a.available_pages == 2
    a.alloc(2)
    with pytest.raises(OutOfSlotsError, match="0 of 4 in the full pool"):
        a.alloc(1)
    a.check()


def test_nothing_is_allocated_freed_or_evicted_for_nothing():
    a = make()
    before = contents(a)
    assert a.alloc(0).shape == (0,)
    a.free(loc())
    a.evict(SWA, loc())
    assert contents(a) == before


def test_slots_may_come_in_any_order():
    a = make()
    a.alloc(2)
    a.evict(SWA, loc(5, 4))
    a.free(loc(5, 2, 4, 3))
    assert (a.primary.free_pages, a.pools[SWA].free_pages) == (4, 3)
    a.check()


# every refusal below is of an allocator with 4 pages of two slots that holds pages 1, 3, 4, of which page 1 is evicted


REFUSED_BY_FREE = {
    "free": (4, 5),
    "one-free": (2, 3, 4, 5),
    "sink": (0, 1),
    "named-twice": (2, 3, 2, 3),
    "half-a-page": (2,),
    "halves-of-two-pages": (3, 4),
    "one-slot-twice": (2, 2),
    "page-and-a-half": (2, 3, 6),
    "negative": (-2, -1),
    "beyond-the-pool": (10, 11),
}
REFUSED_BY_EVICT = {**REFUSED_BY_FREE, "evicted": (2, 3), "one-evicted": (2, 3, 6, 7), "mapped-twice": (6, 7, 6, 7)}


def refusals():
    for name, cases in (("free", REFUSED_BY_FREE), ("evict", REFUSED_BY_EVICT)):
        for case, slots in cases.items():
            yield pytest.param(name, slots, id=f"{name}-{case}")


@pytest.mark.parametrize(("operation", "slots"), list(refusals()))
def test_wrong_slots_are_refused_and_nothing_changes(operation: str, slots: tuple[int, ...]):
    a = make(full=4, swa=4, page_size=2)
    a.alloc(4)
    a.free(loc(4, 5))
    a.evict(SWA, loc(2, 3))
    before = contents(a)
    with pytest.raises(DoubleFreeError):
        getattr(a, operation)(*([SWA] if operation == "evict" else []), loc(*slots))
    assert contents(a) == before
    a.check()


def test_freeing_twice_raises():
    """Evicting, too."""
    a = make()
    slots = a.alloc(1)
    a.evict(SWA, slots)
    with pytest.raises(DoubleFreeError, match=r"window 4 pool: pages \[1\] are not all mapped"):
        a.evict(SWA, slots)
    a.free(slots)
    with pytest.raises(DoubleFreeError, match=r"full pool: pages \[1\] are not held"):
        a.free(slots)
    a.check()
