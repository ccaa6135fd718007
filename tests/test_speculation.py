"""Requests of one batch that speculate differently, or not at all: the same tokens, and a drafter that stays right."""

import itertools
from functools import partial

import pytest
import torch

from specdec import Engine, SamplingParams, SpecConfig
from specdec.draft_models.gemma4_mtp import Gemma4MTPWorker
from specdec.draft_models.heads.feedback_drafts import FeedbackWorker
from specdec.errors import ConfigError
from specdec.runtime.rounds.decode_round import DecodeRound
from specdec.runtime.rounds.result import NO_DRAFT

from engine_internals import capture_on_cpu, captured_rounds
from marks import deep, deep_cases, slow
from scripted_drafter import following

NEW = 14
TREE = SpecConfig(3, 2, 6)
KINDS = (None, False, SpecConfig(1), SpecConfig(2, 2, 4), SpecConfig(3, 1, 3), False, None)


def asking(speculation, **settings) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": NEW, "ignore_eos": True, "speculation": speculation, **settings})


@pytest.fixture
def engine_for(make_target, make_drafter, make_engine, monkeypatch):
    """engine_for(drafter, captured=False, spec=TREE, **config)"""

    def make(drafter, captured=False, spec=TREE, **config) -> Engine:
        capture_on_cpu(monkeypatch, captured)
        model = make_target("gemma4-e2b")
        same_vocabulary = partial(make_target, "gemma4-e2b", seed=3)
        module = same_vocabulary() if drafter == "language_model" else make_drafter(drafter, model)
        return make_engine(model, module, spec=spec, **{"max_batch_size": 4, "max_model_len": 96, **config})

    return make


@deep_cases("language_model-4-True")
@pytest.mark.parametrize(
    ("drafter", "page_size", "captured"),
    [
        *(deep("mtp", 1, False), ("eagle3", 4, False), deep("mtp", 4, True), slow("ngram", 1, True)),
        *(deep("suffix", 4, True), slow("language_model", 4, True)),
        *(deep("mtp", 1, True), deep("eagle3", 4, True), deep("mtp", 4, False), deep("ngram", 1, False)),
    ],
)
def test_tokens_do_not_depend_on_speculation(drafter, page_size, captured, engine_for, random_prompt):
    """Seven requests, greedy and sampled, through four rows: each as it is with no drafter at all."""
    prompts = [random_prompt(n) for n in (5, 21, 9, 30, 2, 13, 17)]
    settings = [{"temperature": t, "seed": i} for i, t in enumerate((0, 1, 0, 0.7, 0, 0, 1))]
    want = engine_for(None).generate(prompts, [asking(None, **each) for each in settings])
    engine = engine_for(drafter, captured, page_size=page_size)
    got = engine.generate(prompts, [asking(kind, **each) for kind, each in zip(KINDS, settings, strict=True)])
    assert [out.token_ids for out in got] == [out.token_ids for out in want]
    engine.table.check()
    for out, kind in zip(got, KINDS, strict=True):
        depth = 3 if kind is None else kind.depth if kind else 0
        assert len(out.stats.accepted_counts) <= depth and out.stats.round_tokens == NEW - 1
        if not depth:
            assert out.stats.acceptance_length == 1 and not any(out.drafted)
    drafted = [out.stats for out, kind in zip(got, KINDS, strict=True) if kind is not False]
    tokens, rounds = (sum(getattr(s, name) for s in drafted) for name in ("drafted_round_tokens", "drafted_rounds"))
    assert engine.stats().acceptance_length == tokens / rounds  # those without drafts have no part in it


@pytest.mark.parametrize("depth", [1, 2])
def test_no_more_is_accepted_than_was_asked_for(depth, engine_for, scripted, make_target, greedy_oracle, random_prompt):
    """Every draft is right, and a neighbour takes three a round: this one takes its own number each time."""
    model, prompts = make_target("gemma4-e2b"), [random_prompt(n) for n in (5, 20)]
    whole = [[*p, *greedy_oracle(model, p, NEW + 8)] for p in prompts]
    engine = engine_for(scripted(following(whole)), spec=SpecConfig(3))
    kinds = [asking(kind, max_new_tokens=13) for kind in (None, SpecConfig(depth))]
    deep, shallow = engine.generate(prompts, kinds)
    assert deep.token_ids == whole[0][5:18] and shallow.token_ids == whole[1][20:33]
    assert deep.stats.accepted_per_position == [1, 1, 1] and deep.stats.rounds == 3
    assert shallow.stats.accepted_per_position == [1] * depth and shallow.stats.rounds == 12 / (depth + 1)


