"""A model and a lookup that drafts in its place: same tokens, drafts as each makes alone, and a sound choice."""

import random
from dataclasses import replace

import numpy as np
import pytest
from random_loads import check_tokens, random_config, random_requests

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.cli.bodies.settings import drafter_name
from specdec.cli.options import PairOptions
from specdec.draft_models.language_model import LanguageModelDrafter
from specdec.draft_models.model_and_lookup import ModelAndLookup
from specdec.draft_models.suffix import SuffixDrafter
from specdec.errors import ConfigError
from specdec.models.target import TargetModel
from specdec.runtime.adaptive.cost_table import CostTable
from specdec.runtime.adaptive.draft_chances import DraftChances
from specdec.runtime.adaptive.draft_choice import DraftChoice
from specdec.runtime.adaptive.draft_ladder import draft_ladder
from specdec.runtime.rounds.result import DraftShape
from specdec.runtime.rounds.round_shapes import NO_DRAFT

from inside import capture_on_tape
from marks import deep, deep_cases, each_value, examples, pairs, usual
from tiny_models import FAMILIES

CHAIN, TREE = SpecConfig(4, adaptive=True), SpecConfig(3, 3, 12, adaptive=True)
LADDER = draft_ladder(CHAIN, lookup=True)
LOOKED_UP = [shape for shape in LADDER if shape.by_lookup]
MODELS = ["tiny-gemma4-mtp", "tiny-gemma4-eagle3", "tiny-gemma4"]
CONFIG = EngineConfig(max_batch_size=4, max_model_len=200)

pytestmark = pytest.mark.usefixtures("shallow_pair", "bundled_once")


def prompts(engine):
    texts = ["Tom has 3 boxes of 12 pencils.", "A cinema has 4 rows with 8 seats each.", "17 boys go to a match."]
    return [engine.chat_prompt(text) for text in texts]


def choosing(engine, choose):
    """The engine's choice is replaced: `choose` is given all shapes."""
    choice = engine.steps.choice
    choice.choose = lambda *_, **__: choose(choice.shapes)


def in_turn(engine):
    turn = iter(range(10**6))
    choosing(engine, lambda shapes: shapes[next(turn) % len(shapes)])


# the ladder and the choice


@pytest.mark.parametrize(
    ("spec", "looked_up"),
    [
        (SpecConfig(1), [(1, 1, 2)]),
        (SpecConfig(4), [(2, 1, 3), (4, 1, 5)]),
        (SpecConfig(6, 3, 20), [(3, 1, 4), (6, 3, 20)]),
        (SpecConfig(1, 4), [(1, 1, 2), (1, 4, 5)]),
    ],
    ids=str,
)
def test_a_lookup_adds_two_rungs_at_most(spec, looked_up):
    ladder = draft_ladder(spec, lookup=True)
    alone = draft_ladder(spec)
    assert ladder == [*alone, *(DraftShape(*rung, by_lookup=True) for rung in looked_up)]


def rows(count):
    return np.arange(count)


def test_what_one_brings_says_nothing_of_the_other():
    chances = DraftChances(LADDER, num_rows=2)
    before = chances.tokens(rows(2), np.full(2, 4))
    chain, looked_up = LADDER.index(DraftShape(4, 1, 5)), LADDER.index(DraftShape(4, 1, 5, True))
    for _ in range(50):
        chances.learn(looked_up, rows(1), np.array([4]), np.array([4]))
    after = chances.tokens(rows(2), np.full(2, 4))
    assert (after[:, chain] == before[:, chain]).all()
    assert after[0, looked_up, 0] > after[0, looked_up, 1] > before[0, looked_up, 1]
    assert after[0, LADDER.index(DraftShape(2, 1, 3, True)), 0] > 2.8, "its shorter chains begin as the long ones do"
    chances.begin(rows(1))
    for _ in range(50):
        chances.learn(chain, rows(1), np.array([0]), np.array([4]))
    assert chances.tokens(rows(2), np.full(2, 4))[0, looked_up, 0] == pytest.approx(after[0, looked_up, 1])


