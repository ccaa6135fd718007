"""Many requests that get rows, prompt chunks, or leave in one step: all is as if they had come one after the other."""

import copy
import random
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kv_rig import SWA, ByGroup, MirroredArray, PrefixCache, RequestTable, flush, ints, make_allocator

from specdec import SamplingParams
from specdec.errors import DoubleFreeError
from specdec.sampling.sampling_table import SamplingTable

from inside import Detokenizer, Prefixes, PromptRoom, Request, RequestState, Scheduler
from marks import deep_cases
from snapshots import contents

ROWS, MAX_LEN = 6, 40
PAGE_SIZES = pytest.mark.parametrize("page_size", [1, 3, 4])


def make(page_size: int, *, pages: int = 300, window_pages: int | None = None, window: int | None = 4) -> RequestTable:
    """`retain` is the window."""
    allocator = make_allocator(pages, [window] if window else [], window_pages, page_size=page_size)
    return RequestTable(allocator, max_requests=ROWS, max_len=MAX_LEN, lookahead=2, extra_keys=1)


def grow(table: RequestTable, row: int, length: int) -> None:
    """Up to so many tokens of a row are committed."""
    more = max(0, length - int(table.committed_len.host[row]))
    table.ensure_slots(row, int(table.committed_len.host[row]) + more)
    table.commit_chunk_on_host(ints(row), ints(more))


def state(table: RequestTable, *, ordered: bool = True) -> dict[str, object]:
    """All that the table and its pools hold, the order of free pages too, unless that is no matter."""
    allocator = table.allocator
    flush([table.slots, table.committed_len, allocator.maps])  # when it goes is no difference
    arrays = table.slots, table.committed_len, table.capacity, table.evicted_len, table._active
    pools = [copy.copy(pool) for pool in allocator.pools]
    for pool in pools:
        pool._stack = pool._stack[: pool.free_pages] if ordered else np.sort(pool._stack[: pool.free_pages])
    return contents(*arrays, *pools, allocator.maps)


def tree(cache: PrefixCache) -> list[tuple[list[int], list[int], list[int], int]]:
    """Key, pages, peers kept by group and number of the parent of each node, the one used longest ago first."""
    number = {node: i for i, node in enumerate(cache._by_age)}
    return [
        (node.key.tolist(), node.pages.tolist(), node.num_peers.tolist(), number.get(node.parent, -1))
        for node in cache._by_age
    ]


class Scene:
    """Rows at work, most of them on texts that begin alike, with what a cache had and what it had to give up since."""

    def __init__(self, seed: int, page_size: int) -> None:
        self.draw = random.Random(seed)
        self.table = make(page_size, window=self.draw.choice((None, 4, 4)))
        self.cache = PrefixCache(self.table)
        self.texts: dict[int, list[int]] = {}
        self.heads = [[self.draw.randrange(2) for _ in range(MAX_LEN)] for _ in range(2)]
        for _ in range(3):
            self.begin()
        for row in list(self.texts):
            self.go_on(row)
        self.lose_some()
        while len(self.texts) < ROWS:
            self.begin()
        for row in self.texts:
            self.go_on(row)
        if self.draw.random() < 0.5:
            self.lose_some()
        self.table.check()

    def begin(self) -> None:
        row, shared = self.table.open_row(), self.draw.randrange(MAX_LEN)
        text = self.draw.choice(self.heads)[:shared] + [self.draw.randrange(3) for _ in range(MAX_LEN - shared)]
        self.texts[row] = text
        self.cache.adopt(row, self.cache.key(text)[: self.draw.randrange(MAX_LEN)])

    def go_on(self, row: int) -> None:
        for _ in range(self.draw.randint(1, 3)):
            grow(self.table, row, self.draw.randrange(MAX_LEN))
            if self.draw.random() < 0.5:
                self.cache.insert([row], [self.cache.key(self.texts[row])])
            if self.draw.random() < 0.7:
                self.table.evict_unseen(ints(row), slack_pages=self.draw.choice((0, 1)))

    def lose_some(self) -> None:
        """Gives up pages as when the pool of a windowed group runs short."""
        for pool in self.table.allocator.pools.values[1:]:
            self.cache.evict(ByGroup((0, self.draw.randint(0, pool.capacity - pool.free_pages))))

    def leavers(self) -> list[int]:
        return self.draw.sample(sorted(self.texts), self.draw.randint(1, ROWS))