def test_a_round_is_no_larger_than_its_requests_ask_for(engine_for, random_prompt, monkeypatch):
    engine, run, seen = engine_for("mtp"), DecodeRound.run, []

    def spying(decode):
        seen.append(tuple(decode.shape.draft)[:3])
        return run(decode)

    def rounds_of(*kinds):
        seen.clear()
        engine.generate([random_prompt(9)] * len(kinds), [asking(kind, max_new_tokens=10) for kind in kinds])
        return max(seen, key=lambda shape: shape[2])

    monkeypatch.setattr(DecodeRound, "run", spying)
    assert rounds_of(False, False) == (0, 1, 1) and set(seen) == {(0, 1, 1)}
    assert rounds_of(False, SpecConfig(1)) == (1, 1, 2)
    assert rounds_of(SpecConfig(2, 1), SpecConfig(1, 2)) == (2, 2, 3)
    assert rounds_of(None, SpecConfig(1)) == (3, 2, 6)


def test_captured_rounds_have_two_draft_shapes(engine_for, random_prompt):
    """The engine's own, and none."""
    engine = engine_for("mtp", captured=True, max_batch_size=2)
    for pair in itertools.combinations_with_replacement((None, False, SpecConfig(2, 2)), 2):
        engine.generate([random_prompt(9)] * 2, [asking(kind, max_new_tokens=6) for kind in pair])
    shapes = captured_rounds(engine)
    assert {tuple(shape.draft)[:3] for shape in shapes} == {(3, 2, 6), (0, 1, 1)}


def test_tables_of_a_plain_round_have_room_for_the_round_in_flight(engine_for, random_prompt):
    """Six nodes may be in flight before it, for any draft of its own: its tables must have that width."""
    engine = engine_for("ngram", captured=True)
    handle = engine.submit(random_prompt(9), asking(False))
    engine.step()
    while [launched.drawing for launched in engine.steps.launches.unsettled] != [None]:
        engine.step()
    shape = engine.steps.shape_for(engine.scheduler.batch_of(engine.scheduler.running), [5])
    committed = int(engine.table.committed_len.host[0])
    assert committed >= 9 and (shape.draft, shape.max_committed_len) == (NO_DRAFT, committed + 6)
    handle.abort()


@deep_cases("mtp-captured", "eagle3-eager")
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("drafter", ["mtp", "eagle3"])
def test_the_drafters_state_is_that_of_the_tokens(drafter, captured, engine_for, random_prompt):
    """Behind rounds cut short, of rows that speculate and that do not: as in a fresh engine, given the tokens."""
    engine = engine_for(drafter, captured)
    prompts = [random_prompt(n) for n in (9, 20, 14)]
    kinds = (asking(SpecConfig(1), max_new_tokens=20), asking(False), asking(False, max_new_tokens=6))
    handles = [engine.submit(prompt, each) for prompt, each in zip(prompts, kinds, strict=True)]
    for _ in range(5):
        engine.step()
    engine.steps.launches.settle(busy=False)
    states = [(drafter_state(engine, request.row), request.tokens) for request in engine.scheduler.running]
    assert len(states) >= 2
    for state, tokens in states:
        fresh = engine_for(drafter)
        fresh.submit(tokens[:-1], asking(None))
        while fresh.scheduler.running == [] or fresh.scheduler.running[0].num_output == 0:
            fresh.step()
        torch.testing.assert_close(state, drafter_state(fresh, 0), atol=1e-3, rtol=1e-3)
    for handle in handles:
        handle.abort()


