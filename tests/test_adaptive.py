"""Adaptive drafts: the ladder, what is learned of acceptance and time, the account, and that no token changes.

Loads are simulated (`draft_simulation.py`) for what the choice as a whole must hold.
"""

import dataclasses
import functools
import inspect
from itertools import pairwise

import numpy as np
import pytest
from draft_simulation import CHAIN, ROWS, TREE, Load, Machine, adaptive, chances, fixed, measured, mixture, prompts
from hypothesis import given, settings
from hypothesis import strategies as st

import specdec.runtime.warm_up
from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.runtime.drafts.draft_policy import (
    DECAY_ROUNDS,
    FIRST_GUESS,
    LOSS_SHARE,
    MAX_SAMPLES,
    MAX_SAVED,
    RETRY_ROUNDS,
    DraftAcceptance,
    DraftAccount,
    DraftPolicy,
    RoundTimes,
    draft_ladder,
)
from specdec.runtime.rounds.captured_rounds import Rounds
from specdec.runtime.rounds.result import NO_DRAFT, DraftShape

from engine_internals import capture_on_cpu
from marks import deep, deep_cases, examples, is_deep, pairs, usual_cases

LADDER = draft_ladder(CHAIN, captured=True)
BOTH = draft_ladder(CHAIN, captured=True, lookup=True)

pytestmark = pytest.mark.usefixtures("shallow_pair", "bundled_once")


def rows(count):
    return np.arange(count)


def test_adaptive_drafts_are_the_default():
    assert {each.name: each.default for each in dataclasses.fields(SpecConfig)}["adaptive"] is True
    assert "adaptive=True" in inspect.getsource(SpecConfig).replace(": bool = ", "=")


# the ladder


@pytest.mark.parametrize(
    ("spec", "ladder", "looked_up"),
    [
        (SpecConfig(1), [(1, 1, 2)], [(1, 1, 2)]),
        (SpecConfig(4), [(1, 1, 2), (2, 1, 3), (3, 1, 4), (4, 1, 5)], [(2, 1, 3), (4, 1, 5)]),
        (SpecConfig(7), [(1, 1, 2), (2, 1, 3), (3, 1, 4), (4, 1, 5), (6, 1, 7), (7, 1, 8)], [(3, 1, 4), (7, 1, 8)]),
        (SpecConfig(6, 1, 3), [(1, 1, 2), (2, 1, 3)], [(1, 1, 2), (2, 1, 3)]),
        (SpecConfig(4, 4, 16), [(1, 1, 2), (2, 1, 3), (4, 4, 8), (4, 4, 16)], [(2, 1, 3), (4, 4, 16)]),
        (SpecConfig(6, 3, 20), [(1, 1, 2), (2, 1, 3), (4, 3, 8), (5, 3, 16), (6, 3, 20)], [(3, 1, 4), (6, 3, 20)]),
        (SpecConfig(1, 4), [(1, 4, 5)], [(1, 1, 2), (1, 4, 5)]),
    ],
    ids=str,
)
def test_the_ladder_goes_from_none_to_the_whole_draft(spec, ladder, looked_up):
    own = [NO_DRAFT, *(DraftShape(*rung) for rung in ladder)]
    lookups = [DraftShape(*rung, by_lookup=True) for rung in looked_up]
    assert draft_ladder(spec, captured=True) == own
    assert draft_ladder(spec, captured=True, lookup=True) == [*own, *lookups]
    assert draft_ladder(spec, captured=False, lookup=True) == [NO_DRAFT, own[-1], lookups[-1]]


@pytest.mark.parametrize("topk", [1, 2, 5, 63])
def test_every_rung_is_a_draft_that_the_engine_could_have(topk):
    for steps in (1, 2, 3, 7, 20):
        whole = SpecConfig(steps, topk)
        for shape in draft_ladder(whole, captured=True)[1:]:
            SpecConfig(shape.num_steps, shape.topk, shape.num_nodes)  # or it would raise
            assert shape.num_steps <= whole.depth and shape.num_nodes <= whole.num_nodes and shape.topk <= topk


# acceptance


def learned(acceptance, number, accepted, times=1, row=0, most=4):
    for _ in range(times):
        acceptance.learn(number, np.array([row]), np.array([accepted]), np.array([most]))


def tokens_of(acceptance, count, most=4):
    """[K]: expected by the mean over this many rows."""
    return acceptance.tokens(rows(count), np.full(count, most))[0]


