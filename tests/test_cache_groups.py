"""Pools of one allocator, and groups of layers in one cache: claims, refusals and matches by group.

Conservation, and that K/V of several groups are those of their texts, is shown over random histories by
`test_kv_state_machine.py`; slots of one group used in another by `test_sanitize.py`; `check` itself by
`test_request_table.py`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_rig import PRIMARY, SWA, GroupId, HybridAllocator, PrefixRig, PrimaryLoc, ints, layer_spec, make_allocator

from specdec.errors import DoubleFreeError, OutOfSlotsError
from specdec.kvcache.layout import KEEP_ALL, KVLayout, Retention, cache_groups
from specdec.kvcache.table import RequestTable
from specdec.runtime.sizing import DraftNeeds

from marks import examples
from snapshots import contents


def make(full: int = 4, swa: int = 3, page_size: int = 2) -> HybridAllocator:
    return make_allocator(full, [4], swa, page_size=page_size)


def mapping(allocator: HybridAllocator) -> list[int]:
    return allocator.translate(SWA, PrimaryLoc(torch.arange(len(allocator.maps.host[SWA])))).tolist()


def test_worked_example():
    """Pages of two slots; page 0 of each pool is never given out."""
    a = make(full=4, swa=3, page_size=2)
    assert a.alloc(2).tolist() == [2, 3, 4, 5]
    assert mapping(a) == [0, 0, 2, 3, 4, 5, 0, 0, 0, 0]
    a.evict(SWA, ints(1))
    assert mapping(a) == [0, 0, 0, 0, 4, 5, 0, 0, 0, 0]
    assert (a.primary.held_pages, a.pools[SWA].held_pages) == (2, 1)
    assert a.alloc(1).tolist() == [6, 7]  # a full page never used before, the SWA page just evicted
    assert mapping(a) == [0, 0, 0, 0, 4, 5, 2, 3, 0, 0]
    a.check()
    a.free(ints(1, 2))
    assert mapping(a) == [0, 0, 0, 0, 0, 0, 2, 3, 0, 0]
    assert (a.primary.held_pages, a.pools[SWA].held_pages) == (1, 1)
    a.free(ints(3))
    assert (a.primary.free_pages, a.pools[SWA].free_pages) == (4, 3)
    a.check()


def test_eviction_makes_room_in_swa_only():
    a = make(full=4, swa=2)
    a.alloc(2)
    with pytest.raises(OutOfSlotsError):
        a.alloc(1)
    a.evict(SWA, ints(1, 2))
    assert a.available_pages == 2
    a.alloc(2)
    with pytest.raises(OutOfSlotsError, match="0 of 4 in the full pool"):
        a.alloc(1)
    a.check()


def test_nothing_is_allocated_freed_or_evicted_for_nothing():
    a = make()
    before = contents(a)
    assert a.alloc(0).shape == (0,)
    a.free(ints())
    a.evict(SWA, ints())
    assert contents(a) == before


# every refusal below is of an allocator with 4 pages that holds pages 1, 3, 4, of which page 1 is evicted


REFUSED_BY_FREE = {"free": (2,), "one-free": (1, 2), "sink": (0,), "twice": (1, 1), "negative": (-1,), "beyond": (5,)}
REFUSED_BY_EVICT = {**REFUSED_BY_FREE, "evicted": (1,), "one-evicted": (1, 3), "mapped-twice": (3, 3)}


def refusals():
    for name, cases in (("free", REFUSED_BY_FREE), ("evict", REFUSED_BY_EVICT)):
        for case, pages in cases.items():
            yield pytest.param(name, pages, id=f"{name}-{case}")


@pytest.mark.parametrize(("operation", "pages"), list(refusals()))
def test_wrong_pages_are_refused_and_nothing_changes(operation: str, pages: tuple[int, ...]):
    a = make(full=4, swa=4, page_size=2)
    a.alloc(4)
    a.free(ints(2))
    a.evict(SWA, ints(1))
    before = contents(a)
    with pytest.raises(DoubleFreeError):
        getattr(a, operation)(*([SWA] if operation == "evict" else []), ints(*pages))
    assert contents(a) == before
    a.check()


def test_freeing_twice_raises():
    """Evicting, too."""
    a = make()
    a.alloc(1)
    a.evict(SWA, ints(1))
    with pytest.raises(DoubleFreeError, match=r"window 4 pool: pages \[1\] are not all mapped"):
        a.evict(SWA, ints(1))
    a.free(ints(1))
    with pytest.raises(DoubleFreeError, match=r"full pool: pages \[1\] are not held"):
        a.free(ints(1))
    a.check()


def test_the_primary_group_evicts_nothing():
    a = make()
    a.alloc(1)
    with pytest.raises(AssertionError, match="the primary group evicts nothing"):
        a.evict(PRIMARY, ints(1))
    a.check()


# many groups


NARROW, WIDE = GroupId(1), GroupId(2)
NODES = 3


def rig_of(windows: Sequence[int], **sizes: Any) -> PrefixRig:
    """`retain` is the window; the group numbers follow the windows."""
    return PrefixRig(windows=windows, **{"pages": 60, "max_len": 90, **sizes}, lookahead=NODES, extra_keys=1)


def grown(rig: PrefixRig, length: int) -> int:
    """A new row of this many committed tokens."""
    row = rig.table.open_row()
    rig.fill(row, length)
    return row


# the groups of layouts


def test_a_late_reader_needs_more_keys_in_its_own_groups() -> None:
    """Eviction keeps 16 keys more there, and a match needs none of them: who adopts pages has read them."""
    models = [KVLayout((layer_spec(0, 3), layer_spec(1, 5))), KVLayout((layer_spec(0, 5), layer_spec(1, 7)))]
    groups = cache_groups(models)
    assert [*DraftNeeds(models[1], max_lag=16).max_lag_in(groups)][1:] == [0, 16, 16]
    assert [*DraftNeeds(models[1]).max_lag_in(groups)] == [0] * 4
    allocator = make_allocator(80, [5, 7])
    max_lag = DraftNeeds(models[1], max_lag=16).max_lag_in(allocator.groups)
    table = RequestTable(allocator, max_requests=2, max_len=90, lookahead=NODES, extra_keys=2, max_lag=max_lag)
    row = table.open_row()
    table.ensure_slots(row, 60)
    table.commit_chunk_on_host(ints(row), ints(60))
    table.evict_unseen(ints(row), slack_pages=0)
    assert table.evicted_len[:, row].tolist() == [0, 60 - 6 - 16, 60 - 8 - 16]
    other = table.open_row()
    table.adopt_pages(other, table.pages(row, 44))  # the drafter has read no more
    assert table.evicted_len[:, other].tolist() == [0, 44 - 6, 44 - 8]
    table.check()


def test_groups_are_those_of_all_models_the_primary_first() -> None:
    layers = [layer_spec(i, window) for i, window in enumerate((64, None, 4, 64))]
    groups = cache_groups([KVLayout(tuple(layers)), KVLayout((layer_spec(0, 9),))])
    assert [kept.name for kept in groups] == ["full", "window 4", "window 9", "window 64"]
    assert [groups.group_of(kept) for kept in (KEEP_ALL, Retention(4), Retention(64))] == [0, 1, 3]
    assert cache_groups([KVLayout((layer_spec(0, 4),))])[PRIMARY] == KEEP_ALL  # though no layer is
    with pytest.raises(AssertionError, match=r"no group has Retention\(window=5"):
        groups.group_of(Retention(5))


# claims by group


@pytest.mark.parametrize("short", range(4))
def test_alloc_takes_from_all_pools_or_from_none(short: int) -> None:
    pages = [5, 5, 5, 5]
    pages[short] = 2
    a = make_allocator(pages[0], [2, 4, 8], pages[1:], page_size=4)
    before = contents(a)
    names = "full", "window 2", "window 4", "window 8"
    there = ", ".join(f"{count} of {count} in the {name} pool" for count, name in zip(pages, names, strict=True))
    with pytest.raises(OutOfSlotsError, match=f"^3 pages needed; free: {there}$"):
        a.alloc(3)
    assert contents(a) == before and a.available_pages == 2
    a.alloc(2)
    assert [pool.held_pages for pool in a.pools] == [2] * 4 and a.available_pages == 0
    a.check()


def test_a_peer_that_is_released_in_one_group_stays_in_another() -> None:
    rig = rig_of([2, 8], page_size=2)
    a, table, row = rig.allocator, rig.table, grown(rig, 12)
    pages = table.pages(row, 6)
    table.evict_unseen(ints(row), slack_pages=0)
    assert table.evicted_len[:, row].tolist() == [0, 10, 4]
    assert a.is_mapped(NARROW, pages).tolist() == [False] * 5 + [True]
    assert a.is_mapped(WIDE, pages).tolist() == [False] * 2 + [True] * 4
    assert [pool.held_pages for pool in a.pools] == [6, 1, 4]
    with pytest.raises(DoubleFreeError, match=r"window 2 pool: .* some were evicted before"):
        a.evict(NARROW, pages[4:5])
    a.evict(WIDE, pages[2:3])
    a.check()
    with pytest.raises(AssertionError, match="in the window of group 2 is unmapped"):
        table.check()


# the prefix cache by group


def longest(rig: PrefixRig, pages: np.ndarray) -> int:
    """The definition: the tokens of the most of these pages whose last `retain` tokens are mapped in each group."""
    a, size = rig.allocator, rig.allocator.page_size
    mapped = {group: a.is_mapped(group, pages).tolist() for group in a.windowed}

    def fits(count: int, group: GroupId) -> bool:
        seen = range(max(0, count * size - int(rig.table.retain[group])), count * size)
        return all(mapped[group][token // size] for token in seen)

    every = range(len(pages), -1, -1)
    return size * next(count for count in every if all(fits(count, group) for group in a.windowed))


@pytest.mark.parametrize("lost", [NARROW, WIDE])
def test_a_match_needs_the_window_of_every_group(lost: GroupId) -> None:
    """Position 5 of 12 is lost in one group: a match that ends within its window after that is none."""
    rig, text = rig_of([2, 4]), list(range(12))
    row = grown(rig, 12)
    rig.keep(row, text)
    rig.close(row)
    pages = rig.cache.match_prefix(rig.cache.key(text))
    rig.lose_peers(lost, pages[[5]])
    window = 2 if lost == NARROW else 4
    expected = [min(n, 5) if n < 5 + window + 1 else n for n in range(13)]
    assert [rig.found([*text[:n], 0]) for n in range(13)] == expected


@given(
    windows=st.sets(st.integers(1, 64), min_size=1, max_size=4).map(sorted),
    page_size=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=examples(20, 300), deadline=None, derandomize=True, database=None)
def test_random_matches_are_the_longest_by_the_definition(windows, page_size, seed) -> None:
    """Peers are lost here and there in each group; a second row of the same text then revives some of them."""
    draw = np.random.default_rng(seed)
    rig, text = rig_of(windows, page_size=page_size, pages=180), list(range(80))
    first, second = (grown(rig, 80) for _ in range(2))
    rig.keep(first, text)
    rig.close(first)
    pages = rig.cache._pages_of(rig.cache._walk(rig.cache.key(text), b""))
    for group in rig.allocator.windowed:
        rig.lose_peers(group, pages[draw.random(len(pages)) < draw.choice([0.0, 0.1, 0.5])])
    for count in range(len(pages) + 1):
        assert rig.found([*text[: count * page_size], 0]) == longest(rig, pages[:count])
    had = rig.found([*text, 0])
    rig.table.evict_unseen(ints(second), slack_pages=0)
    rig.keep(second, text)
    assert rig.found([*text, 0]) >= had
    rig.close(second)
    pages = rig.cache._pages_of(rig.cache._walk(rig.cache.key(text), b""))
    assert rig.found([*text, 0]) == longest(rig, pages)
    rig.cache.clear()
    assert all(pool.free_pages == 180 for pool in rig.allocator.pools)


def revived(*, evict: bool, lost: GroupId = NARROW) -> tuple[PrefixRig, list[int], np.ndarray, np.ndarray]:
    """The cache has 9 tokens without peers in the group `lost`; a second row of them comes, evicted or not."""
    rig, text = rig_of([2, 5]), list(range(9))
    first, second = grown(rig, 9), grown(rig, 9)
    rig.keep(first, text)
    rig.close(first)
    old, own = rig.cache.match_prefix(rig.cache.key(text)), rig.table.pages(second, 9)
    rig.lose_peers(lost, old)
    if evict:
        rig.table.evict_unseen(ints(second), slack_pages=0)
    rig.keep(second, text)
    rig.close(second)
    return rig, text, old, own


def test_a_page_is_exchanged_with_its_peers_in_all_groups() -> None:
    rig, text, _, own = revived(evict=False)
    assert rig.cache.match_prefix(rig.cache.key(text)).tolist() == own.tolist()
    assert all(rig.allocator.is_cached(group, own).all() for group in rig.allocator.windowed)
    assert [pool.cached_pages for pool in rig.allocator.pools] == [9, 9, 9]
    assert rig.allocator.primary.free_pages == 60 - 9  # the old ones are free


def test_pages_whose_peers_a_row_has_evicted_are_not_exchanged() -> None:
    """The row has given up 7 tokens in the narrow group and 4 in the wide one: the cache keeps its own first 7."""
    rig, text, old, own = revived(evict=True)
    assert rig.cache.match_prefix(rig.cache.key(text)).tolist() == [*old[:7], *own[7:]]
    assert rig.allocator.is_cached(WIDE, old[:7]).all()
    assert [pool.cached_pages for pool in rig.allocator.pools] == [9, 2, 9]


def test_an_exchange_that_would_lose_a_peer_is_not_made() -> None:
    """Positions 4 .. are the row's in the wide group and 7 .. in the narrow one. The cache has lost all of the wide
    group and has the narrow one: exchanged are only pages whose peers the row has in both."""
    rig, _, old, own = revived(evict=True, lost=WIDE)
    [node] = rig.cache._by_age
    assert node.pages.tolist() == [*old[:7], *own[7:]]
    assert [pool.cached_pages for pool in rig.allocator.pools] == [9, 9, 2]


def test_caching_two_rows_revives_the_peers_that_the_first_had_evicted() -> None:
    rig, text = rig_of([2, 5]), list(range(9))
    first, second = grown(rig, 9), grown(rig, 9)
    rig.table.evict_unseen(ints(first), slack_pages=0)
    rig.cache.insert([first, second], [rig.cache.key(text)] * 2)
    rig.table.check()
    assert [pool.cached_pages for pool in rig.allocator.pools] == [9, 9, 9]
    assert rig.cache.match_prefix(rig.cache.key(text))[:4].tolist() == rig.table.pages(second, 4).tolist()


@pytest.mark.parametrize("short", [PRIMARY, NARROW, WIDE])
def test_the_cache_evicts_what_the_short_pool_needs(short: GroupId) -> None:
    """Each pool in turn is the one that is full: only its peers, or its pages with theirs, are given up."""
    pages = [60, 60, 60]
    pages[short] = 20
    rig = rig_of([2, 5], pages=pages[0], window_pages=pages[1:])
    row = grown(rig, 16)
    rig.keep(row, range(16))
    rig.close(row)
    grown(rig, 15)
    kept = [pool.cached_pages for pool in rig.allocator.pools]
    assert kept == ([5, 5, 5] if short == PRIMARY else [5 if group == short else 16 for group in range(3)])
    assert rig.found(range(17)) == (5 if short == PRIMARY else 16)
