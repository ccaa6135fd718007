"""All rows of a step at once: slots, claims on pages, chunks, tokens and settings, in cases to check by eye; and
figures kept by rows, which are those of each request.

Random histories of many rows at once are in `test_kv_state_machine.py` and `test_scheduler_machine.py`.
"""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kv_rig import SWA, MirroredArray, PagePool, RequestTable, ints, make_allocator

from specdec import SamplingParams, SpecConfig
from specdec.errors import DoubleFreeError, KVStateError, OutOfSlotsError
from specdec.kvcache.table import PREALLOC_SLOTS
from specdec.runtime.request_output import RowTotals
from specdec.runtime.rounds.result import DraftShape
from specdec.sampling.grammars.grammar import GrammarState
from specdec.sampling.grammars.token_rules import TokenRules
from specdec.sampling.sampling_table import SamplerFeatures, SamplingTable

from engine_internals import (
    Detokenizer,
    PromptBudget,
    PromptGap,
    Request,
    RequestState,
    RoundResult,
    Scheduler,
    record_round,
    restricted,
    settle_round,
)
from marks import examples
from snapshots import contents

LOOKAHEAD = 2


def make(
    page_size: int = 1, *, pages: int = 20, window_pages: int | None = None, window: int | None = 3, rows: int = 3
) -> RequestTable:
    """`retain` is the window, rows are 24 slots wide."""
    allocator = make_allocator(pages, [window] if window else [], window_pages, page_size=page_size)
    table = RequestTable(allocator, max_requests=rows, max_len=22, lookahead=LOOKAHEAD, extra_keys=1)
    for _ in range(rows):
        table.open_row()
    return table


def grow(table: RequestTable, length: list[int]) -> None:
    """So many more tokens are committed in each row."""
    rows = np.arange(len(length))
    table.ensure_slots(rows, table.committed_len.host[rows] + ints(*length))
    table.commit_chunk_on_host(rows, ints(*length))


# slots for all


def test_every_row_gets_the_pages_that_it_lacks():
    """Pages of 4: row 0 wants 5 slots and has none, row 1 has 4 of the 4 that it wants, row 2 wants 9 and has 4."""
    table = make(page_size=4)
    table.ensure_slots(1, 4)
    table.ensure_slots(2, 4)
    rows, length = ints(0, 1, 2), ints(5, 4, 9)
    assert table.pages_needed(rows, length).tolist() == [2, 0, 2]
    table.ensure_slots(rows, length)
    assert table.slots.host[0, :9].tolist() == [12, 13, 14, 15, 16, 17, 18, 19, 0]
    assert table.slots.host[1, :5].tolist() == [4, 5, 6, 7, 0]
    assert table.slots.host[2, :13].tolist() == [8, 9, 10, 11, 20, 21, 22, 23, 24, 25, 26, 27, 0]
    assert table.capacity.tolist() == [8, 4, 12, 0]
    assert (table.slots.tensor == torch.from_numpy(table.slots.host)).all()
    table.check()


def test_a_row_too_long_or_closed_is_named_and_no_row_gets_a_page():
    table = make()
    table.close_rows(1)
    before = contents(table)
    with pytest.raises(OutOfSlotsError, match="row 2: 25 slots needed, a row has 24"):
        table.ensure_slots(ints(0, 2), ints(3, 25))
    for row in (1, 3, 4, -1):
        with pytest.raises(KVStateError, match=f"row {row} is not open"):
            table.ensure_slots(ints(0, row), ints(3, 3))
    assert contents(table) == before


# claims on one page


def test_a_page_is_free_once_every_holder_has_released_it():
    pool = PagePool("full", 4)
    pool.alloc(3)
    pool.share(ints(2, 3))
    pool.cache_pages(ints(3))
    before = contents(pool)
    with pytest.raises(DoubleFreeError, match=r"pages \[2, 1, 2, 2\] are not held, or named twice"):
        pool.free(ints(2, 1, 2, 2))
    assert contents(pool) == before
    assert pool.free(ints(2, 1, 3)).tolist() == [False, True, False]
    assert pool.row_refs(ints(1, 2, 3)).tolist() == [0, 1, 1]
    pool.share(ints(2, 3))
    assert pool.free(ints(3, 2, 2, 3)).tolist() == [False, True, True, False]  # the cache has page 3
    assert (pool.free_pages, pool.evictable_pages, pool.held_pages) == (3, 1, 0)
    pool.check()


