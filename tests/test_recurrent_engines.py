"""Engines over targets with recurrent layers: tokens are those of the model's own full forward, and keep their bits."""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.errors import CapacityError, UnsupportedModelError
from specdec.gpu.operations import REFERENCE
from specdec.models.target import TargetModel
from specdec.runtime import sizing

from engine_internals import assert_idle
from marks import deep, examples, is_deep

NEW = examples(14, 24)  # answers cross a fold, at 16, 32 or 48 tokens
NAMES = ["qwen3_5", "qwen3_next", "qwen3_5_moe", "granitemoehybrid", "nemotron_h", "lfm2"]
SPECS = {
    "chain": SpecConfig(3, adaptive=False),
    "tree": SpecConfig(3, 2, 6, adaptive=False),
    "deep tree": SpecConfig(19, 2, 26, adaptive=False),  # a path crosses one fold or two
}
DRAFTERS = ["trees", "ngram", "suffix", "lm", "eagle3"]
PLAIN = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
LENGTHS = (3, 16, 30, 37)[: examples(3, 4)]


@pytest.fixture
def prompts(random_prompt) -> list[list[int]]:
    return [random_prompt(length, seed=length) for length in LENGTHS]


@pytest.fixture(scope="module")
def truths(make_engine, greedy_oracle) -> Callable[..., list[list[int]]]:
    """What greedy decoding gives after these prompts, by full forwards: one each where a plain engine is right."""
    plain: dict[int, Engine] = {}
    known: dict[str, list[list[int]]] = {}

    def found(model: Any, prompts: Sequence[Sequence[int]], new: int = NEW) -> list[list[int]]:
        if id(model) not in plain:
            plain[id(model)] = make_engine(model, max_batch_size=8, max_model_len=128, prefix_cache=False)
        if (case := f"{id(model)} {new} {prompts}") not in known:
            outs = plain[id(model)].generate(prompts, replace(PLAIN, max_new_tokens=new))
            known[case] = [
                list(greedy_oracle(model, text, new, out.token_ids)) for text, out in zip(prompts, outs, strict=True)
            ]
        return known[case]

    return found


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, *map(deep, range(1, 10))])
def test_tokens_are_those_of_full_forwards(
    part, make_target, make_engine, random_prompt, truths, greedy_oracle, make_drafter
) -> None:
    """300 of families x drafters x chains and trees x pages x chunks x hits x preemption; `make test` has each family
    once, with one prompt and a part of it."""
    count = examples(8, 20)
    for seed in range(30 * part, 30 * part + examples(6, 30)):
        draw = random.Random(seed)
        model = make_target(NAMES[seed % len(NAMES)])
        prompts = [
            random_prompt(draw.randrange(1, 50), seed=seed + i) for i in range(draw.randrange(1, 4) if is_deep() else 1)
        ]
        prompts += [prompt[: draw.randrange(1, len(prompt) + 1)] for prompt in prompts]
        drafter, shape = DRAFTERS[seed % 5], list(SPECS.values())[(seed + seed // 6) % 3]
        spec = SPECS["chain"] if drafter in ("ngram", "suffix") else shape
        answers = truths(model, prompts, count) if drafter == "trees" else ()
        sizes = {
            "page_size": draw.choice((1, 2, 4, 16)),
            "prefill_chunk": draw.choice((3, 16, 64)),
            "max_batch_size": draw.randrange(1, 5),
            "full_slots": draw.choice((160, 400)),
            "max_model_len": 96,
            "prefix_cache": draw.random() < 0.8,
            "deterministic": seed % 2 == 1,
        }
        engine = make_engine(model, make_drafter(drafter, model, prompts, answers), spec=spec, **sizes)
        for prompt, out in zip(prompts, engine.generate(prompts, replace(PLAIN, max_new_tokens=count)), strict=True):
            truth = list(greedy_oracle(model, prompt, count, out.token_ids))
            assert out.token_ids == truth, (seed, drafter, spec, sizes)
        assert_idle(engine)


@pytest.mark.parametrize("deterministic", [False, deep(True)])
@pytest.mark.parametrize("family", ["qwen3_5", deep("qwen3_next"), deep("qwen3_5_moe")])
def test_fused_layers_give_the_tokens_of_full_forwards(
    family, deterministic, make_target, prompts, truths, make_drafter
) -> None:
    """Trees, chunks, hits, a last layer that is recurrent and runs for the last token of a prompt alone."""
    model = make_target(family)
    expected = truths(model, prompts)
    config = EngineConfig(deterministic=deterministic, max_batch_size=3, prefill_chunk=16, page_size=4)
    target = TargetModel(model, REFERENCE)
    for drafter in ("trees", None):  # which reads all states of a prompt, and none
        trees = drafter and make_drafter(drafter, model, prompts, expected)
        engine = Engine(target, trees, spec=SPECS["deep tree"], config=config)
        assert engine.target.unfused is None and engine.target.narrows_at() == (None if deterministic else 3)
        for _ in range(2):
            assert [out.token_ids for out in engine.generate(prompts, PLAIN)] == expected
        assert_idle(engine)


# what other engines do wrong


def test_a_round_without_drafts_between_rounds_with_drafts(
    make_target, make_engine, prompts, truths, make_drafter
) -> None:
    model = make_target("qwen3_5")
    count = examples(24, 40)
    expected = truths(model, prompts, count)
    engine = make_engine(model, make_drafter("trees", model, prompts, expected), spec=SPECS["tree"], max_batch_size=4)
    handles = engine.submit_many(prompts, replace(PLAIN, max_new_tokens=count))
    widths = set()
    for step in itertools.count():
        engine.state.max_drafts[: len(prompts)] = (3, 0, 0, 3, 1)[step % 5]
        if not engine.step():
            break
        widths.add((3, 0, 0, 3, 1)[step % 5])
    assert [handle.output().token_ids for handle in handles] == expected and widths == {0, 1, 3}
    assert any(handle.output().stats.rounds < count - 1 for handle in handles)


def test_an_aborted_request_leaves_no_state(make_target, make_engine, prompts, truths) -> None:
    model = make_target("qwen3_5")
    engine = make_engine(model, max_batch_size=1)
    handle = engine.submit(prompts[-1], PLAIN)
    for _ in range(6):
        engine.step()
    handle.abort()
    assert [out.token_ids for out in engine.generate(prompts, PLAIN)] == truths(model, prompts)


def test_a_request_ends_at_the_maximum_length(
    make_target, make_engine, random_prompt, greedy_oracle, make_drafter
) -> None:
    """Drafts reach beyond the last position; the tokens before it are right."""
    model, prompt = make_target("qwen3_5"), random_prompt(44)
    truth = list(greedy_oracle(model, prompt, 20))
    trees = make_drafter("trees", model, [prompt], [truth])
    engine = make_engine(model, trees, spec=SPECS["deep tree"], max_model_len=64, max_batch_size=2)
    [out] = engine.generate(prompt, replace(PLAIN, max_new_tokens=20))
    assert out.token_ids == truth


def test_rows_of_padding_change_no_state(make_target, make_engine, prompts, truths, make_drafter) -> None:
    """One request in a batch of four seats; the padding row has a state of its own, which stays empty."""
    model = make_target("qwen3_5")
    [prompt] = prompts[-1:]
    [truth] = truths(model, [prompt])
    trees = make_drafter("trees", model, [prompt], [truth])
    engine = make_engine(model, trees, spec=SPECS["deep tree"], max_batch_size=4)
    assert engine.generate(prompt, PLAIN)[0].token_ids == truth
    states = [layer.state for layer in engine.cache.stores[0].layers.values() if layer.state is not None]
    assert len(states) == 3
    for state in states:
        assert not state.matrices[1:5].any() and not state.folded_len[1:5].any()
        assert state.folded_len[0] == (len(prompt) + NEW - 1) // 16 * 16 and state.matrices[0].any()


def test_a_prefix_that_prompts_are_timed_after_is_folded(make_target, make_engine, measured) -> None:
    """They are timed in the padding row. Its state was at the beginning, so that a GPU folded the prefix from slots
    that no table has: an illegal memory access."""
    engine = make_engine(make_target("qwen3_5"), max_model_len=300)
    round, seen = engine.steps.state, []
    state = next(kept.state for kept in round.cache.stores[0].layers.values() if kept.state is not None)

    def begin_forward(rows: Any, length: Any, states: Any) -> Any:
        seen.append((int(round.cache.table.committed_len.host[rows[0]]), int(state.folded_len[rows[0]])))
        return SimpleNamespace(run=lambda: None)

    prefill = SimpleNamespace(begin_forward=begin_forward)
    measured["time_prompts"](round, engine.scheduler.prompt_gap, prefill, 64)
    assert max(seen) > (100, 100) and all(0 <= prefix - folded < 16 for prefix, folded in seen)


def test_slots_are_checked(make_target, make_engine, prompts, truths, make_drafter, monkeypatch) -> None:
    """SPECDEC_SANITIZE=1: freed records are NaN, and no answer is."""
    monkeypatch.setenv("SPECDEC_SANITIZE", "1")
    model = make_target("qwen3_5")
    expected = truths(model, prompts)
    trees = make_drafter("trees", model, prompts, expected)
    engine = make_engine(model, trees, spec=SPECS["tree"], max_batch_size=3, page_size=4, full_slots=128)
    assert [out.token_ids for out in engine.generate(prompts, PLAIN)] == expected


def test_states_that_leave_no_memory_are_named(make_target, make_engine, monkeypatch) -> None:
    """The advice was to raise full_slots and swa_slots, which would have been of no use."""
    monkeypatch.setattr(sizing, "free_bytes", lambda device: 4_000_000)
    assert make_engine(make_target("qwen3_5"), max_batch_size=8).max_model_len == 256
    with pytest.raises(CapacityError, match=r"max_batch_size=64: states of .*; lower max_batch_size"):
        make_engine(make_target("qwen3_5"), max_batch_size=64)


@pytest.mark.parametrize("taps", [2, 17])
def test_the_narrowest_and_the_widest_convolution(taps, make_target, make_engine, random_prompt, greedy_oracle) -> None:
    model = make_target("lfm2", num_hidden_layers=2, layer_types=["conv", "full_attention"], conv_L_cache=taps)
    prompt = random_prompt(30)
    [out] = make_engine(model, prefill_chunk=7).generate(prompt, PLAIN)
    assert out.token_ids == greedy_oracle(model, prompt, NEW)


@pytest.mark.parametrize(("family", "field"), [("qwen3_5", "linear_conv_kernel_dim"), ("lfm2", "conv_L_cache")])
@pytest.mark.parametrize("taps", [1, 18])
def test_a_convolution_whose_inputs_no_state_keeps_is_refused(family, field, taps, make_target) -> None:
    """It was served until the first token was decoded, or folded, which raised an IndexError or a RuntimeError."""
    with pytest.raises(UnsupportedModelError, match=rf"layer 0 convolves {taps} tokens; 2 to 17 are supported"):
        TargetModel(make_target(family, fresh=True, **{field: taps}))