def drafter_state(engine: Engine, row: int) -> dict[str, torch.Tensor]:
    """What a drafter knows of one row."""
    worker = engine.state.worker
    if isinstance(worker, Gemma4MTPWorker):
        return {"hidden": worker._seed_hidden[row].clone()}
    assert isinstance(worker, FeedbackWorker)
    length = int(engine.table.committed_len.host[row])
    slots = torch.from_numpy(engine.table.slots.host[row, :length])
    state = {"hidden": worker._last[:, :, row].clone()}
    for layer, kept in worker.store.layers.items():
        state |= {f"k{layer}": kept.k[slots], f"v{layer}": kept.v[slots]}
    return state


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (SpecConfig(4), "num_steps=4, and this engine was made for at most 3"),
        (SpecConfig(1, 3), "topk=3, and this engine was made for at most 2"),
        (SpecConfig(3, 2, 7), "num_draft_tokens=7, and this engine was made for at most 6"),
    ],
    ids=["steps", "topk", "nodes"],
)
def test_more_than_the_engine_has_is_refused_at_submission(asked, said, engine_for):
    engine = engine_for("ngram")
    for ask in (engine.submit, engine.stream, engine.generate):
        with pytest.raises(ConfigError) as error:
            ask([5, 6], asking(asked))
        assert said in str(error.value) and "\n" not in str(error.value)
    assert engine.scheduler.idle


def test_more_branches_than_tokens_are_refused_at_construction(make_target, make_engine, make_drafter):
    model = make_target("llama", vocab_size=12)
    head = make_drafter("eagle3", model, [[1, 2, 3]], [[4, 5]])
    make_engine(model, head, spec=SpecConfig(2, 12))
    with pytest.raises(ConfigError, match=r"topk=13, and .* 12 tokens; give spec=SpecConfig\(topk=12\), or fewer"):
        make_engine(model, head, spec=SpecConfig(2, 13))


def test_a_draft_is_no_larger_than_what_is_left_to_generate():
    assert SpecConfig(4, 4, 16).shortened(9) == (4, 16)
    assert SpecConfig(4, 4, 16).shortened(1) == (1, 5)
    assert SpecConfig(4, 4, 16).shortened(0) == (0, 1)
    assert SpecConfig(6).shortened(2) == (2, 3)
    assert SpecConfig(6, 1, 3).shortened(9) == (2, 3)


def test_without_a_drafter_there_is_nothing_to_ask_for(engine_for):
    engine = engine_for(None)
    with pytest.raises(ConfigError, match=r"^speculation=SpecConfig\(.*\), but this engine has no drafter"):
        engine.submit([5, 6], asking(SpecConfig(1)))
    assert len(engine.generate([5, 6], asking(False))[0].token_ids) == NEW


# samples


def test_sample_i_is_drawn_with_seed_plus_i(engine_for, random_prompt):
    """Flat, prompt by prompt: three of the first, one of the second, two of the third."""
    prompts, counts, seeds = [random_prompt(n) for n in (5, 9, 20)], (3, 1, 2), (7, 1, 100)
    params = [asking(None, max_new_tokens=8, temperature=1.0, seed=s, n=n) for s, n in zip(seeds, counts, strict=True)]
    engine = engine_for("ngram")
    outs = engine.generate(prompts, params)
    alone = [
        engine.generate(prompt, asking(None, max_new_tokens=8, temperature=1.0, seed=seed + i))[0]
        for prompt, seed, count in zip(prompts, seeds, counts, strict=True)
        for i in range(count)
    ]
    assert [out.token_ids for out in outs] == [out.token_ids for out in alone]
    assert [out.prompt_token_ids for out in outs] == [prompts[i] for i in (0, 0, 0, 1, 2, 2)]
    assert len({tuple(out.token_ids) for out in outs[:3]}) == 3
    handles = engine.submit_many(prompts, params)
    assert [handle.output().token_ids for handle in handles] == [out.token_ids for out in outs]


def test_samples_without_a_seed_differ(engine_for):
    outs = engine_for(None).generate([5, 6, 7], asking(None, temperature=1.0, n=3))
    assert len({tuple(out.token_ids) for out in outs}) == 3


def test_a_handle_is_of_one_sample(engine_for):
    engine = engine_for(None)
    for ask in (engine.submit, engine.stream):
        with pytest.raises(ConfigError, match=r"^n=2: a (handle|stream) has one sample; submit_many returns"):
            ask([5, 6], asking(None, n=2))
    with pytest.raises(ConfigError, match=r"^seed=\d+: an integer from 0 to 9223372036854775805 is expected"):
        asking(None, n=3, seed=(1 << 63) - 2)