def test_depths_are_counted_where_they_were_reached():
    """A chain of 3: row 0 accepts 1 and row 1 all: depth 1 was right twice, depth 2 once of two, depth 3 once. A row
    that asked for one draft has rejected nothing."""
    acceptance = DraftAcceptance(LADDER[:4], num_rows=3)
    acceptance.learn(3, rows(2), np.array([1, 3]), np.array([3, 3]))
    assert acceptance.chance[0].tolist() == [3 / 4, 2 / 4, 2 / 3]
    learned(acceptance, 3, accepted=1, most=1)
    assert acceptance.chance[0] == pytest.approx([4 / 5, 2 / 4, 2 / 3], abs=1e-3)


def test_expected_tokens_by_hand():
    """Chance one half at each depth: 1, 1.5, 1.75 tokens; of a row that accepts one draft at most 1, 1.5, 1.5."""
    acceptance = DraftAcceptance(LADDER[:3], num_rows=2)
    assert tokens_of(acceptance, 1) == pytest.approx([1, 1.5, 1.75])
    assert tokens_of(acceptance, 1, most=1) == pytest.approx([1, 1.5, 1.5])
    mixed = acceptance.tokens(rows(2), np.array([4, 1]))[0]
    assert mixed == pytest.approx([1, 1.5, np.sqrt(1.5 * 1.75)])  # the geometric mean


def test_rows_differ_by_what_they_accepted_and_begin_anew():
    acceptance = DraftAcceptance(LADDER, num_rows=2)
    for _ in range(30):
        acceptance.learn(4, rows(2), np.array([0, 4]), np.array([4, 4]))
    hard, easy = (acceptance.tokens(np.array([row]), np.array([4]))[0, -1] for row in (0, 1))
    assert hard < 1.5 and easy > 3.5
    acceptance.begin_rows(rows(1))
    assert hard < tokens_of(acceptance, 1)[-1] < easy


def test_sources_are_learned_independently():
    acceptance = DraftAcceptance(BOTH, num_rows=2)
    before = acceptance.tokens(rows(1), np.array([4]))
    learned(acceptance, 6, accepted=4, times=50)
    after = acceptance.tokens(rows(1), np.array([4]))
    assert (after[:, :5] == before[:, :5]).all() and (after[0, 5:] > before[0, 5:]).all()
    assert after[0, 5] > 2.8, "shorter chains of the lookup begin as the long ones do"
    learned(acceptance, 4, accepted=0, times=50)
    assert tokens_of(acceptance, 1)[6] == pytest.approx(after[0, 6], rel=0.01)


def test_an_untried_chain_is_believed_as_trees_of_the_model_are():
    """Regression: a chain of 1 that failed once kept chains of 2 from being tried next to trees that bring no more."""
    tree = draft_ladder(TREE, captured=True)
    acceptance = DraftAcceptance(tree, num_rows=1)
    learned(acceptance, 1, accepted=0)
    assert acceptance.chance[0].tolist() == [1 / 3, 1 / 2, 1 / 2, 1 / 2]
    learned(acceptance, 3, accepted=2, times=7)  # levels 1 and 2 are right, 3 is not
    assert acceptance.chance[0] == pytest.approx([2 * 8 / 9 / 3, 8 / 9, 1 / 9, 1 / 2], abs=3e-3)


def test_optimism_exceeds_the_expectation_and_fades_with_observations():
    acceptance = DraftAcceptance(LADDER, num_rows=1)
    first = acceptance.tokens(rows(1), np.array([4]))
    learned(acceptance, 4, accepted=0, times=200)
    seen = acceptance.tokens(rows(1), np.array([4]))
    assert first[1, 4] > first[0, 4] + 0.5 > seen[1, 4] and seen[1, 1] < 1.03
    for _ in range(3 * DECAY_ROUNDS):
        acceptance.learn(0, *np.zeros((3, 0), dtype=np.int64))
    acceptance.begin_rows(rows(1))
    assert acceptance.tokens(rows(1), np.array([4]))[1, 1] > 1.2  # unknown again


# times


def test_a_burst_makes_no_timed_draft_look_worse():
    times = RoundTimes([1.0, 1.5, 2.0])
    for _ in range(2):
        times.learn(2, 9.0)
    assert times.seconds[0].tolist() == [1.0, 1.5, 2.0]


def test_one_fast_round_of_a_draft_says_nothing_of_plain_rounds():
    """Regression: with noise of 30 %, drafts that paid were dropped again and again: 0.92 of the best."""
    times = RoundTimes([1.0, 1.1])
    for seconds in [1.1] * 8 + [0.9] * 2:
        times.learn(1, seconds)
    assert times.seconds[0].tolist() == [1.0, 1.1]


