"""Rounds and prompts in one step: which requests wait, for how long, and what happens to requests that leave
meanwhile."""

import itertools
import random

import pytest

from specdec import Engine, SamplingParams, SpecConfig
from specdec.runtime.request import RequestState
from specdec.runtime.rounds.prompt_chunks import read_chunk

from engine_internals import assert_idle, capture_on_cpu
from marks import deep, deep_cases, examples, slow

NEW = examples(8, 12)
PARAMS = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
BOTH = pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])


@pytest.fixture
def engine_for(make_target, make_engine, monkeypatch):
    """engine_for(captured, drafter="ngram", **config)"""

    def make(captured, drafter="ngram", **config) -> Engine:
        capture_on_cpu(monkeypatch, captured)
        sizes = {"max_batch_size": 4, "max_model_len": 128, "prefill_chunk": 8, **config}
        return make_engine(make_target("gemma4-e2b"), drafter, **sizes)

    return make


def check(engine: Engine) -> None:
    """Nothing is lost or owned twice; host and device agree where nothing is under way."""
    (engine.table.allocator if engine.steps.launches.unsettled else engine.table).check()


def chunks_of(engine: Engine) -> dict[int, int]:
    """What K/V of each running request's prompt there are, by id."""
    return {r.id: int(engine.table.committed_len.host[r.row]) for r in engine.scheduler.running}


@deep_cases("eager")
@BOTH
def test_a_stream_gets_tokens_in_every_step_while_a_long_prompt_is_read(
    captured, engine_for, make_target, greedy_oracle, random_prompt
):
    """80 tokens of prompt in chunks of 8: ten steps, and a plain stream gains a token in each."""
    engine = engine_for(captured, None)
    stream = engine.submit(random_prompt(5), SamplingParams(max_new_tokens=40, ignore_eos=True))
    for _ in range(4):
        engine.step()
    stream.read()
    long = engine.submit(random_prompt(80), PARAMS)
    gained = []
    while long.read() is None:
        engine.step()
        delta = stream.read()
        gained.append(0 if delta is None else len(delta.token_ids))
    # captured: with chunks after it a round is settled in its own step, without them a step later
    assert gained == ([2, *[1] * 9, 0] if captured else [1] * 10)
    assert [len(h.output().token_ids) for h in (stream, long)] == [40, NEW]
    model = make_target("gemma4-e2b")
    assert stream.output().token_ids == greedy_oracle(model, random_prompt(5), 40)
    assert long.output().token_ids == greedy_oracle(model, random_prompt(80), NEW)
    assert_idle(engine)


def test_the_cap_is_of_all_prompts_together_and_first_come_first_served(engine_for, random_prompt):
    """While 0 decodes at most 10 tokens a step, 8 of one request: 1 has its prompt first, then 2, 3."""
    engine = engine_for(False, max_prefill_tokens=10)
    engine.submit(random_prompt(1), SamplingParams(max_new_tokens=30, ignore_eos=True))
    engine.step()
    for length in (12, 9, 9):
        engine.submit(random_prompt(length), PARAMS)
    seen = []
    for _ in range(3):
        engine.step()
        seen.append(chunks_of(engine))
        del seen[-1][0]
    #              8 + 2          4 + 6 (1 is through)         1 + 8; 1 has had a round
    assert seen[0] == {1: 8, 2: 2, 3: 0} and seen[1] == {1: 12, 2: 8, 3: 0}
    assert (seen[2][2], seen[2][3]) == (9, 8) and seen[2][1] > 12


@deep_cases("None-eager", "eagle3-captured", "eagle3-eager")
@BOTH
@pytest.mark.parametrize("drafter", [None, deep("ngram"), deep("mtp"), slow("eagle3")])
def test_a_step_settles_prompts_only_when_their_tokens_are_due(
    captured, drafter, engine_for, make_target, make_drafter, greedy_oracle, random_prompt
):
    """Requests join and leave four rows, one prompt token or sixty, some for one token only."""
    model = make_target("gemma4-e2b")
    engine = engine_for(captured, make_drafter(drafter, model), max_prefill_tokens=12, spec=SpecConfig(3, 1))
    draw = random.Random(4)
    prompts = [random_prompt(draw.choice([1, 3, 9, 17, 60]), seed=i) for i in range(examples(10, 16))]
    lengths = [draw.choice([1, 2, 7, NEW]) for _ in prompts]
    params = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in lengths]
    outs = engine.generate(prompts, params)
    truths = [greedy_oracle(model, p, NEW)[:n] for p, n in zip(prompts, lengths, strict=True)]
    assert [out.token_ids for out in outs] == truths
    assert_idle(engine)


def test_chunks_wait_for_no_round_when_rounds_are_captured(engine_for, random_prompt):
    """While a long prompt is read, a round or a group of chunks is under way at the end of every step."""
    engine = engine_for(True, None)
    stream = engine.submit(random_prompt(5), SamplingParams(max_new_tokens=40, ignore_eos=True))
    engine.step()
    engine.step()
    engine.submit(random_prompt(60), PARAMS)
    for _ in range(6):
        engine.step()
        [left] = engine.steps.launches.unsettled
        assert left.drawing == [] and [r.id for r in left.batch.requests] == [1]
    stream.abort()


