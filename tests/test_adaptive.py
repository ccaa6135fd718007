"""Adaptive drafts: the ladder, what is learned of acceptance and cost, the choice, and that it changes no token."""

import dataclasses
import functools
import heapq
import inspect
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specdec.engine
import specdec.runtime.steps
from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.runtime.adaptive import round_timing
from specdec.runtime.adaptive.cost_table import CostTable, Level
from specdec.runtime.adaptive.draft_account import CREDIT, MAX_SAVED, SHARE, DraftAccount
from specdec.runtime.adaptive.draft_chances import DraftChances
from specdec.runtime.adaptive.draft_choice import DraftChoice
from specdec.runtime.adaptive.draft_ladder import draft_ladder
from specdec.runtime.rounds.result import DraftShape
from specdec.runtime.rounds.round_shapes import NO_DRAFT

from marks import deep_cases, each_value, examples, pairs, usual

CHAIN = SpecConfig(4, adaptive=True)

pytestmark = pytest.mark.usefixtures("shallow_pair", "bundled_once")


def rows(count):
    return np.arange(count)


def test_it_is_the_default():
    assert {each.name: each.default for each in dataclasses.fields(SpecConfig)}["adaptive"] is True
    assert "adaptive=True" in inspect.getsource(SpecConfig).replace(": bool = ", "=")


@pytest.mark.parametrize(
    ("spec", "ladder"),
    [
        (SpecConfig(1), [(0, 1, 1), (1, 1, 2)]),
        (SpecConfig(4), [(0, 1, 1), (1, 1, 2), (2, 1, 3), (3, 1, 4), (4, 1, 5)]),
        (SpecConfig(7), [(0, 1, 1), (1, 1, 2), (2, 1, 3), (3, 1, 4), (4, 1, 5), (6, 1, 7), (7, 1, 8)]),
        (SpecConfig(6, 1, 3), [(0, 1, 1), (1, 1, 2), (2, 1, 3)]),
        (SpecConfig(4, 4, 16), [(0, 1, 1), (1, 1, 2), (2, 1, 3), (4, 4, 8), (4, 4, 16)]),
        (SpecConfig(6, 3, 20), [(0, 1, 1), (1, 1, 2), (2, 1, 3), (4, 1, 5), (4, 3, 8), (5, 3, 16), (6, 3, 20)]),
        (SpecConfig(1, 4), [(0, 1, 1), (1, 4, 5)]),
    ],
)
def test_the_ladder_goes_from_none_to_the_whole_draft(spec, ladder):
    assert draft_ladder(spec) == [DraftShape(*rung) for rung in ladder]


@pytest.mark.parametrize("topk", [1, 2, 5, 63])
def test_every_rung_is_a_draft_that_the_engine_could_have(topk):
    for steps in (1, 2, 3, 7, 20):
        whole = SpecConfig(steps, topk)
        for shape in draft_ladder(whole)[1:]:
            SpecConfig(shape.num_steps, shape.topk, shape.num_nodes)  # or it would raise
            assert shape.num_steps <= whole.depth and shape.num_nodes <= whole.num_nodes and shape.topk <= topk


def test_depths_are_counted_where_they_were_reached():
    """A chain of 3: row 0 accepts 1 and row 1 all: depth 1 was right twice, depth 2 once of two, depth 3 once."""
    chances = DraftChances(draft_ladder(SpecConfig(3)), num_rows=3)
    before = chances.chance[0, 0]
    chances.learn(3, rows(2), np.array([1, 3]), np.array([3, 3]))
    assert chances._right[0].tolist() == [2, 1, 1] and chances._tried[0].tolist() == [2, 2, 1]
    assert chances.chance[0, 0] > before and chances.chance[0, 1] < before


def test_a_row_that_may_accept_no_more_has_rejected_nothing():
    chances = DraftChances(draft_ladder(SpecConfig(3)), num_rows=1)
    chances.learn(3, rows(1), np.array([1]), np.array([1]))  # it asked for drafts of one
    assert chances._tried[0].tolist() == [1, 0, 0] and chances._right[0].tolist() == [1, 0, 0]


def test_expected_tokens_by_hand():
    """Chance one half at each depth: 1, 1.5, 1.75 tokens."""
    chances = DraftChances(draft_ladder(SpecConfig(2)), num_rows=2)
    chances._right[:], chances._tried[:] = 5e8, 1e9
    tokens, _ = chances.tokens(rows(2), np.array([2, 1]))
    assert np.allclose(tokens, [[1, 1], [1.5, 1.5], [1.75, 1.5]])  # the second row accepts one draft at most


