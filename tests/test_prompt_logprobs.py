"""`prompt_logprobs`: the log-probabilities of a prompt's own tokens, whatever the chunks, the batch and the cache.

By transformers' own forward, by eye on a prompt of one token, and to the bit in deterministic mode; each prompt is
scored in one forward over it.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cpu_capture import record

import specdec.runtime.prompts.prefill
import specdec.runtime.rounds.prompt_chunks
from specdec import Engine, GenerationOutput, SamplingParams, SpecConfig
from specdec.errors import CapacityError, ConfigError
from specdec.runtime.rounds.prompt_chunks import score_chunk
from specdec.sampling.log_probs import TokenScores

from engine_internals import PromptLogProbs, TargetModel, assert_idle, capture_on_cpu, captured_prompts, prompt_chunks
from marks import deep, deep_cases, examples, usual_cases
from tiny_families import VOCAB, random_eagle3

pytestmark = pytest.mark.usefixtures("shallow_pair", "bundled_once")
NEW = 6
SCORE = SamplingParams(max_new_tokens=NEW, prompt_logprobs=4)


@pytest.fixture
def chunks() -> Iterator[list[int]]:
    """The lengths of all prompt chunks that are computed."""
    with prompt_chunks() as lengths:
        yield lengths


def assert_right(model: Any, out: GenerationOutput, hf_forward: Callable[..., Any], asked: int = 4) -> None:
    """Log-probabilities by one forward of transformers' own."""
    prompt, scores = out.prompt_token_ids, out.prompt_logprobs
    assert scores is not None and len(scores) == len(prompt) and scores[0] is None
    log_p = hf_forward(model, prompt).logits[0].float().log_softmax(-1)
    for token, one, row in zip(prompt[1:], scores[1:], log_p, strict=False):
        assert one is not None and one.token_id == token
        assert one.logprob == pytest.approx(float(row[token]), abs=1e-4)
        best = row.topk(min(asked, VOCAB))
        assert list(one.top) == best.indices.tolist()
        assert list(one.top.values()) == pytest.approx(best.values.tolist(), abs=1e-4)


@deep_cases("whole-gemma4-e2b", "chunks-of-5-llama")
@pytest.mark.parametrize("family", ["gemma4-e2b", "llama"])
@pytest.mark.parametrize("config", [{}, {"prefill_chunk": 5, "page_size": 4}], ids=["whole", "chunks-of-5"])
def test_prompt_logprobs_are_those_of_transformers(family, config, make_target, make_engine, random_prompt, hf_forward):
    """Prompts of several lengths at once, next to one that asks for none; the output does not change."""
    model = make_target(family)
    engine = make_engine(model, "ngram", **config)
    prompts = [random_prompt(length) for length in (23, 1, 2, 40, 9)]
    plain = engine.generate(prompts, SamplingParams(max_new_tokens=NEW))
    outs = engine.generate(prompts, [SCORE] * 4 + [SamplingParams(max_new_tokens=NEW)])
    for out in outs[:4]:
        assert_right(model, out, hf_forward)
    assert outs[1].prompt_logprobs == [None] and outs[4].prompt_logprobs is None
    assert [out.token_ids for out in outs] == [out.token_ids for out in plain]


@pytest.mark.parametrize("asked", [0, 1, 200])
def test_any_number_of_alternatives(asked, make_target, make_engine, random_prompt, hf_forward):
    """Beside a neighbour that asks for another number."""
    model = make_target("llama")
    params = [SamplingParams(max_new_tokens=1, prompt_logprobs=asked), SCORE]
    out, other = make_engine(model).generate([random_prompt(9), random_prompt(12)], params)
    assert_right(model, out, hf_forward, asked)
    assert_right(model, other, hf_forward)


def test_a_prompt_is_scored_without_any_new_token(make_target, make_engine, random_prompt, hf_forward):
    """A prompt as long as the model's length, too, where no token would fit."""
    model = make_target("gemma4-e2b")
    engine = make_engine(model, "ngram", max_model_len=48)
    params = SamplingParams(max_new_tokens=0, prompt_logprobs=4)
    for length in (48, 7, 1):
        [out] = engine.generate(random_prompt(length), params)
        assert (out.token_ids, out.text, out.finish_reason, out.logprobs) == ([], "", "length", None)
        assert_right(model, out, hf_forward)
    with pytest.raises(CapacityError, match="max_model_len=48"):
        engine.generate(random_prompt(49), params)
    [delta] = engine.stream(random_prompt(7), params)
    assert delta.token_ids == [] and delta.output is not None and delta.output.prompt_logprobs is not None
    assert engine.stats().output_tokens == 0
    with pytest.raises(ConfigError, match="max_new_tokens=0: an integer from 1"):
        SamplingParams(max_new_tokens=0)
    engine.table.check()


