"""What comes after the last K/V runs for the last token of a prompt alone, and nothing else changes.

Gemma 4 with shared K/V, six layers of which the last three store nothing: tokens by transformers' own forward, drafts
and bits by the same engine with every layer run for every token, and rows by what their attention is asked for.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.attention.plan import locate_pack
from specdec.errors import SpecDecError
from specdec.gpu.operations import REFERENCE
from specdec.kvcache.layer_context import EarlyExit
from specdec.models.target import StatesNeeded, TargetModel
from specdec.runtime.rounds.device_state import DeviceState

from engine_internals import capture_on_cpu, captured_prompts
from marks import deep, deep_cases, each_value, examples, usual_cases
from tiny_families import TWO_OWNERS, random_eagle3
from tiny_models import FAMILIES, FAST_FAMILIES
from watched_drafts import watch_proposals

SHARING = ["gemma4-e2b", "gemma4-multimodal"]
WHOLE, LAYERS = 2, 6  # the third stores the last K/V
NEW = examples(5, 6)
GREEDY = SamplingParams(max_new_tokens=NEW)
DRAFTERS = [None, "ngram", "suffix", "mtp", "mtp-tree", "eagle3-low", "eagle3-middle", "eagle3-all", "eagle3-final"]
EAGLE3_LAYERS = {"low": (0, 1, 2), "middle": (0, 2, 3), "all": (0, 1, LAYERS), "final": ()}
NARROWED = {None: 2, "ngram": 2, "suffix": 2, "mtp": 2, "mtp-tree": 2, "eagle3-low": 2, "eagle3-middle": 3}


@pytest.fixture
def make_target(make_target: Callable[..., Any]) -> Callable[..., Any]:
    """Models of `make_target`, but for a Gemma 4 E2B of six layers."""

    def make(family: str, **overrides: Any) -> Any:
        return make_target(family, **(overrides or (TWO_OWNERS if family == "gemma4-e2b" else {})))

    return make


@pytest.fixture
def engine(make_drafter: Callable[..., Any]) -> Callable[..., Engine]:
    """engine(model, drafter=None, **config): on fused layers."""

    def make(model: Any, kind: str | None = None, **config: Any) -> Engine:
        name, _, which = (kind or "").partition("-")
        if name == "eagle3":
            drafter = random_eagle3(model, aux_layers=EAGLE3_LAYERS[which])
        else:
            drafter = make_drafter(name or None, model)
        spec = SpecConfig(3, 2, 6) if which == "tree" else SpecConfig(3)
        settings = EngineConfig(**{"max_model_len": 256, "prefill_chunk": 16, "fused": True, **config})
        return Engine.from_pretrained(model, drafter, spec=spec, config=settings)

    return make


def rows_of_layers(target: TargetModel) -> list[list[int]]:
    """How many rows attend in each layer, forward by forward, from now on; where a forward ends, none do."""
    seen: list[list[int]] = [[] for _ in target.decoder.layers]  # type: ignore[union-attr, arg-type]
    for number, layer in enumerate(target.decoder.layers):  # type: ignore[union-attr, arg-type]

        def before(_: Any, args: Any, kwargs: Any, number: int = number) -> None:
            narrowing = kwargs.get("narrowing")
            if not isinstance(narrowing, EarlyExit):
                seen[number].append(len(args[0] if narrowing is None else narrowing.rows))

        layer.register_forward_pre_hook(before, with_kwargs=True)
    return seen


def run_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer runs for every token from now on."""
    monkeypatch.setattr(DeviceState, "states_needed", lambda self, scored, ends_prompt: StatesNeeded.EVERY)


def outputs(engine: Engine, prompts: Sequence[list[int]], params: Any) -> list[Any]:
    """All that a caller gets, log-probabilities bit by bit, and how drafts fared."""
    outs = engine.generate(list(prompts), params)
    engine.table.check()
    return [(o.token_ids, o.logprobs, o.prompt_logprobs, o.stats.accepted_per_position) for o in outs]


# which layers, by eye


def test_layers_that_may_be_skipped(make_target):
    """Part of the last that stores K/V, or that a state is taken from on its way in, and all after it."""
    target = TargetModel(make_target("gemma4-e2b"), REFERENCE)
    assert [spec.owner for spec in target.layout.layers] == [0, 1, 2, 2, 2, 1]
    assert target.narrows_at() == target.narrows_at((0, 2)) == 2
    assert [target.narrows_at((0, entered)) for entered in (2, 3, 4, 5, 6)] == [2, 3, 4, 5, None]
    llama = TargetModel(make_target("llama"), REFERENCE)
    assert llama.narrows_at() == len(llama.layout.layers) - 1  # but for its K/V
    assert TargetModel(make_target("gemma4-e2b")).narrows_at() is None  # layers as they were written
    assert TargetModel(make_target("gemma4-e2b"), REFERENCE, deterministic=True).narrows_at() is None  # in tiles


