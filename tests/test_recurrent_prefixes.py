"""Cached prefixes of targets with recurrent layers: a match ends at a copy of a state, which is of certain tokens."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from crowd import require_empty

from specdec import Engine, SamplingParams, SpecConfig
from specdec.attention.recurrence import paths
from specdec.kvcache.prefix_cache import PrefixCache
from specdec.kvcache.recurrent_state import RecurrentState

from marks import deep, examples, slow

NEW = 20
PLAIN = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
TREE = SpecConfig(3, 2, 6, adaptive=False)


def cache_of(engine: Engine) -> PrefixCache:
    cache = engine.table.allocator.cache
    assert isinstance(cache, PrefixCache) and cache.states is not None
    return cache


def hits(engine: Engine, *prompts: list[int], **params: Any) -> list[int]:
    """Cached tokens with which each of these prompts begins, one after the other."""
    asked = SamplingParams(**{"max_new_tokens": 2, "ignore_eos": True, **params})
    return [engine.generate(prompt, asked)[0].stats.cached_tokens for prompt in prompts]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_match_is_cut_back_to_its_last_state(page_size, make_target, make_engine, random_prompt) -> None:
    """A prompt of 37 leaves a copy at 32, its answer one at the last multiple of 16 that has been folded."""
    engine = make_engine(make_target("qwen3_5"), page_size=page_size, prefill_chunk=64)
    prompt, other = random_prompt(37), random_prompt(37, seed=1)
    assert hits(engine, prompt, prompt, prompt[:36] + other[:5], prompt[:33]) == [0, 32, 32, 32]
    assert hits(engine, prompt[:31] + other[:9], prompt[:32]) == [0, 0]  # nothing before 32 has a copy
    [out] = engine.generate(other, SamplingParams(max_new_tokens=30, ignore_eos=True))
    text = other + out.token_ids
    assert hits(engine, [*text, 7], [*text[:60], 7]) == [64, 32]
    cache_of(engine).check()


def test_prompts_of_another_salt_share_no_state(make_target, make_engine, random_prompt) -> None:
    engine, prompt = make_engine(make_target("qwen3_5"), prefill_chunk=64), random_prompt(37)
    assert hits(engine, prompt, cache_salt="a") == hits(engine, prompt, cache_salt="b") == [0]
    assert hits(engine, prompt, cache_salt="a") == [32]


def test_a_long_prompt_leaves_copies_on_its_way(make_target, make_engine, random_prompt, monkeypatch) -> None:
    monkeypatch.setattr("specdec.runtime.prefixes.STATE_EVERY", 32)
    engine, prompt = make_engine(make_target("qwen3_5"), prefill_chunk=16), random_prompt(100)
    assert hits(engine, prompt, prompt[:70], prompt[:60]) == [0, 64, 32]


@pytest.mark.parametrize(
    "family", ["qwen3_5", slow("lfm2"), *map(deep, ("qwen3_next", "qwen3_5_moe", "granitemoehybrid", "nemotron_h"))]
)
def test_bits_do_not_depend_on_a_hit(family, make_target, make_engine, random_prompt, scripted, tree_script) -> None:
    model, options = make_target(family), {"deterministic": True, "prefill_chunk": 24}
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True, logprobs=2)
    base = random_prompt(40)
    prompts = [base, base, [*base[:36], 5, 6, 7], base[:20] + [9] * 20]
    lone = make_engine(model, max_batch_size=1, prefix_cache=False, **options)
    alone = [(out.token_ids, out.logprobs) for out in lone.generate(prompts, params)]
    trees = scripted(tree_script([p + tokens for p, (tokens, _) in zip(prompts, alone, strict=True)]))
    engine = make_engine(model, trees, spec=TREE, page_size=4, max_batch_size=2, **options)
    found = [engine.generate(prompt, params)[0] for prompt in prompts]
    assert [out.stats.cached_tokens for out in found] == [0, 32, 32, 0]
    assert [(out.token_ids, out.logprobs) for out in found] == alone


def test_a_hit_after_a_rejected_draft(
    make_target, make_engine, random_prompt, greedy_oracle, scripted, tree_script
) -> None:
    """The answer's state, copied when it ends, is that of its tokens, though most drafts were rejected."""
    model, prompt = make_target("qwen3_5"), random_prompt(21)
    text = prompt + list(greedy_oracle(model, prompt, 44))
    engine = make_engine(model, scripted(tree_script([text], hit=0.3)), spec=TREE, page_size=4)
    [out] = engine.generate(prompt, SamplingParams(max_new_tokens=44, ignore_eos=True))
    assert prompt + out.token_ids == text and out.stats.rounds > 20
    [again] = engine.generate([*text, 3, 4], PLAIN)
    assert again.stats.cached_tokens == 64
    assert again.token_ids == list(greedy_oracle(model, [*text, 3, 4], NEW))


def test_samples_begin_with_the_state_of_their_prompt(make_target, make_engine, random_prompt) -> None:
    model, prompt = make_target("qwen3_5"), random_prompt(40)
    params = SamplingParams(max_new_tokens=8, ignore_eos=True, temperature=1.0, seed=3, n=4)
    plain = make_engine(model, max_batch_size=1, prefix_cache=False).generate(prompt, params)
    shared = make_engine(model, max_batch_size=4, prefill_chunk=64).generate(prompt, params)
    assert [out.token_ids for out in shared] == [out.token_ids for out in plain]
    assert sorted(out.stats.cached_tokens for out in shared) == [0, 32, 32, 32]