def test_a_row_forgets_sooner_how_a_lookup_did():
    """Text is copied in runs: after one of 200 tokens, a few wrong drafts tell that it is over."""
    chances = DraftChances(LADDER, num_rows=2)
    chain, looked_up = LADDER.index(DraftShape(4, 1, 5)), LADDER.index(DraftShape(4, 1, 5, True))
    for number in (chain, looked_up):
        for row, accepted, count in ((0, 4, 40), (1, 2, 40), (0, 0, 8)):
            for _ in range(count):
                chances.learn(number, np.array([row]), np.array([accepted]), np.array([4]))
    tokens = chances.tokens(rows(1), np.array([4]))[0, :, 0]
    assert tokens[looked_up] < 0.75 * tokens[chain]


def test_costs_of_drafting_are_each_ones_own():
    """Nothing is captured: a lookup's level is timed by lookups, a verify by all."""
    table = CostTable(LADDER)
    chain, looked_up = LADDER.index(DraftShape(4, 1, 5)), LADDER.index(DraftShape(4, 1, 5, True))
    for _ in range(20):
        table.note(0, 1, 0, {"draft": 0.0, "verify": 1.0, "other": 0.1})
        table.note(chain, 1, 0, {"draft": 2.0, "verify": 1.4, "other": 0.1})
        table.note(looked_up, 1, 0, {"draft": 0.04, "verify": 1.4, "other": 0.1})
    seconds = table.seconds(1, 0)
    assert seconds[chain] == pytest.approx(3.5) and seconds[looked_up] == pytest.approx(1.54)
    assert seconds[LADDER.index(DraftShape(2, 1, 3))] == pytest.approx(2.3, abs=0.1)
    assert seconds[LADDER.index(DraftShape(2, 1, 3, True))] == pytest.approx(1.32, abs=0.1)


def took(shape):
    return 1 + 0.05 * (shape.num_nodes - 1) + (0.0 if shape.by_lookup else 0.15 * shape.num_steps)


def simulated(shapes, loads):
    """Tokens a second of a choice between these shapes. loads: (chance of the model, of the lookup) of each request,
    one after the other, 100 tokens each."""
    choice = DraftChoice(shapes, 2)
    choice.cost.timed[1] = np.array([took(shape) for shape in shapes])
    draw, total, tokens, left, request = np.random.default_rng(0), 0.0, 0, 0, -1
    for _ in range(examples(3000, 8000)):
        if left <= 0:
            request, left = request + 1, 100
            choice.begin(rows(1))
        shape = choice.choose(rows(1), np.array([4]), 1, 0, NO_DRAFT)
        chance = loads[request % len(loads)][shape.by_lookup]
        accepted = int(np.cumprod(draw.random(max(shape.depth, 1)) < chance).sum()) if shape.depth else 0
        seconds = {"draft": 0.0, "verify": took(shape), "other": 0.0}
        choice.learn(shape, 1, 0, seconds, rows(1), np.array([accepted]), np.array([4]))
        total, tokens, left = total + took(shape), tokens + accepted + 1, left - accepted - 1
    return tokens / total


def share_of_the_better(chances):
    alone = (simulated(shapes, [chances]) for shapes in (draft_ladder(CHAIN), [NO_DRAFT, *LOOKED_UP]))
    return simulated(LADDER, [chances]) / max(alone)


@deep_cases("(0.8, 0.1)", "(0.8, 0.0)")
@pytest.mark.parametrize("chances", [(0.8, 0.1), (0.8, 0.0), (0.3, 0.9), (0.0, 0.0)], ids=str)
def test_one_that_is_always_better_is_found_at_the_price_of_trials(chances):
    assert share_of_the_better(chances) > 0.98


def test_a_few_unlucky_drafts_do_not_give_a_row_to_the_lookup():
    """Regression: a model's odds in a row stood still while the lookup drafted, so 3 to 6 % of the tokens were lost."""
    assert share_of_the_better((0.75, 0.45)) > 0.98


def test_each_request_has_the_better_one():
    loads = [(0.7, 0.05), (0.7, 0.95)]
    model = simulated(draft_ladder(CHAIN), loads)
    lookup = simulated([NO_DRAFT, *LOOKED_UP], loads)
    assert simulated(LADDER, loads) > 1.08 * max(model, lookup)


def test_a_request_that_fixes_its_draft_has_the_models():
    choice = DraftChoice(LADDER, 2)
    choice.cost.timed[1] = np.array([9.0, 9, 9, 9, 9, 1, 1])
    for _ in range(50):
        chosen = choice.choose(rows(1), np.array([4]), 1, 0, DraftShape(3, 1, 4))
        assert chosen.num_steps >= 3 and not chosen.by_lookup


