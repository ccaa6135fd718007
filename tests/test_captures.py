"""Memory of captures and the cost of their failures, with a tape instead of graphs that fails or counts on demand.

One failure refuses one shape; memory is bounded; parameters that are data share a capture; the host sends what changed.
"""

import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cpu_capture import record
from samplers import sampler_of

import specdec.engine
from specdec import Engine, SamplingParams
from specdec.errors import ConfigError
from specdec.gpu.captures import SPARE_POOL, CaptureMemory, CaptureStore, OverBudget
from specdec.runtime.rounds.captured_rounds import ROUNDS
from specdec.sampling.reference_sampler import EditInputs, ReferenceSampler
from specdec.sampling.sampling_table import SamplerFeatures, SamplingTable

from engine_internals import captured_prompts, captured_rounds
from marks import deep_cases

NEW = 6
GREEDY = SamplingParams(max_new_tokens=NEW, ignore_eos=True)


class FailingTape:
    """A capture whose calls number `failing` raise, in the middle of the program."""

    def __init__(
        self, failing: tuple[int, ...] = (), error: Callable[[str], Exception] = torch.OutOfMemoryError
    ) -> None:
        self.failing, self.error, self.calls = failing, error, 0

    def __call__(self, program: Any) -> Any:
        def broken() -> torch.Tensor:
            program()
            raise self.error("no room (seeded)")

        self.calls += 1
        return record(broken if self.calls in self.failing else program)


class WeighedTape(FailingTape, CaptureMemory):
    """Every captured program takes 10 bytes, and every pool 100 until it is closed."""

    def __init__(self) -> None:
        super().__init__()
        gc.collect()
        gc.freeze()  # it collects at every look, and what was there before need not be visited each time
        self.pools: set[str] = set()
        self.captures: list[Any] = []

    def __call__(self, program: Any) -> Any:
        self.pools.add(self.pool)
        replay, out = super().__call__(program)

        def held() -> None:
            replay()

        self.captures.append(weakref.ref(held))
        return held, out

    def held_bytes(self) -> int:
        return 100 * len(self.pools) + 10 * sum(self.alive_now())

    def alive_now(self) -> list[bool]:
        gc.collect()
        return [capture() is not None for capture in self.captures]

    def wait(self) -> None:
        pass

    def close(self, pool: str) -> None:
        self.pools.discard(pool)


@pytest.fixture
def engine_with(make_target, make_engine, monkeypatch):
    """engine_with(capture, **config)"""

    def make(capture: Any, drafter: Any = None, model: Any = None, **config: Any) -> Engine:
        monkeypatch.setattr(specdec.engine, "capture_for", lambda device, setting: capture)
        sizes = {"max_batch_size": 4, "max_model_len": 64, "device": "cpu", **config}
        return make_engine(model or make_target("llama"), drafter, **sizes)

    return make


def serve(engine: Engine, random_prompt: Any, times: int = 2) -> list[list[int]]:
    prompts = [random_prompt(n) for n in (5, 9, 3)]
    return [out.token_ids for _ in range(times) for out in engine.generate(prompts, GREEDY)]


def test_one_failed_capture_does_not_end_capturing(engine_with, random_prompt, caplog):
    """The first of those that are made at construction, of four rows: the shapes after it are captured."""
    right = serve(engine_with(None), random_prompt)
    with caplog.at_level(logging.WARNING, "specdec"):
        engine = engine_with(FailingTape((1,), RuntimeError))
        assert serve(engine, random_prompt) == right
    captured = {shape.batch for shape in captured_rounds(engine)}
    assert captured == {1, 2, 4}  # and the first was tried again
    assert [r.message for r in caplog.records] == ["rounds run without CUDA graphs: no room (seeded)"]
    use = engine.stats().captures
    assert use.refused == 1 and use.captured == use.made >= 4 and use.uncaptured_rounds == 0


def test_a_capture_that_keeps_failing_is_retried_less_and_less_often(engine_with, random_prompt):
    tape = FailingTape(tuple(range(1, 1000)), RuntimeError)
    engine = engine_with(tape, max_batch_size=1)
    counts = []
    for _ in range(4):
        serve(engine, random_prompt)
        counts.append((engine.stats().captures.uncaptured_rounds, tape.calls))
    (_, first), (_, second), *_, (runs, tries) = counts
    assert first < second < tries < runs / 4 and engine.stats().captures.refused == tries
    with pytest.raises(ConfigError, match="rounds cannot be captured"):
        engine_with(FailingTape((1,), RuntimeError), cuda_graphs=True)


def test_a_shape_is_captured_again_when_memory_is_there(engine_with, random_prompt):
    """However often it failed for lack of memory: its runs until the next attempt have an upper bound."""
    tape = FailingTape(tuple(range(1, 10**6)))
    engine = engine_with(tape, max_batch_size=1)
    graphs = engine.steps.store
    for shape in list(graphs._waits):
        graphs._setbacks[shape], graphs._waits[shape] = 60, 0
        graphs.capture_next(shape, [lambda: torch.zeros(1)], ROUNDS)
        assert graphs._waits[shape] == 1024
        graphs._waits[shape] = 1
    tape.failing = ()
    serve(engine, random_prompt)
    assert captured_rounds(engine)


