"""The prefix cache in the engine: the same tokens whether K/V were made or found, and made once.

What the tree does with pages is in `test_prefix_cache.py`; float32 on the CPU, so that ties do not matter.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from specdec import Engine, SamplingParams, SpecConfig

from engine_internals import assert_idle, capture_on_cpu, prompt_chunks, slots_needed
from marks import deep, deep_cases, each_value, examples, usual, usual_cases

NEW = examples(6, 8)
CHAIN, TREE = SpecConfig(3), SpecConfig(3, 2, 6)
DRAFTERS = {
    "plain": ("gemma4-e2b", None, CHAIN),
    "ngram": ("gemma4-e2b", "ngram", CHAIN),
    "mtp-chain": ("gemma4-e2b", "mtp", CHAIN),
    "mtp-tree": ("gemma4-31b", "mtp", TREE),
    "eagle3-chain": ("llama", "eagle3", CHAIN),
    "eagle3-tree": ("gemma4-e2b", "eagle3", TREE),
}
UNLIKE = ("mtp-tree", "eagle3-chain", "eagle3-tree")  # drafters of which each finds something else of its own


@pytest.fixture
def build(make_target, make_drafter, make_engine) -> Callable[..., Engine]:
    """build(case, **config): an engine of one of the cases."""

    def make(case: tuple[str, str | None, SpecConfig], **config: Any) -> Engine:
        family, drafter, spec = case
        model = make_target(family)
        return make_engine(model, make_drafter(drafter, model), spec=spec, **config)

    return make


def ends(engine: Engine, prompt: list[int], new: int = NEW, **params: Any) -> tuple[list[int], int]:
    """Its output, and how many prompt tokens were found."""
    [out] = engine.generate(prompt, SamplingParams(max_new_tokens=new, **params))
    assert_idle(engine)
    return out.token_ids, out.stats.cached_tokens


# the same tokens


@deep_cases("mtp-tree-1", "eagle3-chain-4")
@pytest.mark.parametrize(
    ("name", "page_size"),
    usual(each_value(itertools.product(DRAFTERS, [1, 4, 16])), lambda name, _: name in ("plain", *UNLIKE)),
)
def test_a_hit_changes_no_token(name, page_size, build, greedy_oracle, random_prompt):
    """Another end, the same prompt, its next turn, a part of it; EAGLE-3 finds a token less where it looks ahead."""
    case = DRAFTERS[name]
    engine = build(case, page_size=page_size)
    model, look = engine.target.model, case[1] == "eagle3"
    prompt, other = random_prompt(40), random_prompt(9)

    def pages(tokens: int) -> int:
        return tokens // page_size * page_size

    truth = greedy_oracle(model, prompt, NEW)
    assert ends(engine, prompt) == (truth, 0)
    assert ends(engine, prompt) == (truth, pages(39))
    forked = prompt[:32] + [token for token in other if token != prompt[32]]
    assert ends(engine, forked) == (greedy_oracle(model, forked, NEW), pages(32 - look))
    turn = [*prompt, *truth, *other]
    assert ends(engine, turn) == (greedy_oracle(model, turn, NEW), pages(40 + NEW - 1))
    assert ends(engine, prompt[:21]) == (greedy_oracle(model, prompt[:21], NEW), pages(20))
    assert ends(engine, other) == (greedy_oracle(model, other, NEW), 0)
    assert engine.stats().cached_tokens == pages(39) + pages(32 - look) + pages(39 + NEW) + pages(20)


@usual_cases("eagle3-chain-1")
@pytest.mark.parametrize(
    ("name", "page_size"), usual(each_value(itertools.product(DRAFTERS, [1, 16])), lambda name, _: name in UNLIKE)
)
def test_a_draft_after_a_hit_is_the_same(name, page_size, build, random_prompt):
    """What a drafter reads of the prefix is what it would have made: as many drafts are accepted, round by round."""
    prompts = [random_prompt(40), random_prompt(40)[:25] + random_prompt(20, seed=3)]
    params = SamplingParams(max_new_tokens=examples(10, 24))
    seen = []
    for prefix_cache in (True, False):
        engine = build(DRAFTERS[name], page_size=page_size, prefix_cache=prefix_cache)
        outs = [engine.generate(prompt, params)[0] for prompt in [*prompts, *prompts]]
        seen.append([(out.token_ids, out.drafted, out.stats.accepted_counts) for out in outs])
        assert any(out.stats.cached_tokens for out in outs) is prefix_cache
    assert seen[0] == seen[1]


def test_penalties_and_logprobs_know_the_whole_prompt(build, random_prompt):
    """They come from tokens, not from K/V."""
    prompt = random_prompt(30)
    params = {"repetition_penalty": 1.3, "logprobs": 3, "temperature": 0.8, "seed": 4}
    engine = build(DRAFTERS["mtp-chain"])
    first, again = (engine.generate(prompt, SamplingParams(max_new_tokens=NEW, **params))[0] for _ in range(2))
    assert again.stats.cached_tokens == 29
    assert again.token_ids == first.token_ids
    assert [item.logprob for item in again.logprobs] == pytest.approx(
        [item.logprob for item in first.logprobs], abs=1e-5
    )


def test_rounds_in_flight_overwrite_no_cached_page(build, greedy_oracle, random_prompt, monkeypatch):
    """Captured rounds are launched before the one in front is settled: who ended there still writes after its end."""
    capture_on_cpu(monkeypatch)
    engine = build(DRAFTERS["eagle3-tree"], max_batch_size=3, full_slots=240)
    model, base = engine.target.model, random_prompt(30)
    prompts = [base[: 10 + 5 * i] + random_prompt(4, seed=i) for i in range(4)]
    for _ in range(2):
        truths = [greedy_oracle(model, prompt, NEW) for prompt in prompts]
        params = [SamplingParams(max_new_tokens=NEW, stop_token_ids=[truth[5]]) for truth in truths]
        outs = engine.generate(prompts, params)
        for out, truth in zip(outs, truths, strict=True):
            assert out.token_ids == truth[: truth.index(truth[5]) + 1]
        assert_idle(engine)
        prompts = [[*prompt, *out.token_ids, 7] for prompt, out in zip(prompts, outs, strict=True)]


# made once


def test_64_requests_make_a_common_prefix_once(build, random_prompt):
    """They arrive together: all but the first wait until its chunks are there, and none of them longer. Their head
    looks ahead."""
    page_size, prefix = 16, random_prompt(500)
    engine = build(
        DRAFTERS["eagle3-tree"], max_batch_size=64, prefill_chunk=128, max_model_len=600, page_size=page_size
    )
    prompts = [prefix + random_prompt(20, seed=i) for i in range(64)]
    with prompt_chunks() as lengths:
        outs = engine.generate(prompts, SamplingParams(max_new_tokens=3))
    assert all(out.stats.cached_tokens >= 499 // page_size * page_size for out in outs[1:])
    assert sum(lengths) <= 520 + 63 * (520 - 499 // page_size * page_size)
    assert_idle(engine)


def test_groups_wait_for_the_prefix_of_their_own_first_request(build, random_prompt):
    """A common part, then one of two longer ones: each is made once, though all arrive together."""
    engine = build(DRAFTERS["plain"], max_batch_size=8, prefill_chunk=32)
    parts = [random_prompt(60, seed=s) for s in (1, 2)]
    prompts = [random_prompt(60) + parts[i % 2] + [i] for i in range(8)]
    with prompt_chunks() as lengths:
        engine.generate(prompts, SamplingParams(max_new_tokens=2))
    assert sum(lengths) == 60 + 2 * 60 + 8


def test_a_request_that_shares_too_little_does_not_wait(build, random_prompt):
    engine = build(DRAFTERS["plain"], max_batch_size=4, prefill_chunk=16)
    prompts = [random_prompt(15) + random_prompt(30, seed=i) for i in range(4)]
    handles = engine.submit_many(prompts, SamplingParams(max_new_tokens=NEW))
    engine.step()
    assert [request.stats.cached_tokens for request in engine.scheduler.running] == [0] * 4
    for handle in handles:
        handle.abort()
    engine.step()
    assert_idle(engine)


def test_a_request_waiting_for_a_prefix_keeps_its_row_and_lets_others_pass(build, random_prompt):
    engine = build(DRAFTERS["plain"], max_batch_size=3, prefill_chunk=16)
    prefix = random_prompt(60)
    maker, waiter, other, late = engine.submit_many(
        [prefix, [*prefix, 5], random_prompt(20, seed=1), random_prompt(20, seed=2)], SamplingParams(max_new_tokens=NEW)
    )
    engine.step()
    running = [request.id for request in engine.scheduler.running]
    assert running == [maker.id, other.id]  # the third row is the waiter's
    while not waiter.finished:
        engine.step()
    assert waiter.output().stats.cached_tokens == 60
    assert [handle.output().stats.cached_tokens for handle in (maker, other, late)] == [0, 0, 0]


def test_a_request_does_not_wait_for_kv_that_it_cannot_adopt(build, random_prompt):
    """Its prompt's scores need states that only its own samples compute; another salt; K/V of old weights."""
    engine = build(DRAFTERS["plain"], max_batch_size=4, prefill_chunk=16)
    prefix, asked = random_prompt(60), [{}, {"prompt_logprobs": 1}, {"cache_salt": "a"}, {}]
    params = [SamplingParams(max_new_tokens=2, **each) for each in asked]
    engine.submit_many([[*prefix, i] for i in range(4)], params)
    engine.step()
    assert [request.params for request in engine.scheduler.running] == params[:3]
    engine.clear_prefix_cache()
    engine.step()
    assert len(engine.scheduler.running) == 4


