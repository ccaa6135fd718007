"""Counts the cost of admission: comparisons of prompts, pages adopted, cells sent to the device. Also tests sharing.

Requests with one beginning are the usual case of a server: every chat starts with the system prompt.
"""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_rig import MirroredArray, PrefixCache, RequestTable, make_allocator

from specdec import SamplingParams, SpecConfig
from specdec.runtime import scheduler as scheduling
from specdec.runtime.calls.inbox import Inbox

from engine_internals import Detokenizer, PrefixPolicy, PromptBudget, PromptGap, Request, RequestState, Scheduler
from marks import examples


def make(
    rows: int,
    pages: int,
    *,
    window: int | None = None,
    max_len: int = 600,
    chunk: int = 64,
    page_size: int = 1,
    pairs: bool = False,
) -> Scheduler:
    allocator = make_allocator(pages, [window] if window else [], page_size=page_size)
    table = RequestTable(allocator, max_requests=rows, max_len=max_len, lookahead=2)
    cache = SimpleNamespace(table=table, models=[None] * (1 + pairs), state_cache=lambda: None)
    prefixes = PrefixPolicy(cache, lambda: 0)  # type: ignore[arg-type]
    gap = PromptGap(PromptBudget(10**6, 10**6, chunk))
    return Scheduler(table, prefixes=prefixes, max_model_len=max_len, prompt_gap=gap)


def submit(scheduler: Scheduler, number: int, prompt: list[int], *, priority: int = 0, **params: Any) -> Request:
    params = {"max_new_tokens": 8, "ignore_eos": True} | params
    request = Request(prompt, SamplingParams(**params), 0, Detokenizer(None), frozenset())
    request.id, request.priority = number, priority
    scheduler.submit(request)
    return request


def prefill(scheduler: Scheduler) -> int:
    """One step's prompt chunks; requests that are through decode. -> tokens computed"""
    requests, chunk_len = scheduler.next_prefill()
    if requests:
        scheduler.commit_chunks(requests, chunk_len)
    for request in requests:
        if request.state is RequestState.DECODE and request.num_output == 0:
            request.settle([1])
    return int(chunk_len.sum())


def admit_and_read(scheduler: Scheduler) -> None:
    """Admit what fits, and compute its prompts to the end."""
    scheduler.admit_requests()
    while prefill(scheduler):
        pass


class Counts:
    """comparisons: of two keys. adopted: pages. cells: of the device's arrays that were written."""

    def __init__(self) -> None:
        self.comparisons = self.adopted = self.cells = 0

    def of(self, step: Any) -> tuple[int, int, int]:
        self.comparisons = self.adopted = self.cells = 0
        step()
        return self.comparisons, self.adopted, self.cells


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    counted = Counts()
    compare, adopt, write = PrefixCache._common_pages, RequestTable.adopt_pages, MirroredArray.__setitem__

    def counting_compare(cache: PrefixCache, *keys: np.ndarray) -> int:
        counted.comparisons += 1
        return compare(cache, *keys)

    def counting_adopt(table: RequestTable, row: int, pages: np.ndarray) -> None:
        counted.adopted += len(pages)
        adopt(table, row, pages)

    def counting_write(array: MirroredArray, index: Any, value: Any) -> None:
        counted.cells += array.host[index].size
        write(array, index, value)

    monkeypatch.setattr(PrefixCache, "_common_pages", counting_compare)
    monkeypatch.setattr(RequestTable, "adopt_pages", counting_adopt)
    monkeypatch.setattr(MirroredArray, "__setitem__", counting_write)
    return counted


SYSTEM = list(range(100, 140))


@pytest.mark.parametrize("count", [50, 200])
def test_prompts_with_one_beginning_are_not_compared_with_each_other(count: int, counts: Counts):
    """Each was compared with every running one: 200 admitted in a step made 20,000 comparisons."""
    scheduler = make(rows=count + 1, pages=200 * count)
    submit(scheduler, 0, [*SYSTEM, 9])
    admit_and_read(scheduler)  # the system prompt is cached
    for number in range(count):
        submit(scheduler, 1 + number, [*SYSTEM, *([1000 + number] * 20)])
    comparisons, adopted, _ = counts.of(scheduler.admit_requests)
    assert len(scheduler.running) == count + 1
    assert adopted == count * len(SYSTEM)
    assert comparisons <= 8 * count


