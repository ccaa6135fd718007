"""Cached prefixes of targets with recurrent layers: a match ends at a copy of a state, which is of certain tokens."""

from typing import Any

import pytest

from specdec import Engine, SamplingParams, SpecConfig

from inside import state_cache_of
from marks import deep, deep_cases, examples, slow

NEW = examples(8, 20)
PLAIN = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
TREE = SpecConfig(3, 2, 6, adaptive=False)


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
    assert hits(engine, prompt, prompt[:70], prompt[:60]) == [0, 64, 32]


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


def test_a_copy_goes_with_its_page_and_the_oldest_for_a_new_one(make_target, make_engine, random_prompt) -> None:
    engine = make_engine(make_target("qwen3_5"), max_batch_size=1, full_slots=100, max_model_len=64)
    prompts = [random_prompt(40, seed=seed) for seed in range(4)]
    for prompt in prompts:
        assert hits(engine, prompt, prompt) == [0, 32]
        engine.table.check()
    assert len(state_cache_of(engine).states.pages) <= 2  # of the prompts that the pool still has
    assert hits(engine, prompts[-1], prompts[0]) == [32, 0]