@pytest.mark.parametrize("family", SHARING)
def test_layers_that_store_nothing_see_one_row_a_prompt(family, make_target, engine, random_prompt):
    """12 and 5 tokens in chunks of 8: 13 tokens in a row, then what remains of the first. A chunk with which no prompt
    ends does not reach these layers."""
    made = engine(make_target(family), prefill_chunk=8, max_batch_size=2)
    rows = rows_of_layers(made.target)
    made.generate([random_prompt(12), random_prompt(5)], SamplingParams(max_new_tokens=1))
    assert rows == [[13, 4]] * WHOLE + [[2, 1]] * (LAYERS - WHOLE)
    for seen in rows:
        seen.clear()
    made.generate([random_prompt(20, seed=1)], SamplingParams(max_new_tokens=1))
    assert rows == [[8, 8, 4]] * WHOLE + [[1]] * (LAYERS - WHOLE)


@deep_cases("gemma2")
@pytest.mark.parametrize("family", [family if family in FAST_FAMILIES else deep(family) for family in FAMILIES])
def test_the_last_layer_of_any_family(family, make_target, engine, random_prompt, greedy_oracle):
    """Its K/V are made of every token, and no more than that but of a prompt's last."""
    model, prompt = make_target(family), random_prompt(20)
    made = engine(model, prefill_chunk=8)
    rows = rows_of_layers(made.target)
    [out] = made.generate([prompt], GREEDY)
    assert rows[-1] == [1] * NEW and rows[0] == [8, 8, 4] + [1] * (NEW - 1)
    assert out.token_ids == greedy_oracle(model, prompt, NEW)


@deep_cases("ngram", "mtp-tree", "eagle3-middle", "eagle3-all")
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_rows_by_what_a_drafter_reads(drafter, make_target, engine, random_prompt):
    """Taps need the layers up to the last one, a head on final states all layers; the others need the last token."""
    made = engine(make_target("gemma4-e2b"), drafter, prefill_chunk=8)
    rows = rows_of_layers(made.target)
    made.generate([random_prompt(8)], SamplingParams(max_new_tokens=1))
    first = NARROWED.get(drafter, LAYERS)
    assert [seen[0] for seen in rows] == [8] * first + [1] * (LAYERS - first)


def test_scored_prompts_run_through_every_layer(make_target, engine, random_prompt):
    """The chunks with tokens to score: not those after, nor those of others."""
    made = engine(make_target("gemma4-e2b"), prefill_chunk=8)
    rows = rows_of_layers(made.target)
    made.generate([random_prompt(8)], SamplingParams(max_new_tokens=1, prompt_logprobs=0))
    made.generate([random_prompt(8, seed=1)], SamplingParams(max_new_tokens=1))
    assert [seen[:2] for seen in rows] == [[8, 8]] * WHOLE + [[8, 1]] * (LAYERS - WHOLE)


# what comes out


@usual_cases("gemma4-e2b-None", "gemma4-e2b-mtp-tree", "gemma4-e2b-eagle3-middle", "gemma4-multimodal-eagle3-all")
@pytest.mark.parametrize(("family", "drafter"), each_value(itertools.product(SHARING, DRAFTERS)))
def test_tokens_are_those_of_transformers(family, drafter, make_target, engine, random_prompt, greedy_oracle):
    """Past the window, in chunks, prompts of unlike lengths at once, with a token alone in its chunk."""
    model = make_target(family)
    prompts = [random_prompt(length, seed=length) for length in (23, 1, 17, 9, 8)]
    made = engine(model, drafter, prefill_chunk=8, max_batch_size=3)
    assert (made.target.narrows_at(made.state.aux_layers) is None) == (drafter == "eagle3-all")
    tokens = [out.token_ids for out in made.generate(prompts, GREEDY)]
    assert tokens == [greedy_oracle(model, prompt, NEW, said) for prompt, said in zip(prompts, tokens, strict=True)]


