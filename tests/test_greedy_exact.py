"""Greedy output is that of the target alone: one full eager HF forward per token, without cache, window or pages.

Every family of target, any drafter and tree, any page size, chunk size, batch and pool that is just large enough.
"""

import itertools

import pytest

from specdec import SamplingParams
from specdec.errors import CapacityError
from specdec.runtime.scheduler import slots_needed

from engine_internals import assert_idle
from marks import deep_cases, each_value, examples, pairs, quick, slow, usual, usual_cases
from tiny_models import FAMILIES, FAST_FAMILIES

LENGTHS = (1, 5, 13, 40, 60)
NEW, LONG = examples(12, 20), 20
GREEDY = SamplingParams(max_new_tokens=NEW)
SOME = ["gemma4-e2b", "gpt_oss", "llama", "mistral"]


def is_fast(family, *_):
    return family in FAST_FAMILIES


@pytest.fixture
def prompts(random_prompt):
    return [random_prompt(n) for n in LENGTHS]


def run(engine, prompts, params=GREEDY):
    """Outputs, after checking that the engine is left whole and empty."""
    outputs = engine.generate(prompts, params)
    assert_idle(engine)
    return outputs


def tokens(outputs):
    return [out.token_ids for out in outputs]


@pytest.mark.parametrize("right", [0, 1, 7, 11, 12])
def test_the_oracle_believes_no_guess(right, make_target, random_prompt, greedy_oracle, hf_forward):
    """12 tokens of which a given number are right: the others, and what comes after them, are computed again."""
    model, prompt = make_target("gemma4-e2b", seed=8), random_prompt(9, seed=right)
    want = []
    for _ in range(14):
        want.append(int(hf_forward(model, [*prompt, *want]).logits[0, -1].argmax()))
    guess = [*want[:right], *((token + 1) % 96 for token in want[right:12])]
    assert (
        (guess == greedy_oracle(model, prompt, 12)) is ([guess] == [greedy_oracle(model, prompt, 12)]) is (right == 12)
    )
    assert greedy_oracle(model, prompt, 5, guess) == want[:5]
    truth = greedy_oracle(model, prompt, 14)
    assert truth == want != guess and truth != want[:13] and list(truth) == want == truth[:]
    assert prompt + truth == [*prompt, *want] and truth + prompt == [*want, *prompt]


@deep_cases("qwen3-None-1", "qwen2-ngram-4", "gemma4-moe-None-1")
@pytest.mark.parametrize(
    ("family", "drafter", "page_size"), each_value(quick(pairs(FAMILIES, [None, "ngram"], [1, 4]), is_fast))
)
def test_families(family, drafter, page_size, make_target, make_engine, greedy_oracle, prompts):
    model = make_target(family)
    outputs = run(make_engine(model, drafter, page_size=page_size, max_batch_size=3), prompts)
    assert tokens(outputs) == [
        greedy_oracle(model, p, NEW, out.token_ids) for p, out in zip(prompts, outputs, strict=True)
    ]
    assert [out.prompt_token_ids for out in outputs] == prompts
    assert {out.finish_reason for out in outputs} == {"length"}
    assert len({token for out in outputs for token in out.token_ids}) > 20  # it wanders


@deep_cases("gpt_oss-1", "llama-4")
@pytest.mark.parametrize(
    ("family", "page_size"),
    usual(each_value((family, size) for i, family in enumerate(FAMILIES) for size in (1, 3 + i % 2)), is_fast),
)
def test_random_trees(family, page_size, make_target, make_engine, greedy_oracle, prompts, scripted, tree_script):
    """Branches of which some are right, in any order: the accepted nodes are scattered over the tree."""
    model = make_target(family)
    want = [greedy_oracle(model, p, NEW) for p in prompts]
    drafter = scripted(tree_script([p + w for p, w in zip(prompts, want, strict=True)]))
    outputs = run(make_engine(model, drafter, page_size=page_size, max_batch_size=3, num_steps=7), prompts)
    assert tokens(outputs) == want
    assert all(out.stats.acceptance_length > 1.2 for out in outputs)