def test_drafts_that_were_timed_in_a_burst_are_timed_again():
    """All took three times as long, the plain round too; rounds with a draft that take less than it show that."""
    times = RoundTimes([3.0, 3.3, 3.6])
    for draft, seconds in [(1, 3.3), (2, 3.6)] * 8 + [(1, 1.1)] * 3:
        times.learn(draft, seconds)
    assert times.seconds[0].tolist() == [1.1, 1.1, 3.6]
    assert times.seconds[1, 2] == 1.8, "what the other draft took in the burst is forgotten: it may take half"


def test_extra_time_of_one_draft_is_assumed_for_the_others():
    """Context, host, or rows that route less alike than those that were timed. A plain round is timed for itself."""
    times = RoundTimes([1.0, 1.5, 2.0])
    for _ in range(3):
        times.learn(2, 3.0)
    assert times.seconds.tolist() == [[1.0, 2.25, 3.0], [0.5, 1.125, 3.0]]
    times.learn(1, 2.0)
    for _ in range(3):
        times.learn(0, 1.25)
    assert times.seconds.tolist() == [[1.25, 2.0, 3.0]] * 2


def test_times_measured_under_other_load_are_corrected():
    """A draft that takes less than a plain round shows that something else ran meanwhile: hope tries that one next."""
    times = RoundTimes([5.5, 4.5, 9.0])
    assert times.seconds.tolist() == [[5.5, 5.5, 9.0], [2.75, 2.75, 4.5]]
    times.learn(0, 4.0)
    assert times.seconds[0].tolist() == [4.0, 4.5, 9.0]
    times.learn(2, 5.0)
    assert times.seconds[0].tolist() == [4.0, 4.5, 5.0]
    times.learn(2, 3.0)
    assert times.seconds[:, 0].tolist() == [3.0, 1.5]
    times.learn(0, 2.5)
    assert times.seconds[0].tolist() == [2.5, 4.5, 3.0]


@pytest.mark.parametrize(("right", "burst"), [(0.0, (1.3, 1, 1, 1, 1)), (0.8, (1, *[1.2] * 4)), (0.8, (2, 1, 1, 1, 1))])
def test_an_engine_timed_under_other_load_still_finds_the_best_draft(right, burst):
    """Regression: two engines were made at once on one GPU, no draft seemed slower than a chain of 1, and never ran."""
    load, machine = Load(chances(right), batch=8), Machine()
    outcome = adaptive(machine, load, LADDER, burst=burst)
    assert min(fixed(machine, load, shape) for shape in LADDER) / outcome.seconds > 0.95, outcome.rounds
    assert outcome.plain_seconds / outcome.seconds > 0.98, outcome.rounds


@pytest.mark.parametrize("right", [0.0, 0.5])
@pytest.mark.parametrize(("timed", "real"), [(0.0, 1.0), (1.0, 0.0)], ids=["alike", "apart"])
def test_a_mixture_is_judged_by_how_its_own_rounds_route(timed, real, right):
    """Rows that were timed chose other experts than those of real text do: drafts that seemed dear pay, or the other
    way round. They were held to what was timed forever: 0.78 of the best, 0.67 of plain."""
    load, machine = Load(chances(right), batch=4, crowds=2), Machine(seconds=mixture(real))
    burst = [mixture(timed)(shape, 4) / mixture(real)(shape, 4) for shape in LADDER]
    outcome = adaptive(machine, load, LADDER, burst=burst)
    assert min(fixed(machine, load, shape) for shape in LADDER) / outcome.seconds > 0.9, outcome.rounds
    assert outcome.plain_seconds / outcome.seconds > 0.95, outcome.rounds
    if right:
        most = max(outcome.rounds, key=outcome.rounds.__getitem__)
        assert most == (LADDER[-1] if real else NO_DRAFT), outcome.rounds


def test_times_are_learned_where_nothing_is_captured():
    times = RoundTimes([0.0, 0.0])
    assert not times.seconds.any()
    times.learn(0, 2.0)
    assert times.seconds.tolist() == [[2.0, 2.0 * FIRST_GUESS], [2.0, 2.0]]
    times.learn(1, 99.0)  # a burst
    assert times.seconds.tolist() == [[2.0, 2.0 * FIRST_GUESS]] * 2
    for _ in range(3):
        times.learn(1, 9.0)
    assert times.seconds.tolist() == [[2.0, 9.0]] * 2
    for _ in range(3):
        times.learn(1, 1.95)
    assert times.seconds[0].tolist() == [2.0, 2.0], "a draft never takes less than none"