def test_catching_up_is_no_cost_of_a_lookup():
    choice = DraftChoice(LADDER, 2)
    choice.cost.timed[1] = np.array([1.0, 1.1, 1.2, 1.3, 1.4, 1.2, 1.4])
    choice.cost.catching_up[1] = 100.0
    for number in (4, 6):
        for _ in range(40):
            choice.learn(LADDER[number], 1, 0, {"verify": 1.4, "draft": 0.0, "other": 0.0}, rows(1), np.array([4]),
                         np.array([4]))  # fmt: skip
    chosen = [choice.choose(rows(1), np.array([4]), 1, 0, NO_DRAFT, unread=1) for _ in range(20)]
    assert set(chosen) <= {NO_DRAFT, *LOOKED_UP} and LADDER[6] in chosen


# tokens


@deep_cases("tiny-gemma4-mtp-chain-0.0")
@pytest.mark.parametrize(("model", "shape", "temperature"), each_value(pairs(MODELS, ["chain", "tree"], [0.0, 0.8])))
def test_no_token_depends_on_who_drafts(model, shape, temperature):
    spec = CHAIN if shape == "chain" else TREE
    params = SamplingParams(max_new_tokens=examples(30, 60), ignore_eos=True, temperature=temperature, seed=5)
    with Engine.from_pretrained("tiny-gemma4", config=CONFIG) as plain:
        want = [out.token_ids for out in plain.generate(prompts(plain), params)]
    with Engine.from_pretrained("tiny-gemma4", [model, "suffix"], spec=spec, config=CONFIG) as engine:
        in_turn(engine)
        assert [out.token_ids for out in engine.generate(prompts(engine), params)] == want
        engine.table.check()


def test_the_bits_of_logits_do_not_depend_on_who_drafts_or_what_was_answered(make_target, make_engine, random_prompt):
    model, asked = make_target("gemma4-e2b"), [random_prompt(n, seed=n) for n in (5, 20, 20)]
    params = SamplingParams(max_new_tokens=examples(22, 30), logprobs=2)
    plain = make_engine(model, None, deterministic=True, max_model_len=128).generate(asked, params)
    target = TargetModel(model, deterministic=True)
    drafter = ModelAndLookup(LanguageModelDrafter(TargetModel(make_target("llama")), target), SuffixDrafter())
    config = EngineConfig(max_model_len=128, max_batch_size=2, deterministic=True, finished_tokens=300)
    engine = Engine(target, drafter, spec=CHAIN, config=config)
    in_turn(engine)
    for _ in range(2):
        outs = engine.generate(asked, params)
        assert [(out.token_ids, out.logprobs) for out in outs] == [(out.token_ids, out.logprobs) for out in plain]
    assert engine.round.finished.num_tokens > 100


@deep_cases("0")
@pytest.mark.parametrize("seed", [0, *(deep(seed) for seed in range(1, 60))])
def test_tokens_of_plain_decoding(seed, make_target, make_engine, random_prompt):
    """Random engines, as in `test_any_drafter.py`, with a language model and suffixes in turn."""
    rng = random.Random(f"both {seed}")
    target_model = make_target(rng.choice(FAMILIES))
    asked, params = random_requests(rng, random_prompt)
    config = random_config(rng, rng.choice((None, 130)), finished_tokens=rng.choice((0, 200)))
    alone = [replace(each, speculation=None) for each in params]
    want = [out.token_ids for out in make_engine(target_model, None, max_model_len=128).generate(asked, alone)]
    target = TargetModel(target_model)
    other = target_model if rng.random() < 0.3 else make_target(rng.choice(FAMILIES), seed=rng.randint(0, 2))
    drafter = ModelAndLookup(LanguageModelDrafter(TargetModel(other), target), SuffixDrafter())
    depth, topk = rng.randint(1, 6), rng.choice((1, 1, 2))
    engine = Engine(target, drafter, spec=SpecConfig(depth, topk, adaptive=True), config=config)
    choosing(engine, lambda shapes: rng.choice(shapes))
    check_tokens(engine, asked, params, want)


class Watched:
    """(committed length, tokens) of the model's drafts and of the lookup's, in order."""

    def __init__(self, engine):
        self.drafts = {True: [], False: []}
        self.observed = []
        worker = engine.round.worker
        propose, observe = worker.propose, worker.model.observe

        def watch(batch):
            tree = propose(batch)
            for start, tokens in zip((batch.history_len - 1).tolist(), tree.tokens.tolist(), strict=True):
                self.drafts[batch.by_lookup].append((start, tokens))
            return tree

        def watch_observed(seen):
            self.observed.append(int(seen.length.max()))
            observe(seen)

        worker.propose, worker.model.observe = watch, watch_observed