@deep_cases("gemma4-e2b-1-1")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "page_size", "chunk"),
    each_value(pairs(["gemma4-e2b", "gemma4-31b", "gpt_oss", "qwen3"], [1, 4], [1, 7, 512])),
)
def test_prefill_chunks(name, page_size, chunk, make_target, make_engine, greedy_oracle, prompts):
    model = make_target(name)
    engine = make_engine(model, "ngram", page_size=page_size, prefill_chunk=chunk, max_batch_size=3)
    assert tokens(run(engine, prompts)) == [greedy_oracle(model, p, NEW) for p in prompts]


FEW_POOLS = [("gemma4-e2b", *case) for case in pairs([1, 2, LONG], [1, 3, 4], LENGTHS)]


def just_enough(engine, prompt_len, new, factor=1.0):
    """Pool settings: `factor` times the slots that one request of this size may own at a time."""
    page_size, needed = engine.config.page_size, slots_needed(engine.table, prompt_len, new)
    sizes = (int(factor * slots) // page_size * page_size for slots in needed)
    return dict(zip(("full_slots", "swa_slots"), sizes, strict=False))


@usual_cases(
    *("gemma4-e2b-1-1-1", "gemma4-e2b-1-3-5", "gemma4-e2b-2-1-5", "gemma4-e2b-2-4-40", "gemma4-e2b-20-4-60"),
    *("llama-2-3-60", "mistral-20-1-13"),
)
@pytest.mark.parametrize(
    ("name", "new", "page_size", "length"),
    [
        *usual(itertools.product(["gemma4-e2b"], [1, 2, LONG], [1, 3, 4], LENGTHS), lambda *case: case in FEW_POOLS),
        *each_value(
            slow(name, *case) for name in ("llama", "mistral") for case in pairs([1, 2, LONG], [1, 3, 4], LENGTHS)
        ),
    ],
)
def test_pools_just_large_enough(
    name, page_size, length, new, make_target, make_engine, greedy_oracle, random_prompt, scripted, tree_script
):
    """One request in pools of exactly the slots that the scheduler says it needs, for a chunk that is larger."""
    model, prompt = make_target(name), random_prompt(length)
    want = greedy_oracle(model, prompt, new)
    drafter = scripted(tree_script([prompt + want]))
    sizes = {"page_size": page_size, "prefill_chunk": 512, "num_steps": 5}
    pools = just_enough(make_engine(model, drafter, **sizes), length, new)
    if pools["full_slots"] < 1 + 6:  # room for the prompt alone: no request with a verify step would ever run
        with pytest.raises(
            CapacityError, match=r"_slots=\d+ can hold no request: a prompt of one token takes \d+ slots"
        ):
            make_engine(model, drafter, **sizes, **pools)
        return
    engine = make_engine(model, drafter, **sizes, **pools)
    [out] = run(engine, [prompt], SamplingParams(max_new_tokens=new))
    assert out.token_ids == want
    assert out.stats.preemptions == 0


@deep_cases("gpt_oss-1-1.5", "mistral-1-1.0")
@pytest.mark.slow
@pytest.mark.parametrize(("name", "page_size", "factor"), each_value(pairs(SOME, [1, 4], [1.0, 1.5])))
def test_preemption(name, page_size, factor, make_target, make_engine, greedy_oracle, prompts, scripted, tree_script):
    """Rows for all, slots for little more than one: requests throw each other out, and nothing shows."""
    model = make_target(name)
    want = [greedy_oracle(model, p, NEW) for p in prompts]
    drafter = scripted(tree_script([p + w for p, w in zip(prompts, want, strict=True)], hit=0.4))
    sizes = {"page_size": page_size, "num_steps": 5, "prefill_chunk": 7}
    pools = just_enough(make_engine(model, drafter, **sizes), max(LENGTHS), NEW, factor)
    if "swa_slots" in pools:  # else one is admitted at a time: it needs a window of them from the start
        pools["swa_slots"] *= 2
    engine = make_engine(model, drafter, **sizes, **pools)
    outputs = run(engine, prompts)
    assert tokens(outputs) == want
    assert engine.stats().preemptions > 0
