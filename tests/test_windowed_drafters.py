"""Drafters whose own layers slide: they draft as if every key were kept, and keep what their windows need."""

import dataclasses
from typing import Any

import pytest
from block_heads import random_block
from mtp_checkpoints import publish

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.draft_models.language_model import LanguageModelDrafter
from specdec.kvcache.layout import FULL_ATTENTION, KEEP_ALL, ByGroup, GroupId, KVLayout
from specdec.models.target import TargetModel
from specdec.runtime import sizing
from specdec.runtime.rounds.drafter_lag import MAX_LAG

from marks import deep, examples, is_deep
from tiny_families import random_eagle3
from watched_drafts import watch_proposals

CHAIN = SpecConfig(3, adaptive=False)
TREE = SpecConfig(3, topk=2, num_draft_tokens=7, adaptive=False)
PARAMS = SamplingParams(max_new_tokens=examples(12, 18), ignore_eos=True)
KINDS = ("eagle3", "block", "anchored", "language model", "mtp")


@pytest.fixture
def pair(make_target, tmp_path) -> Any:
    """pair(kind): a target, and a drafter fitted to it that has a window of 5, of 6, of 4, of 3 and of 8, of 5."""

    def make(kind: str) -> tuple[TargetModel, Any]:
        if kind == "mtp":  # three modules that slide as the target's last layer but one
            with Engine.from_pretrained(publish("step-form", tmp_path).folder, "mtp") as engine:
                return engine.target, engine.drafter
        model = make_target("gpt_oss" if kind == "eagle3" else "llama")
        target = TargetModel(model)
        if kind == "language model":
            return target, LanguageModelDrafter(TargetModel(make_target("two_windows")), target)
        if kind == "eagle3":
            return target, random_eagle3(model, windows=(5, None))
        return target, random_block(model, "speculators" if kind == "anchored" else "dflash", windows=(None, 6))

    return make


def engine_of(target: TargetModel, drafter: Any, spec: SpecConfig, **config: Any) -> Engine:
    return Engine(target, drafter, spec=spec, config=EngineConfig(max_model_len=128, prefill_chunk=7, **config))


def kept_in_full(layout: KVLayout) -> KVLayout:
    layers = (dataclasses.replace(spec, layer_type=FULL_ATTENTION, retention=KEEP_ALL) for spec in layout.layers)
    return KVLayout(tuple(layers))


@pytest.mark.parametrize(
    ("kind", "spec", "page_size"),
    [
        ("eagle3", TREE, 1),
        ("block", CHAIN, 4),
        deep("language model", TREE, 4),
        deep("mtp", CHAIN, 1),
        deep("anchored", CHAIN, 1),
    ],
)
def test_drafts_are_those_of_a_drafter_that_keeps_every_key(
    kind, spec, page_size, pair, random_prompt, monkeypatch
) -> None:
    """Texts longer than the windows, chunks, preemption, hits within and at the end of prompts, each slot checked."""
    monkeypatch.setenv("SPECDEC_SANITIZE", "1")
    target, drafter = pair(kind)
    shared = random_prompt(20)
    texts = [[t % target.vocab_size for t in (*shared, *random_prompt(n, seed=n))] for n in (1, 9, 14)]
    own, runs = drafter.kv_layout, []
    for layout in (own, kept_in_full(own)):
        drafter.kv_layout = layout
        engine = engine_of(target, drafter, spec, page_size=page_size, max_batch_size=3, full_slots=60)
        seen = watch_proposals(engine)
        outputs = [*engine.generate(texts, PARAMS), *engine.generate(texts if is_deep() else texts[1:2], PARAMS)]
        assert engine.stats().preemptions > 0 and sum(out.stats.cached_tokens for out in outputs) > 0
        engine.table.check()
        engine.table.allocator.check()
        drafts = {tuple(each.text): (each.tokens, each.parents) for each in seen}
        runs.append(([out.token_ids for out in outputs], drafts))
    (tokens, drafts), (same, of_all_keys) = runs
    assert tokens == same
    # near its end a text is drafted for as deep as its company wants
    both = [text for text in drafts.keys() & of_all_keys.keys() if len(drafts[text][0]) == len(of_all_keys[text][0])]
    assert len(both) > 20 and all(drafts[text] == of_all_keys[text] for text in both)


def test_a_drafters_window_takes_the_memory_of_a_window(make_target, monkeypatch) -> None:
    """A window that the target has not is a group of its own; its slots are those of the formula of docs/memory.md."""
    monkeypatch.setattr(sizing, "free_bytes", lambda device: 10**12)
    model, config = make_target("llama", max_position_embeddings=16384), EngineConfig(max_batch_size=8)
    drafter, spec = random_block(model, windows=(None, 64)), SpecConfig(5, adaptive=True)
    with Engine(TargetModel(model), drafter, spec=spec, config=config) as engine:
        kept, length = engine.cache.bytes_by_group(), engine.max_model_len
    assert list(kept) == ["full", "window 64"] and length == 16384
    token = 2 * 2 * 8 * 4  # K and V of one layer
    room = sizing.PromptBudget.from_config(config, "cpu")
    need = token * (
        8 * (64 - 1 + MAX_LAG + spec.num_nodes) + max(room.while_idle, 8 * min(room.chunk, sizing.WINDOW_SPARE))
    )
    assert need <= kept["window 64"] <= 1.05 * need
    assert kept["full"] == (2 + 1) * token * (8 * (length + spec.num_nodes) + 1)


def test_a_window_that_the_target_has_is_its_group(make_target) -> None:
    model = make_target("gpt_oss")
    for windows, names in (((8, None), ["full", "window 8"]), ((5, 8), ["full", "window 5", "window 8"])):
        with Engine(TargetModel(model), random_eagle3(model, windows)) as engine:
            assert [kept.name for kept in engine.table.allocator.groups] == names


@pytest.mark.parametrize("lost", [False, True])
def test_a_match_needs_the_drafters_window(lost, pair, random_prompt) -> None:
    """Pages whose keys are gone for the drafter alone are no prefix of another request."""
    target, drafter = pair("block")
    engine = engine_of(target, drafter, CHAIN, max_batch_size=1)
    engine.generate([random_prompt(40)], PARAMS)
    allocator = engine.table.allocator
    if lost:
        allocator.cache.evict(ByGroup((0, allocator.pools[GroupId(1)].capacity)))
    [out] = engine.generate([random_prompt(40)], PARAMS)
    assert out.stats.cached_tokens == (0 if lost else 39)


def test_a_match_ends_where_a_lagging_drafter_has_read(make_target, random_prompt) -> None:
    """Rounds without drafts leave a lag at the end of an answer: another request begins with the pages before them."""
    model, spec = make_target("llama"), SpecConfig(3, adaptive=True)
    engine = engine_of(TargetModel(model), random_eagle3(model, windows=(5, None)), spec, max_batch_size=1)
    engine.steps.draft_policy.choose = lambda *_, **__: engine.steps.draft_policy.shapes[0]
    release_rows, read = engine.prefixes.release_rows, []

    def noting(requests: Any) -> None:
        read.append(int(engine.state.lag.read[0]))
        release_rows(requests)

    engine.prefixes.release_rows = noting
    prompt = random_prompt(20)
    [out] = engine.generate([prompt], SamplingParams(max_new_tokens=60, ignore_eos=True))
    text = [*prompt, *out.token_ids]
    assert 40 < read[0] < len(text) - 9
    [again] = engine.generate([text], SamplingParams(max_new_tokens=2))
    assert again.stats.cached_tokens == read[0]