@pytest.mark.parametrize("count", [50, 200])
def test_waiting_for_a_prompt_in_progress_is_looked_up_once(count: int, counts: Counts):
    """In every step, each request that waited for the system prompt was compared again."""
    scheduler = make(rows=count + 1, pages=200 * count, max_len=2000)
    system = list(range(100, 1100))
    for number in range(count):
        submit(scheduler, number, [*system, 2000 + number])
    first, _, _ = counts.of(scheduler.admit_requests)
    assert [request.id for request in scheduler.running] == [0]
    assert first <= 8 * count
    for _ in range(5):
        prefill(scheduler)
        comparisons, _, _ = counts.of(scheduler.admit_requests)
        assert comparisons == 0 and len(scheduler.running) == 1
    while len(scheduler.running) == 1:
        prefill(scheduler)
        comparisons, adopted, _ = counts.of(scheduler.admit_requests)
    assert comparisons <= 12 * count
    assert (len(scheduler.running), adopted) == (count, (count - 1) * len(system))


@pytest.mark.parametrize("window", [None, 8])
def test_the_head_of_the_line_adopts_nothing_while_it_does_not_fit(window: int | None, counts: Counts):
    """It adopted its cached prefix and dropped it again, every step: 64,000 cells for 32,000 tokens."""
    scheduler = make(rows=4, pages=560, window=window)
    prompt = list(range(400))
    first = submit(scheduler, 0, [*prompt, 7])
    admit_and_read(scheduler)
    scheduler.release_requests(first)
    holder = submit(scheduler, 1, list(range(1000, 1150)))
    admit_and_read(scheduler)
    waiter = submit(scheduler, 2, [*prompt, *range(2000, 2030)])
    for _ in range(5):
        assert counts.of(scheduler.admit_requests)[1:] == (0, 0)
        assert scheduler.waiting == [waiter] and waiter.row == -1
        scheduler.table.check()
    scheduler.release_requests(holder)
    assert counts.of(scheduler.admit_requests)[1] == 400
    assert scheduler.running == [waiter] and waiter.stats.cached_tokens == 400
    scheduler.table.check()


def test_a_full_pool_is_noticed_before_prompts_are_compared(counts: Counts):
    scheduler = make(rows=4, pages=202)
    submit(scheduler, 0, list(range(200)), max_new_tokens=2)
    admit_and_read(scheduler)
    scheduler.next_decode()
    submit(scheduler, 1, [*range(200)], max_new_tokens=2)
    scheduler.table.committed_len[np.array([0])] = scheduler.table.committed_len.host[0] + 1  # one more is due
    assert counts.of(scheduler.admit_requests) == (0, 0, 0)


def test_a_thousand_waiting_requests_are_counted_once_an_admission(counts: Counts):
    """Their passes too: they were gone through for each of those admitted."""
    scheduler = make(rows=1000, pages=30_000)
    looked = 0

    class Number(int):
        def __lt__(self, other: object) -> bool:
            nonlocal looked
            looked += 1
            return int(self) < int(other)  # type: ignore[call-overload]

    for number in range(1000):
        submit(scheduler, number, [number] * 20).id = Number(number)
    scheduler.admit_requests()
    assert len(scheduler.running) == 1000
    assert looked < 100_000, "each was looked at for each of those admitted"