def test_a_few_drafts_tell_an_easy_row_from_a_hard_one():
    """Chance one half: after a draft of four that was right the odds are 5 : 1, after three wrong ones 1 : 4. Where the
    engine's chances counted for four drafts in a row's odds it was 2 : 1 and 4 : 7, and mixed loads took longer.
    """
    chances = DraftChances(draft_ladder(CHAIN), num_rows=2)
    chances._right[:], chances._tried[:] = 5e8, 1e9
    chances.learn(4, np.array([0]), np.array([4]), np.array([4]))
    for _ in range(3):
        chances.learn(4, np.array([1]), np.array([0]), np.array([4]))
    one_draft = chances.tokens(rows(2), np.array([4, 4]))[0, 1]
    assert np.allclose(one_draft, [1 + 5 / 6, 1 + 1 / 5])


@pytest.mark.parametrize(("alike", "after_three_wrong"), [(True, 16 / 35), (False, 1 / 5)])
def test_where_requests_are_alike_a_few_drafts_tell_little(alike, after_three_wrong):
    """Forty requests that all accept every second draft, or of which every second accepts all; then one begins with
    three wrong ones: its odds are 16 : 19, or 1 : 4."""
    chances = DraftChances(draft_ladder(CHAIN), num_rows=1)
    one, most = rows(1), np.array([1])
    chances._right[:], chances._tried[:] = 5e8, 1e9
    for request in range(40):
        for turn in range(20):
            chances.learn(1, one, np.array([(turn if alike else request) % 2]), most)
        chances.begin(one)
    for _ in range(3):
        chances.learn(1, one, np.array([0]), most)
    one_draft = chances.tokens(one, most)[0, 1, 0] - 1
    assert one_draft == pytest.approx(after_three_wrong, abs=1e-3)


def test_rows_differ_by_what_they_accepted_and_begin_anew():
    chances = DraftChances(draft_ladder(CHAIN), num_rows=2)
    for _ in range(30):
        chances.learn(4, rows(2), np.array([0, 4]), np.array([4, 4]))
    hard, easy = chances.tokens(rows(2), np.array([4, 4]))[0, -1]
    assert hard < 1.5 and easy > 3.5
    chances.begin(np.array([0]))
    again, _ = chances.tokens(rows(2), np.array([4, 4]))[0, -1]
    assert hard < again < easy


def test_what_is_smaller_takes_no_longer():
    table = CostTable(draft_ladder(SpecConfig(2)))
    for number, seconds in ((0, 9.0), (1, 2.0)):
        table.note(number, 1, 0, {"draft": 0.0, "verify": seconds, "other": 0.0})
    assert table.seconds(1, 0)[:2].tolist() == [2.0, 2.0]


def test_none_takes_less_than_a_draft_by_the_time_of_drafting():
    """They were equal where rounds without drafts had been slow by chance, and wrong drafts were chosen as often."""
    table = CostTable(draft_ladder(SpecConfig(2)))
    table.note(0, 1, 0, {"draft": 0.0, "verify": 9.0, "other": 0.0})
    table.note(1, 1, 0, {"draft": 0.5, "verify": 2.0, "other": 0.0})
    assert table.seconds(1, 0)[:2].tolist() == [2.0, 2.5]


def test_a_level_follows_the_least_and_forgets_it_slowly():
    level = Level()
    for value in (5.0, 2.0, 2.0, 2.0):
        level.add(value)
    fast = level.value
    level.add(100.0)
    assert 2.0 <= fast < 2.6 and level.value < 1.2 * fast
    for _ in range(200):
        level.add(4.0)
    assert level.value == pytest.approx(4.0, rel=0.01)


def test_a_timed_table_learns_what_context_costs():
    table = CostTable(draft_ladder(SpecConfig(1)))
    table.timed[8] = np.array([1.0, 1.5])
    for _ in range(50):
        table.note(1, 8, 1000, {"draft": 0.5, "verify": 2.0, "other": 0.0})
    assert table.seconds(8, 0).tolist() == [1.0, 1.5]
    assert np.allclose(table.seconds(8, 2000), [3.0, 3.5])  # nothing is known of the first but what the other showed


def host_periods(table, number, waited, period, times=1):
    for _ in range(times):
        table.note_host(number, 8, waited, period)
    return table.seconds(8, 0).tolist()


