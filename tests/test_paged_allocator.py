"""Pages of one pool, without slots or requests: literal cases, refusals that change nothing, and a random run."""

import numpy as np
import pytest

from specdec.errors import DoubleFreeError, OutOfSlotsError
from specdec.kvcache.page_pool import PagePool

from snapshots import contents


def pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def test_pages_start_at_one_and_come_in_order():
    pool = PagePool("full", 4)
    taken = pool.alloc(2)
    assert taken.tolist() == [1, 2]
    taken[:] = 9  # an array of the caller's own
    assert pool.alloc(2).tolist() == [3, 4]
    assert (pool.free_pages, pool.held_pages) == (0, 4)
    pool.check()


def test_the_pages_freed_last_are_reused_first():
    pool = PagePool("full", 4)
    pool.alloc(4)
    pool.free(pages(2, 3))
    assert (pool.free_pages, pool.held_pages) == (2, 2)
    assert pool.is_held(pages(0, 1, 2, 3, 4)).tolist() == [False, True, False, False, True]
    assert pool.alloc(2).tolist() == [2, 3]
    pool.check()


def test_alloc_of_none_and_free_of_none_change_nothing():
    pool = PagePool("full", 2)
    before = contents(pool)
    assert pool.alloc(0).tolist() == []
    pool.free(pages())
    assert contents(pool) == before


@pytest.mark.parametrize(("capacity", "taken", "wanted"), [(0, 0, 1), (4, 2, 3)], ids=["empty", "too many"])
def test_more_pages_than_are_free_takes_none(capacity: int, taken: int, wanted: int):
    pool = PagePool("swa", capacity)
    pool.alloc(taken)
    before, free = contents(pool), capacity - taken
    with pytest.raises(OutOfSlotsError, match=f"swa pool: {wanted} pages needed, {free} of {capacity} free"):
        pool.alloc(wanted)
    assert contents(pool) == before
    assert pool.alloc(free).tolist() == list(range(taken + 1, capacity + 1))
    pool.check()


@pytest.mark.parametrize(
    "wrong",
    [(3,), (1, 3), (1, 1), (0,), (1, 0), (5,), (-1,), (-4,)],
    ids=["free", "one-free", "twice", "sink", "one-sink", "beyond", "negative", "negative-held"],
)
def test_wrong_pages_are_refused_and_none_is_freed(wrong: tuple[int, ...]):
    pool = PagePool("full", 4)
    pool.alloc(2)
    before = contents(pool)
    with pytest.raises(DoubleFreeError, match=r"full pool: pages .* not held, or named twice"):
        pool.free(pages(*wrong))
    assert contents(pool) == before


def test_freeing_twice_raises():
    pool = PagePool("full", 4)
    taken = pool.alloc(2)
    pool.free(taken)
    with pytest.raises(DoubleFreeError, match=r"pages \[1, 2\] are not held"):
        pool.free(taken)
    pool.check()


def corrupt(pool: PagePool, how: str) -> None:
    match how:
        case "free twice":
            pool._stack[0] = pool._stack[1]
        case "free and held":
            pool._held[pool._stack[0]] = True
        case "page 0 held":
            pool._held[0] = True
        case "page lost":
            pool.free_pages -= 1
        case _:
            raise AssertionError(how)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("free twice", "a page is free twice"),
        ("free and held", "a free page is held"),
        ("page 0 held", "page 0 is held"),
        ("page lost", r"held 2 \+ evictable 0 \+ free 1 != 4"),
    ],
)
def test_check_finds(how: str, message: str):
    pool = PagePool("full", 4)
    pool.alloc(2)
    pool.check()
    corrupt(pool, how)
    with pytest.raises(AssertionError, match=message):
        pool.check()


def test_random_run_agrees_with_a_set():
    rng = np.random.default_rng(0)
    pool, held = PagePool("full", 13), set()
    for _ in range(2000):
        if rng.random() < 0.5:
            count = int(rng.integers(0, 6))
            if count > 13 - len(held):
                with pytest.raises(OutOfSlotsError):
                    pool.alloc(count)
            else:
                fresh = set(pool.alloc(count).tolist())
                assert len(fresh) == count
                assert not fresh & held
                held |= fresh
        else:
            given = rng.permutation(sorted(held))[: rng.integers(0, 6)].astype(np.int64)
            pool.free(given)
            held -= set(given.tolist())
        pool.check()
        assert set(np.flatnonzero(pool._held).tolist()) == held