@pytest.mark.parametrize("drafter", [deep("mtp"), "eagle3-middle"])
def test_a_resumed_request_drafts_from_its_last_state(drafter, make_target, engine, random_prompt, monkeypatch):
    """A drafter that is shown another state only drafts worse, so what it proposes is compared. What a resumed request
    had is read again, in chunks; none of them draws a token, yet the next draft starts where they end."""
    model, prompts = make_target("gemma4-e2b"), [random_prompt(30, seed=1), random_prompt(21, seed=2)]
    seen, new = [], examples(7, 20)
    for whole in (False, True):
        if whole:
            run_whole(monkeypatch)
        made = engine(model, drafter, prefill_chunk=8, max_batch_size=2)
        drafts = watch_proposals(made)
        handles = made.submit_many(prompts, [SamplingParams(max_new_tokens=new)] * 2)
        while any(request.num_output < 2 for request in made.scheduler.running) or made.scheduler.waiting:
            made.step()
        before = len(drafts)
        made.steps.restart(list(made.scheduler.running))
        while not made.scheduler.idle:
            made.step()
        seen.append([draft.tokens for draft in drafts])
        assert 0 < before < len(drafts) - 2
        assert [len(handle.output().token_ids) for handle in handles] == [new, new]
    assert seen[0] == seen[1]


@usual_cases("0")
@pytest.mark.parametrize("case", range(examples(4, 60)))
def test_random_loads(case, make_target, engine, random_prompt, greedy_oracle):
    """Chunks, pages, pools that are too small, prompts that begin alike, scores, every drafter that can skip."""
    draw = random.Random(case)
    model, drafter = make_target(draw.choice(SHARING)), draw.choice(sorted(NARROWED, key=str))
    shared = random_prompt(draw.randrange(0, 30), seed=case)
    prompts = [shared + random_prompt(draw.randrange(1, 30), seed=100 + i) for i in range(draw.randrange(1, 7))]
    params = [
        SamplingParams(max_new_tokens=draw.randrange(1, 9), prompt_logprobs=draw.choice([None, None, None, 1]))
        for _ in prompts
    ]
    pools = draw.choice([{}, {"page_size": 4, "full_slots": 112, "swa_slots": 112}])
    made = engine(model, drafter, prefill_chunk=draw.randrange(3, 20), max_batch_size=draw.randrange(1, 5), **pools)
    for _ in range(2):  # the second time the prompts are cached
        outs = made.generate(prompts, params)
        made.table.check()
        for prompt, out, asked in zip(prompts, outs, params, strict=True):
            assert out.token_ids == greedy_oracle(model, prompt, asked.max_new_tokens, out.token_ids)
            assert (out.prompt_logprobs is None) == (asked.prompt_logprobs is None)


@deep_cases("mtp")
@pytest.mark.parametrize("drafter", [None, "mtp", "eagle3-middle"])
def test_captured_prompts(drafter, make_target, engine, random_prompt, monkeypatch):
    """Replayed for other rows and lengths, scored chunks among them, with the same outputs; shapes do not mix."""
    model = make_target("gemma4-e2b")
    draw = random.Random(5)
    count = examples(5, 16)
    prompts = [random_prompt(draw.randrange(1, 50), seed=i) for i in range(count)]
    params = [SamplingParams(max_new_tokens=NEW, prompt_logprobs=2 if 3 < i < 8 else None) for i in range(count)]
    expected = outputs(engine(model, drafter, max_batch_size=4), prompts, params)
    capture_on_cpu(monkeypatch)
    made = engine(model, drafter, max_batch_size=4)
    got = outputs(made, prompts, params)
    assert [one[0] for one in got] == [one[0] for one in expected]
    captured = captured_prompts(made)
    every = made.target.narrows_at(made.state.aux_layers) is None
    fewer = {StatesNeeded.LAST, StatesNeeded.NONE}  # scored prompts are rare then, and are not captured
    assert {shape.needed for shape in captured} == ({StatesNeeded.EVERY} if every else fewer)


def test_under_the_sanitizer(make_target, engine, random_prompt, monkeypatch):
    """Slots and lengths of both plans of a chunk are right, and a slot of another position is noticed."""
    monkeypatch.setenv("SPECDEC_SANITIZE", "1")
    prompts = [random_prompt(20), random_prompt(3)]
    made = engine(make_target("gemma4-e2b"), "ngram", prefill_chunk=8, max_batch_size=2)
    outs = made.generate(prompts, SamplingParams(max_new_tokens=3))
    assert all(len(out.token_ids) == 3 for out in outs)

    def shifted(table: Any, pack: Any, longest: int) -> Any:
        tables = locate_pack(table, pack, longest)
        lines = tables.lines.map(lambda lines: lines._replace(slots=lines.slots.roll(1, 1)))
        return tables._replace(lines=lines)

    monkeypatch.setattr("specdec.attention.plan.locate_pack", shifted)
    with pytest.raises(SpecDecError, match="slot"):
        made.generate([random_prompt(9, seed=4)], SamplingParams(max_new_tokens=3))