def test_a_round_takes_no_less_than_the_host_that_the_device_waits_for():
    """Drafts that the device made for nothing were left out, as if they had held anybody up."""
    table = CostTable(draft_ladder(SpecConfig(2)))  # none, one draft, two
    table.timed[8] = np.array([1.0, 1.5, 3.0])
    assert host_periods(table, 0, 0.01, 1.01, 20) == [1.0, 1.5, 3.0]  # launches that follow each other
    assert host_periods(table, 0, 1.0, 2.0, 3) == [1.0, 1.5, 3.0]  # too few to say
    assert host_periods(table, 0, 1.0, 2.0) == [2.0, 2.0, 3.0]  # with drafts the host takes no less
    assert host_periods(table, 1, 1.0, 2.5, 4) == [2.0, 2.5, 3.0]
    assert host_periods(table, 0, 0.0, 1.0) == [1.0, 2.5, 3.0]  # it has become quicker
    for _ in range(8):
        table.note_host(2, 16, waited=9.0, period=9.0)
    table.timed[16] = np.ones(3)
    assert table.seconds(16, 0).tolist() == [1.0, 1.0, 1.0]  # nothing is known of a batch that was not timed


def test_what_a_pause_took_is_no_cost_of_the_host():
    table = CostTable(draft_ladder(SpecConfig(1)))
    table.timed[8] = np.array([1.0, 2.0])
    for _ in range(20):  # requests end every few rounds, and others begin
        assert host_periods(table, 0, 500.0, 501.0) == [1.0, 2.0]
        assert host_periods(table, 0, 0.0, 1.0, 3) == [1.0, 2.0]


def test_slow_rounds_without_drafts_are_forgotten_while_there_are_drafts():
    """Bursts had made rounds without drafts seem slow, so that all had drafts, and none was seen again: where no draft
    was right, a GPU took up to three times as long as without a drafter."""
    table = CostTable(draft_ladder(SpecConfig(1)))
    table.timed[8] = np.array([1.0, 1.5])
    assert host_periods(table, 0, 8.0, 9.0, 4) == [9.0, 9.0]
    assert host_periods(table, 1, 2.0, 3.0, 4) == [3.0, 3.0]  # for none it does no more than for a draft
    assert host_periods(table, 1, 0.0, 1.5) == [1.0, 1.5]


def test_a_trial_is_paid_from_what_was_put_aside():
    choice, running = DraftChoice(draft_ladder(SpecConfig(1)), 1), rows(1)
    choice.cost.timed[1] = np.array([1.0, 1.5])
    choice.begin(running)
    choice.chances.learn(1, running, np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64))  # so none is best
    choice.account.balance = 100.0
    draft, spare, rounds = NO_DRAFT, 0.0, 0
    while draft == NO_DRAFT:
        spare = choice.account.spare
        draft = choice.choose(running, np.full(1, 100), 1, 0, NO_DRAFT)
        rounds += 1
        assert rounds < 200
    assert choice.use().tried == [0, 1]
    assert choice.account.spare < spare + 0.006 - 0.05 + 1.0 * (rounds == 1) + 1e-9


@pytest.mark.parametrize("right", [0.0, 0.6])
@pytest.mark.parametrize(
    ("device", "host"),
    [
        ((1.0, 1.3, 1.6, 1.9, 2.2), (0.3, 0.3)),
        ((1.0, 1.5, 2.0, 2.5, 3.0), (1.4, 1.6)),
        ((0.5, 0.6, 0.7, 0.8, 0.9), (2.0, 2.1)),
    ],
    ids=["device", "both", "host"],
)
def test_drafts_pay_beside_a_host_that_is_waited_for(device, host, right):
    """With no draft right, 5 % were lost by drafts that seemed as fast as none."""
    batch, random, choice = 8, np.random.default_rng(0), DraftChoice(draft_ladder(CHAIN), 8)
    choice.cost.timed[batch] = np.array(device)
    running, most = rows(batch), np.full(batch, 100)
    choice.begin(running)
    periods = [max(seconds, host[number > 0]) for number, seconds in enumerate(device)]
    best = max(sum(right**depth for depth in range(k + 1)) / periods[k] for k in range(5))
    spent = tokens = 0.0
    for _ in range(600):
        draft = choice.choose(running, most, batch, 0, NO_DRAFT)
        period = max(device[draft.num_steps], host[draft.num_steps > 0] * (1 + 0.05 * random.normal()))
        failed = np.cumsum(random.random((batch, draft.num_steps + 1)) > [right] * draft.num_steps + [-1], axis=1)
        accepted = np.count_nonzero(failed == 0, axis=1)
        spent, tokens = spent + period, tokens + 1 + accepted.mean()
        seconds = {"draft": 0.0, "verify": device[draft.num_steps], "other": 0.0}
        since = (period - device[draft.num_steps], period)
        choice.learn(draft, batch, 0, seconds, running, accepted, most, since)
    assert tokens / spent > 0.97 * best