def test_no_request_waits_for_one_that_is_served_after_it(build, random_prompt):
    engine = build(DRAFTERS["plain"], max_batch_size=3, prefill_chunk=16)
    prefix = random_prompt(100)
    slow_one = engine.submit(prefix, SamplingParams(max_new_tokens=NEW), priority=5)
    engine.step()
    urgent = engine.submit([*prefix, 3], SamplingParams(max_new_tokens=NEW), priority=0)
    engine.step()
    assert [request.id for request in engine.scheduler.running] == [urgent.id, slow_one.id]
    assert 0 < urgent.output().stats.cached_tokens < 100  # those of the first step
    while engine.step():
        pass
    assert_idle(engine)


def test_an_abort_of_the_first_request_releases_those_that_wait_for_its_prefix(build, greedy_oracle, random_prompt):
    engine = build(DRAFTERS["ngram"], max_batch_size=4, prefill_chunk=16)
    prompt = random_prompt(80)
    maker, waiter = engine.submit_many([prompt, prompt], SamplingParams(max_new_tokens=NEW))
    engine.step()
    maker.abort()
    while not waiter.finished:
        engine.step()
    assert waiter.output().token_ids == greedy_oracle(engine.target.model, prompt, NEW)
    assert 0 < waiter.output().stats.cached_tokens < 79  # what was made of it is kept
    assert_idle(engine)


