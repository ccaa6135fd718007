"""Many groups of layers in one cache: claims, refusals and matches by group.

That K/V of several groups are those of their texts over random histories is shown by `test_kv_state_machine.py`; slots
of one group used in another by `test_sanitize.py`.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_rig import ints, layer_spec, make_allocator

from specdec.errors import DoubleFreeError, OutOfSlotsError
from specdec.kvcache.layout import (
    KEEP_ALL,
    PRIMARY,
    ByGroup,
    GroupId,
    KVLayout,
    PrimaryLoc,
    Retention,
    attention_fields,
    cache_groups,
)
from specdec.kvcache.prefix_cache import PrefixCache
from specdec.kvcache.store import KVStore
from specdec.kvcache.table import RequestTable
from specdec.runtime.sizing import DraftNeeds

from marks import examples
from snapshots import contents

NARROW, WIDE = GroupId(1), GroupId(2)
NODES = 3


def table_of(windows: Sequence[int], *, page_size: int = 1, pages: int = 60, rows: int = 4) -> RequestTable:
    """`retain` is the window; the group numbers follow the windows."""
    allocator = make_allocator(pages, windows, page_size=page_size)
    return RequestTable(allocator, max_requests=rows, max_len=90, lookahead=NODES, extra_keys=1)


def grown(table: RequestTable, length: int) -> int:
    """A new row of so many committed tokens."""
    row = table.open_row()
    table.ensure_slots(row, length)
    table.commit_chunk_on_host(ints(row), ints(length))
    return row


def loc(table: RequestTable, row: int, begin: int, end: int) -> PrimaryLoc:
    return PrimaryLoc(torch.from_numpy(table.slots.host[row, begin:end].copy()))


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
    row = grown(table, 60)
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


@given(
    windows=st.lists(st.one_of(st.none(), st.integers(1, 64)), min_size=1, max_size=5),
    page_size=st.sampled_from([1, 4, 16]),
    sizes=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)), min_size=5, max_size=5),
)
@settings(max_examples=examples(15, 100), deadline=None, derandomize=True, database=None)
def test_a_store_holds_what_fields_say_at_the_slots_of_their_group(windows, page_size, sizes) -> None:
    layers = [
        dataclasses.replace(layer_spec(i, window), fields=attention_fields(*size))
        for i, (window, size) in enumerate(zip(windows, sizes, strict=False))
    ]
    layout = KVLayout(tuple(layers))
    given_windows = sorted({window for window in windows if window is not None})
    allocator = make_allocator(5, given_windows, [2 + n for n in range(len(given_windows))], page_size=page_size)
    store = KVStore(layout, allocator, torch.float32, torch.device("cpu"), rank=0)
    for kept, layer in zip(store.layers.values(), layers, strict=True):
        slots = allocator.num_slots(kept.group)
        assert allocator.groups[kept.group] == layer.retention
        assert [*kept.k.shape] == [slots, layer.k.heads, layer.k.dim]
        assert [*kept.v.shape] == [slots, layer.v.heads, layer.v.dim]
    for group, retention in allocator.groups.items():
        held = sum(tensor[0].nbytes for tensor in store.tensors(group))
        assert held == layout.slot_bytes(retention, torch.float32)


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
    table = table_of([2, 8], page_size=2)
    a, row = table.allocator, grown(table, 12)
    pages = table.pages(row, 6)
    table.evict_unseen(ints(row), slack_pages=0)
    assert table.evicted_len[:, row].tolist() == [0, 10, 4]
    assert a.is_mapped(NARROW, pages).tolist() == [False] * 5 + [True]
    assert a.is_mapped(WIDE, pages).tolist() == [False] * 2 + [True] * 4
    assert [pool.held_pages for pool in a.pools] == [6, 1, 4]
    with pytest.raises(DoubleFreeError, match=r"window 2 pool: .* some were evicted before"):
        a.evict(NARROW, loc(table, row, 8, 10))
    a.evict(WIDE, loc(table, row, 4, 6))
    a.check()
    with pytest.raises(AssertionError, match="in the window of group 2 is unmapped"):
        table.check()


@given(
    windows=st.sets(st.integers(1, 64), max_size=4).map(sorted),
    page_size=st.sampled_from([1, 4, 16]),
    pages=st.lists(st.integers(2, 24), min_size=5, max_size=5),
    beyond=st.lists(st.integers(0, 17), min_size=5, max_size=5),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=examples(20, 300), deadline=None, derandomize=True, database=None)
def test_random_groups_keep_what_their_windows_need(windows, page_size, pages, beyond, seed) -> None:
    """Growing, eviction, sharing and closing: pools and rows agree, and a refusal names the short pool. beyond: how
    late each group is read."""
    draw = np.random.default_rng(seed)
    allocator = make_allocator(pages[0], windows, pages[1 : len(windows) + 1], page_size=page_size)
    max_lag = ByGroup(tuple(beyond[: 1 + len(windows)]))
    table = RequestTable(allocator, max_requests=4, max_len=150, lookahead=NODES, extra_keys=1, max_lag=max_lag)
    for _ in range(40):
        rows = draw.permutation(table.active_rows)[: draw.integers(1, 3)]
        choice = draw.integers(0, 5)
        if choice == 0 and len(table.active_rows) < 4:
            fresh = table.open_row()
            if len(rows) and (whole := int(table.committed_len.host[rows[0]]) // page_size):
                shared = table.pages(rows[0], whole)
                evicted = table.num_evicted(whole)
                if all(allocator.is_mapped(g, shared[evicted[g] :]).all() for g in allocator.windowed):
                    table.adopt_pages(fresh, shared)
        elif choice == 1 and len(rows):
            table.close_rows(rows)
        elif choice == 2 and len(rows):
            table.evict_unseen(rows, slack_pages=int(draw.integers(0, 2)))
        elif len(rows):
            more = draw.integers(1, 20, len(rows))
            wanted = table.committed_len.host[rows] + more
            needed, before = int(table.pages_needed(rows, wanted).sum()), contents(table)
            short = [pool.name for pool in allocator.pools if pool.available_pages < needed]
            if wanted.max() > 150 or short:
                with pytest.raises(OutOfSlotsError) as refusal:
                    table.ensure_slots(rows, wanted)
                assert wanted.max() > 150 or all(f"in the {name} pool" in str(refusal.value) for name in short)
                assert contents(table) == before
            else:
                table.ensure_slots(rows, wanted)
                table.commit_chunk_on_host(rows, more)
        table.check()
        for group, window in enumerate(windows, 1):
            gone = table.committed_len.host - table.evicted_len[group]
            adopted = np.where(
                table.shared_len.host > 0, table.committed_len.host - table.shared_len.host, beyond[group]
            )
            late_by = np.minimum(adopted, beyond[group])  # who adopted pages has read them
            assert (gone >= np.minimum(table.committed_len.host, window + late_by)).all()
    table.close_rows(table.active_rows)
    assert [pool.free_pages for pool in allocator.pools] == pages[: len(windows) + 1]


# the prefix cache by group


class Texts:
    """A table with a prefix cache, whose peers can be lost by group."""

    def __init__(self, windows: Sequence[int], *, page_size: int = 1, pages: int = 60) -> None:
        self.table = table_of(windows, page_size=page_size, pages=pages)
        self.allocator, self.cache = self.table.allocator, PrefixCache(self.table)

    def keep(self, row: int, text: list[int]) -> None:
        self.cache.insert([row], [self.cache.key(text)])
        self.table.check()

    def lose(self, group: GroupId, pages: np.ndarray) -> None:
        self.allocator.uncache_peers(group, pages)
        for node in self.cache._by_age:
            node.num_peers = self.cache._count_peers(node.pages)
        self.table.check()

    def found(self, text: list[int]) -> int:
        return len(self.cache.match_prefix(self.cache.key(text)))

    def longest(self, pages: np.ndarray) -> int:
        """The definition: the most of these pages whose last `retain` tokens are mapped in each group."""
        a, size = self.allocator, self.table.allocator.page_size
        mapped = {group: a.is_mapped(group, pages).tolist() for group in a.windowed}

        def fits(count: int, group: GroupId) -> bool:
            seen = range(max(0, count * size - int(self.table.retain[group])), count * size)
            return all(mapped[group][token // size] for token in seen)

        every = range(len(pages), -1, -1)
        return next(count for count in every if all(fits(count, group) for group in a.windowed))


@pytest.mark.parametrize("lost", [NARROW, WIDE])
def test_a_match_needs_the_window_of_every_group(lost: GroupId) -> None:
    """Position 5 of 12 is lost in one group: a match that ends within its window after that is none."""
    texts, text = Texts([2, 4]), list(range(12))
    row = grown(texts.table, 12)
    texts.keep(row, text)
    texts.table.close_rows(row)
    pages = texts.cache.match_prefix(texts.cache.key(text))
    texts.lose(lost, pages[[5]])
    window = 2 if lost == NARROW else 4
    expected = [min(n, 5) if n < 5 + window + 1 else n for n in range(13)]
    assert [texts.found(text[:n]) for n in range(13)] == expected


@given(
    windows=st.sets(st.integers(1, 64), min_size=1, max_size=4).map(sorted),
    page_size=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=examples(20, 300), deadline=None, derandomize=True, database=None)
def test_random_matches_are_the_longest_by_the_definition(windows, page_size, seed) -> None:
    """Peers are lost here and there in each group; a second row of the same text then revives some of them."""
    draw = np.random.default_rng(seed)
    texts, text = Texts(windows, page_size=page_size, pages=180), list(range(80))
    first, second = (grown(texts.table, 80) for _ in range(2))
    texts.keep(first, text)
    texts.table.close_rows(first)
    pages = texts.cache._pages_of(texts.cache._walk(texts.cache.key(text), b""))
    for group in texts.allocator.windowed:
        texts.lose(group, pages[draw.random(len(pages)) < draw.choice([0.0, 0.1, 0.5])])
    for count in range(len(pages) + 1):
        assert texts.found(text[: count * page_size]) == texts.longest(pages[:count])
    had = texts.found(text)
    texts.table.evict_unseen(ints(second), slack_pages=0)
    texts.keep(second, text)
    assert texts.found(text) >= had
    texts.table.close_rows(second)
    texts.table.check()
    pages = texts.cache._pages_of(texts.cache._walk(texts.cache.key(text), b""))
    assert texts.found(text) == texts.longest(pages)
    texts.cache.clear()
    assert all(pool.free_pages == 180 for pool in texts.allocator.pools)


def revived(*, evict: bool) -> tuple[Texts, list[int], np.ndarray, np.ndarray]:
    """The cache has 9 tokens without peers in the narrow group; a second row of them comes, evicted or not."""
    texts, text = Texts([2, 5]), list(range(9))
    first, second = grown(texts.table, 9), grown(texts.table, 9)
    texts.keep(first, text)
    texts.table.close_rows(first)
    old, own = texts.cache.match_prefix(texts.cache.key(text)), texts.table.pages(second, 9)
    texts.lose(NARROW, old)
    if evict:
        texts.table.evict_unseen(ints(second), slack_pages=0)
    texts.keep(second, text)
    texts.table.close_rows(second)
    texts.table.check()
    return texts, text, old, own


def test_a_page_is_exchanged_with_its_peers_in_all_groups() -> None:
    texts, text, _, own = revived(evict=False)
    assert texts.cache.match_prefix(texts.cache.key(text)).tolist() == own.tolist()
    assert all(texts.allocator.is_cached(group, own).all() for group in texts.allocator.windowed)
    assert [pool.cached_pages for pool in texts.allocator.pools] == [9, 9, 9]
    assert texts.allocator.primary.free_pages == 60 - 9  # the old ones are free


def test_pages_whose_peers_a_row_has_given_up_are_not_exchanged() -> None:
    """The row has given up 7 tokens in the narrow group and 4 in the wide one: the cache keeps its own first 7."""
    texts, text, old, own = revived(evict=True)
    assert texts.cache.match_prefix(texts.cache.key(text)).tolist() == [*old[:7], *own[7:]]
    assert texts.allocator.is_cached(WIDE, old[:7]).all()
    assert [pool.cached_pages for pool in texts.allocator.pools] == [9, 2, 9]


def test_an_exchange_that_would_lose_a_peer_is_not_made() -> None:
    """Positions 4 .. are the row's in the wide group and 7 .. in the narrow one. The cache has lost all of the wide
    group and has the narrow one: exchanged are only pages whose peers the row has in both."""
    texts, text = Texts([2, 5]), list(range(9))
    first, second = grown(texts.table, 9), grown(texts.table, 9)
    texts.keep(first, text)
    texts.table.close_rows(first)
    old, own = texts.cache.match_prefix(texts.cache.key(text)), texts.table.pages(second, 9)
    texts.lose(WIDE, old)
    texts.table.evict_unseen(ints(second), slack_pages=0)
    texts.keep(second, text)
    [node] = texts.cache._by_age
    assert node.pages.tolist() == [*old[:7], *own[7:]]
    assert [pool.cached_pages for pool in texts.allocator.pools] == [9, 9, 2]
    texts.table.close_rows(second)
    texts.table.check()


def test_of_two_rows_kept_at_once_the_second_revives_what_the_first_had_given_up() -> None:
    texts, text = Texts([2, 5]), list(range(9))
    first, second = grown(texts.table, 9), grown(texts.table, 9)
    texts.table.evict_unseen(ints(first), slack_pages=0)
    texts.cache.insert([first, second], [texts.cache.key(text)] * 2)
    texts.table.check()
    assert [pool.cached_pages for pool in texts.allocator.pools] == [9, 9, 9]
    assert texts.cache.match_prefix(texts.cache.key(text))[:4].tolist() == texts.table.pages(second, 4).tolist()


@pytest.mark.parametrize("short", [PRIMARY, NARROW, WIDE])
def test_the_cache_gives_up_what_the_short_pool_needs(short: GroupId) -> None:
    """Each pool in turn is the one that is full: only its peers, or its pages with theirs, are given up."""
    pages = [60, 60, 60]
    pages[short] = 20
    table = RequestTable(
        make_allocator(pages[0], [2, 5], pages[1:]), max_requests=4, max_len=90, lookahead=NODES, extra_keys=1
    )
    cache, row = PrefixCache(table), grown(table, 16)
    cache.insert([row], [cache.key(range(16))])
    table.close_rows(row)
    grown(table, 15)
    table.check()
    kept = [pool.cached_pages for pool in table.allocator.pools]
    assert kept == ([5, 5, 5] if short == PRIMARY else [5 if group == short else 16 for group in range(3)])
    assert len(cache.match_prefix(cache.key(range(16)))) == (5 if short == PRIMARY else 16)