def test_what_a_draft_took_replaces_the_guess_for_good():
    """A draft that has not run for long is hoped to be faster, the more so the longer, but not believed to be."""
    times = RoundTimes([0.0, 0.0])
    for draft in [0, 1, 1, 1, *[0] * (DECAY_ROUNDS + 1)]:
        times.learn(draft, 9.0 if draft else 1.0)
    assert times.seconds.tolist() == [[1.0, 9.0], [1.0, 4.5]]
    for _ in range(DECAY_ROUNDS):
        times.learn(0, 1.0)
    assert times.seconds.tolist() == [[1.0, 9.0], [1.0, 2.25]]


def test_learned_times_grow_old():
    """A draft that has not run for long may take half, and so may a plain round."""
    times = RoundTimes([1.0, 1.5])
    for _ in range(MAX_SAMPLES):
        times.learn(1, 2.0)
    times.learn(0, 1.0)
    assert times.seconds.tolist() == [[1.0, 2.0]] * 2
    for _ in range(DECAY_ROUNDS):
        times.learn(0, 1.0)
    assert times.seconds.tolist() == [[1.0, 1.5], [1.0, 1.0]]
    for _ in range(DECAY_ROUNDS + 1):
        times.learn(1, 1.5)
    assert times.seconds.tolist() == [[1.0, 1.5], [0.5, 1.5]]


def test_a_draft_that_just_became_slow_is_timed_anew_once():
    """If it is slow then, too, or was slow for long or always, no burst made it so: it waits as long as other
    drafts."""

    def believed(slow_rounds, plain_rounds, fast_rounds=20):
        times = RoundTimes([1.0, 1.5])
        for draft, seconds, count in ((1, 1.5, fast_rounds), (1, 9.0, slow_rounds), (0, 1.0, plain_rounds)):
            for _ in range(count):
                times.learn(draft, seconds)
        return times

    assert believed(8, RETRY_ROUNDS - 1).seconds[0, 1] == 9.0
    assert believed(RETRY_ROUNDS, DECAY_ROUNDS - 1).seconds[0, 1] == 9.0
    assert believed(8, DECAY_ROUNDS - 1, fast_rounds=0).seconds[0, 1] == 9.0
    times = believed(8, RETRY_ROUNDS + 1)
    assert times.seconds[0, 1] == 1.5
    for draft, seconds in [(1, 9.0)] * 3 + [(0, 1.0)] * (DECAY_ROUNDS - 1):
        times.learn(draft, seconds)
    assert times.seconds[0, 1] == 9.0


# the account


def test_the_account_by_hand():
    """Plain rounds of 2 seconds. A wrong draft that takes 3 takes 1; one of which two drafts are right brings three
    tokens, 6 seconds of plain rounds for 3. Old rounds fade."""
    account, times = DraftAccount([0, 0]), RoundTimes([2.0, 3.0])
    account.settle(times, 1, 1.0)
    assert account.balance(times) == pytest.approx(2.0 - 1.0 + LOSS_SHARE * 3.0, rel=0.01)
    account.settle(times, 1, 3.0)
    assert account.balance(times) == pytest.approx(2.0 + 2.0 + LOSS_SHARE * 6.0, rel=0.01)
    for _ in range(100):
        account.settle(times, 1, 5.0)
    assert account.balance(times) == pytest.approx(MAX_SAVED * 2.0, rel=0.1)
    few, saved = RoundTimes([0.2, 0.3]), account.balance(times)
    account.settle(few, 0, 1.0)  # fewer requests: what was saved is worth no more rounds of them
    assert account.balance(few) < saved / 5


def test_a_loss_is_paid_by_later_rounds_and_forgotten_with_them():
    account, times = DraftAccount([0, 0]), RoundTimes([2.0, 9.0])
    account.settle(times, 1, 1.0)
    for _ in range(100):
        account.settle(times, 0, 1.0)
    assert account.balance(times) == pytest.approx(
        2.0 - 7.0 * np.exp(-100 / DECAY_ROUNDS) + LOSS_SHARE * 100 * 2.0, abs=0.3
    )
    for _ in range(4 * DECAY_ROUNDS):
        account.settle(times, 0, 1.0)
    assert account.balance(times) == pytest.approx(2.0 + LOSS_SHARE * DECAY_ROUNDS * 2.0, rel=0.05)


