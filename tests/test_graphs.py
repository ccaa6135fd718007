"""Captured rounds: what a CUDA graph would do, on the CPU, by a tape that freezes all that Python decided.

Tokens equal those of the same rounds run eagerly, also if requests join and leave, and nothing of a round outlives it.
"""

import logging
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from crowd import make_crowd

from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.draft_models.lookup import NgramDrafter
from specdec.errors import ConfigError, FrozenKVError
from specdec.runtime.rounds.captured_prompts import ChunkProgram, ChunkShape
from specdec.runtime.rounds.captured_rounds import run_programs
from specdec.runtime.rounds.result import DraftShape, RoundShape
from specdec.runtime.rounds.round_shapes import (
    GREEDY,
    batch_buckets,
    captured_shape,
    is_rare,
    prefix_buckets,
    with_forced,
)

from engine_internals import StatesNeeded, assert_idle, capture_on_cpu, captured_prompts, captured_rounds
from marks import deep_cases, examples
from tiny_models import few_layers

pytestmark = pytest.mark.usefixtures("shallow_pair", "bundled_once")
TREE = SpecConfig(3, 2, 6)
SHORT_POOLS = {"page_size": 4, "full_slots": 88, "swa_slots": 88}


def requests(count: int, seed: int = 1) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts and outputs of many lengths, greedy and sampled, some with edits of logits and log-probabilities."""
    crowd = make_crowd(count, examples(12, 24), 87, seed=seed)
    prompts = [[token + 3 for token in each.prompt] for each in crowd]
    return prompts, [replace(each.params, speculation=None) for each in crowd]


def serve(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    outs = engine.generate(prompts, params)
    assert_idle(engine)
    assert [bool(out.logprobs) for out in outs] == [p.logprobs is not None for p in params]
    return [out.token_ids for out in outs]


def captured_batches(engine: Engine) -> set[int]:
    return {shape.batch for shape in captured_rounds(engine)}


@deep_cases("eagle3-tree-short")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "spec", "pool"),
    [
        pytest.param(None, None, {}, marks=pytest.mark.deep, id="plain"),
        pytest.param("mtp", TREE, {}, id="mtp-tree"),
        pytest.param("ngram", None, SHORT_POOLS, marks=pytest.mark.deep, id="ngram-short"),
        pytest.param("mtp", None, SHORT_POOLS, marks=pytest.mark.deep, id="mtp-chain-short"),
        pytest.param("eagle3", TREE, SHORT_POOLS, id="eagle3-tree-short"),
    ],
)
def test_captured_rounds_give_the_same_tokens(drafter, spec, pool, monkeypatch) -> None:
    """More requests than rows join and leave; the short pools preempt some of them, with rounds under way."""
    name = {"mtp": "tiny-gemma4-mtp", "eagle3": "tiny-gemma4-eagle3"}.get(drafter, drafter)
    config = EngineConfig(
        max_batch_size=examples(2, 4), max_model_len=96, device="cpu", **pool
    )  # where the tape can record
    asked = requests(examples(3, 12))
    outputs = []
    for on in (False, True):
        capture_on_cpu(monkeypatch, on)
        engine = Engine.from_pretrained("tiny-gemma4", name, spec=spec, config=config)
        outputs.append(serve(engine, *asked))
        if on:
            assert len(captured_batches(engine)) > 1 and captured_prompts(engine)
            assert bool(pool) == bool(engine.stats().preemptions)
    assert outputs[0] == outputs[1]


@pytest.fixture
def small_engine(monkeypatch, make_target, make_engine):
    def make(drafter="ngram", on=True, cuda_graphs="auto", layers=None, **config) -> Engine:
        capture_on_cpu(monkeypatch, on)
        config["cuda_graphs"] = cuda_graphs
        return make_engine(
            make_target("gemma4-e2b", **layers or {}), drafter, **{"max_batch_size": 2, "max_model_len": 64, **config}
        )

    return make


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here: the tape records interpreted ones")
def test_the_kernels_are_captured_too(small_engine, make_target, make_assistant, monkeypatch) -> None:
    """Tables, attention and tree selection as interpreted kernels on the tape; tokens are those of plain torch."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("specdec.runtime.rounds.prompt_sizes.MIN_TOKENS", 4)  # the interpreter is slow
    layers = few_layers()
    assistant = make_assistant(make_target("gemma4-e2b", **layers))
    asked = [[5, 9, 11]], [SamplingParams(max_new_tokens=examples(3, 5), ignore_eos=True)]
    settings = {"spec": SpecConfig(2, 2, 4), "page_size": 2, "max_batch_size": 1, "attention": "triton"}
    captured = small_engine(assistant, layers=layers, **settings)
    outputs = serve(captured, *asked)
    assert captured_rounds(captured) and captured_prompts(captured)
    monkeypatch.delenv("TRITON_INTERPRET")
    assert outputs == serve(small_engine(None, on=False, layers=layers, attention="torch"), *asked)


