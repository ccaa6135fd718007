"""Captures on a GPU: 1,000 random requests of 50 kinds, and what their captured rounds and prompts take.

A target with the widths and the whole vocabulary of Gemma 4 E4B and few layers, its MTP drafter, trees, random weights.
Every output of a sample is that of an engine without captures, to the token (`deterministic=True`); captures are few,
within their budget and truly reported; a seeded out-of-memory is survived; steady rounds wait for nobody. With
`--device cpu` a small one runs on the tape of the tests, to debug the script.
"""

import argparse
import importlib.util
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from gpu_setup import (  # isort: skip - before triton
    DEVICE,
    ON_CPU,
    ROOT,
    device_option,
    machine,
    require_device,
    waiting_row,
)
import torch
from result_table import ResultTable, Row

import specdec.engine
from specdec.config import EngineConfig, SamplingParams, SpecConfig
from specdec.engine import Engine
from specdec.evaluation.model_shapes import SHAPES, Shrink
from specdec.evaluation.phases.random_weights import make_drafter, make_target
from specdec.gpu.operations import choose_operations
from specdec.models.bundled import resolve_name
from specdec.models.target import TargetModel

TREE = SpecConfig(4, 4, 16, adaptive=False)
MAX_CAPTURES = 60
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"type": "integer"}, "on": {"type": "boolean"}},
    "required": ["name", "n", "on"],
    "additionalProperties": False,
}
HAS_GRAMMARS = importlib.util.find_spec("llguidance") is not None