def test_rounds_are_charged_by_what_is_believed_of_them_now():
    """A draft that was timed too fast is charged in full once that is known; a burst is not charged."""
    account, times = DraftAccount([0, 0]), RoundTimes([2.0, 3.0])
    for _ in range(3):
        times.learn(1, 9.0)
        account.settle(times, 1, 1.0)
    assert account.balance(times) == pytest.approx(2.0 + 3 * (2.0 - 9.0), rel=0.03)
    times.learn(1, 3.0)
    account.settle(times, 0, 1.0)
    assert account.balance(times) == pytest.approx(2.0 + 3 * (2.0 - 3.0), abs=0.2)


def test_overestimated_gains_block_no_later_draft():
    """Plain rounds seem ten times as long in a burst, and what drafts gain in them too."""
    account, times = DraftAccount([0, 0]), RoundTimes([20.0, 30.0])
    for _ in range(100):
        account.settle(times, 1, 5.0)
    times.learn(1, 3.0)
    times.learn(0, 2.0)
    account.settle(times, 0, 1.0)
    assert account.balance(times) > 0


def test_no_source_takes_the_trials_of_the_other():
    account = DraftAccount([0, 0, 1])
    times = RoundTimes([2.0, 9.0, 3.0])
    account.settle(times, 1, 1.0)
    assert account.balance(times).tolist() == pytest.approx(
        [1.0 - 7.0 + LOSS_SHARE * 4.5, 1.0 + LOSS_SHARE * 4.5], rel=0.01
    )


@settings(max_examples=examples(8, 300))
@given(seed=st.integers(0, 2**32 - 1), timed=st.booleans())
def test_drafts_never_cost_more_than_the_account_allows(seed, timed):
    """Requests of any chance come and go, rounds take anything, and the drafter may have to catch up. All together take
    at most what plain rounds would have taken for the same tokens, a share of it, one plain round, the first draft of
    each source, and reading. Where nothing is timed ahead, drafts may also take longer than was believed."""
    draw = np.random.default_rng(seed)
    spec, lookup = draw.choice([SpecConfig(1), CHAIN, TREE]), bool(draw.integers(2))
    node, level = draw.choice([0.0, 0.05, 0.5]), draw.choice([0.02, 0.3])
    chance = draw.choice([0.0, 0.0, 0.5, 0.95], (2, 40))
    reads = draw.choice([0.0, 0.3])
    machine = Machine(
        captured=timed,
        seconds=lambda shape, batch: (
            batch**0.5 * (1 + node * (shape.num_nodes - 1) + (0 if shape.by_lookup else level * shape.num_steps))
        ),
        read_lag=None if reads == 0.0 else lambda batch: reads * batch**0.5,
    )
    load = Load(lambda number: tuple(chance[:, number % 40]), batch=int(draw.integers(1, 5)), crowds=3, tokens=80)
    shapes = draft_ladder(spec, captured=timed, lookup=lookup)
    outcome = adaptive(machine, load, shapes)
    plain = machine.seconds(NO_DRAFT, 4)
    worst = max(machine.seconds(shape, 4) for shape in shapes) - plain
    allowed = (1 + LOSS_SHARE) * outcome.plain_seconds + plain + outcome.reading
    surprises = 2 if timed else 6  # a first draft of each source, where nothing is timed in each batch size
    assert outcome.seconds <= allowed + surprises * worst + 1e-9


# the choice as a whole


measured_row = functools.cache(lambda name, seed: measured(ROWS[name], seed)[:2])
USUAL = list(ROWS)[::41]


def ratios(names):
    """[row, 2, seed]: how many times as fast as the best fixed draft, and as plain decoding."""
    seeds = range(examples(1, 8))
    return np.array([[measured_row(name, seed) for seed in seeds] for name in names]).swapaxes(1, 2)


@pytest.mark.parametrize("name", [name if name in USUAL else deep(name) for name in ROWS])
def test_no_slower_than_plain_by_two_percent_and_near_the_best_fixed_draft(name):
    best, plain = ratios([name])[0]
    assert best.mean() > 0.95, best
    if ROWS[name].never_right:
        assert plain.min() > (0.98 if ROWS[name].machine.captured else 0.96), plain


def test_the_mean_is_near_the_best_fixed_draft():
    assert ratios(ROWS if is_deep() else USUAL)[:, 0].mean() > 0.97


@deep_cases("1")
@pytest.mark.parametrize("batch", [1, 32])
def test_trees_that_bring_no_more_than_chains_cost_little(batch):
    """Regression: 0.94 and 0.88 of the best fixed draft at one request, which was a chain of 2."""
    names = [f"vain tree of 16, {batch} requests, right {right}" for right in (0.45, 0.8)]
    assert (ratios(names)[:, 0].mean(axis=1) > 0.95).all(), ratios(names)