def test_rows_name_a_page_once_each() -> None:
    """Rows 0 and 1 begin with page 1; row 1 has given up its peer."""
    table = make(2)
    table.ensure_slots(0, 2)
    table.commit_chunk_on_host(ints(0), ints(2))
    table.adopt_pages(1, table.pages(0, 1))
    free, pages, before = table.allocator.free, ints(1, 1), contents(table)
    for rows in (ints(0, 0), ints(1, 1)):
        with pytest.raises(DoubleFreeError, match="named twice"):
            free(pages, rows=rows)
    with pytest.raises(DoubleFreeError, match="named twice"):
        table.close_rows(ints(0, 0))
    with pytest.raises(DoubleFreeError, match="not held"):
        free(ints(1, 1, 1), rows=ints(0, 1, 2))
    assert contents(table) == before
    free(pages, rows=ints(0, 1), evicted=np.array([[False, False], [True, False]]))
    assert table.allocator.primary.held_pages == 0
    assert table.allocator.pools[SWA].row_refs(ints(1)).tolist() == [1]


# who runs


def request_of(number: int = 0, prompt: int = 3, **params: object) -> Request:
    asked = SamplingParams(**{"max_new_tokens": 9, "ignore_eos": True, **params})
    request = Request(list(range(10, 10 + prompt)), asked, 0, Detokenizer(Letters()), frozenset())
    request.id = number
    return request