SHAPES = {"chain": CHAIN, "tree": TREE, "long": SpecConfig(20, adaptive=True)}  # longer than what may be unread
RUNS = [("chain", 1), ("chain", 3), ("chain", 9), ("tree", 5), ("long", 2)]
LAGGING = [
    (*run, *pair) for run in RUNS for pair in pairs(["tiny-gemma4-eagle3", "tiny-gemma4"], ["one token", "text"])
]


def each_once(shape, looked_up, model, said):
    """One of every shape, those that repeat a token with the head, the others with a language model."""
    return looked_up in (2, 5, 9) and (model == "tiny-gemma4-eagle3") == (said == "one token")


@pytest.mark.parametrize(("shape", "looked_up", "model", "said"), usual(LAGGING, each_once))
def test_a_model_that_caught_up_drafts_as_if_it_had_read_along(shape, looked_up, model, said):
    """`looked_up` rounds by lookup between two of the model. Of a text of one token all drafts are right."""
    spec, repeats = SHAPES[shape], said == "one token"
    config = EngineConfig(max_batch_size=1, max_model_len=300)
    count = 100 if repeats else examples(50, 100)
    params = SamplingParams(max_new_tokens=count, ignore_eos=True, logit_bias={7: 100.0} if repeats else None)
    seen = []
    for lags in (True, False):
        with Engine.from_pretrained("tiny-gemma4", [model, "suffix"], spec=spec, config=config) as engine:
            assert engine.round.unread is not None
            if not lags:
                engine.round.unread, engine.round.draft_seats = None, engine.round.seats
            turn = iter(range(10**6))
            choosing(engine, lambda shapes: shapes[-1] if next(turn) % (looked_up + 1) else shapes[-3])  # noqa: B023
            watched = Watched(engine)
            [out] = engine.generate([prompts(engine)[0]], params)
            assert out.stats.rounds < 40 or not repeats
            seen.append((out.token_ids, watched))
    (tokens, lagging), (same, reading) = seen
    assert tokens == same
    assert lagging.drafts == reading.drafts and lagging.drafts[True] and lagging.drafts[False]
    assert max(lagging.observed) <= (16 if spec.depth < 16 else 21)
    if spec.depth < 16 and looked_up > 1:
        assert len(lagging.observed) < len(reading.observed)


def test_the_prefix_cache_keeps_no_page_that_the_model_has_not_read():
    config = EngineConfig(max_batch_size=1, max_model_len=200)
    params = SamplingParams(max_new_tokens=33, ignore_eos=True, logit_bias={7: 100.0})
    with Engine.from_pretrained("tiny-gemma4", "tiny-gemma4-eagle3,suffix", spec=CHAIN, config=config) as engine:
        choosing(engine, lambda shapes: shapes[-1])
        [prompt] = prompts(engine)[:1]
        release_rows, read = engine.prefixes.release_rows, list[int]()

        def watched(requests):
            read.append(int(engine.round.unread.read[0]))
            release_rows(requests)

        engine.prefixes.release_rows = watched
        text = prompt + engine.generate(prompt, params)[0].token_ids
        assert len(prompt) < read[0] < len(text) - 2, "it was behind"
        [again] = engine.generate(text, SamplingParams(max_new_tokens=4))
        assert len(prompt) - 2 <= again.stats.cached_tokens <= read[0]