# rows and their pages


@deep_cases("1", "3")
@PAGE_SIZES
def test_rows_closed_at_once_are_rows_closed_one_after_the_other(page_size: int) -> None:
    shared = evicted = kept = 0
    for seed in range(60):
        scene = Scene(seed, page_size)
        table, rows = scene.table, scene.leavers()
        one_by_one = copy.deepcopy(table)
        pool, pages = table.allocator.primary, np.concatenate([table.pages(r, int(table.capacity[r])) for r in rows])
        shared += int((pool.row_refs(pages) > 1).sum())
        evicted, kept = evicted + int(table.evicted_len[:, rows].sum()), kept + int(pool.is_cached(pages).sum())
        table.close_rows(ints(*rows))
        for row in rows:
            one_by_one.close_rows(row)
        assert state(table) == state(one_by_one)
        table.check()
    assert min(shared, evicted, kept) > 100


def test_the_pages_of_the_last_row_are_used_first() -> None:
    """Rows 0 and 1 begin with pages 1 and 2; row 0 goes on with 3, row 1 with 4."""
    table = make(1)
    grow(table, table.open_row(), 2)
    table.adopt_pages(table.open_row(), table.pages(0, 2))
    grow(table, 0, 3)
    grow(table, 1, 3)
    table.close_rows(ints(0, 1))
    assert table.allocator.primary.alloc(4).tolist() == [1, 2, 4, 3]
    table.close_rows(ints())
    assert table.active_rows.tolist() == []


def test_rows_name_a_page_once_each() -> None:
    table = make(2)
    grow(table, table.open_row(), 2)
    table.adopt_pages(table.open_row(), table.pages(0, 1))
    free, slots, before = table.allocator.free, torch.tensor([2, 3, 2, 3]), state(table)
    for rows in (ints(0, 0, 0, 0), ints(1, 1, 1, 1)):
        with pytest.raises(DoubleFreeError, match="named twice"):
            free(slots, rows=rows)
    with pytest.raises(DoubleFreeError, match="named twice"):
        table.close_rows(ints(0, 0))
    with pytest.raises(DoubleFreeError, match="not held"):
        free(torch.tensor([2, 3, 2, 3, 2, 3]), rows=ints(0, 0, 1, 1, 2, 2))
    assert state(table) == before
    free(slots, rows=ints(0, 0, 1, 1), evicted=np.array([[False] * 4, [True, True, False, False]]))
    assert table.allocator.primary.free_pages == 300
    assert table.allocator.pools[SWA].row_refs(ints(1)).tolist() == [1]  # that of row 0, which had given it up


# the prefix cache


@deep_cases("1", "3")
@PAGE_SIZES
def test_rows_kept_at_once_are_rows_kept_one_after_the_other(page_size: int) -> None:
    split = revived = 0
    for seed in range(120):
        scene = Scene(seed, page_size)
        cache, rows = scene.cache, scene.leavers()
        before = tree(cache)
        one_by_one = copy.deepcopy(cache)
        keys = [cache.key(scene.texts[row]) for row in rows]
        cache.insert(rows, keys)
        for row, key in zip(rows, keys, strict=True):
            one_by_one.insert([row], [key])
        assert tree(cache) == tree(one_by_one)
        assert state(cache.table) == state(one_by_one.table)
        cache.table.check()
        after = {tuple(key): num_peers for key, _, num_peers, _ in tree(cache)}
        split += any(tuple(key) not in after and len(key) > min(map(len, after), default=0) for key, *_ in before)
        revived += any(after.get(tuple(key), num_peers)[-1] > num_peers[-1] for key, _, num_peers, _ in before)
    assert split > 5 and revived > 5


