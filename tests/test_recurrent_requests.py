"""Requests of every kind on targets with recurrent layers: with each drafter, what they are by plain decoding alone.

A match with a cached prefix ends at a copy of a state, which is of certain tokens.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
import torch
from mtp_checkpoints import publish

from specdec import Engine, GenerationOutput, SamplingParams, SpecConfig

from engine_internals import assert_idle, state_cache_of
from marks import deep, deep_cases, examples, is_deep, slow, usual

VOCAB = 300  # more than byte_tokenizer has
NEW = examples(8, 20)
PLAIN = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
TREE = SpecConfig(3, 2, 6, adaptive=False)
FEW_LAYERS = {} if is_deep() else {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "kind": {"enum": ["x", "long-one"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
FORCED = {"regex": "[a-f]{3,9}: the end of a long answer", "max_new_tokens": 48}
ASKED: dict[str, dict[str, Any]] = {
    "schema": {"json_schema": SCHEMA, "max_new_tokens": 60},
    "sampled regex": {**FORCED, "temperature": 1.0, "seed": 4},
    "choice": {"choice": ["yes", "not at all, and for a long time", "not at all"], "max_new_tokens": 40},
    "samples": {"n": 2, "temperature": 1.0, "seed": 9, "max_new_tokens": 20},
    "salted": {"cache_salt": "a", "max_new_tokens": 16},
    "edited": {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "logit_bias": {7: 3.0}, "max_new_tokens": 20},
    "scored": {"prompt_logprobs": 2, "logprobs": 2, "max_new_tokens": 8},
    "plain": {"speculation": False, "max_new_tokens": 20},
}
LENGTHS = (33, 5, 20, 37, 37, 16, 40, 21)
FAMILIES = ["qwen3_5", "qwen3_next", "qwen3_5_moe", "granitemoehybrid", "nemotron_h", "lfm2"]
WITH_MTP = FAMILIES[:3]
KINDS = ["trees", "eagle3", "block", "ngram", "suffix"]

Outputs = list[GenerationOutput]


@pytest.fixture(scope="module")
def prompts(random_prompt) -> list[list[int]]:
    """One for each of `ASKED`; the salted one has the prompt of the samples, without its salt."""
    return [random_prompt(length, seed=length, vocab=256) for length in LENGTHS]


@pytest.fixture
def params() -> list[SamplingParams]:
    return [SamplingParams(**asked) for asked in ASKED.values()]


@pytest.fixture(scope="module")
def source(make_target, tmp_path_factory) -> Callable[..., Any]:
    """source(family, mtp): a model, or the folder of one with MTP modules."""
    folders: dict[str, Any] = {}

    def get(family: str, mtp: bool) -> Any:
        if not mtp:
            return make_target(family, vocab_size=VOCAB, **FEW_LAYERS)
        if family not in folders:
            folders[family] = publish(family, tmp_path_factory.mktemp(family), vocab_size=VOCAB).folder
        return folders[family]

    return get


@pytest.fixture
def engine_for(source, make_engine, make_drafter, byte_tokenizer) -> Callable[..., Engine]:
    """engine_for(family, kind, texts=(), mtp=False, **config): mtp: over the model that has MTP modules."""

    def make(family: str, kind: str | None, texts: Any = (), mtp: bool = False, **config: Any) -> Engine:
        model = source(family, mtp or kind == "mtp")
        spec = SpecConfig(3, adaptive=False) if kind in ("ngram", "suffix", "block") else TREE
        drafter, options = make_drafter(kind, model, texts), {"max_model_len": 160, **config}
        return make_engine(model, drafter, tokenizer=byte_tokenizer, spec=spec, **options)

    return make


def answers(outs: Outputs) -> list[tuple[list[int], str, str]]:
    return [(out.token_ids, out.text, out.finish_reason) for out in outs]


def prompt_scores(outs: Outputs) -> torch.Tensor:
    return torch.tensor([step.logprob for out in outs for step in (out.prompt_logprobs or [None])[1:]])


CASES = [(family, kind) for family in FAMILIES for kind in KINDS] + [(family, "mtp") for family in WITH_MTP]


@pytest.mark.parametrize(("family", "kind"), usual(CASES, lambda *case: case == ("qwen3_5", "trees")))
def test_each_request_is_what_it_is_alone(family, kind, engine_for, prompts, params) -> None:
    """Schemas, choices, samples, salts, penalties and scores, in one batch with a drafter; then again, with hits."""
    lone = engine_for(family, None, mtp=kind == "mtp", max_batch_size=1, prefix_cache=False)
    plain = [replace(one, speculation=None) for one in params]
    alone = lone.generate(prompts, plain)
    if alone[0].finish_reason == "stop":
        jsonschema.validate(json.loads(alone[0].text), SCHEMA)
    assert re.fullmatch(FORCED["regex"], alone[1].text) and alone[2].text in ASKED["choice"]["choice"]
    owners = [prompt for prompt, one in zip(prompts, params, strict=True) for _ in range(one.n)]
    texts = [prompt + out.token_ids for prompt, out in zip(owners, alone, strict=True)]
    engine = engine_for(family, kind, texts, page_size=4, max_batch_size=8, prefill_chunk=7)
    for hits in (False, True):
        outs = engine.generate(prompts, params)
        assert answers(outs) == answers(alone), hits
        torch.testing.assert_close(prompt_scores(outs), prompt_scores(alone), rtol=0, atol=2e-4)
        assert any(out.stats.cached_tokens for out in outs) or not hits
    assert_idle(engine)


def test_tokens_that_a_grammar_forces_find_their_records(source, make_engine, random_prompt, byte_tokenizer) -> None:
    """A round without drafts commits 16 tokens then: those before them are in no state yet. The end of the text, which
    is free, is that after a prompt which ends with what was forced."""
    engine = make_engine(source("qwen3_5", False), tokenizer=byte_tokenizer, prefill_chunk=64)
    prompts = [random_prompt(length, seed=length, vocab=256) for length in range(18, 34, 3)]
    outs = engine.generate(prompts, SamplingParams(regex="x{30}[a-p]{4}", max_new_tokens=34))
    assert all(out.stats.forced_tokens >= 28 for out in outs)
    begun = [[*prompt, *byte_tokenizer.encode("x" * 30)] for prompt in prompts]
    ends = engine.generate(begun, SamplingParams(regex="[a-p]{4}", max_new_tokens=4))
    assert [out.text for out in outs] == ["x" * 30 + out.text for out in ends]


@pytest.mark.parametrize("family", [slow("qwen3_5"), *map(deep, FAMILIES[1:])])
def test_an_answer_that_was_stopped_within_a_round_goes_on(
    family, make_target, make_engine, random_prompt, greedy_oracle, scripted, tree_script, pair_tokenizer
) -> None:
    """A stop string that ends within the tokens of one: accepted drafts after it are in no state that the cache has."""
    model, prompt = make_target(family), random_prompt(21)
    truth = list(greedy_oracle(model, prompt, 40))
    ask = SamplingParams(max_new_tokens=40, ignore_eos=True)
    drafter = scripted(tree_script([prompt + truth], hit=0.9))
    engine = make_engine(model, drafter, spec=SpecConfig(7), tokenizer=pair_tokenizer, page_size=4, max_model_len=96)
    text, cached = pair_tokenizer.decode(truth), set()
    for end in (9, 10, 11, 12, 13, 26, 27, 28) if is_deep() else (10, 12, 27):
        stop = text[2 * end - 3 : 2 * end - 1]  # of two tokens, half of each
        [first] = engine.generate(prompt, replace(ask, stop=(stop,), cache_salt=str(end)))
        assert first.text == text[: text.index(stop)] and first.finish_reason == "stop"
        count = len(first.token_ids)
        assert first.token_ids == truth[:count]
        more = replace(ask, max_new_tokens=40 - count, cache_salt=str(end))
        [again] = engine.generate(prompt + first.token_ids, more)
        assert again.token_ids == truth[count:], end
        cached.add(again.stats.cached_tokens)
    assert len(cached) > 1  # stopped before and after a fold


# cached prefixes


def hits(engine: Engine, *prompts: list[int], **params: Any) -> list[int]:
    """Cached tokens with which each of these prompts begins, one after the other."""
    asked = SamplingParams(**{"max_new_tokens": 2, "ignore_eos": True, **params})
    return [engine.generate(prompt, asked)[0].stats.cached_tokens for prompt in prompts]


@pytest.mark.parametrize("page_size", [1, deep(4), 16])
def test_a_match_is_cut_back_to_its_last_state(page_size, make_target, make_engine, random_prompt) -> None:
    """A prompt of 37 leaves a copy at 32, its answer one at the last multiple of 16 that has been folded."""
    engine = make_engine(make_target("qwen3_5"), page_size=page_size, prefill_chunk=64)
    prompt, other = random_prompt(37), random_prompt(37, seed=1)
    assert hits(engine, prompt, prompt, prompt[:36] + other[:5], prompt[:33]) == [0, 32, 32, 32]
    assert hits(engine, prompt[:31] + other[:9], prompt[:32]) == [0, 0]  # nothing before 32 has a copy
    [out] = engine.generate(other, SamplingParams(max_new_tokens=30, ignore_eos=True))
    text = other + out.token_ids
    assert hits(engine, [*text, 7], [*text[:60], 7]) == [64, 32]
    state_cache_of(engine).check()


def test_prompts_of_another_salt_share_no_state(make_target, make_engine, random_prompt) -> None:
    engine, prompt = make_engine(make_target("qwen3_5"), prefill_chunk=64), random_prompt(37)
    assert hits(engine, prompt, cache_salt="a") == hits(engine, prompt, cache_salt="b") == [0]
    assert hits(engine, prompt, cache_salt="a") == [32]


def test_a_long_prompt_leaves_copies_on_its_way(make_target, make_engine, random_prompt, monkeypatch) -> None:
    monkeypatch.setattr("specdec.runtime.prompts.prefixes.STATE_EVERY", 32)
    engine, prompt = make_engine(make_target("qwen3_5"), prefill_chunk=16), random_prompt(100)
    assert hits(engine, prompt, prompt[:90], prompt[:70], prompt[:60]) == [0, 64, 64, 32]


@deep_cases("lfm2")
@pytest.mark.parametrize(
    "family", ["qwen3_5", slow("lfm2"), *map(deep, ("qwen3_next", "qwen3_5_moe", "granitemoehybrid", "nemotron_h"))]
)
def test_bits_do_not_depend_on_a_hit(family, make_target, make_engine, random_prompt, scripted, tree_script) -> None:
    model, options = make_target(family), {"deterministic": True, "prefill_chunk": 24}
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True, logprobs=2)
    base = random_prompt(40)
    prompts = [base, [*base[:36], 5, 6, 7], base[:20] + [9] * 20]
    lone = make_engine(model, max_batch_size=1, prefix_cache=False, **options)
    alone = [(out.token_ids, out.logprobs) for out in lone.generate(prompts, params)]
    trees = scripted(tree_script([p + tokens for p, (tokens, _) in zip(prompts, alone, strict=True)]))
    engine = make_engine(model, trees, spec=TREE, page_size=4, max_batch_size=2, **options)
    found = [engine.generate(prompt, params)[0] for prompt in (base, *prompts)]
    assert [out.stats.cached_tokens for out in found] == [0, 32, 32, 0]
    assert [(out.token_ids, out.logprobs) for out in found] == [alone[0], *alone]


def test_a_hit_after_a_rejected_draft(
    make_target, make_engine, random_prompt, greedy_oracle, scripted, tree_script
) -> None:
    """The answer's state, copied when it ends, is that of its tokens, though most drafts were rejected."""
    model, prompt = make_target("qwen3_5"), random_prompt(41)
    text = prompt + list(greedy_oracle(model, prompt, 24))
    engine = make_engine(model, scripted(tree_script([text], hit=0.3)), spec=TREE, page_size=4)
    [out] = engine.generate(prompt, SamplingParams(max_new_tokens=24, ignore_eos=True))
    assert prompt + out.token_ids == text and out.stats.rounds > 11
    [again] = engine.generate([*text, 3, 4], PLAIN)
    assert again.stats.cached_tokens == 64
    assert again.token_ids == list(greedy_oracle(model, [*text, 3, 4], NEW))