@pytest.mark.parametrize("later", ["a lookup of 20", "drafts of a neighbour"])
def test_the_prefix_cache_keeps_no_page_of_a_row_that_the_model_has_lost(later, make_target, random_prompt):
    """Tokens were counted only in rounds that the model could read later: what a lost row gained in others, from a
    lookup of 16 or more on or next to a row that drafts, was kept as if the model had read it."""
    target = TargetModel(make_target("llama"))
    drafter = ModelAndLookup(LanguageModelDrafter(TargetModel(make_target("llama")), target), SuffixDrafter())
    config = EngineConfig(max_batch_size=2, max_model_len=128)
    first, second = random_prompt(20), random_prompt(9)
    long, short = (SamplingParams(max_new_tokens=n, ignore_eos=True) for n in (60, 20))
    with Engine(target, drafter, spec=SpecConfig(20, adaptive=True), config=config) as engine:
        engine.steps.choice.reads_along = lambda *_: False
        choosing(engine, lambda shapes: shapes[0])
        lost = engine.submit(first, long)
        while lost.stats.output_tokens < 25:
            engine.step()
        [row] = [request.row for request in engine.scheduler.running]
        assert engine.round.unread.lost(rows(row + 1))[row]
        by_lookup = later == "a lookup of 20"
        choosing(engine, lambda shapes: shapes[-1 if by_lookup else -3])
        if not by_lookup:
            engine.submit(second, short)
        while engine.step():
            pass
        assert not lost.stats.drafted_rounds  # of drafts that others had
        choosing(engine, lambda shapes: shapes[0])
        [again] = engine.generate([first + lost.output().token_ids], [short])
        assert len(first) - 2 <= again.stats.cached_tokens <= len(first)


@deep_cases("tiny-gemma4-mtp-chain", "tiny-gemma4-eagle3-tree")
@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("model", ["tiny-gemma4-mtp", "tiny-gemma4-eagle3"])
def test_drafts_are_those_that_each_makes_alone(model, spec):
    params = SamplingParams(max_new_tokens=examples(20, 40), ignore_eos=True)
    outs = {}
    for drafter, number in ((f"{model},suffix", -3), (f"{model},suffix", -1), (model, -1), ("suffix", -1)):
        with Engine.from_pretrained("tiny-gemma4", drafter, spec=spec, config=CONFIG) as engine:
            choosing(engine, lambda shapes, number=number: shapes[number])
            found = engine.generate(prompts(engine), params)
            outs[drafter, number] = [(out.token_ids, out.drafted, out.stats.rounds) for out in found]
    assert outs[f"{model},suffix", -3] == outs[model, -1] != outs["suffix", -1]
    assert outs[f"{model},suffix", -1] == outs["suffix", -1]


@deep_cases("tiny-gemma4-eagle3")
@pytest.mark.parametrize("model", ["tiny-gemma4-mtp", "tiny-gemma4-eagle3"])
def test_captured_rounds_of_both_give_the_same_tokens(model, monkeypatch):
    """All drafts are captured when the engine is made, and none later."""
    config = EngineConfig(max_batch_size=2, max_model_len=200, finished_tokens=300, device="cpu")
    params = SamplingParams(max_new_tokens=examples(16, 40), ignore_eos=True)
    outputs = []
    for captured in (False, True):
        capture_on_tape(monkeypatch, captured)
        monkeypatch.setattr("specdec.runtime.adaptive.round_timing.time_catching_up", lambda *_: 1e-3)
        monkeypatch.setattr(
            "specdec.runtime.adaptive.round_timing.time_rounds", lambda graphs, shapes, done: [1e-3] * len(shapes)
        )
        with Engine.from_pretrained("tiny-gemma4", [model, "suffix"], spec=CHAIN, config=config) as engine:
            in_turn(engine)
            outs = engine.generate(prompts(engine) * 2, params)
            outputs.append([out.token_ids for out in outs])
            if captured:
                made = engine.stats().captures
                assert made.uncaptured_rounds == 0 and made.refused == 0
    assert outputs[0] == outputs[1]


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
        ("other", "auto", None),
        ("other", "head,ngram", "head,ngram"),
        ("other", "auto,suffix", "none,suffix"),  # refused where it is loaded
        ("tiny-gemma4", "none", None),
    ],
)
def test_a_command_names_a_pair_by_a_comma(target, given, drafter):
    assert drafter_name(PairOptions(target=target, drafter=given)) == drafter


def test_a_pair_needs_a_choice():
    with pytest.raises(ConfigError, match=r"adaptive=False, and each round of .+ or suffix has the draft"):
        Engine.from_pretrained("tiny-gemma4", "tiny-gemma4-mtp,suffix", spec=SpecConfig(4, adaptive=False))


def test_statistics_name_who_drafted():
    with Engine.from_pretrained("tiny-gemma4", "tiny-gemma4-mtp,suffix", spec=CHAIN, config=CONFIG) as engine:
        choosing(engine, lambda shapes: shapes[-1])
        engine.generate(prompts(engine), SamplingParams(max_new_tokens=4))
        use = engine.stats().drafts
        assert use.shapes[-1] == (4, 1, 5, True)
        assert engine.drafter.name.endswith(" or suffix")