@pytest.mark.parametrize("batch", [8, 32])
def test_drafts_that_were_all_timed_too_slow_are_tried(batch):
    """Regression: all drafts were timed at twice what they take, seemed not to pay, and never ran: 0.86 of the best."""
    best, plain = ratios([f"all drafts timed at 2x, {batch} requests, right 0.3"])[0]
    assert best.min() > 0.93 and plain.min() > 1.05, (best, plain)


def test_hard_and_easy_requests_get_drafts_of_their_own():
    machine = Machine(seconds=lambda shape, batch: 1 + 0.4 * shape.num_steps)
    load = Load(lambda number: (0.9 if number % 2 else 0.1, 0.0), tokens=200, crowds=10)
    outcome = adaptive(machine, load, LADDER)
    assert min(fixed(machine, load, shape) for shape in LADDER) / outcome.seconds > 1.05, outcome.rounds


def test_drafts_that_were_off_come_back_when_they_are_right():
    """An engine that saw thousands of wrong drafts meets requests whose drafts are right."""
    wrong = examples(8, 100)
    machine, load = Machine(), Load(lambda number: (float(number >= wrong), 0.0), tokens=200, crowds=wrong + 1)
    outcome = adaptive(machine, load, LADDER)
    assert sum(outcome.rounds.values()) < 200 * wrong + 100
    assert outcome.rounds[NO_DRAFT] > 0.6 * 200 * wrong


def test_a_draft_that_a_request_must_have_is_given():
    choice = DraftPolicy(BOTH, 2)
    choice.times[1] = RoundTimes([1.0, 10, 10, 10, 10, 1, 1])
    for _ in range(50):
        shape = choice.choose(rows(1), np.array([4]), 1, DraftShape(3, 1, 4))
        assert shape.num_steps >= 3 and not shape.by_lookup


def settled(choice, number, seconds, accepted=0, times=1):
    """Settle rounds of one request with draft `number`, of which it accepted `accepted` tokens."""
    shape = choice.shapes[number]
    for _ in range(times):
        drafted = rows(int(number > 0)), np.full(int(number > 0), accepted), np.full(int(number > 0), shape.depth)
        choice.learn(shape, 1, seconds, drafted, 1.0 + accepted)


def test_a_draft_in_flight_is_covered_by_the_same_balance():
    """Plain rounds of a second, the credit of one: it covers one draft that may lose 0.9, not a second one."""
    choice = DraftPolicy(LADDER[:2], 1)
    choice.times[1] = RoundTimes([1.0, 1.9])
    learned(choice.acceptance, 1, accepted=1, times=99, most=1)
    assert choice.choose(rows(1), np.array([4]), 1, NO_DRAFT) == LADDER[1]
    assert choice.choose(rows(1), np.array([4]), 1, NO_DRAFT, [LADDER[1]]) == NO_DRAFT


def test_a_dear_draft_that_is_wrong_is_not_tried_again_and_again():
    """Regression: every 512 rounds its time was guessed anew, three trials were due, and its debt was forgotten: 1.05
    of plain decoding forever."""
    machine = Machine(captured=False, seconds=lambda shape, batch: 1.0 + shape.num_steps)
    outcome = adaptive(machine, Load(chances(0.0), tokens=1600), draft_ladder(SpecConfig(8), captured=False))
    assert outcome.seconds < 1.02 * outcome.plain_seconds, outcome.rounds


def test_levels_that_are_rarely_reached_are_not_tried_forever():
    """Regression: a trial of 16 levels rarely tells of the last ones, whose hope never faded: 0.88 of the best."""
    load, shapes = Load(chances(0.4), crowds=4), draft_ladder(SpecConfig(16), captured=True)
    outcome = adaptive(Machine(), load, shapes)
    assert min(fixed(Machine(), load, shape) for shape in shapes) / outcome.seconds > 0.96, outcome.rounds


def test_a_draft_that_requests_shortened_is_timed():
    """Regression: all requests asked for two levels of four, which were never timed: 1.8 of plain decoding forever."""
    choice = DraftPolicy(draft_ladder(CHAIN, captured=False), 2)
    none = np.zeros((3, 0), dtype=np.int64)

    def learned_time(shape, seconds, times):
        for _ in range(times):
            choice.learn(shape, 1, seconds, none, 1.0)
        return choice.times[1].seconds[0, 1]

    learned_time(NO_DRAFT, 1.0, 1)
    assert learned_time(DraftShape(2, 1, 3), 3.0, 3) == 3.0
    assert learned_time(DraftShape(4, 1, 5), 5.0, MAX_SAMPLES) == 5.0
    assert learned_time(DraftShape(2, 1, 3), 3.0, MAX_SAMPLES) == 5.0, "the whole one takes longer"


