"""What an engine says of itself: figures that add up, a copy of them, and sizes that stay level."""

import gc
import time
import tracemalloc

import pytest
import torch

from specdec import SamplingParams
from specdec.kvcache.page_pool import PagePool
from specdec.runtime.engine_stats import REQUEST_ROUNDS_PER_CHECK, PoolStats
from specdec.runtime.request import Request

from marks import examples

NEW = 12


def test_stats_count_waiting_and_running_requests_and_held_slots(make_target, make_engine, random_prompt) -> None:
    engine = make_engine(make_target("gemma4-e2b"), "ngram", max_batch_size=2, full_slots=200, swa_slots=120)
    nothing = engine.stats()
    assert (nothing.waiting, nothing.running, nothing.finished, nothing.aborted, nothing.batches) == (0,) * 5
    assert nothing.full_slots == PoolStats(0, 0, 0, 200) and nothing.swa_slots == PoolStats(0, 0, 0, 120)
    handles = engine.submit_many([random_prompt(n) for n in (20, 30, 9)], SamplingParams(max_new_tokens=NEW))
    for _ in range(4):
        engine.step()
    busy = engine.stats()
    assert (busy.waiting, busy.running, busy.finished) == (1, 2, 0)
    assert 50 <= busy.full_slots.held <= busy.full_slots.peak <= 200 and 0 < busy.swa_slots.held < busy.full_slots.held
    handles[0].abort()
    while engine.step():
        pass
    done = engine.stats()
    assert (done.waiting, done.running, done.finished, done.aborted) == (0, 0, 2, 1)
    assert done.full_slots.held == 0 and done.full_slots.peak >= busy.full_slots.peak
    assert done.output_tokens == 2 * NEW  # of those that ended by themselves


def test_a_long_output_holds_a_window_of_swa_slots_where_there_is_room_for_more(
    make_target, make_engine, random_prompt
) -> None:
    engine = make_engine(make_target("gemma4-e2b"), full_slots=400, swa_slots=400)
    assert engine.table.retain[1] < 40
    engine.generate(random_prompt(5), SamplingParams(max_new_tokens=50, ignore_eos=True))
    held = engine.stats()
    assert held.full_slots.peak >= 50 and held.swa_slots.peak <= engine.table.retain[1] + engine.table.lookahead + 4


def test_an_idle_engine_holds_no_request(make_target, make_engine, random_prompt) -> None:
    engine = make_engine(make_target("llama"), "ngram")
    engine.generate([random_prompt(47)] * 2, SamplingParams(max_new_tokens=NEW))
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is Request and len(each.prompt) == 47]


def test_times_add_up(make_target, make_engine, random_prompt) -> None:
    """One row: the second waits until the first has ended."""
    engine = make_engine(make_target("llama"), max_batch_size=1)
    began = time.perf_counter()
    one, two = engine.generate([random_prompt(9), random_prompt(12)], SamplingParams(max_new_tokens=NEW))
    assert two.stats.first_token_seconds + two.stats.decode_seconds < time.perf_counter() - began
    assert 0 < one.stats.queue_seconds < one.stats.first_token_seconds < two.stats.queue_seconds
    assert two.stats.queue_seconds < two.stats.first_token_seconds
    stats = engine.stats()
    assert stats.mean_queue_seconds == pytest.approx((one.stats.queue_seconds + two.stats.queue_seconds) / 2)
    assert stats.mean_first_token_seconds == pytest.approx(
        (one.stats.first_token_seconds + two.stats.first_token_seconds) / 2
    )
    assert stats.batches == stats.rounds == 2 * (NEW - 1) and stats.requests_per_batch == 1
    assert stats.batch_seconds == pytest.approx(stats.draft_seconds + stats.verify_seconds + stats.other_seconds)
    assert stats.batch_milliseconds == pytest.approx(1e3 * stats.batch_seconds / stats.batches)


def test_cache_hits_are_a_share_of_the_prompts(make_target, make_engine, random_prompt) -> None:
    engine = make_engine(make_target("llama"))
    for _ in range(2):
        engine.generate(random_prompt(21), SamplingParams(max_new_tokens=2))
    assert engine.stats().cached_tokens == 20 and engine.stats().cache_hit_rate == 20 / 42


def test_a_round_of_many_requests_is_one_batch(make_target, make_engine, random_prompt) -> None:
    engine = make_engine(make_target("llama"), max_batch_size=3)
    engine.generate([random_prompt(9)] * 3, SamplingParams(max_new_tokens=NEW))
    assert (engine.stats().batches, engine.stats().rounds) == (NEW - 1, 3 * (NEW - 1))
    assert engine.stats().requests_per_batch == 3