# little memory


@deep_cases("mtp-tree-1", "eagle3-tree-4")
@pytest.mark.parametrize(("name", "page_size"), each_value(itertools.product(["mtp-tree", "eagle3-tree"], [1, 4, 16])))
def test_tiny_pools_change_no_token(name, page_size, build, greedy_oracle, random_prompt):
    """Pools for little more than one request: everything cached is given up again and again, and rows are preempted."""
    case = DRAFTERS[name]
    model_len = slots_needed(build(case, page_size=page_size).table, 50, 2 * NEW)
    engine = build(case, page_size=page_size, max_batch_size=3, full_slots=model_len[0], swa_slots=2 * model_len[1])
    base = random_prompt(40)
    prompts = [base[: 12 * (i % 4)] + random_prompt(10, seed=i) for i in range(examples(5, 8))]
    outs = engine.generate(prompts, SamplingParams(max_new_tokens=2 * NEW))
    for out, prompt in zip(outs, prompts, strict=True):
        assert out.token_ids == greedy_oracle(engine.target.model, prompt, 2 * NEW)
    assert_idle(engine)


def test_a_preempted_request_finds_what_it_had_made(build, greedy_oracle, random_prompt):
    """It was preempted for slots that another request then freed: its K/V are recomputed for few tokens or none."""
    engine = build(DRAFTERS["eagle3-chain"], max_batch_size=2)
    prompts = [random_prompt(40), random_prompt(30, seed=1)]
    streams = [engine.stream(prompt, SamplingParams(max_new_tokens=2 * NEW)) for prompt in prompts]
    got = [list(next(stream).token_ids) for stream in streams]
    engine.scheduler._make_room() or engine.scheduler._make_room()
    while not engine.scheduler.waiting:
        engine.scheduler._make_room()
    with prompt_chunks() as lengths:
        for tokens, stream in zip(got, streams, strict=True):
            tokens += [token for delta in stream for token in delta.token_ids]
    assert got == [greedy_oracle(engine.target.model, prompt, 2 * NEW) for prompt in prompts]
    assert 0 < sum(lengths) <= 2
    assert engine.stats().cached_tokens == 0  # of other requests
    assert_idle(engine)