def test_one_trial_at_a_time():
    """A draft of which no round is settled may seem better only until one is, although the account pays for two."""
    choice = DraftPolicy(LADDER[:2], 1)
    choice.times[1] = RoundTimes([1.0, 1.52])
    settled(choice, 0, 1.0, times=60)
    first = choice.choose(rows(1), np.array([4]), 1, NO_DRAFT)
    assert first == LADDER[1]
    assert choice.choose(rows(1), np.array([4]), 1, NO_DRAFT, [first]) == NO_DRAFT
    assert choice.choose(rows(1), np.array([4]), 1, NO_DRAFT) == first


def test_reading_the_lag_is_no_cost_of_a_lookup():
    """Before each round of the model the drafter read its lag, for 100 seconds; those of the lookup were not."""
    choice = DraftPolicy(BOTH, 2)
    choice.times[1] = RoundTimes([1.0, 1.1, 1.2, 1.3, 1.4, 1.2, 1.4])
    settled(choice, 0, 1.0)
    settled(choice, 4, 101.4, accepted=4, times=40)
    settled(choice, 6, 1.4, accepted=4, times=40)
    chosen = [choice.choose(rows(1), np.array([4]), 1, NO_DRAFT) for _ in range(20)]
    assert set(chosen[2:]) == {BOTH[6]}


def test_a_poor_model_does_not_starve_the_lookup_of_trials():
    """Regression: trials were paid from one purse, the one that risked least came first, and a model that is never
    right emptied it: 500 rounds for 500 tokens and no lookup, where the lookup alone takes 104."""
    machine = Machine(
        seconds=lambda shape, batch: (
            1 + 0.25 * (shape.num_nodes - 1) + (0 if shape.by_lookup else 0.02) * shape.num_steps
        )
    )
    for right in (0.0, 0.3):
        outcome = adaptive(machine, Load(chances(right, 1.0), tokens=500), BOTH)
        assert sum(outcome.rounds.values()) < 140, outcome.rounds
    late = Load(lambda number: (0.0, float(number > 2)), tokens=300, crowds=6)  # 60 rounds each of the last three
    outcome = adaptive(machine, late, BOTH)
    assert sum(outcome.rounds.values()) < 900 + 330, outcome.rounds


def test_a_drafter_that_turns_bad_loses_little_of_what_it_gained():
    """Drafts of 10 crowds are right, those of the next two never."""

    def outcome(crowds):
        load = Load(lambda number: (0.8 * (number < 10), 0.0), crowds=crowds)
        return adaptive(Machine(), load, LADDER)

    good, both = outcome(10), outcome(12)
    assert (both.seconds - good.seconds) / (both.plain_seconds - good.plain_seconds) < 1.04


@pytest.mark.parametrize(("begins", "ends", "factor"), [(0.02, 0.07, 10), (0.0, 0.5, 5), (0.3, 1.3, 3), (0.3, 1.5, 6)])
def test_one_burst_of_noise_parks_no_draft(begins, ends, factor):
    """Regression: a draft that was slow once, by what else ran, was not timed again: 2,189 rounds for 3,000 tokens,
    where 600 do. A burst of 7 to 11 rounds still did that: all samples of the draft were slow, those of plain rounds
    not."""
    machine = Machine(
        captured=False,
        seconds=lambda shape, batch: 0.01 * (1 + 0.4 * shape.num_steps),
        noise=lambda now: factor if begins <= now < ends else 1.0,
    )
    outcome = adaptive(machine, Load(chances(1.0), tokens=3000), draft_ladder(CHAIN, captured=False))
    assert sum(outcome.rounds.values()) < 660, outcome.rounds


# engines


@functools.cache
def plain_tokens(params):
    with Engine.from_pretrained("tiny-gemma4", config=EngineConfig(max_batch_size=4, max_model_len=200)) as plain:
        return [out.token_ids for out in plain.generate(prompts(plain), params)]


MODELS = ["tiny-gemma4-mtp", "tiny-gemma4-eagle3", "tiny-gemma4"]
ALONE = ["tiny-gemma4-mtp", "tiny-gemma4-eagle3", "ngram", "suffix"]


