"""A model and a lookup that drafts in its place: same tokens, drafts as each makes alone, and a sound choice."""

from dataclasses import dataclass, replace

import pytest
from draft_simulation import CHAIN, prompts

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.attention.trees.tree import DraftTree
from specdec.cli.actions.settings import drafter_name
from specdec.cli.options import PairOptions
from specdec.draft_models.base import Drafter
from specdec.draft_models.language_model import LanguageModelDrafter
from specdec.draft_models.lookup import ModelAndLookup, NgramDrafter, SuffixDrafter
from specdec.errors import ConfigError
from specdec.models.target import TargetModel

from engine_internals import capture_on_cpu
from marks import deep, deep_cases, examples, usual_cases

TREE = SpecConfig(3, 3, 12, adaptive=True)
CONFIG = EngineConfig(max_batch_size=4, max_model_len=200)

pytestmark = pytest.mark.usefixtures("shallow_pair", "bundled_once")


def choosing(engine, choose):
    """The engine's choice is replaced: `choose` is given all shapes."""
    choice = engine.steps.draft_policy
    choice.choose = lambda *_, **__: choose(choice.shapes)


def in_turn(engine):
    turn = iter(range(10**6))
    choosing(engine, lambda shapes: shapes[next(turn) % len(shapes)])


# tokens


def test_the_bits_of_logits_do_not_depend_on_who_drafts_or_what_was_answered(make_target, make_engine, random_prompt):
    model, asked = make_target("gemma4-e2b"), [random_prompt(n, seed=n) for n in (5, 20)]
    params = SamplingParams(max_new_tokens=examples(9, 30), logprobs=2)
    plain = make_engine(model, None, deterministic=True, max_model_len=128).generate(asked, params)
    target = TargetModel(model, deterministic=True)
    drafter = ModelAndLookup(LanguageModelDrafter(TargetModel(make_target("llama")), target), SuffixDrafter())
    config = EngineConfig(max_model_len=128, max_batch_size=2, deterministic=True, finished_tokens=300)
    engine = Engine(target, drafter, spec=CHAIN, config=config)
    in_turn(engine)
    for _ in range(2):
        outs = engine.generate(asked, params)
        assert [(out.token_ids, out.logprobs) for out in outs] == [(out.token_ids, out.logprobs) for out in plain]
    assert engine.state.finished.num_tokens > examples(30, 70)


def test_a_model_that_is_never_right_does_not_switch_the_lookup_off(make_target, random_prompt):
    """Regression: its reading did not pay, so its rows were lost, to the lookup as well: 888 rounds for 900 tokens that
    the lookup alone drafts in 190."""
    target = TargetModel(make_target("llama"))
    drafter = ModelAndLookup(LanguageModelDrafter(TargetModel(make_target("llama", seed=1)), target), SuffixDrafter())
    params = SamplingParams(max_new_tokens=120, ignore_eos=True, stop_token_ids=())
    with Engine(target, drafter, spec=CHAIN, config=EngineConfig(max_batch_size=1, max_model_len=256)) as engine:
        choice, worker = engine.steps.draft_policy, engine.state.worker.model
        propose, learn = worker.propose, choice.learn
        worker.propose = lambda batch: DraftTree.chain((propose(batch).tokens + 1) % target.vocab_size)

        def learn_planted(shape, batch, seconds, *given, **named):
            took = 1.0 + 0.1 * (shape.num_nodes - 1)
            if shape.num_steps and not shape.by_lookup:
                took += 0.2 + 0.2 * shape.num_steps  # reading the lag and drafting
            learn(shape, batch, took, *given, **named)

        choice.learn = learn_planted
        alike = replace(params, logit_bias={7: 100.0})  # a text of one token, which begins late
        first = engine.submit(random_prompt(20), replace(params, max_new_tokens=60))
        while engine.step():
            pass
        assert first.stats.rounds > 50
        [out] = engine.generate([random_prompt(20)], [alike])
    assert out.stats.rounds < 60


class Watched:
    """(committed length, tokens) of the model's drafts and of the lookup's, in order."""

    def __init__(self, engine):
        self.drafts = {True: [], False: []}
        self.observed = []
        worker = engine.state.worker
        model = worker.model if engine.drafter.has_lookup else worker
        propose, observe = worker.propose, model.observe

        def watch(batch):
            tree = propose(batch)
            for start, tokens in zip((batch.history_len - 1).tolist(), tree.tokens.tolist(), strict=True):
                self.drafts[batch.by_lookup].append((start, tokens))
            return tree

        def watch_observed(seen):
            self.observed.append(int(seen.length.max()))
            observe(seen)

        worker.propose, model.observe = watch, watch_observed