def test_trials_are_paid_in_the_seconds_of_rounds():
    """Before the first round the table holds no seconds: two rounds of its own unit paid for thirty trials on a CPU."""
    choice = DraftChoice(draft_ladder(SpecConfig(4)), 2)
    row, most = rows(1), np.array([100])
    choice.begin(row)
    spent = 0.0
    for _ in range(400):
        draft = choice.choose(row, most, 1, 0, NO_DRAFT)
        seconds = {"draft": 0.001 * draft.num_steps, "verify": 0.06 + 0.008 * (draft.num_nodes - 1), "other": 0.0}
        spent += sum(seconds.values())
        choice.learn(draft, 1, 0, seconds, row, np.zeros(1, dtype=np.int64), most)
    assert spent < 1.02 * 400 * 0.06
    assert sum(choice.use().tried) >= 3


REQUESTS, TOKENS = 60, 200


@functools.cache
def fixed_rounds(chances, depth, batch):
    """Rounds with drafts of one depth until all requests have their tokens, each of a chance to be right."""
    draw, chance = np.random.default_rng(0), np.random.default_rng(1).choice(chances, REQUESTS)[::-1]
    right = draw.random((REQUESTS, TOKENS, depth)) < chance[:, None, None]
    done = (np.cumprod(right, axis=2).sum(axis=2) + 1).cumsum(axis=1) >= TOKENS
    rows = [0] * batch  # the round in which each row is free again
    for rounds in (done.argmax(axis=1) + 1).tolist():
        heapq.heapreplace(rows, rows[0] + rounds)
    return max(rows)


def best_fixed(chances, seconds, spec, batch=1):
    """Total seconds with no draft, and with the best of all fixed ones."""
    shapes = draft_ladder(spec)
    total = [seconds(shape) * fixed_rounds(tuple(chances), shape.depth, batch) for shape in shapes]
    return total[0], min(total)


def simulate(chances, seconds, spec, requests=REQUESTS, tokens=TOKENS, batch=1):
    """Total seconds until all requests have their tokens, each of a chance to be right; and the choice."""
    shapes = draft_ladder(spec)
    choice = DraftChoice(shapes, batch + 1)
    choice.cost.timed[batch] = np.array([seconds(shape) for shape in shapes])
    draw, queue = np.random.default_rng(0), list(np.random.default_rng(1).choice(chances, requests))
    left, chance, on = np.full(batch, tokens), np.array([queue.pop() for _ in range(batch)]), np.ones(batch, bool)
    total = 0.0
    while on.any():
        present, most = np.flatnonzero(on), np.minimum(spec.depth, left[on] - 1)
        shape = choice.choose(present, most, batch, 0, NO_DRAFT)
        right = draw.random((len(present), max(shape.depth, 1))) < chance[present, None]
        accepted = np.minimum(np.cumprod(right, axis=1).sum(axis=1), shape.depth)
        total += seconds(shape)
        stages = {"draft": 0.0, "verify": seconds(shape), "other": 0.0}
        choice.learn(shape, batch, 0, stages, present, accepted, np.full(len(present), spec.depth))
        left[present] -= np.minimum(accepted + 1, left[present])
        for row in np.flatnonzero(on & (left == 0)):
            on[row] = bool(queue)
            if queue:
                left[row], chance[row] = tokens, queue.pop()
                choice.begin(np.array([row]))
    return total, choice


def cheap(shape):
    return 1 + 0.04 * shape.num_steps


def dear(shape):
    return 1 + 0.4 * shape.num_steps


LOADS = list(itertools.product([0.0, 0.05, 0.3, 0.6, 0.9], [cheap, dear], [1, 8]))