@deep_cases("32-shapes0")
@pytest.mark.parametrize(("most", "shapes"), [(32, {16, 24, 32}), (23, {16}), (15, set())])
def test_long_prompts_run_uncaptured(small_engine, monkeypatch, most, shapes) -> None:
    monkeypatch.setattr("specdec.runtime.rounds.captured_prompts.MAX_TOKENS", most)
    asked = requests(4, seed=7)
    engine = small_engine()
    assert serve(engine, *asked) == serve(small_engine(on=False), *asked)
    assert captured_batches(engine) == {1, 2}
    tried = captured_prompts(engine)
    assert {shape.tokens for shape in tried} <= shapes and bool(tried) == bool(shapes)
    use = engine.stats().captures
    assert use.uncaptured_prompts > 0 and (use.bytes > 0) == bool(shapes)  # bytes of what receives results


def test_any_load_takes_few_shapes(small_engine) -> None:
    """Once a shape was (batch, width, prefix): there were up to a thousand."""
    graphs = small_engine(None, layers=few_layers(), max_batch_size=256).steps.prefill.forwards
    draw = random.Random(0)
    shapes = set()
    for states in (StatesNeeded.LAST, StatesNeeded.NONE):
        for _ in range(examples(60, 2000)):
            tokens = int(2 ** draw.uniform(0, 13))
            runs = draw.randint(1, min(tokens, 256))
            shape = graphs.bucket(runs, tokens, states)
            if shape is not None:
                assert shape.tokens >= tokens and runs <= shape.runs <= 256
                assert shape.tokens <= 1.25 * tokens or tokens <= 2048
                shapes.add(shape)
    assert 20 < len(shapes) <= 46
    for tokens, room, pool in ((2048, 2048, "prompts"), (2049, 2560, "long prompts"), (8192, 8192, "long prompts")):
        shape = graphs.bucket(1, tokens, StatesNeeded.LAST)
        assert shape.tokens == room and shape.rule.pool == pool
    assert graphs.bucket(1, 8193, StatesNeeded.LAST) is None
    assert graphs.bucket(8, 9, StatesNeeded.LAST)[:2] == (16, 8)  # as many requests as it has room for


def test_a_captured_forward_without_a_request_at_a_place_reads_the_padding_row(small_engine) -> None:
    """Another row may have a drafter's state and a lag, which such a place would change."""
    engine = small_engine(None, max_batch_size=4)
    program = ChunkProgram(engine.state, ChunkShape(16, 4, StatesNeeded.EVERY))
    program.load_chunks(np.array([1]), np.array([5]))
    for part in program.programs:
        part()
    pack = program.result().pack
    assert pack.rows.tolist() == [1, *[engine.table.padding_row] * 3] and pack.length.tolist() == [5, 0, 0, 0]


def test_rounds_are_captured_before_the_first_request(small_engine) -> None:
    """In a round of padding rows alone, no request sees a key that padding wrote."""
    engine = small_engine(max_batch_size=5)
    assert captured_batches(engine) == {1, 2, 4, 5}
    engine.table.check()
    assert not engine.table.slots.tensor.any() and not engine.table.committed_len.tensor.any()


def test_a_round_is_launched_before_the_previous_one_is_settled(small_engine) -> None:
    engine = small_engine(None)
    stream = engine.stream([5, 9, 11], SamplingParams(max_new_tokens=6, ignore_eos=True))
    seen = [(len(delta.token_ids), len(engine.steps.launches.unsettled)) for delta in stream]
    # the first token is the prompt's; what is sure to end a request is not followed by a round for nothing
    assert seen == [(1, 0), (1, 1), (1, 1), (1, 1), (1, 1), (1, 0)]
    assert engine.table.lookahead == 2


@pytest.mark.parametrize("new", [1, 3])
def test_the_next_prompts_are_launched_before_first_tokens_are_settled(new, small_engine, random_prompt) -> None:
    """The device would wait for the host between two forwards; after the last one the host waits for the device."""
    prompts, params = [random_prompt(16, seed=i) for i in range(6)], SamplingParams(max_new_tokens=new, ignore_eos=True)
    sizes = {"max_batch_size": 6, "max_prefill_tokens": 16, "prefix_cache": False}
    engine, alone = small_engine(None, **sizes), small_engine(None, on=False, **sizes)
    handles, seen = engine.submit_many(prompts, [params] * 6), []
    while any(handle.num_output == 0 for handle in handles):
        engine.step()
        seen.append(([handle.num_output > 0 for handle in handles].count(True), len(engine.steps.launches.unsettled)))
    assert seen[:3] == ([(0, 1), (1, 1), (6, 0)] if new == 1 else [(0, 1), (1, 1), (2, 1)])
    while engine.step():
        pass
    assert [one.output().token_ids for one in handles] == [out.token_ids for out in alone.generate(prompts, params)]
    engine.table.check()