SHAPES = {"chain": CHAIN, "tree": TREE, "long": SpecConfig(20, adaptive=True)}  # longer than a lag may be
EAGLE3, MODEL = "tiny-gemma4-eagle3", "tiny-gemma4"
LAGGING = [
    *(("chain", 9, EAGLE3, "one token"), ("tree", 5, EAGLE3, "one token"), ("long", 2, EAGLE3, "one token")),
    *(("tree", 5, MODEL, "text"), ("chain", 1, EAGLE3, "plain")),
    *(deep("chain", 3, MODEL, "one token"), deep("chain", 1, MODEL, "text"), deep("long", 2, MODEL, "text")),
    *(deep("chain", rounds, EAGLE3, "plain") for rounds in (5, 15, 16, 17, 40)),
    *(deep("chain", rounds, MODEL, "plain") for rounds in (1, 16, 17)),
]


@pytest.mark.cpu
@pytest.mark.parametrize(("shape", "others", "model", "said"), LAGGING)
def test_a_model_that_read_its_lag_drafts_as_if_it_had_read_along(shape, others, model, said):
    """`others` rounds between two of the model: by lookup, or plain ones. Of a text of one token all drafts are right.
    Several requests, so that rows begin while others have a lag."""
    spec, repeats, plain = SHAPES[shape], said == "one token", said == "plain"
    config = EngineConfig(max_batch_size=2 if plain else 1, max_model_len=300)
    count = others + 12 if plain else examples(60, 100) if repeats else examples(30, 100)
    params = SamplingParams(max_new_tokens=count, ignore_eos=True, logit_bias={7: 100.0} if repeats else None)
    seen = []
    for lags in (True, False):
        drafter = model if plain else [model, "suffix"]
        with Engine.from_pretrained("tiny-gemma4", drafter, spec=spec, config=config) as engine:
            assert engine.state.lag is not None
            if not lags:
                engine.state.lag, engine.state.draft_seats = None, engine.state.seats
            turn = iter(range(plain, 10**6))
            own, other = (-1, 0) if plain else (1, -1)
            choosing(engine, lambda shapes: shapes[own if next(turn) % (others + 1) == 0 else other])  # noqa: B023
            watched = Watched(engine)
            outs = engine.generate(prompts(engine)[: 3 if plain else 1], params)
            assert outs[0].stats.rounds < 40 or not repeats
            seen.append(([(out.token_ids, out.drafted) for out in outs], watched))
    (tokens, lagging), (same, reading) = seen
    assert tokens == same
    assert lagging.drafts == reading.drafts and lagging.drafts[False] and bool(lagging.drafts[True]) != plain
    assert max(lagging.observed) <= (16 if spec.depth < 16 else 21)
    if plain and others > 5:
        assert max(lagging.observed) == min(others, 16)
    if spec.depth < 16 and others > 1:
        assert len(lagging.observed) < len(reading.observed)


@pytest.mark.cpu
@pytest.mark.parametrize(("drafter", "number"), [("tiny-gemma4-eagle3,suffix", -1), ("tiny-gemma4-eagle3", 0)])
def test_the_prefix_cache_keeps_no_page_that_the_model_has_not_read(drafter, number):
    """After rounds by lookup, and after plain rounds."""
    config = EngineConfig(max_batch_size=1, max_model_len=200)
    params = SamplingParams(max_new_tokens=33, ignore_eos=True, logit_bias={7: 100.0})
    with Engine.from_pretrained("tiny-gemma4", drafter, spec=CHAIN, config=config) as engine:
        choosing(engine, lambda shapes: shapes[number])
        [prompt] = prompts(engine)[:1]
        release_rows, read = engine.prefixes.release_rows, list[int]()

        def watched(requests):
            read.append(int(engine.state.lag.read[0]))
            release_rows(requests)

        engine.prefixes.release_rows = watched
        text = prompt + engine.generate(prompt, params)[0].token_ids
        assert len(prompt) < read[0] < len(text) - 2, "it had unread tokens"
        [again] = engine.generate(text, SamplingParams(max_new_tokens=4))
        assert len(prompt) - 2 <= again.stats.cached_tokens <= read[0]