@PAGE_SIZES
def test_what_is_kept_is_claimed_in_one_call(page_size: int, monkeypatch) -> None:
    """But where a node is split: 6 rows with nothing in common take one."""
    table, calls = make(page_size), list[int]()
    cache, keep = PrefixCache(table), table.allocator.primary.cache_pages
    monkeypatch.setattr(table.allocator.primary, "cache_pages", lambda pages: (calls.append(len(pages)), keep(pages)))
    rows = [table.open_row() for _ in range(ROWS)]
    for row in rows:
        grow(table, row, 24)
    cache.insert(rows, [cache.key([row] * 24) for row in rows])
    assert calls == [ROWS * 24 // page_size]
    cache.insert(rows, [cache.key([row] * 24) for row in rows])
    assert len(calls) == 1
    table.check()


@PAGE_SIZES
def test_what_a_short_pool_wants_is_given_up_in_one_call(page_size: int, monkeypatch) -> None:
    """Two and a half of six texts of 24 tokens: the oldest, and of the third its end."""
    table, calls = make(page_size, window=None), list[list[int]]()
    cache, forget = PrefixCache(table), table.allocator.primary.uncache_pages
    monkeypatch.setattr(
        table.allocator.primary, "uncache_pages", lambda pages: (calls.append(pages.tolist()), forget(pages))[1]
    )
    rows = [table.open_row() for _ in range(ROWS)]
    for row in rows:
        grow(table, row, 24)
    cache.insert(rows, [cache.key([row] * 24) for row in rows])
    each = 24 // page_size
    pages = [table.pages(row, each).tolist() for row in rows]
    table.close_rows(ints(*rows))
    free = table.allocator.primary.free_pages
    cache.evict(ByGroup((2 * each + each // 2,)))
    assert calls == [pages[2][each - each // 2 :] + pages[1] + pages[0]]
    assert table.allocator.primary.free_pages - free == 2 * each + each // 2
    left = [2] * (each - each // 2) * page_size
    assert [key for key, *_ in tree(cache)] == [left, *([row] * 24 for row in (3, 4, 5))]
    table.check()
    cache.clear()
    assert len(calls) == 2 and tree(cache) == []
    table.check()


@pytest.mark.parametrize("pairs", [False, True])
def test_a_key_that_grows_is_that_of_all_tokens(pairs: bool) -> None:
    request = request_of(0, [3, 5, 7])
    prefixes = prefixes_of(make(1), num_models=1 + pairs)
    for emitted in ([], [4], [9], [8, 2, 6]):
        if emitted:
            request.settle(emitted)
        for _ in range(2):
            assert prefixes._key(request).tolist() == prefixes._cache.key(request.tokens).tolist()


# requests


def request_of(number: int, prompt: Sequence[int]) -> Request:
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    request = Request(list(prompt), params, 0, Detokenizer(None), frozenset())
    request.number = number
    return request


def prefixes_of(table: RequestTable, num_models: int = 1) -> Prefixes:
    cache = SimpleNamespace(table=table, models=[None] * num_models, state_cache=lambda: None)
    return Prefixes(cache, lambda: 0)


def busy(seed: int, page_size: int, **sizes: int) -> Scheduler:
    """Some decode, some read their prompts, some wait."""
    draw = random.Random(seed)
    table = make(page_size, **sizes)
    scheduler = Scheduler(table, prefixes=prefixes_of(table), max_model_len=MAX_LEN, prompt_room=PromptRoom(24, 24, 8))
    head = [draw.randrange(2) for _ in range(20)]
    for number in range(ROWS + 2):
        shared = draw.randint(0, 12)
        request = request_of(number, head[:shared] + [draw.randrange(9) for _ in range(draw.randint(1, 8))])
        request.priority = draw.choice((0, 0, 1))
        scheduler.submit(request)
    for _ in range(draw.randint(1, 3)):
        scheduler.admit_requests()
        requests, chunk_len = scheduler.next_prefill()
        for request, length in zip(requests, chunk_len.tolist(), strict=True):
            grow(table, request.row, int(table.committed_len.host[request.row]) + length)
            if table.committed_len.host[request.row] == request.prefill_target:
                request.state = RequestState.DECODE
                request.settle([draw.randrange(9) for _ in range(draw.randint(1, 3))])
                grow(table, request.row, request.settled.num_tokens - 1)
        table.evict_unseen(table.active_rows)
    return scheduler


def seats(scheduler: Scheduler) -> list[object]:
    """Who is where."""
    return [
        [(r.number, r.row, r.state, r.row_epoch, r.stats.preemptions) for r in requests]
        for requests in (scheduler.running, scheduler.waiting)
    ]


@PAGE_SIZES
def test_requests_that_leave_together_leave_as_one_after_the_other(page_size: int) -> None:
    """But for the order of free pages: what the cache exchanges for pages of theirs may be free before or after."""
    for seed in range(40):
        scheduler = busy(seed, page_size)
        twin = copy.deepcopy(scheduler)
        draw = random.Random(seed)
        everybody = scheduler.running + scheduler.waiting
        numbers = {request.number for request in draw.sample(everybody, draw.randint(1, len(everybody)))}
        leavers, others = ([r for r in s.running + s.waiting if r.number in numbers] for s in (scheduler, twin))
        stranger = request_of(99, [1])
        scheduler.release_requests(*leavers, stranger)
        for request in others:
            twin.release_requests(request)
        assert seats(scheduler) == seats(twin)
        assert [(r.row, r.state, r.row_epoch) for r in leavers] == [(r.row, r.state, r.row_epoch) for r in others]
        assert state(scheduler.table, ordered=False) == state(twin.table, ordered=False)
        assert tree(scheduler.prefixes._cache) == tree(twin.prefixes._cache)
        scheduler.table.check()
        assert not {r.number for r in scheduler.running + scheduler.waiting} & numbers


def chunks_one_after_the_other(scheduler: Scheduler) -> list[tuple[int, int]]:
    """Each by rank takes its slots at once, and whoever finds none has room made."""
    table, chosen = scheduler.table, []
    page_size = table.allocator.page_size
    for request, share in scheduler._prompt_shares():
        done = int(table.committed_len.host[request.row])
        while request.state is RequestState.PREFILL:
            room = int(table.capacity[request.row]) - done + table.allocator.available_pages * page_size
            chunk = min(share, room)
            if chunk > 0:
                table.ensure_slots(request.row, done + chunk)
                chosen.append((request, chunk))
                break
            scheduler._make_room()
    return [(request.number, chunk) for request, chunk in chosen if request.state is RequestState.PREFILL]


@deep_cases("1")
@pytest.mark.parametrize("page_size", [1, 4])
def test_prompt_chunks_get_the_slots_that_one_after_the_other_would(page_size: int) -> None:
    draw, preempted, cut = random.Random(page_size), 0, 0
    for seed in range(150):
        scheduler = busy(seed, page_size, pages=60 // page_size, window_pages=60 // page_size)
        table = scheduler.table
        if scheduler.waiting and len(scheduler.running) < ROWS:
            scheduler.admit_requests()
        for request in scheduler.running:  # far behind, as when what they had is gone
            request.state = RequestState.PREFILL if draw.random() < 0.7 else request.state
            request.settle([1] * draw.randint(1, 6))
        table.allocator.alloc(draw.randint(0, table.allocator.available_pages))  # of somebody else
        twin = copy.deepcopy(scheduler)
        requests, chunk_len = scheduler.next_prefill()
        chunks = [(request.number, chunk) for request, chunk in zip(requests, chunk_len.tolist(), strict=True)]
        assert chunks == chunks_one_after_the_other(twin)
        assert seats(scheduler) == seats(twin)
        for mine, theirs in ((table.capacity, twin.table.capacity), (table.evicted_len, twin.table.evicted_len)):
            assert (mine == theirs).all()
        pool, other = table.allocator.primary, twin.table.allocator.primary
        assert (pool.free_pages, pool.held_pages) == (other.free_pages, other.held_pages)
        preempted += sum(request.stats.preemptions for request in scheduler.waiting)
        done = table.committed_len.host[[request.row for request in requests]]
        cut += any(chunk < min(8, r.prefill_target - n) for r, chunk, n in zip(requests, chunk_len, done, strict=True))
    assert preempted > 10 and cut > 10


def test_rows_that_are_taken_together_sample_as_asked() -> None:
    asked = [
        (SamplingParams(temperature=0.5, top_k=7), -3),
        (SamplingParams(), 1 << 61),
        (SamplingParams(min_p=0.25), 5),
    ]
    together, apart = (SamplingTable(5, torch.device("cpu")) for _ in range(2))
    together.load(ints(4, 0, 1), asked)
    for row, each in zip((4, 0, 1), asked, strict=True):
        apart.load(ints(row), [each])
    assert together.cells.host.tolist() == apart.cells.host.tolist()
    assert together.cells.host[[4, 0, 1, 2], :2].tolist() == [[-3, 7], [1 << 61, 0], [5, 0], [0, 0]]
    together.cells.check()


def test_a_cell_that_was_written_twice_has_its_last_value() -> None:
    array = MirroredArray((6,), torch.device("cpu"))
    for number, cells in enumerate((ints(5, 3, 5), ints(0), ints(3))):
        array[cells] = cells + number
    flush([array])
    assert array.tensor.tolist() == [1, 0, 0, 5, 0, 5]
    array.check()