class Letters:
    """A tokenizer of single letters."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(97 + token) for token in ids)


def scheduler_of(table: RequestTable, prompts: list[int]) -> Scheduler:
    """So many tokens of each request are committed; those of odd length have more of their prompt to come."""
    scheduler = Scheduler(table, max_model_len=22, prompt_gap=PromptGap(PromptBudget(8, 8, 8)))
    for row, length in enumerate(prompts):
        request = request_of(row, length)
        request.assign_row(row)
        request.state = RequestState.PREFILL if length % 2 else RequestState.DECODE
        scheduler.running.append(request)
    return scheduler


def test_only_the_last_request_is_preempted_and_only_if_slack_is_not_enough():
    """Rows of 6 tokens and 14 slots: 2 each are asked for. Of 20 in the SWA pool all are taken until slack is given
    up."""
    table = make(pages=60, window_pages=20, window=3)
    scheduler = scheduler_of(table, [6, 6, 6])
    grow(table, [6, 6, 6])
    assert [r.id for r in scheduler.next_decode()] == [0, 1, 2]  # each gives up 6 - 3 tokens
    assert table.evicted_len[SWA, :3].tolist() == [3, 3, 3]
    table.check()
    table = make(pages=22, window_pages=60, window=3)
    scheduler = scheduler_of(table, [6, 6, 6])
    grow(table, [6, 6, 6])
    assert [r.id for r in scheduler.next_decode()] == [0, 1]
    assert [r.id for r in scheduler.waiting] == [2] and scheduler.waiting[0].stats.preemptions == 1
    assert table.capacity.tolist() == [8, 8, 0, 0]
    table.check()


@pytest.mark.parametrize(("window_pages", "changed"), [(400, 5), (60, 40)])
def test_most_rounds_change_no_slot_where_there_is_ample_room(window_pages: int, changed: int):
    """Rows that gain a token each round get slots, and lose peers, every sixteen tokens; where a pool is short, in
    every round, and none more than it needs."""
    allocator = make_allocator(400, [3], window_pages)
    table = RequestTable(allocator, max_requests=2, max_len=80, lookahead=LOOKAHEAD, extra_keys=2)
    rows, found = ints(table.open_row(), table.open_row()), []
    for _ in range(40):
        before = table.capacity.tolist(), table.evicted_len.tolist()
        table.ensure_slots(rows, table.committed_len.host[rows] + LOOKAHEAD, ahead=True)
        table.commit_chunk_on_host(rows, ints(1, 1))
        table.evict_unseen(rows, lazily=True)
        found.append((table.capacity.tolist(), table.evicted_len.tolist()) != before)
        more = PREALLOC_SLOTS if window_pages == 400 else 0
        assert (table.capacity[rows] - table.committed_len.host[rows] < LOOKAHEAD + more).all()
        table.check()
    assert sum(found) == changed
    table.evict_unseen(rows)
    assert table.evicted_len[1, rows].tolist() == [40 - 4 - 1] * 2  # a window of 3, 2 keys more, the slack


def test_prompts_get_the_free_pages_and_then_those_of_the_last_request() -> None:
    """Three read 8 tokens each, where 10 pages are free: of 8, 2 and none. The fourth gives up its 3."""
    table = make(pages=13, window=None, rows=4)
    grow(table, [0, 0, 0, 3])
    scheduler = Scheduler(table, max_model_len=22, prompt_gap=PromptGap(PromptBudget(24, 24, 8)))
    for row in range(4):
        request = request_of(row, 9)
        request.assign_row(row)
        request.state = RequestState.PREFILL
        scheduler.running.append(request)
    requests, chunk_len = scheduler.next_prefill()
    assert [request.id for request in requests] == [0, 1, 2] and chunk_len.tolist() == [8, 2, 3]
    assert [request.id for request in scheduler.waiting] == [3] and table.capacity[:4].tolist() == [8, 2, 3, 0]
    table.check()


# what a round brought


def result_of(tokens: list[list[int]], length: list[int], **seconds: float) -> RoundResult:
    chain = np.arange(len(tokens[0])) * np.ones((len(tokens), 1), dtype=np.int64)
    stages = {"draft": 0.0, "verify": 0.0, "other": 0.0, **seconds}
    drafts, forced = ints(*[2] * len(tokens)), ints(*[0] * len(tokens))
    return RoundResult(ints(*length), chain, np.array(tokens), [[] for _ in tokens], drafts, stages, forced)


def test_a_round_is_settled_for_all():
    """Rows 2 and 0 gain one token and three; the last of row 0 would be one too many."""
    table = make(window=None)
    grow(table, [3, 4, 5])
    table.ensure_slots(ints(0, 2), ints(6, 8))
    tokens = MirroredArray((4, 24), torch.device("cpu"))
    requests = [request_of(0, 5), request_of(1, 3, max_new_tokens=3)]
    for request, row in zip(requests, (2, 0), strict=True):
        request.row = row
        request.settle([1])
    before = [request.stats for request in requests]
    round = SimpleNamespace(cache=SimpleNamespace(table=table), tokens=tokens)
    rows, result = ints(2, 0), result_of([[5, 6, 7], [2, 3, 4]], [1, 3], verify=1.0)
    settle_round(round, requests, rows, result, RowTotals(4).after_round(rows, result))
    assert tokens.host[:3, :9].tolist() == [[0, 0, 0, 0, 2, 3, 4, 0, 0], [0] * 9, [0, 0, 0, 0, 0, 0, 5, 0, 0]]
    assert [request.output_ids for request in requests] == [[1, 5], [1, 2, 3]]
    assert [request.finish_reason for request in requests] == ["", "length"]
    assert table.committed_len.host.tolist() == [6, 4, 6, 0]
    assert [request.stats.verify_seconds for request in requests] == [0.5, 0.5]
    assert [request.stats.output_tokens for request in requests] == [2, 3]
    assert [(stats.rounds, sum(stats.accepted_counts)) for stats in before] == [(0, 0)] * 2, "settled before"


def test_an_interrupted_step_moves_no_reader(monkeypatch):
    """The next step must know nothing of "b", which was not to be: "ac" is no stop string, and "bc" would be."""
    request = request_of(stop="bc")
    request.settle([0])
    settled, before = request.settled, contents(request.settled.reader)
    monkeypatch.setattr(Request, "settled", property(Request.settled.__get__, lambda *_: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        request.settle([1], row_totals=RowTotals(1))
    assert request.settled is settled and contents(settled.reader) == before
    monkeypatch.undo()
    request.settle([2])
    assert (request.output_ids, request.finish_reason) == ([0, 2], "")
    request.settle([1, 2, 3])
    assert (request.output_ids, request.finish_reason) == ([0, 2, 1, 2], "stop")


@pytest.mark.parametrize("draft", [SpecConfig(4), SpecConfig(3, 2, 6), SpecConfig(1), SpecConfig(3, 1, 3)])
def test_only_the_end_of_an_output_shortens_a_draft(draft):
    sizes = [DraftShape.from_spec(draft, depth) for depth in range(9)]
    assert [(size.num_steps, size.num_nodes) for size in sizes] == [draft.shortened(depth) for depth in range(9)]
    assert {size.topk for size in sizes} == {draft.topk} and sizes[-1] == DraftShape.from_spec(draft)


def test_restricted_requests_are_those_with_active_rules():
    """Rules that no longer hold are dropped with the token that ends them, not asked in every step."""
    requests, ends = [request_of(number) for number in range(3)], frozenset([3])
    for request, least in ((requests[1], 1), (requests[2], 2)):
        rules = TokenRules.from_params(SamplingParams(min_tokens=least), ends, 64)
        request.settled = request.settled._replace(grammar_state=GrammarState(None, None, ends, rules, least))
    assert restricted(requests) == requests[1:]
    for left in ([requests[2]], []):
        for request in requests:
            request.settle([1])
        assert restricted(requests) == left


def test_sampler_features_are_those_of_the_batch_at_hand():
    table = SamplingTable(4, torch.device("cpu"))
    greedy, sampled, biased = SamplingParams(), SamplingParams(temperature=0.5), SamplingParams(logit_bias={3: 1.0})
    equal = SamplingParams(temperature=0.5)
    for batch in ([greedy], [sampled], [equal], [equal, biased], [greedy, biased], [greedy, greedy], [], [biased]):
        for _ in range(2):
            assert table.features_of(batch) == SamplerFeatures.from_params(batch)
    mine = [greedy]
    table.features_of(mine)
    mine[0] = sampled
    assert table.features_of(mine).sampled


def test_rows_that_are_taken_together_sample_as_asked() -> None:
    table = SamplingTable(5, torch.device("cpu"))
    asked = [
        (SamplingParams(temperature=0.5, top_k=7), -3),
        (SamplingParams(), 1 << 61),
        (SamplingParams(min_p=0.25), 5),
    ]
    table.load(ints(4, 0, 1), asked)
    assert table.cells.host[[4, 0, 1, 2], :2].tolist() == [[-3, 7], [1 << 61, 0], [5, 0], [0, 0]]
    table.cells.check()


def test_a_cell_that_was_written_twice_has_its_last_value() -> None:
    array = MirroredArray((6,), torch.device("cpu"))
    for number, cells in enumerate((ints(5, 3, 5), ints(0), ints(3))):
        array[cells] = cells + 10 * number
    assert array.tensor.tolist() == [0 + 10, 0, 0, 3 + 20, 0, 5]
    array.check()


# figures by rows, and batches


def make_requests(count: int) -> list[Request]:
    asked = SamplingParams(max_new_tokens=40, ignore_eos=True)
    requests = [Request([1, 2], asked, 0, Detokenizer(None), frozenset()) for _ in range(count)]
    for number, request in enumerate(requests):
        request.id = request.row = number
    return requests


def random_result(draw: random.Random, count: int) -> RoundResult:
    """A round of chains, some with drafts and some with tokens that a grammar forced."""
    depth = draw.randint(0, 4)
    drafts = [draw.randint(0, depth) for _ in range(count)]
    forced = [draw.choice([0, 0, each]) for each in drafts]
    length = [draw.randint(1, 1 + each) for each in drafts]
    nodes = np.arange(1 + depth) * np.ones((count, 1), dtype=np.int64)
    seconds = {stage: draw.random() for stage in ("draft", "verify", "other")}
    return RoundResult(ints(*length), nodes, nodes, [[]] * count, ints(*drafts), seconds, ints(*forced))


def test_statistics_of_a_batch_equal_those_counted_per_request():
    """Requests lose their rows now and then, and outputs end within their drafts."""
    cut = 0
    for seed in range(examples(20, 200)):
        draw, requests = random.Random(seed), make_requests(3)
        row_totals, counted = RowTotals(3), [request.stats.copy() for request in requests]
        while going_on := [request for request in requests if not request.finished]:
            chosen = draw.sample(going_on, draw.randint(1, len(going_on)))
            for request in chosen:
                if request.row < 0:
                    request.row = request.id
                    row_totals = row_totals.without(ints(request.row))
            result, rows = random_result(draw, len(chosen)), ints(*(request.row for request in chosen))
            row_totals = row_totals.after_round(rows, result)
            columns = (array.tolist() for array in (result.length, result.draft_depth, result.forced))
            for request, length, drafts, forced in zip(chosen, *columns, strict=True):
                own, taken, before = counted[request.id], min(length, request.remaining), request.stats
                request.settle([1] * length, [], row_totals, drafts, forced)
                assert before.rounds == own.rounds, "figures that were read change no more"
                whole = (taken, 0, 0) if forced else (taken, length - 1, drafts)
                record_round(own, *(whole if forced or taken == length else (taken,) * 3))
                own.forced_rounds += forced > 0
                own.forced_tokens += min(taken, forced)
                own.draft_nodes += result.path.shape[1] - 1 if drafts and not forced else 0
                own.output_tokens += taken
                for stage in ("draft", "verify"):
                    spent = getattr(own, f"{stage}_seconds") + result.seconds[stage] / len(chosen)
                    assert getattr(request.stats, f"{stage}_seconds") == pytest.approx(spent)
                for name in ("draft", "verify", "other", "first_token", "decode"):  # to the bit, or by the clock
                    setattr(own, f"{name}_seconds", getattr(request.stats, f"{name}_seconds"))
                assert request.stats == own
                cut += taken < length
                if draw.random() < 0.1:
                    request.lose_row()
    assert cut, "no output ended within its drafts"


def test_a_batch_is_made_when_its_requests_or_their_rows_change():
    batches, requests = scheduler_of(make(), []), make_requests(3)
    whole, few = batches.batch_of(requests), batches.batch_of(requests[:2])
    assert batches.batch_of(list(requests)) is whole and batches.batch_of(requests[:2]) is few
    assert whole.rows.tolist() == [0, 1, 2] and whole.max_total_len.tolist() == [42] * 3
    requests[1].lose_row()
    assert whole.present() == [0, 2]
    requests[1].row = 5
    again = batches.batch_of(requests)
    assert again.rows.tolist() == [0, 5, 2] and batches.batch_of(list(requests)) is again
