"""Defects that other engines published of recurrent hybrids, and their kin: each a short history, on every family."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import specdec
from specdec import Engine, SamplingParams, SpecConfig

from marks import deep, examples, is_deep, slow
from proved_models import SHARED
from tiny_families import random_eagle3

FAMILIES = [slow("qwen3_5"), *map(deep, ("granitemoehybrid", "qwen3_next", "qwen3_5_moe", "nemotron_h", "lfm2"))]
TREE = SpecConfig(3, 2, 6, adaptive=False)
NEW = examples(10, 20)
PLAIN = SamplingParams(max_new_tokens=NEW, ignore_eos=True)

pytestmark = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture
def model(family, make_target) -> Any:
    return make_target(family)


@pytest.fixture
def truth(model, make_engine, greedy_oracle) -> Callable[..., list[int]]:
    """truth(prompt, new=NEW): greedy decoding, by full forwards."""
    plain = make_engine(model, max_batch_size=1, prefix_cache=False)

    def found(prompt: Sequence[int], new: int = NEW) -> list[int]:
        [out] = plain.generate(list(prompt), replace(PLAIN, max_new_tokens=new))
        return list(greedy_oracle(model, prompt, new, out.token_ids))

    return found


@pytest.fixture
def drafted(model, make_engine, scripted, tree_script) -> Callable[..., Engine]:
    """drafted(texts, hit=0.6, **config): an engine with trees of drafts, of which some are right."""

    def make(texts: Sequence[Sequence[int]], hit: float = 0.6, spec: SpecConfig = TREE, **config: Any) -> Engine:
        return make_engine(model, scripted(tree_script(texts, hit=hit)), spec=spec, **config)

    return make


def tokens(engine: Engine, prompt: Sequence[int], params: SamplingParams = PLAIN) -> list[int]:
    return engine.generate([list(prompt)], params)[0].token_ids


def test_turns_of_a_conversation(truth, drafted, random_prompt) -> None:
    """Each turn begins with the answers before it, and hits what they left; later turns became gibberish elsewhere
    (vllm 36872, 53912)."""
    texts: list[list[int]] = []
    engine, text, cached = drafted(texts, page_size=4), random_prompt(21), []
    for turn in range(examples(3, 4)):
        expected = truth(text)
        texts.append(text + expected)
        [out] = engine.generate(text, PLAIN)
        cached.append(out.stats.cached_tokens)
        assert out.token_ids == expected, turn
        text = [*text, *expected, *random_prompt(3, seed=turn)]
    assert cached == sorted(cached) and cached[-1] >= examples(32, 64)


def test_a_prompt_is_asked_again_after_another_that_shares_a_part(truth, drafted, random_prompt) -> None:
    """Lengths are around folds and pages; a poisoned cache stayed so until a restart elsewhere (vllm 43559)."""
    base = random_prompt(50)
    prompts = [base[:n] for n in ((16, 17, 32, 33, 48, 49) if is_deep() else (16, 33))]
    prompts += [*base[:20], 5, 6], [*base[:33], 7]
    texts = [prompt + truth(prompt, 4) for prompt in prompts]
    for page_size in (1, 16) if is_deep() else (16,):
        engine = drafted(texts, page_size=page_size, prefill_chunk=64)
        for _ in range(2):
            for prompt, text in zip(prompts, texts, strict=True):
                answer = tokens(engine, prompt, replace(PLAIN, max_new_tokens=4))
                assert prompt + answer == text, (page_size, len(prompt))


def test_drafts_longer_than_two_folds(truth, model, make_engine, scripted, random_prompt) -> None:
    """They are chains of 40, right up to some place (`--draft-max 48` elsewhere: ik_llama.cpp 1639)."""
    prompt, count = random_prompt(13), examples(56, 90)
    expected = truth(prompt, count)
    text = [*prompt, *expected, *[0] * 48]

    def script(tokens: list[int], count: int) -> tuple[list[int], None]:
        right = len(tokens) * 7 % (count + 1)
        return [*text[len(tokens) :][:right], *[1] * (count - right)], None

    engine = make_engine(model, scripted(script), spec=SpecConfig(40, adaptive=False))
    [out] = engine.generate(prompt, replace(PLAIN, max_new_tokens=count))
    assert out.token_ids == expected and out.stats.rounds < count // 2


def test_weights_that_change_take_their_states_along(
    family, make_target, make_engine, random_prompt, greedy_oracle
) -> None:
    """No copy of a state outlives the weights that made it."""
    model, prompt = make_target(family, fresh=True), random_prompt(40)
    engine = make_engine(model, "ngram")
    answer = tokens(engine, prompt)
    assert answer == greedy_oracle(model, prompt, NEW, answer)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "in_proj" in name:
                weight.mul_(-0.7)
    changed = make_target(family, fresh=True)
    changed.load_state_dict(model.state_dict())
    answer = tokens(engine, prompt)
    assert answer == greedy_oracle(changed, prompt, NEW, answer)


def test_a_step_that_fails_begins_all_states_anew(truth, drafted, random_prompt) -> None:
    prompts = [random_prompt(n, seed=n) for n in (9, 30, 47)]
    expected = [truth(prompt) for prompt in prompts]
    engine = drafted([p + e for p, e in zip(prompts, expected, strict=True)], max_batch_size=3)
    handles = engine.submit_many(prompts, PLAIN)
    forward, calls = engine.state.target.forward, []

    def failing(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        calls.append(1)
        if len(calls) == 8:
            raise ValueError("out of luck")
        return out

    engine.state.target.forward = failing
    try:
        while True:
            try:
                if not engine.step():
                    break
            except Exception:
                continue
    finally:
        del engine.state.target.forward
    assert [handle.output().token_ids for handle in handles] == expected and len(calls) > 8


def test_scores_of_a_prompt_after_a_hit(model, drafted, hf_forward, random_prompt) -> None:
    """Scores need every position, whatever the cache has."""
    prompt = random_prompt(40)
    engine = drafted([], prefill_chunk=64)
    tokens(engine, prompt)
    params = SamplingParams(max_new_tokens=1, ignore_eos=True, prompt_logprobs=1)
    [out] = engine.generate(prompt, params)
    logits = hf_forward(model, prompt).logits[0].log_softmax(-1)
    want = torch.tensor([float(logits[i, token]) for i, token in enumerate(prompt[1:])])
    found = torch.tensor([step.logprob for step in out.prompt_logprobs[1:]])
    torch.testing.assert_close(found, want, atol=1e-4, rtol=0)


def test_the_drop_in_for_transformers(model, greedy_oracle) -> None:
    """Rows of several lengths, padded on the left (states of padding were read elsewhere)."""
    ids, mask = torch.zeros((3, 20), dtype=torch.int64), torch.zeros((3, 20), dtype=torch.int64)
    for row, length in enumerate((20, 3, 17)):
        ids[row, 20 - length :] = torch.arange(1, length + 1) * 7 % 90
        mask[row, 20 - length :] = 1
    ask = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    got = specdec.generate(model, drafter="ngram", input_ids=ids, attention_mask=mask, **ask)
    for row, length in enumerate((20, 3, 17)):
        prompt, answer = ids[row, 20 - length :].tolist(), got[row, 20:].tolist()
        assert answer == list(greedy_oracle(model, prompt, 20, answer)), row


@pytest.mark.parametrize("dtype", [torch.bfloat16, deep(torch.float16)], ids=str)
def test_16_bits_have_the_bits_of_plain_decoding(
    dtype, family, make_target, make_engine, scripted, tree_script, random_prompt
) -> None:
    """States are float32 in any dtype; drafts change no bit."""
    model = make_target(family, fresh=True).to(dtype)
    SHARED[id(model)] = model
    prompts = [random_prompt(n, seed=n) for n in (9, 33)]
    ask = SamplingParams(max_new_tokens=examples(5, 24), ignore_eos=True, logprobs=1)
    options = {"deterministic": True, "max_model_len": 64}
    alone = make_engine(model, max_batch_size=1, **options).generate(prompts, ask)
    texts = [prompt + out.token_ids for prompt, out in zip(prompts, alone, strict=True)]
    engine = make_engine(model, scripted(tree_script(texts)), spec=TREE, page_size=4, prefill_chunk=11, **options)
    for _ in range(2):
        found = engine.generate(prompts, ask)
        assert [(out.token_ids, out.logprobs) for out in found] == [(out.token_ids, out.logprobs) for out in alone]


def test_an_adaptive_head_that_lags(model, truth, make_engine, random_prompt) -> None:
    """Rounds without drafts between others, of which the head reads the states later."""
    prompts, count = [random_prompt(n, seed=n) for n in (5, 36)], examples(10, 40)
    expected = [truth(prompt, count) for prompt in prompts]
    engine = make_engine(model, random_eagle3(model), spec=SpecConfig(3, 2, 6, adaptive=True), page_size=4)
    for _ in range(2):
        outs = engine.generate(prompts, replace(PLAIN, max_new_tokens=count))
        assert [out.token_ids for out in outs] == expected