@deep_cases("0.3-cheap-1")
@pytest.mark.parametrize(
    ("chance", "seconds", "batch"),
    each_value(LOADS),
)
def test_no_slower_than_plain_by_two_percent_and_near_the_best_fixed_draft(chance, seconds, batch):
    plain, best = best_fixed([chance], seconds, CHAIN, batch)
    adaptive, choice = simulate([chance], seconds, CHAIN, batch=batch)
    assert adaptive <= 1.02 * plain, choice.use()
    assert adaptive <= 1.03 * best, choice.use()


def test_the_account_by_hand():
    """Plain rounds of 2 seconds. One round of credit; a wrong draft that takes 3 takes 1 of it; two drafts right bring
    three tokens, 6 seconds of plain rounds for 3."""
    account = DraftAccount()
    account.begin(2.0)
    assert account.balance == CREDIT * 2.0
    account.settle(3.0, 2.0, 1.0)
    assert account.balance == pytest.approx(CREDIT * 2.0 - 1.0 + 0.03)
    account.settle(3.0, 2.0, 3.0)
    assert account.balance == pytest.approx(CREDIT * 2.0 + 2.0 + 0.06)
    for _ in range(100):
        account.settle(3.0, 2.0, 5.0)
    assert account.balance == MAX_SAVED * 2.0
    account.begin(2.0)  # nothing for what was credited before
    assert account.balance == MAX_SAVED * 2.0
    account.read_along(100.0)  # no more than half of the share of what was settled
    assert account.balance == pytest.approx(MAX_SAVED * 2.0 - 102 * 3.0 * SHARE / 2)
    account.settle(1.0, 1.0)  # fewer requests: what was saved is worth no more rounds of them
    assert account.balance == MAX_SAVED


@settings(max_examples=examples(40, 300))
@given(seed=st.integers(0, 2**32 - 1), timed=st.booleans())
def test_whatever_comes_drafts_cost_no_more_than_the_account_says(seed, timed):
    """Requests of any chance, which changes on the way, come and go; rounds take anything; a round may be launched
    before the one before it is settled, and the drafter may have to catch up. At every moment what rounds took is at
    most what plain rounds would have taken for the same tokens, a share of it, and the credit.

    Where the table was filled with what rounds take, that is exact. Otherwise one round may take longer than was
    believed when it was chosen, and nothing more.
    """
    draw = np.random.default_rng(seed)
    spec = draw.choice([SpecConfig(1), CHAIN, SpecConfig(7), SpecConfig(4, 4, 16)])
    shapes, rows_of_table, lag = draft_ladder(spec), 4, int(draw.integers(2)) if timed else 0
    plain_of = {1: draw.uniform(0.5, 1), 2: draw.uniform(1, 2), 4: draw.uniform(2, 4)}
    dear = draw.choice([0.0, 0.05, 0.5, 2.0]) * draw.random(len(shapes)) * [shape.num_nodes - 1 for shape in shapes]
    took = {size: plain * (1 + np.maximum.accumulate(dear)) for size, plain in plain_of.items()}
    choice = DraftChoice(shapes, rows_of_table + 1)
    if timed:
        choice.cost.timed.update(took)
        choice.cost.catching_up.update({size: draw.choice([0.0, 0.3]) * plain for size, plain in plain_of.items()})
    chance, launched = np.zeros(rows_of_table), []
    spent = plainly = beyond = 0.0
    count = 1
    for turn in range(300):
        if turn % 20 == 0:
            count = int(draw.integers(1, rows_of_table + 1))
            choice.begin(rows(rows_of_table)[draw.random(rows_of_table) < 0.3])
            chance[:] = draw.choice([0.0, 0.0, 0.5, 0.95], rows_of_table)
        size = next(each for each in took if each >= count)
        behind = timed and not (launched and launched[-1][0].num_steps)
        believed = choice.cost.seconds(size, 0)
        shape = choice.choose(
            rows(count), np.full(count, spec.depth), size, 0, NO_DRAFT,
            unread=behind, unsettled=[each for each, _, _ in launched],
        )  # fmt: skip
        number = shapes.index(shape)
        if shape.num_steps:
            spent += behind * choice.cost.catching_up.get(size, 0.0)
            beyond = max(beyond, took[size][number] - believed[number])
        right = draw.random((count, max(shape.depth, 1))) < chance[:count, None]
        accepted = np.minimum(np.cumprod(right, axis=1).sum(axis=1), shape.depth)
        launched.append((shape, size, accepted))
        while len(launched) > lag:
            shape, size, accepted = launched.pop(0)
            seconds = took[size][shapes.index(shape)]
            stages = {"draft": 0.0, "verify": seconds, "other": 0.0}
            choice.learn(shape, size, 0, stages, rows(len(accepted)), accepted, np.full(len(accepted), spec.depth))
            spent += seconds
            plainly += plain_of[size] * (1 + accepted.mean())
            assert spent - plainly <= SHARE * spent + CREDIT * max(plain_of.values()) + (0 if timed else beyond) + 1e-9