def test_a_copy_goes_with_its_page_and_the_oldest_for_a_new_one(make_target, make_engine, random_prompt) -> None:
    engine = make_engine(make_target("qwen3_5"), max_batch_size=1, full_slots=100, max_model_len=64)
    prompts = [random_prompt(40, seed=seed) for seed in range(6)]
    for prompt in prompts:
        assert hits(engine, prompt, prompt) == [0, 32]
        engine.table.check()
    assert len(cache_of(engine).states.pages) <= 2  # of the prompts that the pool still has
    assert hits(engine, prompts[-1], prompts[0]) == [32, 0]


# random interleavings, and what must be true of every copy


def copies(cache: PrefixCache) -> Iterator[tuple[list[int], int]]:
    """Tokens and slot of every copy."""

    def visit(node: Any, before: list[int]) -> Iterator[tuple[list[int], int]]:
        text = before + node.key.tolist()
        for number, page in enumerate(node.pages.tolist()):
            if page in slots:
                yield text[: len(before) + (number + 1) * cache.page_size], slots[page]
        for child in node.children.values():
            yield from visit(child, text)

    assert cache.states is not None
    slots = cache.states.pages
    yield from visit(cache._root, [])


def states_of(engine: Engine) -> list[RecurrentState]:
    return [kept.state for kept in engine.cache.stores[0].layers.values() if kept.state is not None]


def wrong_copies(engine: Engine, fresh: Engine) -> list[int]:
    """Lengths of copies that are not what a prompt of their tokens leaves, bit by bit."""
    wrong = []
    for text, slot in copies(cache_of(engine)):
        fresh.generate([*text, 1], SamplingParams(max_new_tokens=1, ignore_eos=True))
        pairs = zip(states_of(engine), states_of(fresh), strict=True)
        if not all(torch.equal(x[slot], y[0]) for one, other in pairs for x, y in zip(one, other, strict=True)):
            wrong.append(len(text))
    return wrong


def interleave(engine: Engine, seed: int) -> list[tuple[list[int], list[int]]]:
    """Requests that come, hit, are aborted and preempted while drafts go on and off -> prompts and answers."""
    draw = random.Random(seed)
    texts = [[draw.randrange(1, 90) for _ in range(60)] for _ in range(3)]
    asked: list[tuple[list[int], Any]] = []
    while len(asked) < 7 or not engine.scheduler.idle:
        if len(asked) < 7 and draw.random() < 0.3:
            done = [prompt + handle.output().token_ids for prompt, handle in asked if handle.finished]
            base = draw.choice(texts + done)[: draw.randrange(1, 64)]
            prompt = base + [draw.randrange(1, 90) for _ in range(draw.randrange(4))]
            params = SamplingParams(max_new_tokens=draw.randrange(1, 24), ignore_eos=True)
            asked.append((prompt, engine.submit(prompt, params)))
        if asked and draw.random() < 0.03:
            asked[draw.randrange(len(asked))][1].abort()
        engine.round.max_drafts[:4] = draw.choice((0, 1, 3))
        engine.step()
    return [(prompt, handle.output().token_ids) for prompt, handle in asked]


@pytest.fixture
def tried(make_target, make_engine, scripted, tree_script) -> Callable[[int], tuple[int, list[int]]]:
    """tried(seed): how many requests have a wrong token, and lengths of wrong copies, after one interleaving."""
    model = make_target("qwen3_5", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    options = {"deterministic": True, "max_model_len": 96}
    fresh = make_engine(model, max_batch_size=1, prefix_cache=False, **options)
    known: list[list[int]] = []
    script = tree_script(known, hit=0.6)

    def follow(tokens: list[int], *sizes: Any) -> Any:
        """Drafts that follow what plain decoding gives, which is computed once a request."""
        if not any(text[: len(tokens)] == tokens and len(text) > len(tokens) for text in known):
            known.append(
                tokens + fresh.generate(tokens, SamplingParams(max_new_tokens=26, ignore_eos=True))[0].token_ids
            )
        return script(tokens, *sizes)

    def run(seed: int) -> tuple[int, list[int]]:
        known.clear()
        sizes = {"page_size": (1, 4)[seed % 2], "full_slots": 160, "prefill_chunk": 11}
        engine = make_engine(model, scripted(follow), spec=TREE, max_batch_size=4, **sizes, **options)
        answers, wrong = interleave(engine, seed), 0
        for prompt, tokens in answers:
            if tokens:
                [out] = fresh.generate(prompt, SamplingParams(max_new_tokens=len(tokens), ignore_eos=True))
                wrong += out.token_ids != tokens
        require_empty(engine)
        cache_of(engine).check()
        return wrong, wrong_copies(engine, fresh)

    return run


@pytest.mark.slow
def test_states_equal_recomputation_after_random_interleavings(tried) -> None:
    for seed in range(examples(1, 300)):
        assert tried(seed) == (0, []), seed


@pytest.mark.slow
def test_a_speculative_state_that_is_published_is_seen(tried, monkeypatch) -> None:
    """The seeded defect: a path that crosses a fold replaces the request's state, whether it is accepted or not."""
    wave = paths._wave

    def published(rows: Any, blocks: Any, bases: Any, folds: Any) -> Any:
        known = [request._replace(certain=1 << 30) for request in rows.requests]
        certain, rows.requests = rows.requests, known
        try:
            return wave(rows, blocks, bases, folds)
        finally:
            rows.requests = certain

    monkeypatch.setattr(paths, "_wave", published)
    with pytest.raises(AssertionError, match=r"is folded already|assert \("):
        assert tried(0) == (0, [])