def test_tokens_that_a_preempted_request_had_read_count_as_found_by_none(build, random_prompt):
    engine = build(DRAFTERS["plain"], max_batch_size=2, prefill_chunk=16)
    handle = engine.submit(random_prompt(60), SamplingParams(max_new_tokens=1, cache_salt="\ud800"))  # any text
    engine.step()
    while not engine.scheduler.waiting:
        engine.scheduler._make_room()
    with prompt_chunks() as lengths:
        assert handle.output().stats.cached_tokens == 0
    assert sum(lengths) == 60 - 16


# K/V of other weights


def repointed(model: Any, state: dict[str, torch.Tensor]) -> None:
    model.load_state_dict(state, assign=True)


def updated_in_place(model: Any, state: dict[str, torch.Tensor]) -> None:
    model.load_state_dict(state)


def one_of_them_in_place(model: Any, state: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(-1.5)


@pytest.mark.parametrize(
    ("change", "under_way"), [(repointed, False), (one_of_them_in_place, True), deep(updated_in_place, True)]
)
def test_kv_of_weights_that_are_gone_are_not_served(
    change, under_way, make_target, make_engine, random_prompt, hf_forward
):
    """Nor those that a request made before, which ends after."""
    model, other = make_target("llama", fresh=True), make_target("qwen3", fresh=True)
    engine, prompt = make_engine(model, "ngram"), random_prompt(40)
    stream = engine.stream(prompt, SamplingParams(max_new_tokens=30))
    next(stream)
    if not under_way:
        list(stream)
    torch.manual_seed(9)
    state = {name: torch.randn_like(tensor) * 0.3 for name, tensor in model.state_dict().items()}
    change(model, state)
    list(stream)
    [out] = engine.generate(prompt, SamplingParams(max_new_tokens=NEW))
    ids = list(prompt)
    for _ in range(NEW):
        ids.append(int(hf_forward(model, ids).logits[0, -1].argmax()))
    assert out.token_ids == ids[40:]
    assert out.stats.cached_tokens == 0
    assert ends(engine, prompt) == (ids[40:], 39)
    assert other is not model


def test_clear_prefix_cache_drops_kv_of_weights_changed_in_place(make_target, make_engine, random_prompt, hf_forward):
    model, prompt = make_target("llama", fresh=True), random_prompt(40)
    engine = make_engine(model, "ngram")
    ends(engine, prompt)
    stream = engine.stream(random_prompt(30), SamplingParams(max_new_tokens=NEW))
    next(stream)
    model.model.layers[0].mlp.down_proj.weight.data.mul_(-1.5)
    engine.clear_prefix_cache()
    list(stream)  # has K/V of both
    want = int(hf_forward(model, prompt).logits[0, -1].argmax())
    assert ends(engine, prompt, 1) == ([want], 0)
    assert ends(engine, random_prompt(30), 1)[1] == 0
    assert ends(engine, prompt, 1) == ([want], 39)
    engine.clear_prefix_cache()
    assert engine.table.allocator.primary.evictable_pages == 0
    assert_idle(engine)


def test_after_a_fault_the_cache_is_empty(build, greedy_oracle, random_prompt, monkeypatch):
    engine = build(DRAFTERS["mtp-tree"], page_size=4)
    prompt = random_prompt(30)
    truth = greedy_oracle(engine.target.model, prompt, NEW)
    ends(engine, prompt)
    with monkeypatch.context() as broken:
        broken.setattr("specdec.runtime.prompts.prefill.draw_first_tokens", lambda *arguments, **more: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.generate(prompt, SamplingParams(max_new_tokens=NEW))
    assert ends(engine, prompt) == (truth, 0)
    assert ends(engine, prompt) == (truth, 28)


# settings


def test_a_closed_engine_keeps_nothing(build, random_prompt):
    engine = build(DRAFTERS["ngram"])
    ends(engine, random_prompt(30))
    engine.close()
    assert engine.table.allocator.primary.evictable_pages == 0