PLAIN: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.3},
    {"temperature": 0.05},
    *({"temperature": 0.9, "top_k": k} for k in (1, 5, 50, 1000)),
    *({"temperature": 0.9, "top_p": p} for p in (0.1, 0.6, 0.95)),
    *({"temperature": 0.9, "min_p": p} for p in (0.02, 0.3)),
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.05},
    {"speculation": False},
    {"speculation": False, "temperature": 0.8},
    {"speculation": SpecConfig(2)},
    {"speculation": SpecConfig(4, 2, 8), "temperature": 0.6},
    {"n": 2},
    {"n": 3, "temperature": 1.0},
    {"stop": ["the", "\n\n"]},
    {"stop": "a", "temperature": 0.7},
    {"stop_token_ids": [11, 500, 7000]},
]
RICH: list[dict[str, Any]] = [
    {"repetition_penalty": 1.1},
    {"repetition_penalty": 0.8},
    {"repetition_penalty": 1.3, "temperature": 0.9},
    {"repetition_penalty": 1.2, "speculation": False},
    {"presence_penalty": 0.5},
    {"presence_penalty": -0.5, "temperature": 0.8},
    {"frequency_penalty": 0.3},
    {"frequency_penalty": 1.0, "presence_penalty": 1.0, "repetition_penalty": 1.1, "temperature": 0.7},
    {"logit_bias": {7: 4.0, 90: -100.0}},
    {"logit_bias": {3 * i: 1.5 for i in range(40)}},
    {"logit_bias": {2 * i + 1: -2.0 for i in range(300)}, "temperature": 0.9},
    {"logit_bias": {5: 2.0}, "speculation": False},
    *({"logprobs": count} for count in (0, 1, 5, 20)),
    {"logprobs": 3, "temperature": 0.8, "top_p": 0.9},
    {"logprobs": 2, "frequency_penalty": 0.5},
    {"logprobs": 1, "speculation": False},
]
GRAMMARS: list[dict[str, Any]] = [
    {"json_object": True},
    {"json_schema": SCHEMA},
    {"json_schema": SCHEMA, "temperature": 1.0},
    {"regex": "[a-f]{3,9}-end of it"},
    {"regex": "(yes|no), [0-9]{1,4}", "temperature": 1.2, "top_k": 40},
    {"choice": ["yes", "no", "not at all"]},
    {"choice": ["red", "green", "blue"], "logprobs": 2},
    {"json_schema": SCHEMA, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
    {"json_object": True, "logit_bias": {9: 2.0}, "temperature": 0.7},
    {"regex": "[a-z ]{5,30}", "speculation": False},
]
KINDS = PLAIN + RICH + (GRAMMARS if HAS_GRAMMARS else [])

Asked = tuple[list[int], SamplingParams]


class Bench:
    """The pair, and engines over it."""

    def __init__(self, layers: int, divisor: int) -> None:
        shape, shrink = SHAPES["gemma4-e4b"], Shrink(layers, divisor)
        dtype = torch.float32 if ON_CPU else torch.bfloat16
        model = make_target(shape, shrink, DEVICE, dtype, seed=0)
        self.attention = "torch" if ON_CPU else "auto"
        ops = choose_operations("auto", self.attention, DEVICE, dtype)
        self.target = TargetModel(model, ops, deterministic=not ON_CPU)
        self.drafter = make_drafter(shape, shrink, self.target, seed=1)
        self.tokenizer = _tokenizer()
        self.most = 8 if ON_CPU else 64

    def engine(self, *, graphs: bool = True, most: int | None = None, **settings: Any) -> Engine:
        config = EngineConfig(
            attention=self.attention,
            deterministic=not ON_CPU,
            cuda_graphs="auto" if graphs else False,
            max_batch_size=most or self.most,
            max_model_len=160 if ON_CPU else 4096,
            prefix_cache=False,
            **settings,
        )
        if ON_CPU:
            from tape import record

            specdec.engine.capture_for = lambda device, setting: record if setting else None  # type: ignore[assignment]
        return Engine(self.target, self.drafter, tokenizer=self.tokenizer, spec=TREE, config=config)

    def requests(self, count: int, seed: int) -> list[Asked]:
        """Prompts of 1 to 3,000 tokens, most of them short, every kind of parameters in turn."""
        draw = random.Random(seed)
        longest = 60 if ON_CPU else 3000
        end = getattr(self.tokenizer, "eos_token_id", None)
        asked: list[Asked] = []
        for i in range(count):
            length = int(longest ** draw.random())
            prompt = [draw.randrange(3, min(self.target.vocab_size, 4000)) for _ in range(length)]
            kind = dict(KINDS[7 * i % len(KINDS)] if i < len(KINDS) else draw.choice(KINDS))
            if kind in GRAMMARS:
                kind["stop_token_ids"] = [end]
            params = SamplingParams(max_new_tokens=draw.randint(2, 8 if ON_CPU else 40), seed=1000 * i, **kind)
            asked.append((prompt, params))
        draw.shuffle(asked)
        return asked


def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(resolve_name("tiny-gemma4"))


def serve(engine: Engine, asked: Sequence[Asked], seed: int = 0, look: Callable[[], None] = lambda: None) -> list[Any]:
    """All of them, in crowds of 1 to more than fit at once that come before the last one has left. -> token ids."""
    draw = random.Random(seed)
    handles: list[list[Any]] = []
    rest = list(asked)
    while rest:
        size = draw.choice((1, 1, 2, 3, 4, 7, 12, 20, 33, 64, 90))
        wave, rest = rest[:size], rest[size:]
        handles += [engine.submit_many([prompt], [params]) for prompt, params in wave]
        left = draw.choice((0, 0, 1, 5, 20))
        while engine.step() and sum(not each.finished for group in handles[-200:] for each in group) > left:
            pass
        look()
    while engine.step():
        pass
    engine.table.check()
    assert engine.table.allocator.primary.held_pages == 0, "slots are held"
    return [[each.output().token_ids for each in group] for group in handles]


def differing(one: Sequence[Any], other: Sequence[Any]) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


def pools_of_torch() -> int:
    """Bytes in torch's segments that belong to graphs."""
    if ON_CPU:
        return 0
    segments = torch.cuda.memory_snapshot()
    return sum(s["total_size"] for s in segments if tuple(s.get("segment_pool_id", (0, 0))) != (0, 0))


def random_rows(bench: Bench, count: int) -> Iterator[Row]:
    asked = bench.requests(count, seed=5)
    engine = bench.engine()
    begin = time.perf_counter()
    got = serve(engine, asked)
    seconds = time.perf_counter() - begin
    use = engine.stats().captures
    name = f"{count} requests of {len(KINDS)} kinds"
    shapes = sorted(map(str, engine.steps.graphs._captured)) + sorted(map(str, engine.steps.prefill.chunks._captured))
    print(f"{name}: {use}, {engine.stats().batches} rounds", *shapes, sep="\n  ", flush=True)
    few = use.made <= MAX_CAPTURES and use.captured <= MAX_CAPTURES
    yield Row(
        f"{name}: captures", f"{use.made} made, {use.captured} alive, {use.evicted} evicted", f"{seconds:.0f} s", few
    )
    yield Row("none refused", f"{use.refused} refused", ok=use.refused == 0)
    pools, store = pools_of_torch(), engine.steps.graphs.store
    budget = use.budget_bytes
    within = budget is None or use.bytes <= budget
    true = (
        pools
        <= use.bytes
        == (0 if store._memory is None else store._memory.held_bytes())
        + sum(owner.shared_bytes for owner in store._owners)
        or store._memory is None
    )
    said = f"{use.bytes / 1e6:,.0f} MB, of which torch's pools {pools / 1e6:,.0f}; budget {(budget or 0) / 1e6:,.0f}"
    yield Row("bytes of captures: within the budget, as torch has them", said, ok=within and true)
    share = use.uncaptured_rounds / max(engine.stats().batches, 1)
    yield Row("rounds that ran without", f"{use.uncaptured_rounds}, {share:.1%}; {use.uncaptured_prompts} prompts")
    again = serve(engine, asked, seed=1)
    more = engine.stats().captures.made - use.made
    yield Row("again, in other crowds", f"{differing(got, again)} differ, {more} captures more", ok=got == again)
    engine.close()
    left = pools_of_torch()
    yield Row("a closed engine leaves no pool", f"{left} bytes", ok=left == 0)

    sample = sorted(random.Random(7).sample(range(count), min(count, 80)))
    plain = bench.engine(graphs=False, most=16)
    alone = serve(plain, [asked[i] for i in sample])
    plain.close()
    wrong = differing([got[i] for i in sample], alone)
    yield Row(f"{len(sample)} of them without graphs", f"{wrong} differ", ok=wrong == 0)

    if not ON_CPU:
        yield from budget_rows(bench, asked[: count // 5], got[: count // 5], use.bytes // 3)


def budget_rows(bench: Bench, asked: list[Asked], right: list[Any], budget: int) -> Iterator[Row]:
    """A third of what was needed: others go, the budget holds, tokens stay."""
    engine = bench.engine(max_capture_bytes=budget)
    most = 0

    def look() -> None:
        nonlocal most
        most = max(most, pools_of_torch())

    got = serve(engine, asked, look=look)
    use = engine.stats().captures
    said = f"{use}; torch's pools at most {most / 1e6:,.0f} MB; {differing(got, right)} differ"
    yield Row(
        "a third of the bytes", said, ok=use.bytes <= budget and most <= budget and got == right and use.evicted > 0
    )
    engine.close()


def memory_rows(bench: Bench) -> Iterator[Row]:
    """Out of memory within one capture: once, which is tried again at once, and twice in a row."""
    asked = bench.requests(12, seed=9)
    right = None
    for failures in (0, 1, 2):
        engine = bench.engine(most=8)
        store = engine.steps.graphs.store
        real, calls = store._capture, [0]

        def capture(program: Any, real: Any = real, calls: list[int] = calls, failures: int = failures) -> Any:
            def broken() -> torch.Tensor:
                program()
                raise torch.OutOfMemoryError("CUDA out of memory. (seeded)")

            calls[0] += 1
            return real(broken if 2 < calls[0] <= 2 + failures else program)

        store._capture = capture
        outputs = [serve(engine, asked, seed=2) for _ in range(3)]
        right = right or outputs[0]
        use = engine.stats().captures
        wrong = sum(differing(right, each) for each in outputs)
        waiting = sum(one is None for one in engine.steps.graphs._captured.values())
        said = f"{wrong} differ; {use}; {waiting} round shapes not captured"
        yield Row(f"{failures} captures out of memory", said, ok=not wrong and use.refused == max(failures - 1, 0))
        engine.close()


def steady_rows(bench: Bench) -> Iterator[Row]:
    """No wait for the host in steady rounds of every class, and as fast behind an eviction as before."""
    if ON_CPU:
        return
    mixes: dict[str, list[dict[str, Any]]] = {
        "plain": [{}, {"temperature": 0.8, "top_k": 9}],
        "penalised": [{}, {"repetition_penalty": 1.2}],
        "edited": [{"logit_bias": {4: 1.0}}, {"frequency_penalty": 0.5}],
        "scored": [{"logprobs": 3}, {}],
    }
    for name, kinds in mixes.items():
        engine = bench.engine(most=8)
        params = [SamplingParams(max_new_tokens=3000, ignore_eos=True, seed=1, **kind) for kind in kinds]
        streams = [engine.stream([1, 2, 3 + i], params[i % len(params)]) for i in range(8)]

        def steps(count: int, streams: list[Any] = streams) -> None:
            for _ in range(count):
                for stream in streams:
                    next(stream)

        def milliseconds(engine: Engine = engine, steps: Callable[[int], None] = steps) -> float:
            before = engine.stats()
            steps(40)
            after = engine.stats()
            return 1e3 * (after.batch_seconds - before.batch_seconds) / (after.batches - before.batches)

        steps(30)
        yield waiting_row(f"steady {name} rounds", partial(steps, 30))
        first = milliseconds()
        store = engine.steps.graphs.store
        made = store.use().made
        engine._in_turn(lambda store=store: [store._evict(key) for key in list(store._kept)])
        steps(10)
        second = milliseconds()
        said = f"{first:.2f} ms a round, {second:.2f} behind eviction and recapture ({store.use().made - made} made)"
        yield Row(f"{name} rounds of 8, captured again", said, ok=second < 1.5 * first and store.use().made > made)
        for stream in streams:
            stream.close()
        engine.close()


def main() -> int:
    options = argparse.ArgumentParser(parents=[device_option], description=__doc__)
    options.add_argument("--requests", type=int, default=40 if ON_CPU else 1000)
    options.add_argument("--layers", type=int, default=2 if ON_CPU else 6)
    arguments = options.parse_args()
    require_device()
    if ON_CPU:
        sys.path.insert(0, str(ROOT / "tests"))
    bench = Bench(arguments.layers, 16 if ON_CPU else 1)
    checks: list[Callable[[], Iterator[Row]]] = [
        lambda: steady_rows(bench),
        lambda: memory_rows(bench),
        lambda: random_rows(bench, arguments.requests),
    ]
    results = ResultTable(machine())
    results.add([Row("grammars", "llguidance is there" if HAS_GRAMMARS else "llguidance is not there: left out")])
    for check in checks:
        try:
            results.add(check())
        except Exception as exception:  # every check, then the verdict
            import traceback

            traceback.print_exc()
            results.add([Row("a check ended", f"{type(exception).__name__} {str(exception)[:300]}", ok=False)])
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