@pytest.mark.cpu
@usual_cases("tiny-gemma4-eagle3-chain")
@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("model", ["tiny-gemma4-mtp", "tiny-gemma4-eagle3"])
def test_drafts_are_those_that_each_makes_alone(model, spec):
    params = SamplingParams(max_new_tokens=examples(10, 40), ignore_eos=True)
    outs = {}
    for drafter, number in ((f"{model},suffix", 1), (f"{model},suffix", 2), (model, 1), ("suffix", 1)):
        with Engine.from_pretrained("tiny-gemma4", drafter, spec=spec, config=CONFIG) as engine:
            choosing(engine, lambda shapes, number=number: shapes[number])
            found = engine.generate(prompts(engine), params)
            outs[drafter, number] = [(out.token_ids, out.drafted, out.stats.rounds) for out in found]
    assert outs[f"{model},suffix", 1] == outs[model, 1] != outs["suffix", 1]
    assert outs[f"{model},suffix", 2] == outs["suffix", 1]


@deep_cases("tiny-gemma4-eagle3")
@pytest.mark.parametrize("model", ["tiny-gemma4-mtp", "tiny-gemma4-eagle3"])
def test_captured_rounds_of_both_give_the_same_tokens(model, monkeypatch):
    """All drafts are captured when the engine is made, and none later."""
    config = EngineConfig(max_batch_size=examples(1, 2), max_model_len=200, finished_tokens=300, device="cpu")
    spec = SpecConfig(examples(2, 4), adaptive=True)
    params = SamplingParams(max_new_tokens=examples(10, 40), ignore_eos=True)
    outputs = []
    for captured in (False, True):
        capture_on_cpu(monkeypatch, captured)
        with Engine.from_pretrained("tiny-gemma4", [model, "suffix"], spec=spec, config=config) as engine:
            in_turn(engine)
            outs = engine.generate((prompts(engine) * 2)[: examples(2, 6)], params)
            outputs.append([out.token_ids for out in outs])
            if captured:
                made = engine.stats().captures
                assert made.uncaptured_rounds == 0 and made.refused == 0
    assert outputs[0] == outputs[1]


@dataclass(frozen=True, slots=True)
class Frozen:
    inner: Drafter
    name: str = "frozen"

    def bind(self, binding):
        return self.inner.bind(binding)


def test_a_drafter_that_cannot_be_changed_has_defaults(make_target, make_engine, random_prompt):
    """Regression: defaults were set on the user's object, so an engine of a frozen one ended in its error."""
    model, given = make_target("llama"), Frozen(NgramDrafter())
    pair, spec = ModelAndLookup(given, SuffixDrafter()), SpecConfig(3, adaptive=False)
    engines = [make_engine(model, each, spec=spec) for each in (given, pair, None)]
    *outs, plain = (one.generate([random_prompt(9)], SamplingParams(24))[0].token_ids for one in engines)
    assert outs == [plain, plain] and all(one.stats().drafted_rounds for one in engines[:2])
    assert isinstance(engines[0].drafter, Frozen)


# what is given


NO_PAIRS = [
    *("ngram,suffix", ",suffix", "none,ngram", "tiny-gemma4-mtp,suffix,ngram"),
    *(["suffix", "suffix"], ["tiny-gemma4-mtp"], ["tiny-gemma4-mtp", "tiny-gemma4"], [None, "suffix"]),
]


@pytest.mark.parametrize("given", NO_PAIRS, ids=str)
def test_a_pair_that_is_none_is_refused(given):
    with pytest.raises(ConfigError, match="of two the first is a model that drafts, and the second one of 'ngram', "):
        Engine.from_pretrained("tiny-gemma4", given, spec=CHAIN, config=CONFIG)


@pytest.mark.parametrize(
    ("target", "given", "drafter"),
    [
        ("tiny-gemma4", "auto,suffix", "tiny-gemma4-mtp,suffix"),
        ("other", "auto", "auto"),
        ("other", "head,ngram", "head,ngram"),
        ("other", "auto,suffix", "auto,suffix"),
        ("tiny-gemma4", "none", None),
    ],
)
def test_a_command_names_a_pair_by_a_comma(target, given, drafter):
    assert drafter_name(PairOptions(target=target, drafter=given)) == drafter


def test_a_pair_needs_a_choice():
    with pytest.raises(ConfigError, match=r"adaptive=False, but .+ or suffix needs a choice"):
        Engine.from_pretrained("tiny-gemma4", "tiny-gemma4-mtp,suffix", spec=SpecConfig(4, adaptive=False))