def test_hard_and_easy_requests_get_drafts_of_their_own():
    _, best = best_fixed([0.1, 0.9], dear, CHAIN)
    adaptive, choice = simulate([0.1, 0.9], dear, CHAIN)
    assert adaptive < 0.95 * best, choice.use()


def test_what_was_off_is_found_again():
    """An engine that saw thousands of wrong drafts meets requests whose drafts are right."""
    shapes = draft_ladder(CHAIN)
    choice = DraftChoice(shapes, 2)
    choice.cost.timed[1] = np.array([cheap(shape) for shape in shapes])
    one, most = rows(1), np.array([4])

    def run(rounds, accepts):
        chosen = []
        for _ in range(rounds):
            shape = choice.choose(one, most, 1, 0, NO_DRAFT)
            accepted = np.minimum(np.array([accepts]), shape.depth)
            choice.learn(shape, 1, 0, {"verify": cheap(shape), "draft": 0.0, "other": 0.0}, one, accepted, most)
            chosen.append(shape.num_steps)
        return chosen

    for _ in range(examples(25, 100)):
        choice.begin(one)
        assert np.mean(run(200, 0)) < 0.8
    choice.begin(one)
    assert np.mean(run(200, 4)) > 2


def test_what_a_request_must_have_it_gets():
    choice = DraftChoice(draft_ladder(CHAIN), 2)
    choice.cost.timed[1] = np.array([1.0, 10, 10, 10, 10])
    for _ in range(50):
        assert choice.choose(rows(1), np.array([4]), 1, 0, DraftShape(3, 1, 4)).num_steps >= 3


def prompts(engine):
    texts = ["Tom has 3 boxes of 12 pencils.", "A cinema has 4 rows with 8 seats each.", "17 boys go to a match."]
    return [engine.chat_prompt(text) for text in texts]


@functools.cache
def plain_tokens(params):
    with Engine.from_pretrained("tiny-gemma4", config=EngineConfig(max_batch_size=4, max_model_len=200)) as plain:
        return [out.token_ids for out in plain.generate(prompts(plain), params)]


@deep_cases("tiny-gemma4-mtp-chain-0.0", "suffix-chain-0.0")
@pytest.mark.parametrize(
    ("drafter", "shape", "temperature"),
    each_value(
        pairs(["tiny-gemma4-mtp", "tiny-gemma4-eagle3", "ngram", "suffix"], ["chain", "tree"], [0.0, 0.8]),
    ),
)
def test_no_token_depends_on_the_choice(drafter, shape, temperature):
    """Costs are such that every draft is the best in turn, and wrong ones are tried."""
    spec = CHAIN if shape == "chain" else SpecConfig(3, 3, 12, adaptive=True)
    params = SamplingParams(max_new_tokens=40, ignore_eos=True, temperature=temperature, seed=5)
    config = EngineConfig(max_batch_size=4, max_model_len=200)
    with Engine.from_pretrained("tiny-gemma4", drafter, spec=spec, config=config) as engine:
        choice, turn = engine.steps.choice, iter(range(10**6))
        assert choice is not None
        choose, shapes = choice.choose, choice.shapes

        def in_turn(*given, **named):
            chosen = choose(*given, **named)
            assert chosen in shapes
            return shapes[next(turn) % len(shapes)]

        choice.choose = in_turn
        outs = engine.generate(prompts(engine), params)
        assert [out.token_ids for out in outs] == plain_tokens(params)
        use = engine.stats().drafts
        assert 10 < sum(use.rounds) <= engine.stats().batches and use.shapes == shapes and "running" in use.why