def test_a_request_that_ended_takes_no_part_in_rounds_in_flight(small_engine) -> None:
    """A row is taken by another request while a round of the one before is under way."""
    prompts, params = requests(3, seed=5)
    engine, alone = small_engine(max_batch_size=1), small_engine(on=False)
    longer = SamplingParams(max_new_tokens=20, ignore_eos=True)
    stream = engine.stream(prompts[0], longer)
    for _ in range(4):
        next(stream)
    assert engine.steps.launches.unsettled
    stream.close()
    assert [out.token_ids for out in engine.generate(prompts[1:], params[1:])] == [
        out.token_ids for out in alone.generate(prompts[1:], params[1:])
    ]
    engine.table.check()


class Peeking(NgramDrafter):
    """Looks at a token on the host."""

    def propose(self, batch):
        if int(batch.root[0]) < 0:
            raise AssertionError
        return super().propose(batch)


def test_rounds_that_cannot_be_captured_run_eagerly_with_one_warning(small_engine, caplog) -> None:
    asked = requests(2, seed=7)
    right = serve(small_engine(on=False), *asked)
    with caplog.at_level(logging.WARNING, "specdec"):
        assert serve(small_engine(Peeking()), *asked) == right
    assert [r.message for r in caplog.records] == ["rounds run without CUDA graphs: item inside of a captured round"]
    with pytest.raises(ConfigError, match=r"^rounds cannot be captured .*cuda_graphs='auto' or False$"):
        small_engine(Peeking(), cuda_graphs=True)


def test_a_captured_round_belongs_to_its_view_and_to_a_live_cache(small_engine) -> None:
    engine = small_engine(None)
    engine.generate([[5, 9]], SamplingParams(max_new_tokens=8, ignore_eos=True))
    graphs, allocator = engine.steps.rounds, engine.table.allocator
    shape = next(iter(captured_rounds(engine)))
    owner = object()
    allocator.freeze(owner)
    with pytest.raises(FrozenKVError):
        graphs.run(shape)
    allocator.thaw(owner)
    engine.state.view.layer_map = (1, *engine.state.view.layer_map[1:])
    with pytest.raises(FrozenKVError, match="another view"):
        graphs.run(shape)


def test_a_prefix_that_may_seem_longer_than_a_row_has_the_widest_tables(small_engine) -> None:
    """A round that is not settled counts with all of its nodes."""
    engine = small_engine()
    serve(engine, [[5, 9, 11]], [SamplingParams(max_new_tokens=4)])
    most = engine.table.slots.host.shape[1] - 1
    shape = next(iter(captured_rounds(engine)))._replace(max_committed_len=most + 5)
    assert captured_shape(engine.state, shape).max_committed_len == most


def test_rounds_of_a_rare_kind_are_captured_when_they_have_run_a_few_times(small_engine) -> None:
    engine = small_engine(None, layers=few_layers())
    for count, captured in ((4, False), (12, True)):  # 3 rounds, then 11
        engine.generate([5, 9, 11], SamplingParams(max_new_tokens=count, ignore_eos=True, logprobs=2))
        assert any(is_rare(shape) for shape in captured_rounds(engine)) == captured


def test_the_host_works_between_programs_and_not_after_the_last() -> None:
    seen: list[tuple[int, int]] = []
    programs = [lambda number=number: torch.tensor(10 * number) for number in range(3)]
    assert run_programs(programs, lambda number, out: seen.append((number, int(out)))) == 20
    assert seen == [(0, 0), (1, 10)]


def test_forced_tokens_leave_room_for_the_token_after_them() -> None:
    """A row of 8 places, all with slots, and 4 tokens committed: nodes at 4 to 6, and the last token at 7."""
    host = SimpleNamespace(host=np.zeros((2, 8))), SimpleNamespace(host=np.array([4]))
    table = SimpleNamespace(slots=host[0], committed_len=host[1], capacity=np.array([8]))
    state: Any = SimpleNamespace(cache=SimpleNamespace(table=table))
    for draft, forced, captured, width in ((1, 4, False, 3), (1, 4, True, 2), (3, 1, False, 3), (3, 1, True, 3)):
        shape = RoundShape(1, 4, DraftShape(draft - 1, 1, draft), GREEDY, None)
        assert with_forced(shape, state, np.array([0]), forced, captured=captured).forced == width


def test_true_needs_a_gpu(make_target, make_engine) -> None:
    with pytest.raises(ConfigError, match=r"^cuda_graphs=True needs a CUDA device, and this model is on cpu"):
        make_engine(make_target("llama"), cuda_graphs=True)


def test_the_sizes_that_rounds_are_captured_for() -> None:
    assert batch_buckets(1) == [1]
    assert batch_buckets(6) == [1, 2, 4, 6]
    assert batch_buckets(20) == [1, 2, 4, 8, 16, 20]
    assert batch_buckets(100) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 96, 100]
    assert prefix_buckets(300) == [300]
    assert prefix_buckets(4096) == [4096]
    assert prefix_buckets(40_000) == [4096, 32_768, 40_000]