def test_requests_that_wait_are_ranked_again_only_if_they_were_overtaken(monkeypatch: pytest.MonkeyPatch):
    """All that waited were sorted again whenever one was admitted: with 10,000, four milliseconds of a step."""
    scheduler = make(rows=1, pages=2000)
    for number in range(300):
        submit(scheduler, number, [number] * 20, priority=number // 299)
    ranked: list[int] = []
    rank = scheduling.rank
    monkeypatch.setattr(scheduling, "rank", lambda request: ranked.append(request.id) or rank(request))
    for number in range(3):
        scheduler.admit_requests()
        assert [request.id for request in scheduler.running] == [number]
        scheduler.release_requests(*scheduler.running)
    assert len(ranked) < 30
    submit(scheduler, 300, [300] * 20)  # it overtakes the last one
    scheduler.release_requests(*scheduler.waiting[:-2])
    scheduler.admit_requests()
    assert [request.times_overtaken for request in scheduler.waiting] == [1]


def test_requests_that_are_aborted_together_are_released_in_one_call():
    """Each was searched for among all that wait: 10,000 aborts took most of a second, in one turn."""
    inbox, released = inbox_of(make(rows=2, pages=2000))
    requests = [Request([number], SamplingParams(), 0, Detokenizer(None), frozenset()) for number in range(50)]
    inbox.submit(requests)
    inbox.process()
    inbox._steps.scheduler.admit_requests()
    inbox.abort_later(7)
    inbox.abort_later(60)
    inbox.abort_unended(requests)
    inbox.process()
    assert released == [[7, *range(7), *range(8, 50)]]
    assert inbox.is_idle and inbox._steps.scheduler.idle and {each.finish_reason for each in requests} == {"abort"}


def test_an_abort_is_kept_if_its_request_arrives_while_others_are_released():
    """The abort was dropped, since the request was not in the scheduler yet, and the request ran to its end."""
    first, late = (Request([1], SamplingParams(), 0, Detokenizer(None), frozenset()) for _ in range(2))

    def arrive_and_leave(*_: Request) -> None:
        if late.id < 0:
            inbox.submit([late])
            inbox.abort(late.id)

    inbox, _ = inbox_of(make(rows=2, pages=2000), on_release=arrive_and_leave)
    inbox.submit([first])
    inbox.process()
    inbox.abort_later(first.id)
    inbox.process()
    inbox.process()
    assert inbox.is_idle and late.finish_reason == "abort"


def inbox_of(scheduler: Scheduler, on_release: Callable[..., None] = lambda *_: None) -> tuple[Inbox, list[list[int]]]:
    """An inbox that processes nothing by itself, and the numbers of the requests in each call that releases some."""
    released: list[list[int]] = []
    release = scheduler.release_requests

    def counted(*requests: Request) -> None:
        released.append([request.id for request in requests])
        on_release(*requests)
        release(*requests)

    scheduler.release_requests = counted  # type: ignore[method-assign]
    totals = SimpleNamespace(count=lambda request: None)
    steps = SimpleNamespace(
        scheduler=scheduler, drop_lost=lambda: None, launches=SimpleNamespace(totals=totals), restart=None
    )
    return Inbox(steps, lambda: False), released  # type: ignore[arg-type]


# salts


@pytest.mark.parametrize("salts", [(None, "a"), ("a", None), ("a", "b")])
def test_requests_with_different_salts_share_no_page(salts: tuple[str | None, str | None]):
    scheduler = make(rows=4, pages=2000)
    prompt = list(range(60))
    requests = []
    for number, salt in enumerate((*salts, salts[0])):
        requests.append(submit(scheduler, number, prompt, cache_salt=salt))
        admit_and_read(scheduler)
    assert [request.stats.cached_tokens for request in requests] == [0, 0, 59]
    owned = [set(scheduler.table.pages(request.row, 59).tolist()) for request in requests]
    assert owned[0] == owned[2] and not owned[0] & owned[1]
    scheduler.table.check()
    scheduler.release_requests(*requests)
    scheduler.prefixes.clear()
    assert scheduler.table.allocator.primary.free_pages == 2000


def test_no_request_waits_for_the_prompt_of_another_salt():
    """That it waits would tell that the other has the same prompt."""
    scheduler = make(rows=4, pages=2000)
    prompt = list(range(200))
    for number, salt in enumerate(("a", "b", None, "a")):
        submit(scheduler, number, prompt, cache_salt=salt)
    scheduler.admit_requests()
    assert [request.id for request in scheduler.running] == [0, 1, 2]  # the last one's row is kept for it
    assert prefill(scheduler) == 3 * 64


def test_a_salt_that_looks_like_a_page_names_another_text():
    scheduler = make(rows=4, pages=2000)
    page = np.array([65], dtype=np.int64).tobytes().decode()
    one = submit(scheduler, 0, [65, *range(30)])
    two = submit(scheduler, 1, [65, *range(30)], cache_salt=page)
    scheduler.admit_requests()
    prefill(scheduler)
    assert not set(scheduler.table.pages(one.row, 31)) & set(scheduler.table.pages(two.row, 31))
    scheduler.table.check()


def test_requests_that_end_together_are_all_cached():
    """Their outputs too: two tokens each, of which the second has no K/V yet."""
    scheduler = make(rows=4, pages=2000)
    prompts = [list(range(first, first + 60)) for first in (0, 100)]
    requests = [submit(scheduler, number, prompt) for number, prompt in enumerate(prompts)]
    scheduler.admit_requests()
    prefill(scheduler)
    scheduler.next_decode()
    scheduler.table.commit_chunk_on_host(np.array([0, 1]), np.array([1, 1]))
    for request in requests:
        request.settle([2])
    scheduler.release_requests(*requests)
    again = [submit(scheduler, 2 + number, [*prompt, 1, 2]) for number, prompt in enumerate(prompts)]
    scheduler.admit_requests()
    assert [request.stats.cached_tokens for request in again] == [61, 61]


@pytest.mark.parametrize("pairs", [False, True])
def test_a_key_that_grows_is_that_of_all_tokens(pairs: bool):
    scheduler = make(rows=1, pages=2000, pairs=pairs)
    request, prefixes = submit(scheduler, 0, [3, 5, 7], max_new_tokens=9), scheduler.prefixes
    for emitted in ([], [4], [9], [8, 2, 6]):
        if emitted:
            request.settle(emitted)
        for _ in range(2):
            assert prefixes._key(request).tolist() == prefixes._cache.key(request.tokens).tolist()


# no request starves, with any shared prefix


@settings(max_examples=examples(8, 25), deadline=None, derandomize=True, database=None)
@given(st.integers(0, 2**32 - 1))
def test_every_request_gets_its_turn_and_the_books_hold(seed: int):
    """Salts, priorities at both ends, common beginnings, little room: each is passed by a bounded number of later ones,
    and prompts in progress are those of running requests, found as by comparing with each of them."""
    draw = random.Random(seed)
    page_size = draw.choice((1, 4))
    sizes = {"pages": draw.randint(100, 200) // page_size, "window": draw.choice((None, 6)), "page_size": page_size}
    scheduler = make(rows=3, max_len=90, chunk=16, **sizes)
    heads = [[draw.randrange(50) for _ in range(60)] for _ in range(2)]
    left, number, ended = 30, 0, list[Request]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduling, "OVERTAKEN_PER_LEVEL", 2)
        for _ in range(2000):
            while left and draw.random() < 0.5:
                prompt = draw.choice(heads)[: draw.randint(0, 60)] + [draw.randrange(50) for _ in range(9)]
                salt = draw.choice((None, "a", "b"))
                submit(scheduler, number, prompt, priority=draw.choice((-3, 0, 3)), cache_salt=salt)
                left, number = left - 1, number + 1
            scheduler.next_decode()
            oldest = min(scheduler.waiting, key=lambda request: request.id, default=None)
            scheduler.admit_requests()
            assert oldest is None or oldest.times_overtaken <= 2 * 6 + 6  # those past it for a prompt in progress
            prefill(scheduler)
            for request in list(scheduler.running):
                if request.state is RequestState.DECODE and draw.random() < 0.3:
                    scheduler.release_requests(request)
                    ended.append(request)
            scheduler.table.check()
            scheduler.prefixes.check(scheduler.running)
            same_as_comparing_with_each(scheduler)
            if not left and scheduler.idle:
                break
    assert len(ended) == 30, "a request never ended"
    assert scheduler.table.allocator.primary.held_pages == 0


def same_as_comparing_with_each(scheduler: Scheduler) -> None:
    """The common parts with running requests' prompts of the same salt."""
    prefixes = scheduler.prefixes
    assert prefixes._cache is not None
    for request in scheduler.waiting:
        key = prefixes._adoptable(request)
        makers = prefixes._in_progress._readers.values()
        salt = (request.params.cache_salt or "").encode()
        common = {
            maker.request.id: prefixes._cache.common_len(key, maker.key) for maker in makers if maker.salt == salt
        }
        for least in (1, 9):
            found = {maker.request.id: slots for slots, maker in prefixes._in_progress.sharing(key, salt, least)}
            assert found == {number: slots for number, slots in common.items() if slots >= least}


def test_a_request_is_admitted_only_where_its_first_round_fits_too(make_target, make_engine, random_prompt) -> None:
    """22 slots are left: enough for the second prompt, whose first round would then preempt it."""
    engine = make_engine(make_target("llama"), "ngram", spec=SpecConfig(3), full_slots=46)
    engine.generate([random_prompt(20), random_prompt(20, seed=1)], SamplingParams(max_new_tokens=8, ignore_eos=True))
    assert engine.stats().preemptions == 0