def test_a_preemption_starts_no_clock_again(make_target, make_engine, random_prompt) -> None:
    engine = make_engine(make_target("gemma4-e2b"), max_batch_size=3, full_slots=60, swa_slots=60)
    outputs = engine.generate([random_prompt(n) for n in (11, 25, 14)], SamplingParams(max_new_tokens=NEW))
    assert engine.stats().preemptions > 0
    for out in outputs:
        assert 0 < out.stats.queue_seconds < out.stats.first_token_seconds


def test_stats_return_a_copy(make_target, make_engine, random_prompt) -> None:
    engine = make_engine(make_target("llama"), "ngram")
    engine.generate(random_prompt(9), SamplingParams(max_new_tokens=NEW))
    mine = engine.stats()
    mine.rounds = mine.batches = mine.finished = 0
    mine.accepted_counts.clear()
    kept = engine.stats()
    assert kept.rounds > 0 and kept.batches > 0 and kept.finished == 1 and kept.accepted_counts


def test_the_peak_is_of_what_is_held_by_rows() -> None:
    pool = PagePool("full", 8)
    pages = pool.alloc(5)
    pool.cache_pages(pages[:2])
    pool.free(pages)
    assert PoolStats.from_pools([pool], 4) == PoolStats(0, 20, 8, 32)
    pool.share(pages[:2])
    assert PoolStats.from_pools([pool], 4) == PoolStats(8, 20, 0, 32)
    pool.alloc(6)
    assert PoolStats.from_pools([pool], 4) == PoolStats(32, 32, 0, 32)
    assert PoolStats.from_pools([], 4) == PoolStats(0, 0, 0, 0)


def test_without_drafts_nothing_is_warned_of(make_target, make_engine, random_prompt, caplog) -> None:
    engine = make_engine(make_target("llama"), max_batch_size=32)
    engine.generate([random_prompt(9)] * 32, SamplingParams(max_new_tokens=40, ignore_eos=True))
    assert engine.stats().rounds > REQUEST_ROUNDS_PER_CHECK and not caplog.records


@pytest.mark.deep
def test_memory_is_level_over_many_requests(make_target, make_assistant, make_engine, random_prompt) -> None:
    """After a warm-up neither objects nor tensors nor bytes grow with the requests that an engine has served.

    Fewer than one object for four requests, and 100 bytes a request.
    """
    count = examples(600, 2000)
    model = make_target("gemma4-e2b")
    engine = make_engine(model, make_assistant(model), max_batch_size=32, full_slots=400, swa_slots=300)

    def serve(count: int, seed: int) -> None:
        for first in range(0, count, 100):
            prompts = [random_prompt(1 + n % 12, seed=seed + first + n) for n in range(100)]
            handles = engine.submit_many(prompts, SamplingParams(max_new_tokens=2, ignore_eos=True))
            for handle in handles[::10]:
                handle.abort()
            while engine.step():
                pass

    def level() -> tuple[int, int, int]:
        gc.collect()
        objects = gc.get_objects()
        tensors = sum(
            issubclass(type(thing), torch.Tensor) for thing in objects
        )  # some of torch's warn when asked for a class
        return len(objects), tensors, tracemalloc.get_traced_memory()[0]

    serve(300, 0)
    tracemalloc.start()
    try:
        serve(100, 5000)
        before = level()
        serve(count, 10_000)
        after = level()
    finally:
        tracemalloc.stop()
    grown = [b - a for a, b in zip(before, after, strict=True)]
    assert grown[0] < count / 4 and grown[1] <= 2 and grown[2] < 100 * count, f"{grown=} of objects, tensors, bytes"
    assert engine.stats().finished + engine.stats().aborted == 400 + count


@pytest.mark.slow
def test_thousands_of_tokens_hold_a_window_of_swa_slots(make_target, make_engine, random_prompt) -> None:
    """However long a request is: its window, a chunk on its way, a page of slack at both ends."""
    page_size = 4
    longest = examples(600, 8000)
    model = make_target("gemma4-e2b", max_position_embeddings=8192)
    sizes = {"max_model_len": 8100, "prefill_chunk": 256, "page_size": page_size, "max_batch_size": 3}
    engine = make_engine(model, "ngram", **sizes, full_slots=3 * 8192, swa_slots=8192, max_prefill_tokens=768)
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    [out] = engine.generate(random_prompt(longest), params)
    alone = engine.stats()
    assert len(out.token_ids) == 20 and alone.full_slots.peak >= longest
    assert 256 < alone.swa_slots.peak <= engine.table.retain[1] + 256 + engine.table.lookahead + 4 * page_size
    engine.generate([random_prompt(longest + n, seed=1 + n) for n in range(3)], params)
    together = engine.stats()
    assert together.full_slots.peak >= 3 * longest
    assert together.swa_slots.peak <= 3 * (engine.table.retain[1] + 256 + engine.table.lookahead + 4 * page_size)