@usual_cases("tiny-gemma4-mtp,suffix-tree-0.8")
@pytest.mark.parametrize(
    ("drafter", "shape", "temperature"),
    pairs([*ALONE, *(f"{model},suffix" for model in MODELS)], ["chain", "tree"], [0.0, 0.8]),
)
def test_no_token_depends_on_the_choice(drafter, shape, temperature):
    """Costs are such that every draft is the best in turn, and wrong ones are tried."""
    spec = CHAIN if shape == "chain" else SpecConfig(3, 3, 12, adaptive=True)
    params = SamplingParams(max_new_tokens=examples(20, 40), ignore_eos=True, temperature=temperature, seed=5)
    config = EngineConfig(max_batch_size=4, max_model_len=200)
    with Engine.from_pretrained("tiny-gemma4", drafter, spec=spec, config=config) as engine:
        choice, turn = engine.steps.draft_policy, iter(range(10**6))
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


@pytest.mark.cpu
def test_a_request_can_fix_its_draft_in_an_adaptive_engine():
    config = EngineConfig(max_batch_size=1, max_model_len=200)
    with Engine.from_pretrained("tiny-gemma4", "tiny-gemma4-mtp", spec=CHAIN, config=config) as engine:
        choice = engine.steps.draft_policy
        assert choice is not None
        choice.times[1] = RoundTimes([1.0, 50])  # nothing but no draft would be chosen
        choice.learn = lambda *_: None  # or rounds that take less would correct it
        [prompt] = prompts(engine)[:1]
        fixed = SpecConfig(2, adaptive=False)
        [out] = engine.generate(prompt, SamplingParams(max_new_tokens=30, ignore_eos=True, speculation=fixed))
        assert out.stats.drafted_rounds >= out.stats.rounds - 1
        [out] = engine.generate(prompt, SamplingParams(max_new_tokens=30, ignore_eos=True))
        assert out.stats.drafted_rounds <= 2


@pytest.mark.cpu
@deep_cases("tiny-gemma4-mtp")
@pytest.mark.parametrize("drafter", ["tiny-gemma4-mtp", "tiny-gemma4-eagle3"])
def test_a_captured_engine_has_its_table_when_it_is_made(drafter, measured, monkeypatch):
    capture_on_cpu(monkeypatch)
    monkeypatch.setattr(specdec.runtime.warm_up, "REPEATS", 2)
    for name in ("time_rounds", *["time_prompts"] * (drafter == "tiny-gemma4-mtp")):
        monkeypatch.setattr(specdec.runtime.warm_up, name, measured[name])
    begun, run = [], Rounds.run

    def noted(graphs, shape):
        newest = graphs.state.cache.table.committed_len.tensor[: shape.batch, None]
        begun.append(tuple(graphs.state.tokens.tensor[: shape.batch].gather(1, newest)[:, 0].tolist()))
        return run(graphs, shape)

    config = EngineConfig(max_batch_size=2, max_model_len=200)
    params = SamplingParams(max_new_tokens=examples(8, 40), ignore_eos=True)
    with monkeypatch.context() as while_made:
        while_made.setattr(Rounds, "run", noted)
        engine = Engine.from_pretrained("tiny-gemma4", drafter, spec=CHAIN, config=config)
    with engine:
        random = [tokens for tokens in begun if any(tokens)]  # captures begin with zeros
        assert all(a != b for a, b in pairwise(random)), "experts are chosen by tokens: each round begins with others"
        assert len(random) >= 8
        timed = {size: times.seconds for size, times in engine.steps.draft_policy.times.items()}
        assert sorted(timed) == [1, 2] and all((seconds > 0).all() for seconds in timed.values())
        gap = engine.scheduler.prompt_gap
        assert gap.cost.is_known and gap.longest_round > 0 and engine.stats().prompt_gap_ms > 0
        made = engine.stats().captures
        assert made.uncaptured_rounds == 0 and engine.table.committed_len.host.max() == 0
        outs = engine.generate(prompts(engine), params)
        assert [out.token_ids for out in outs] == plain_tokens(params)
        assert engine.stats().captures.uncaptured_rounds == 0  # no draft is captured later
        assert all((times.seconds > 0).all() for times in engine.steps.draft_policy.times.values())  # learned since
        engine.table.check()


def test_a_fixed_engine_chooses_nothing():
    config = EngineConfig(max_batch_size=1, max_model_len=200)
    spec = SpecConfig(2, adaptive=False)
    with Engine.from_pretrained("tiny-gemma4", "tiny-gemma4-mtp", spec=spec, config=config) as engine:
        assert engine.steps.draft_policy is None
        assert engine.stats().drafts.shapes == ()
