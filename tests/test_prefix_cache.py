"""The tree of kept pages: what matches, what is adopted, what is given up first, in cases to check by eye.

That K/V in every adopted and every kept page are those of its text is shown by `test_kv_state_machine.py`; windows,
their matches and exchanges by `test_cache_groups.py`.
"""

from collections.abc import Callable

import numpy as np
import pytest
from kv_rig import SWA, PrefixRig

from specdec.errors import OutOfSlotsError

from snapshots import contents

A, B, C, D = ([token] for token in (11, 22, 33, 44))


# adopting


def test_worked_example():
    rig = PrefixRig(pages=8)
    first, adopted = rig.begin([5, 6, 7, 8])
    assert adopted == 0
    rig.fill(first, 4)
    rig.keep(first, [5, 6, 7, 8])
    assert rig.counts == (4, 4, 0)  # kept, and held as well
    second, adopted = rig.begin([5, 6, 7, 9])
    assert adopted == rig.table.committed_len.host[second] == 3
    assert rig.row_slots(second) == [1, 2, 3]
    rig.fill(second, 4)
    assert rig.row_slots(second) == [1, 2, 3, 5]  # its own from where it differs
    assert rig.counts == (3, 5, 0)
    rig.close(first)
    assert rig.counts == (3, 4, 1)  # slot 4 is the cache's alone
    rig.close(second)
    assert rig.counts == (4, 0, 4)  # slot 5 was not kept
    assert rig.allocator.available_pages == 8


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("pairs", [False, True])
def test_whole_pages_of_what_is_common_are_adopted(page_size: int, pairs: bool):
    """Pairs: K/V at the last common token were made with another token after it, so that a match is one token less."""
    rig, text = PrefixRig(page_size, pairs=pairs), list(range(40))
    rig.serve(text)
    for common in range(1, 35):
        assert rig.found([*text[:common], *[77] * 20]) == (common - pairs) // page_size * page_size
        assert rig.found(text[:common]) == (common - 1) // page_size * page_size  # one token is left to compute


def test_a_page_is_not_shared_if_the_token_after_it_differs():
    """x and y after the same four tokens: the page that y inserted after x's must not come with x's page in front."""
    rig, (x, y) = PrefixRig(4, pairs=True), (70, 80)
    rig.serve([1, 2, 3, 4, x, 5, 6, 7, 8, 9])
    assert rig.serve([1, 2, 3, 4, y, 5, 6, 7, 8, 9]) == 0
    row, adopted = rig.begin([1, 2, 3, 4, y, 5, 6, 7, 8, 9])
    assert adopted == 8
    assert rig.row_slots(row) == list(range(12, 20))  # the second request's own, both pages of them
    plain = PrefixRig(4)
    plain.serve([1, 2, 3, 4, x, 5, 6, 7, 8, 9])
    assert plain.serve([1, 2, 3, 4, y, 5, 6, 7, 8, 9]) == 4  # for the target's K/V alone it is the same page


# windows: `retain` is 4 - 1 + 2 = 5


def test_a_match_ends_with_a_window_that_is_mapped():
    """23 tokens, of which a row gave up the first 17 in SWA (23 - 5 = 18, less a page of slack)."""
    rig = PrefixRig(windows=[4])
    text = list(range(24))
    rig.serve(text, evict=True)
    key = rig.cache.key(text)
    assert [len(rig.cache.match_prefix(key[:n])) for n in (5, 17, 21, 22, 23)] == [0, 0, 0, 22, 23]
    row, adopted = rig.begin([*text[:23], 99])
    assert (adopted, rig.table.evicted_len[SWA, row]) == (23, 18)
    assert (rig.allocator.primary.held_pages, rig.allocator.pools[SWA].held_pages) == (23, 5)


def test_a_row_that_adopted_a_window_revives_it_in_place():
    rig = PrefixRig(windows=[4], pages=40)
    text = list(range(10))
    rig.serve(text)
    row, _ = rig.begin([*text, 1, 2])
    rig.lose_peers(SWA, rig.cache.match_prefix(rig.cache.key(text)))  # the row holds 4 .. 8 on
    before = rig.counts
    rig.keep(row, text)
    assert rig.counts == before
    rig.close(row)
    assert rig.allocator.pools[SWA].evictable_pages == 5
    assert rig.found(text) == 9


# giving up


def test_cached_pages_are_free_for_a_row_that_needs_them():
    rig = PrefixRig(pages=30)
    rig.serve(list(range(21)))
    assert rig.counts == (10, 0, 20)
    row, _ = rig.begin([99] * 26)
    rig.fill(row, 25)
    assert rig.counts == (0, 25, 5)
    assert rig.found(list(range(21))) == 5  # the first of them are left
    with pytest.raises(OutOfSlotsError, match="6 pages needed; free: 5 of 30 in the full pool"):
        rig.table.ensure_slots(row, 31)
    rig.table.ensure_slots(row, 30)
    assert rig.counts == (0, 30, 0)
    rig.table.check()


def test_the_least_recently_used_leaf_is_evicted_first():
    rig = PrefixRig(pages=12)
    rig.serve(A * 4 + B * 3 + [0])
    rig.serve(A * 4 + C * 3 + [0])
    assert rig.serve(A * 4 + B * 3 + [0]) == 7  # used again
    assert rig.counts == (2, 0, 10)
    row, _ = rig.begin(D * 6)
    rig.fill(row, 5)
    assert [rig.found(A * 4 + x * 3 + [0]) for x in (B, C)] == [7, 4]  # a leaf before what it hangs on
    rig.fill(row, 9)
    assert [rig.found(A * 4 + x * 3 + [0]) for x in (B, C)] == [3, 3]
    assert rig.counts == (0, 9, 3)


