"""One allocator over several pools: all or none, freeing once, eviction from one of them, and `check` itself."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from kv_rig import PRIMARY, SWA, HybridAllocator, PrimaryLoc, make_allocator

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


@pytest.mark.parametrize(("full", "swa"), [(4, 2), (2, 4)], ids=["swa-short", "full-short"])
def test_alloc_takes_from_both_or_neither(full: int, swa: int):
    a = make(full=full, swa=swa)
    assert a.available_pages == 2
    before = contents(a)
    with pytest.raises(
        OutOfSlotsError,
        match=rf"3 pages needed; free: {full} of {full} in the full pool, {swa} of {swa} in the window 4 pool",
    ):
        a.alloc(3)
    assert contents(a) == before
    assert len(a.alloc(2)) == 4
    assert a.available_pages == 0
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


def test_without_sliding_layers_there_is_one_pool():
    a = make_allocator(3, page_size=2)
    assert a.windowed == ()
    assert a.num_slots(PRIMARY) == 8  # page 0 and three more
    assert a.available_pages == 3
    slots = a.alloc(3)
    assert not a.maps.host.any()
    a.check()
    with pytest.raises(OutOfSlotsError) as caught:
        a.alloc(1)
    assert "window" not in str(caught.value)
    a.free(slots)
    with pytest.raises(DoubleFreeError):
        a.free(slots)
    a.check()


def test_nothing_is_allocated_freed_or_evicted_for_nothing():
    a = make()
    before = contents(a)
    assert a.alloc(0).shape == (0,)
    a.free(loc())
    a.evict(SWA, loc())
    assert contents(a) == before


def test_translate_keeps_the_shape_and_owns_its_result():
    a = make(page_size=1, full=4, swa=4)
    slots = a.alloc(3)
    a.evict(SWA, slots[:1])
    translated = a.translate(SWA, PrimaryLoc(torch.tensor([[0, 1], [2, 3]])))
    assert translated.tolist() == [[0, 0], [2, 3]]
    a.free(slots)
    assert translated.tolist() == [[0, 0], [2, 3]]  # of the moment it was asked
    assert a.translate(SWA, PrimaryLoc(torch.tensor([[0, 1], [2, 3]]))).tolist() == [[0, 0], [0, 0]]


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


def test_free_after_evict_gives_the_swa_page_back_once():
    a = make(full=4, swa=2)
    old = a.alloc(1)
    a.evict(SWA, old)
    new = a.alloc(1)  # takes over the SWA page of `old`
    assert a.translate(SWA, new).tolist() == [2, 3]
    a.free(old)
    assert a.translate(SWA, new).tolist() == [2, 3]
    assert (a.primary.held_pages, a.pools[SWA].held_pages) == (1, 1)
    a.check()


# `check` finds every kind of corruption. Seeded in: pages 1, 2 held (slots 2-5), page 1 evicted, pages 3, 4 free


def put(name: str, index: object, value: int) -> Callable[[HybridAllocator], None]:
    def corrupt(a: HybridAllocator) -> None:
        array = {"map": a.maps.host[SWA], "full": a.primary._held, "swa": a.pools[SWA]._held}[name]
        array[index] = value

    return corrupt


def lose_an_swa_page(a: HybridAllocator) -> None:
    a._release_peers(SWA, np.array([2]))
    a.pools[SWA].alloc(1)


def strand_the_full_peer(a: HybridAllocator) -> None:
    a.primary.free(np.array([2]))


def share_an_swa_page(a: HybridAllocator) -> None:
    a.maps[SWA, np.array([2, 3])] = a.maps.host[SWA][4:6].copy()


def point_at_a_free_swa_page(a: HybridAllocator) -> None:
    a.maps[SWA, np.array([4, 5])] = np.array([6, 7])


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (put("map", slice(0, 2), 2), "page 0 is mapped"),
        (put("map", 5, 3), "window 4: the peer of a page is not one page"),
        (put("map", 5, 0), "window 4: the peer of a page is not one page"),
        (put("map", 3, 5), "a page is mapped in part"),
        (share_an_swa_page, "window 4: a page has two owners"),
        (point_at_a_free_swa_page, "window 4: a mapped page is free"),
        (lose_an_swa_page, "window 4: a page is held but not mapped"),
        (strand_the_full_peer, "window 4: a free page is mapped"),
        (put("full", 0, True), "full: page 0 is held"),
        (put("swa", 0, True), "window 4: page 0 is held"),
        (put("full", 3, True), "full: a free page is held"),
        (put("swa", 2, False), r"window 4: held 0 \+ evictable 0 \+ free 2 != 3"),
    ],
)
def test_check_finds(corrupt: Callable[[HybridAllocator], None], message: str):
    a = make(full=4, swa=3, page_size=2)
    a.alloc(2)
    a.evict(SWA, loc(2, 3))
    a.check()
    corrupt(a)
    with pytest.raises(AssertionError, match=message):
        a.check()


@pytest.mark.parametrize("page_size", [1, 4])
def test_conservation_over_a_random_run(page_size: int):
    rng = np.random.default_rng(page_size)
    a = make(full=9, swa=6, page_size=page_size)
    held: dict[int, bool] = {}  # full page -> is it mapped

    def slots_of(pages: list[int]) -> PrimaryLoc:
        slots = (np.array(pages, dtype=np.int64)[:, None] * page_size + np.arange(page_size)).reshape(-1)
        return PrimaryLoc(torch.from_numpy(rng.permutation(slots)))

    for _ in range(600):
        choice = rng.integers(0, 3)
        if choice == 0:
            count = int(rng.integers(0, 4))
            room = min(9 - len(held), 6 - sum(held.values()))
            assert a.available_pages == room
            if count > room:
                with pytest.raises(OutOfSlotsError):
                    a.alloc(count)
            else:
                fresh = (a.alloc(count).numpy()[::page_size] // page_size).tolist()
                assert not set(fresh) & set(held)
                held.update(dict.fromkeys(fresh, True))
        elif choice == 1:
            some = [page for page in held if rng.random() < 0.4]
            a.free(slots_of(some))
            held = {page: mapped for page, mapped in held.items() if page not in some}
        else:
            some = [page for page, mapped in held.items() if mapped and rng.random() < 0.4]
            a.evict(SWA, slots_of(some))
            held.update(dict.fromkeys(some, False))
        a.check()
        heads = a.maps.host[SWA][::page_size]
        assert np.flatnonzero(heads).tolist() == sorted(page for page in held if held[page])