@deep_cases("2")
@pytest.mark.parametrize("failures", [1, 2])
def test_a_capture_out_of_memory_evicts_the_others_and_is_retried(engine_with, random_prompt, caplog, failures):
    """Fails at one row: 4 and 2 rows are captured before it. Tried once more at once; then with the next run."""
    right = serve(engine_with(None), random_prompt)
    with caplog.at_level(logging.WARNING, "specdec"):
        engine = engine_with(FailingTape(tuple(range(3, 3 + failures))))
        assert serve(engine, random_prompt, 3) == right + right[:3]
    use = engine.stats().captures
    assert use.refused == failures - 1 == len(caplog.records) and use.evicted == 2
    for count in (1, 2, 3):
        [engine.generate([random_prompt(4)] * count, GREEDY) for _ in range(3)]
    captured = {shape.batch for shape in captured_rounds(engine)}
    assert captured == {1, 4, 2}


@pytest.fixture
def no_shared_bytes(monkeypatch):
    """Prompts leave their results in memory that is not counted."""
    monkeypatch.setattr(CaptureStore, "shared_bytes", property(lambda self: 0, lambda self, _: None), raising=False)


@pytest.mark.usefixtures("no_shared_bytes")
def test_captures_stay_within_their_bytes_and_the_least_recently_used_go(engine_with, random_prompt):
    """Two pools with what they hold: 1 of rounds, 1 of prompts, then too many."""
    right = serve(engine_with(None), random_prompt)
    tape = WeighedTape()
    engine = engine_with(tape, max_capture_bytes=220, prefix_cache=False)
    assert serve(engine, random_prompt) == right
    for length in (3, 20, 40):
        engine.generate([random_prompt(length)], GREEDY)
        use = engine.stats().captures
        assert tape.held_bytes() == use.bytes <= use.budget_bytes == 220
    assert use.evicted and use.made - use.evicted == use.captured == sum(tape.alive_now()) <= 2
    before = captured_rounds(engine)
    engine.close()
    assert before and tape.held_bytes() == 10 * len(before)


@pytest.mark.usefixtures("no_shared_bytes")
def test_a_prompt_captured_twice_for_want_of_room_is_replayed(engine_with, random_prompt):
    """Its pool had grown for others: it is let go, the pool is freed, and it is recorded again."""

    class GrowingTape(WeighedTape):
        """A pool takes 30 bytes for each capture ever made in it."""

        def __call__(self, program: Any) -> Any:
            made[self.pool] = made.get(self.pool, 0) + 1
            return super().__call__(program)

        def held_bytes(self) -> int:
            return 30 * sum(made.values())

        def close(self, pool: str) -> None:
            super().close(pool)
            made.pop(pool, None)

    made: dict[str, int] = {}
    prompts = [random_prompt(n) for n in (5, 20, 40, 40, 40, 5, 5)]
    right = [engine_with(None).generate([prompt], GREEDY)[0].token_ids for prompt in prompts]
    engine = engine_with(GrowingTape(), max_capture_bytes=80, prefix_cache=False, prefill_chunk=64)
    one = SamplingParams(max_new_tokens=1)
    assert [engine.generate([prompt], one)[0].token_ids[0] for prompt in prompts] == [ids[0] for ids in right]
    use = engine.stats().captures
    assert use.evicted == use.made - use.captured > 0 and use.uncaptured_prompts < len(prompts)


def store_of(tape: WeighedTape, budget_bytes: int) -> CaptureStore:
    return CaptureStore(tape, tape, budget_bytes, lambda: 0, lambda: None, strict=False)


def test_a_capture_that_was_replayed_outlives_one_that_was_not():
    store, program = store_of(WeighedTape(), 120), [lambda: torch.zeros(1)]
    for shape in "aabbacc":  # each runs once before it is captured
        store.programs_to_run(shape, program, ROUNDS)
    assert set(store._captured) == {"a", "c"} and store.stats()[:3] == (2, 3, 1)


def test_forwards_over_many_tokens_are_captured_if_there_is_memory_to_spare():
    """They go before all others, and no other goes for them."""
    tape = WeighedTape()
    store = store_of(tape, 230)

    def make(shape: str, pool: str) -> None:
        store._make(shape, [lambda: torch.zeros(1)], pool)

    make("long", SPARE_POOL)
    make("round", "rounds")
    assert (list(store._captured), store.stats().bytes) == (["long", "round"], 220)
    make("longer", SPARE_POOL)
    make("longest", SPARE_POOL)  # 240 bytes: one of its kind goes
    assert list(store._captured) == ["round", "longer", "longest"]
    make("prompt", "prompts")
    assert list(store._captured) == ["round", "prompt"] and store.stats().bytes == 220
    with pytest.raises(OverBudget, match="max_prefill_tokens"):
        make("long", SPARE_POOL)
    assert store.stats()[:3] == (2, 5, 3) and store.stats().bytes == 220
    tape.failing = (tape.calls + 1,)
    with pytest.raises(torch.OutOfMemoryError):
        make("long", SPARE_POOL)
    assert store.stats()[:3] == (2, 5, 3)