def test_a_request_can_fix_its_draft_in_an_adaptive_engine():
    config = EngineConfig(max_batch_size=1, max_model_len=200)
    with Engine.from_pretrained("tiny-gemma4", "tiny-gemma4-mtp", spec=CHAIN, config=config) as engine:
        choice = engine.steps.choice
        assert choice is not None
        choice.cost.timed[1] = np.array([1.0, 50, 50, 50, 50])  # nothing but no draft would be chosen
        [prompt] = prompts(engine)[:1]
        fixed = SpecConfig(2, adaptive=False)
        [out] = engine.generate(prompt, SamplingParams(max_new_tokens=30, ignore_eos=True, speculation=fixed))
        assert out.stats.drafted_rounds >= out.stats.rounds - 1
        [out] = engine.generate(prompt, SamplingParams(max_new_tokens=30, ignore_eos=True))
        assert out.stats.drafted_rounds <= 2


def recorded(program):
    """A capture that runs its program again at each replay, into what it returned first."""
    out = program().clone()
    return lambda: out.copy_(program()), out


@deep_cases("tiny-gemma4-mtp")
@pytest.mark.parametrize("drafter", ["tiny-gemma4-mtp", "tiny-gemma4-eagle3"])
def test_a_captured_engine_has_its_table_when_it_is_made(drafter, monkeypatch):
    monkeypatch.setattr(specdec.engine, "capture_for", lambda *_: recorded)
    monkeypatch.setattr(specdec.engine, "default_budget", lambda _: None)
    monkeypatch.setattr(round_timing, "WARM", 1)
    monkeypatch.setattr(round_timing, "REPEATS", 2)
    monkeypatch.setattr(round_timing, "time_catching_up", lambda graphs, shape: graphs.run(shape) or 1e-3)
    if drafter == "tiny-gemma4-mtp":  # as where no conftest.py replaces them
        monkeypatch.setattr(specdec.runtime.warm_up, "time_prompts", round_timing.time_prompts)
        monkeypatch.setattr(specdec.runtime.warm_up, "time_rounds", round_timing.time_rounds)
    config = EngineConfig(max_batch_size=2, max_model_len=200)
    params = SamplingParams(max_new_tokens=examples(16, 40), ignore_eos=True)
    with Engine.from_pretrained("tiny-gemma4", drafter, spec=CHAIN, config=config) as engine:
        cost = engine.steps.choice.cost
        assert sorted(cost.timed) == [1, 2] and all((seconds > 0).all() for seconds in cost.timed.values())
        assert set(cost.catching_up) == (set() if drafter == "tiny-gemma4-mtp" else {1, 2})
        gap = engine.scheduler.prompt_gap
        assert gap.cost.is_known and gap.longest_round > 0 and engine.stats().prompt_gap_ms > 0
        made = engine.stats().captures
        assert made.uncaptured_rounds == 0 and engine.table.committed_len.host.max() == 0
        outs = engine.generate(prompts(engine), params)
        assert [out.token_ids for out in outs] == plain_tokens(params)
        assert engine.stats().captures.uncaptured_rounds == 0  # no draft is captured later
        engine.table.check()


def test_a_fixed_engine_chooses_nothing():
    config = EngineConfig(max_batch_size=1, max_model_len=200)
    spec = SpecConfig(2, adaptive=False)
    with Engine.from_pretrained("tiny-gemma4", "tiny-gemma4-mtp", spec=spec, config=config) as engine:
        assert engine.steps.choice is None
        assert engine.stats().drafts.shapes == ()


class Pattern:
    """In the place of a choice: so many rounds without drafts between two with the whole one."""

    def __init__(self, engine, plain_rounds):
        self.shapes = engine.steps.choice.shapes
        self.turn, self.plain_rounds = 0, plain_rounds
        engine.steps.choice.choose = self.choose

    def choose(self, *_, **__):
        self.turn += 1
        return self.shapes[-1 if self.turn % (self.plain_rounds + 1) == 0 else 0]