# what is computed, and what is not


def test_scores_never_come_with_a_cached_prefix(make_target, make_engine, random_prompt, hf_forward, chunks):
    """K/V that others made say nothing of the tokens before; what is computed for scores is there for others."""
    model, prompt = make_target("gemma4-e2b"), random_prompt(40)
    engine = make_engine(model, prefill_chunk=16)
    plain = SamplingParams(max_new_tokens=NEW)
    first, scored, again = (engine.generate(prompt, params)[0] for params in (plain, SCORE, plain))
    assert_right(model, scored, hf_forward)
    assert [out.stats.cached_tokens for out in (first, scored, again)] == [0, 0, 39]
    assert sum(chunks) == 40 + 40 + 1
    assert first.token_ids == scored.token_ids == again.token_ids


@usual_cases("cache-4")
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("prefix_cache", [True, False], ids=["cache", "no-cache"])
def test_samples_of_one_prompt_are_scored_in_one_forward(
    page_size, prefix_cache, make_target, make_engine, random_prompt, hf_forward, chunks
):
    model, prompt = make_target("gemma4-e2b"), random_prompt(41)
    engine = make_engine(model, page_size=page_size, prefix_cache=prefix_cache, max_batch_size=4, prefill_chunk=16)
    outs = engine.generate(prompt, SamplingParams(max_new_tokens=NEW, temperature=1.0, seed=3, n=4, prompt_logprobs=4))
    for out in outs:
        assert_right(model, out, hf_forward)
        assert out.prompt_logprobs == outs[0].prompt_logprobs
    assert len({tuple(out.token_ids) for out in outs}) > 1
    assert sum(chunks) == (41 + 3 * (41 - 40 // page_size * page_size) if prefix_cache else 4 * 41)


def test_logits_of_a_long_prompt_are_never_there_as_a_whole(
    make_target, make_engine, random_prompt, hf_forward, monkeypatch
):
    """The head sees few rows at a time."""
    model, seen = make_target("llama"), []
    logits = TargetModel.logits

    def noting(self: TargetModel, hidden: torch.Tensor) -> torch.Tensor:
        seen.append(hidden.numel() // hidden.shape[-1])
        return logits(self, hidden)

    monkeypatch.setattr(specdec.runtime.rounds.prompt_chunks, "MAX_LOGITS", 7 * VOCAB + 5)
    engine = make_engine(model, prefill_chunk=64)
    monkeypatch.setattr(TargetModel, "logits", noting)
    [out] = engine.generate(random_prompt(60), SamplingParams(max_new_tokens=1, prompt_logprobs=4))
    assert seen == [7] * 8 + [3, 1]
    assert_right(model, out, hf_forward)


# whatever happens to the request


@pytest.mark.parametrize("drafter", [deep("mtp"), "eagle3"])
def test_a_drafter_changes_no_score(drafter, make_target, make_assistant, make_engine, random_prompt, hf_forward):
    model = make_target("gemma4-e2b")
    module = (make_assistant if drafter == "mtp" else random_eagle3)(model)
    prompts = [random_prompt(length) for length in (30, 30, 5)]
    engine = make_engine(model, module, spec=SpecConfig(3, 2, 6), prefill_chunk=8)
    plain = make_engine(model).generate(prompts, SamplingParams(max_new_tokens=NEW))
    for outs in (engine.generate(prompts, SCORE), engine.generate(prompts, SCORE)):
        assert [out.token_ids for out in outs] == [out.token_ids for out in plain]
        for out in outs:
            assert_right(model, out, hf_forward)


@pytest.mark.parametrize("captured", [deep(False), True])
@pytest.mark.parametrize("prefix_cache", [deep(False), True])
def test_preempted_requests_have_all_their_scores(
    captured, prefix_cache, make_target, make_engine, random_prompt, hf_forward, monkeypatch
):
    """Within their prompts and after them; with captured rounds, results come a step late."""
    capture_on_cpu(monkeypatch, captured)
    model = make_target("gemma4-e2b")
    engine = make_engine(
        model, "ngram", full_slots=88, swa_slots=88, max_batch_size=4, max_model_len=64, prefill_chunk=8,
        prefix_cache=prefix_cache,
    )  # fmt: skip
    prompts = [
        random_prompt(length, seed=seed) for seed, length in enumerate((30, 27, 33, 5, 29, 31)[: examples(3, 6)])
    ]
    count = examples(10, 20)
    params = SamplingParams(max_new_tokens=count, prompt_logprobs=4, n=2)
    outs = engine.generate(prompts, params)
    assert engine.stats().preemptions > 0
    for out in outs:
        assert_right(model, out, hf_forward)
    expected = make_engine(model).generate(prompts, SamplingParams(max_new_tokens=count))
    assert [out.token_ids for out in outs[::2]] == [out.token_ids for out in expected]
    assert not captured or captured_prompts(engine)
    assert_idle(engine)


def test_nothing_waits_for_the_device_while_a_prompt_is_scored(
    make_target, make_engine, random_prompt, hf_forward, monkeypatch
):
    """The tape refuses whatever reads a value back, or has a shape that depends on data."""
    taped = itertools.count()

    def on_tape(*scored: Any) -> torch.Tensor:
        next(taped)
        replay, out = record(lambda: score_chunk(*scored))
        replay()
        return out

    monkeypatch.setattr(specdec.runtime.prompts.prefill, "score_chunk", on_tape)
    model = make_target("gemma4-e2b")
    for out in make_engine(model, prefill_chunk=16).generate([random_prompt(40), random_prompt(9)], SCORE):
        assert_right(model, out, hf_forward)
    assert next(taped) >= 3


def test_an_aborted_request_has_the_scores_that_it_came_to(make_target, make_engine, random_prompt, hf_forward):
    model, prompt = make_target("llama"), random_prompt(40)
    engine = make_engine(model, prefill_chunk=8, max_prefill_tokens=8, max_batch_size=2)
    handles = engine.submit_many(prompt, SamplingParams(max_new_tokens=NEW, n=2, seed=1, prompt_logprobs=4))
    engine.step()
    engine.step()
    handles[0].abort()
    first = handles[0].output()
    assert first.finish_reason == "abort"
    known = [one is not None for one in first.prompt_logprobs]
    assert 0 < sum(known) < 39 and known[1 : 1 + sum(known)] == [True] * sum(known)  # from the start on
    assert_right(model, handles[1].output(), hf_forward)  # the other sample goes on where it stopped
    engine.table.check()


def test_a_fault_in_the_middle_of_a_prompt_loses_no_score(
    make_target, make_engine, random_prompt, hf_forward, monkeypatch
):
    model = make_target("gemma4-e2b")
    engine = make_engine(model, prefill_chunk=8, max_prefill_tokens=8)
    handle = engine.submit(random_prompt(40), SCORE)
    engine.step()
    take, calls = PromptLogProbs.fill, itertools.count()

    def failing(self: PromptLogProbs, first: int, scores: TokenScores) -> None:
        if next(calls) in (0, 2):
            raise MemoryError("in the middle")
        take(self, first, scores)

    monkeypatch.setattr(PromptLogProbs, "fill", failing)
    for _ in range(2):
        with pytest.raises(MemoryError):
            handle.output()
    assert_right(model, handle.output(), hf_forward)
    engine.table.check()


def test_a_grammar_has_no_say_in_a_prompt() -> None:
    """The bundled model, whose tokenizer can spell."""
    with Engine.from_pretrained("tiny-gemma4", "tiny-gemma4-mtp") as engine:
        prompt = engine.encode("Tom has 3 apples and")
        guided = SamplingParams(max_new_tokens=8, prompt_logprobs=2, regex="[a-c]{3}", temperature=0.7, seed=1)
        free, bound = engine.generate([prompt] * 2, [SamplingParams(max_new_tokens=4, prompt_logprobs=2), guided])
    assert len(bound.text) == 3
    for one, other in zip(free.prompt_logprobs[1:], bound.prompt_logprobs[1:], strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert math.isfinite(one.logprob)


# bits


def test_a_text_has_the_same_scores_as_output_and_as_prompt(make_target, make_engine, random_prompt, monkeypatch):
    """To the bit, in deterministic mode: in any chunks and any company, and in small tiles of the head."""
    model, prompt = make_target("gemma4-e2b"), random_prompt(17)
    fixed = {"deterministic": True, "dtype": model.dtype}
    engine = make_engine(model, "ngram", **fixed)
    [written] = engine.generate(prompt, SamplingParams(max_new_tokens=12, logprobs=5, temperature=1.0, seed=2))
    whole, others = [*prompt, *written.token_ids], [random_prompt(40), random_prompt(5)]
    scored = SamplingParams(max_new_tokens=0, prompt_logprobs=5)
    [read] = engine.generate([whole], scored)
    assert read.prompt_logprobs is not None and read.prompt_logprobs[17:] == written.logprobs
    monkeypatch.setattr(specdec.runtime.rounds.prompt_chunks, "MAX_LOGITS", 3 * VOCAB)
    small = make_engine(model, "ngram", **fixed, max_batch_size=2, page_size=4, prefill_chunk=7)
    assert small.generate([*others, whole], scored)[2].prompt_logprobs == read.prompt_logprobs