@pytest.mark.usefixtures("no_shared_bytes")
def test_a_forward_over_many_tokens_without_room_is_no_error(engine_with, random_prompt, monkeypatch, caplog):
    """Not even where captures are required: it runs as it is, a warning names its size, and shorter ones are captured
    after it."""
    for name in ("captured_prompts", "prompt_sizes"):
        monkeypatch.setattr(f"specdec.runtime.rounds.{name}.MIN_LONG_TOKENS", 16)
    prompts = [random_prompt(n) for n in (5, 40, 40, 40, 12, 12)]
    right = [engine_with(None).generate([prompt], GREEDY)[0].token_ids for prompt in prompts]
    engine = engine_with(WeighedTape(), max_capture_bytes=260, prefix_cache=False, prefill_chunk=64, cuda_graphs=True)
    with caplog.at_level(logging.WARNING, "specdec"):
        assert [engine.generate([prompt], GREEDY)[0].token_ids for prompt in prompts[:4]] == right[:4]
    use = engine.stats().captures
    assert use.refused == 2 and use.evicted == 0 and use.captured > 1 and use.uncaptured_prompts == 4
    assert [r.message[:55] for r in caplog.records] == ["forwards over 40 prompt tokens run without CUDA graphs:"]
    assert [engine.generate([prompt], GREEDY)[0].token_ids for prompt in prompts[4:]] == right[4:]
    assert engine.stats().captures.uncaptured_prompts == 4 and captured_prompts(engine)


def test_a_capture_that_never_fits_is_refused_and_runs_as_it_is(engine_with, random_prompt, caplog):
    right = serve(engine_with(None), random_prompt)
    with caplog.at_level(logging.WARNING, "specdec"):
        engine = engine_with(WeighedTape(), max_capture_bytes=50)
        assert serve(engine, random_prompt) == right
    use = engine.stats().captures
    assert (use.captured, use.made, use.bytes) == (0, 0, use.bytes) and use.refused > 3 and use.uncaptured_rounds >= 10
    assert "max_capture_bytes is 50" in caplog.records[0].message and len(caplog.records) == 2  # rounds and prompts


KINDS = [
    *({"temperature": t} for t in (0.0, 0.5, 1.3)),
    *({"temperature": 0.8, "top_k": k} for k in (1, 7)),
    *({"temperature": 0.8, "top_p": p} for p in (0.3, 0.9)),
    {"temperature": 0.8, "min_p": 0.1},
    {"temperature": 0.8, "top_n_sigma": 1.0},
    {"temperature": 0.8, "min_p": 0.1, "top_k": 5},
    *({"repetition_penalty": p} for p in (0.8, 1.2)),
    *({"presence_penalty": p} for p in (0.5, -0.5)),
    {"frequency_penalty": 0.5},
    {"frequency_penalty": 0.5, "temperature": 1.0},
    *({"logit_bias": dict.fromkeys(range(n), 1.0)} for n in (1, 16, 20, 40)),
    *({"logprobs": n} for n in (0, 1, 2, 5, 20)),
    {"logprobs": 2, "temperature": 0.8, "top_k": 5, "logit_bias": {3: 2.0}},
]


def test_a_class_changes_no_token():
    """Every kind by itself, and as the class that it shares: random logits, all positions. Classes are few, for each of
    them has captures of its own."""
    from specdec.runtime.rounds.round_shapes import widen_to_class

    torch.manual_seed(0)
    logits, positions = torch.randn(1, 4, 50) * 3, torch.arange(4)[None]
    history, length = torch.randint(50, (1, 9)), torch.tensor([9])
    inputs = EditInputs(length, None, lambda: history, torch.tensor([4]))
    classes = set()
    for kind in KINDS:
        params = SamplingParams(**kind)
        exact = sampler_of([params], [5])
        for on_kernels in (False, True):
            features, logprobs = widen_to_class(exact.features, params.logprobs, on_kernels=on_kernels)
            assert all(b >= a for a, b in zip(exact.features, features, strict=True)), (exact.features, features)
            assert (logprobs is None) == (params.logprobs is None) and (logprobs or 0) >= (params.logprobs or 0)
            classes.add((on_kernels, features, logprobs))
            table, rows = SamplingTable(1, logits.device), np.zeros(1, dtype=np.int64)
            table.load(rows, [(params, 5)])
            table.load_biases(rows, [params], features)
            shared = ReferenceSampler(*table.row_params(torch.zeros(1, dtype=torch.int64), features))
            for node in range(4):
                one = logits[:, node : node + 1], positions[:, node : node + 1], inputs
                assert torch.equal(exact.draw(*one), shared.draw(*one)), (kind, features)
    assert sum(not on_kernels for on_kernels, *_ in classes) <= 7
    assert widen_to_class(SamplerFeatures.from_params([]), None, on_kernels=True) == widen_to_class(
        exact.features._replace(bias=0), None, on_kernels=True
    )