@deep_cases("tiny-gemma4-16")
@pytest.mark.parametrize(
    ("drafter", "plain_rounds"),
    usual(
        [*(("tiny-gemma4-eagle3", n) for n in (1, 5, 15, 16, 17, 40)), *(("tiny-gemma4", n) for n in (1, 16, 17))],
        lambda drafter, n: n in (1, 17) if drafter == "tiny-gemma4-eagle3" else n == 16,
    ),
)
def test_a_drafter_that_caught_up_drafts_as_if_it_had_read_along(drafter, plain_rounds, monkeypatch):
    config = EngineConfig(max_batch_size=2, max_model_len=200)  # so that rows begin while others are behind
    params = SamplingParams(max_new_tokens=plain_rounds + 12, ignore_eos=True)
    outs = []
    for lags in (True, False):
        with Engine.from_pretrained("tiny-gemma4", drafter, spec=CHAIN, config=config) as engine:
            assert engine.round.unread is not None
            if not lags:
                engine.round.unread, engine.round.draft_seats = None, engine.round.seats
            Pattern(engine, plain_rounds)
            widths = []
            catch_up = engine.round.catch_up
            monkeypatch.setattr(
                engine.round, "catch_up", lambda shape, most, f=catch_up, w=widths: (w.append(most), f(shape, most))[1]
            )
            outs.append(engine.generate(prompts(engine), params))
            assert bool(widths) is lags
            if lags:  # after each draft and the rounds without one, or where no more is kept
                assert max(widths) == min(plain_rounds, 16)
    lagging, reading = outs
    assert [out.token_ids for out in lagging] == [out.token_ids for out in reading]
    assert [out.drafted for out in lagging] == [out.drafted for out in reading]


@pytest.mark.parametrize("sanitize", ["0", "1"])
def test_rows_are_lost_to_a_drafter_that_does_not_read_along_until_they_have_another_request(sanitize, monkeypatch):
    """Its reading cost 4 % of the time of 128 requests on a CPU, though no draft of it was ever right."""
    monkeypatch.setenv("SPECDEC_SANITIZE", sanitize)
    config = EngineConfig(max_batch_size=2, max_model_len=200, prefix_cache=False)
    with Engine.from_pretrained("tiny-gemma4", "tiny-gemma4-eagle3", spec=CHAIN, config=config) as engine:
        first, second = prompts(engine)[:2]
        long, short = (SamplingParams(max_new_tokens=n, ignore_eos=True) for n in (70, 12))
        right = [engine.generate([text], [params])[0] for text, params in ((first, long), (second, short))]
        Pattern(engine, 30)  # the first draft would come after 16 tokens are unread
        engine.steps.choice.reads_along = lambda *_: False
        lost = engine.submit(first, long)
        while lost.stats.output_tokens < 40:
            engine.step()
        [row] = [request.row for request in engine.scheduler.running]
        assert engine.round.unread.lost(np.array([row])).all() and engine.round.max_drafts.host[row] == 0
        assert engine.round.draft_seats.host[0] == engine.table.padding_row != engine.round.seats.host[0] == row
        Pattern(engine, 0)
        also = engine.submit(second, short)  # drafts beside the lost row, which accepts none of them
        while engine.step():
            pass
        outs = [lost.output(), also.output()]
        assert [out.token_ids for out in outs] == [out.token_ids for out in right]
        assert sum(outs[0].stats.accepted_counts) == 0 < sum(outs[1].stats.accepted_counts)
        again = engine.generate([first], [long])[0]  # the row has another request
        assert again.token_ids == right[0].token_ids and sum(again.stats.accepted_counts) > 0
        engine.table.check()


def test_a_drafter_that_is_never_right_reads_along_as_far_as_that_is_paid_for():
    choice = DraftChoice(draft_ladder(CHAIN), 128)
    assert choice.reads_along(128, 16)  # nobody knows what it takes
    choice.cost.note_catching_up(128, 16, 1.0)
    assert choice.reads_along(128, 16)  # nor whether it is right
    most, none = np.full(128, 4), np.zeros(128, dtype=np.int64)
    choice.chances.learn(1, rows(128), none, most)
    assert not choice.reads_along(128, 16)
    for _ in range(200):
        choice.account.settle(1.0, 1.0)
    assert choice.reads_along(128, 16)  # half a percent of 200 seconds
    choice.account.read_along(1.0)
    assert not choice.reads_along(128, 16)
    for _ in range(600):  # what is not seen for long is uncertain again
        choice.chances.fade()
    assert choice.reads_along(128, 16)


def test_the_prefix_cache_keeps_no_page_that_the_drafter_has_not_read():
    config = EngineConfig(max_batch_size=1, max_model_len=200)
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    with Engine.from_pretrained("tiny-gemma4", "tiny-gemma4-eagle3", spec=CHAIN, config=config) as engine:
        Pattern(engine, 10**6)
        [prompt] = prompts(engine)[:1]
        [out] = engine.generate(prompt, params)
        assert engine.round.unread.count[0] > 0
        text = prompt + out.token_ids
        unread = int(engine.round.unread.count[0])
        [again] = engine.generate(text, params)
        assert again.stats.cached_tokens == len(text) - 1 - unread  # the newest token has no K/V at all