@deep_cases("waiting-eager", "prefill-captured", "first token under way-eager", "decode-captured")
@BOTH
@pytest.mark.parametrize("when", ["waiting", "prefill", "first token under way", "decode"])
def test_an_abort_at_any_moment_frees_everything(when, captured, engine_for, make_target, greedy_oracle, random_prompt):
    engine = engine_for(captured, max_batch_size=2)
    model, prompts = make_target("gemma4-e2b"), [random_prompt(n) for n in (5, 24, 9)]
    stream = engine.submit(prompts[0], SamplingParams(max_new_tokens=30, ignore_eos=True))
    engine.step()
    doomed = engine.submit(prompts[1], PARAMS)
    steps = {"waiting": 0, "prefill": 2, "first token under way": 3, "decode": 5}[when]
    for _ in range(steps):
        engine.step()
    request = engine.inbox.live[doomed.id]
    state = {"waiting": RequestState.WAITING, "prefill": RequestState.PREFILL}.get(when, RequestState.DECODE)
    assert request.state is state
    if when == "first token under way":
        assert bool(request.num_output) is not captured
    had = list(doomed.read().token_ids) if request.num_output else []
    held = engine.table.allocator.primary.held_pages
    doomed.abort()
    assert doomed.finished and (engine.table.allocator.primary.held_pages < held or when == "waiting")
    check(engine)
    last = doomed.read()
    assert last.finish_reason == "abort" and last.token_ids == [] and last.output.token_ids == had
    other = engine.submit(prompts[2], PARAMS)  # takes the row, with what was launched for the other under way
    assert other.output().token_ids == greedy_oracle(model, prompts[2], NEW)
    assert stream.output().token_ids == greedy_oracle(model, prompts[0], 30)
    assert had == greedy_oracle(model, prompts[1], NEW)[: len(had)]
    assert_idle(engine)


def test_the_last_by_priority_is_preempted(engine_for, random_prompt):
    """Three requests outgrow pools for two: it is the one of lowest priority that steps back, though it came first."""
    engine = engine_for(False, None, full_slots=2 * (20 + 40) + 10, max_batch_size=3)
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    last, *others = [engine.submit(random_prompt(20, seed=i), params, priority=p) for i, p in enumerate((5, 0, 0))]
    outs = [handle.output() for handle in (last, *others)]
    assert outs[0].stats.preemptions > 0 and [out.stats.preemptions for out in outs[1:]] == [0, 0]


def test_admission_counts_what_running_prompts_have_yet_to_take(engine_for, random_prompt):
    """Two prompts of 60 do not fit 100 slots: the second waits, and is not admitted only to be thrown out."""
    engine = engine_for(False, None, full_slots=100, max_batch_size=2)
    handles = [engine.submit(random_prompt(60, seed=i), SamplingParams(max_new_tokens=4)) for i in range(2)]
    engine.step()
    assert [len(x) for x in (engine.scheduler.running, engine.scheduler.waiting)] == [1, 1]
    assert [handle.output().stats.preemptions for handle in handles] == [0, 0]


def test_prompts_of_a_step_are_one_forward_without_padding(
    engine_for, make_target, greedy_oracle, random_prompt, monkeypatch
):
    engine = engine_for(False, prefill_chunk=128, max_model_len=256)
    widths = []

    def watched(state, rows, length, num_places, *rest):
        widths.append((length.tolist(), num_places))
        return read_chunk(state, rows, length, num_places, *rest)

    monkeypatch.setattr("specdec.runtime.rounds.captured_prompts.read_chunk", watched)
    prompts = [random_prompt(n) for n in (4, 100, 2, 6)]
    handles = [engine.submit(prompt, PARAMS) for prompt in prompts]
    engine.step()
    assert widths == [([4, 100, 2, 6], 112)] and all(handle.read() for handle in handles)
    model = make_target("gemma4-e2b")
    assert [h.output().token_ids for h in handles] == [greedy_oracle(model, prompt, NEW) for prompt in prompts]
    assert_idle(engine)


@pytest.mark.parametrize("beside", [1, 3])
def test_a_short_prompt_has_its_token_while_long_ones_are_read(beside, make_engine, make_target, random_prompt):
    """Counted in steps: after the long ones it would wait for twelve times as many."""
    engine = make_engine(make_target("llama"), max_batch_size=6, max_prefill_tokens=16, max_model_len=256)
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    stream = engine.submit(random_prompt(3), params)
    engine.step()
    long = [engine.submit(random_prompt(190, seed=i), SamplingParams(max_new_tokens=1)) for i in range(beside)]
    engine.step()
    short = engine.submit(random_prompt(12, seed=9), params)
    steps = next(count for count in itertools.count(1) if engine.step() and short.read() is not None)
    assert steps <= 3
    assert all(each.read() is None for each in long)
    assert stream.finished is False