@pytest.mark.parametrize("kind", ["eagle3", "block"])
def test_an_answer_is_matched_to_its_last_state_with_a_drafter_that_has_windows(
    kind, make_target, make_drafter, make_engine, random_prompt
) -> None:
    """Regression: the drafter's windows before that state were freed, so the match ended with the prompt."""
    model, prompt = make_target("qwen3_5", **FEW_LAYERS), random_prompt(20)
    engine = make_engine(model, make_drafter(kind, model), spec=SpecConfig(3, adaptive=False))
    [out] = engine.generate(prompt, SamplingParams(max_new_tokens=20, ignore_eos=True))
    [again] = engine.generate([*prompt, *out.token_ids, 5], SamplingParams(max_new_tokens=1))
    assert again.stats.cached_tokens == 32


def test_a_copy_goes_with_its_page_and_the_oldest_for_a_new_one(make_target, make_engine, random_prompt) -> None:
    engine = make_engine(make_target("qwen3_5"), max_batch_size=1, full_slots=100, max_model_len=64)
    prompts = [random_prompt(40, seed=seed) for seed in range(4)]
    for prompt in prompts:
        assert hits(engine, prompt, prompt) == [0, 32]
        engine.table.check()
    assert len(state_cache_of(engine).states.pages) <= 2  # of the prompts that the pool still has
    assert hits(engine, prompts[-1], prompts[0]) == [32, 0]
    engine.table.reset()  # as after a step that failed
    assert not state_cache_of(engine).states.pages