def test_pages_held_by_rows_are_not_evicted():
    rig = PrefixRig(pages=12)
    rig.serve(A * 4 + B * 3 + [0])
    holder, adopted = rig.begin(A * 4 + B + [0])
    assert adopted == 5
    rig.serve(C * 4)
    other, _ = rig.begin(D * 7)  # leaves one free
    rig.fill(other, 7)
    assert rig.found(A * 4 + B * 3 + [0]) == 5 and rig.found(C * 4) == 0
    assert rig.row_slots(holder) == [1, 2, 3, 4, 5]
    assert rig.counts == (0, 12, 0)


def test_a_page_followed_by_held_pages_is_evicted_last():
    """Two rows made the same text; the cache took it from the first, and what follows from the second."""
    rig = PrefixRig(pages=12)
    text = list(range(8))
    first, second = rig.begin(text)[0], rig.begin(text)[0]
    rig.fill(first, 3)
    rig.fill(second, 6)
    rig.keep(first, text)
    rig.keep(second, text)
    rig.close(first)
    assert rig.counts == (3, 6, 3)  # positions 0 .. 2 are the first one's, 3 .. 5 the second one's
    assert rig.allocator.available_pages == 6
    third, _ = rig.begin(A * 8)
    rig.fill(third, 6)
    assert rig.counts == (0, 12, 0)
    assert rig.found(text) == 0


def test_swa_peers_are_evicted_first_and_first_those_no_match_needs():
    """Two texts of 20 in SWA for 40: of each the last five are kept to the end, and the full pages anyway."""
    rig = PrefixRig(windows=[4], pages=80, window_pages=40)
    one, two = list(range(21)), list(range(100, 121))
    rig.serve(one)
    rig.serve(two)
    swa = rig.allocator.pools[SWA]
    assert (swa.free_pages, swa.evictable_pages) == (0, 40)
    row, _ = rig.begin([99] * 60)
    rig.fill(row, 30)
    assert (swa.held_pages, swa.evictable_pages) == (30, 10)
    assert rig.counts == (10, 30, 40)
    assert [rig.found(text) for text in (one, two)] == [20, 20]
    rig.fill(row, 35)
    assert [rig.found(text) for text in (one, two)] == [0, 20]  # the older one
    assert rig.counts == (5, 35, 40)
    rig.fill(row, 40)
    assert [rig.found(text) for text in (one, two)] == [0, 0]
    assert (swa.held_pages, swa.evictable_pages) == (40, 0)


@pytest.mark.parametrize("wanted", range(1, 25))
def test_a_leaf_is_cut_back_to_where_a_match_could_end(wanted: int):
    """The last 6 of 23 tokens have SWA peers: with one of them less no match is left, so no page is either."""
    rig = PrefixRig(windows=[4], pages=24)
    rig.serve(list(range(24)), evict=True)
    assert rig.counts == (1, 0, 23)
    rig.table.ensure_slots(rig.table.open_row(), wanted)
    left = rig.counts[2]
    assert left == {1: 23, 2: 22}.get(wanted, 0)
    assert left == 0 or rig.found([*range(left), 0]) == left
    rig.table.check()


# the tree


def test_an_edge_is_as_long_as_it_can_be():
    rig = PrefixRig(pages=9000, max_len=8200)
    text = list(range(8001))
    row, _ = rig.begin(text)
    for end in range(500, 8001, 500):  # kept chunk by chunk
        rig.fill(row, end)
        rig.keep(row, text)
    assert len(rig.cache._by_age) == 1
    rig.serve([*text[:5000], 0, 0])
    assert sorted(len(node.pages) for node in rig.cache._by_age) == [1, 3000, 5000]
    assert rig.allocator.primary.cached_pages == 8001


def test_caching_a_cached_prefix_changes_nothing():
    rig = PrefixRig(4, windows=[6])
    text = list(range(30))
    row, _ = rig.begin(text)
    rig.fill(row, 29)
    rig.keep(row, text)
    before = contents(rig.table, rig.allocator)
    rig.keep(row, text)
    rig.keep(row, text[:9])
    assert contents(rig.table, rig.allocator) == before


# `check` finds every kind of corruption


def lose_a_page(rig: PrefixRig) -> None:
    [node] = rig.cache._by_age
    node.key, node.pages = node.key[:-1], node.pages[:-1]


CORRUPTED = {
    # what is done to a tree of one node, words of the assertion
    "lost node": (lambda rig: rig.cache._root.children.popitem(), "the nodes by age are not those of the tree"),
    "lost page": (lose_a_page, "num_peers|other pages are kept"),
    "one swa claim too many": (
        lambda rig: rig.allocator.pools[SWA].share(np.array([1])),
        "with .* claims|the cache's alone",
    ),
    "peers miscounted": (lambda rig: next(iter(rig.cache._by_age)).num_peers.__setitem__(SWA, 99), "num_peers"),
    "wrong name": (
        lambda rig: next(iter(rig.cache._by_age)).key.__setitem__(0, 77),
        "a node is not where its key says",
    ),
}


@pytest.mark.parametrize(("corrupt", "message"), CORRUPTED.values(), ids=CORRUPTED)
def test_check_finds(corrupt: Callable[[PrefixRig], object], message: str):
    rig = PrefixRig(windows=[4])
    rig.serve(list(range(10)))
    rig.begin([*range(10), 0])
    rig.table.check()
    corrupt(rig)
    with pytest.raises(AssertionError, match=message):
        rig.table.check()
