"""Captures: random requests of 50 kinds, in crowds, and what their captured rounds and prompts take.

A target with the widths and the whole vocabulary of Gemma 4 E4B and few layers, its MTP drafter, trees, random weights,
`deterministic=True`. On a CPU a small one runs on the tape of the tests.
"""

import importlib.util
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

from bench.device import ON_CPU  # isort: skip - before triton
import torch
from transformers import AutoTokenizer

from bench.cases.crowds import on_tape
from bench.clock import waiting_row
from bench.report import Row
from bench.subjects import OPERATIONS, TREE, Pair, engine_of, pair_of
from specdec.config import SamplingParams, SpecConfig
from specdec.engine import Engine
from specdec.models.published import resolve_name

MAX_CAPTURES = 80
PARTS = {"name": {"type": "string", "maxLength": 8}, "n": {"type": "integer"}, "on": {"type": "boolean"}}
SCHEMA = {"type": "object", "properties": PARTS, "required": list(PARTS), "additionalProperties": False}
HAS_GRAMMARS = importlib.util.find_spec("llguidance") is not None
WARM, COLD, PLAIN = {"temperature": 0.9}, {"temperature": 0.7}, {"speculation": False}

FILTERED: list[dict[str, Any]] = [
    {},
    *({"temperature": t} for t in (0.05, 0.7, 1.3)),
    *({**WARM, "top_k": k} for k in (1, 5, 50, 1000)),
    *({**WARM, "top_p": p} for p in (0.1, 0.6, 0.95)),
    *({**WARM, "min_p": p} for p in (0.02, 0.3)),
    *({**COLD, "top_k": 40, "top_p": 0.9, "min_p": p} for p in (0.0, 0.05)),
    *(PLAIN, {**PLAIN, **COLD}, {"speculation": SpecConfig(2)}, {"speculation": SpecConfig(4, 2, 8), **COLD}),
    *({"n": 2}, {"n": 3, "temperature": 1.0}),
    *({"stop": ["the", "\n\n"]}, {"stop": "a", **COLD}, {"stop_token_ids": [11, 500, 7000]}),
]
EDITED: list[dict[str, Any]] = [
    *({"repetition_penalty": p, **more} for p, more in ((1.1, {}), (0.8, {}), (1.3, WARM), (1.2, PLAIN))),
    *({"presence_penalty": p, **more} for p, more in ((0.5, {}), (-0.5, COLD))),
    {"frequency_penalty": 0.3},
    {"frequency_penalty": 1.0, "presence_penalty": 1.0, "repetition_penalty": 1.1, **COLD},
    {"logit_bias": {7: 4.0, 90: -100.0}},
    {"logit_bias": {3 * i: 1.5 for i in range(40)}},
    {"logit_bias": {2 * i + 1: -2.0 for i in range(300)}, **WARM},
    {"logit_bias": {5: 2.0}, **PLAIN},
    *({"logprobs": count} for count in (0, 1, 5, 20)),
    *({"logprobs": 3, **COLD, "top_p": 0.9}, {"logprobs": 2, "frequency_penalty": 0.5}, {"logprobs": 1, **PLAIN}),
]
GRAMMARS: list[dict[str, Any]] = [
    *({"json_object": True}, {"json_object": True, "logit_bias": {9: 2.0}, **COLD}),
    *({"json_schema": SCHEMA, **more} for more in ({}, {"temperature": 1.0}, {"frequency_penalty": 0.2})),
    {"regex": "[a-f]{3,9}-end of it"},
    {"regex": "(yes|no), [0-9]{1,4}", "temperature": 1.2, "top_k": 40},
    {"regex": "[a-z ]{5,30}", **PLAIN},
    {"choice": ["yes", "no", "not at all"]},
    {"choice": ["red", "green", "blue"], "logprobs": 2},
]
KINDS = FILTERED + EDITED + (GRAMMARS if HAS_GRAMMARS else [])
MIXES: dict[str, list[dict[str, Any]]] = {
    "plain": [{}, {"temperature": 0.8, "top_k": 9}],
    "penalised": [{}, {"repetition_penalty": 1.2}],
    "edited": [{"logit_bias": {4: 1.0}}, {"frequency_penalty": 0.5}],
    "scored": [{"logprobs": 3}, {}],
}

Asked = tuple[list[int], SamplingParams]


def subject(layers: int) -> tuple[Pair, Any]:
    pair = pair_of("gemma4-e4b", layers, deterministic=not ON_CPU, operations=OPERATIONS)
    return pair, AutoTokenizer.from_pretrained(resolve_name("tiny-gemma4"))


def captured_engine(
    made: tuple[Pair, Any], *, graphs: bool = True, most: int = 8 if ON_CPU else 64, **more: Any
) -> Engine:
    pair, tokenizer = made
    sizes = {"max_batch_size": most, "max_model_len": 160 if ON_CPU else 4096, "prefix_cache": False}
    sizes |= {"attention": "torch" if ON_CPU else "auto", "cuda_graphs": "auto" if graphs else False, **more}
    return engine_of(pair.target, pair.drafter("own"), TREE, tokenizer=tokenizer, **sizes)


def requests_of(made: tuple[Pair, Any], count: int, seed: int) -> list[Asked]:
    """Prompts of 1 to 3,000 tokens, most of them short, every kind of parameters in turn."""
    pair, tokenizer = made
    draw, longest = random.Random(seed), 60 if ON_CPU else 3000
    asked: list[Asked] = []
    for i in range(count):
        length = int(longest ** draw.random())
        prompt = [draw.randrange(3, min(pair.target.vocab_size, 4000)) for _ in range(length)]
        kind = dict(KINDS[7 * i % len(KINDS)] if i < len(KINDS) else draw.choice(KINDS))
        if kind in GRAMMARS:
            kind["stop_token_ids"] = [tokenizer.eos_token_id]
        new = draw.randint(2, 8 if ON_CPU else 40)
        asked.append((prompt, SamplingParams(max_new_tokens=new, seed=1000 * i, **kind)))
    draw.shuffle(asked)
    return asked


def serve(engine: Engine, asked: Sequence[Asked], seed: int = 0, look: Callable[[], None] = lambda: None) -> list[Any]:
    """All of them, in crowds of 1 to more than fit at once that come before the last one has left. -> token ids."""
    draw, rest = random.Random(seed), list(asked)
    handles: list[list[Any]] = []
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
    segments = [] if ON_CPU else torch.cuda.memory_snapshot()
    return sum(s["total_size"] for s in segments if tuple(s.get("segment_pool_id", (0, 0))) != (0, 0))


@on_tape
def crowds_rows(layers: int, requests: int) -> Iterator[Row]:
    """Few captures, within their budget and truly reported; tokens are those of other crowds, and of no captures."""
    made = subject(layers)
    asked, engine = requests_of(made, requests, seed=5), captured_engine(made)
    begin = time.perf_counter()
    got = serve(engine, asked)
    seconds, use = time.perf_counter() - begin, engine.stats().captures
    found = f"{use.made} made, {use.captured} alive, {use.evicted} evicted, {use.refused} refused"
    few = max(use.made, use.captured) <= MAX_CAPTURES and not use.refused
    yield Row(f"{requests} requests of {len(KINDS)} kinds: captures", found, f"{seconds:.0f} s", few)
    pools, store, budget = pools_of_torch(), engine.steps.store, use.budget_bytes
    within, memory = budget is None or use.bytes <= budget, store._memory
    true = memory is None or pools <= use.bytes == memory.held_bytes() + store.shared_bytes
    found = f"{use.bytes / 1e6:,.0f} MB, of which torch's pools {pools / 1e6:,.0f}; budget {(budget or 0) / 1e6:,.0f}"
    yield Row("bytes of captures: within the budget, as torch has them", found, ok=within and true)
    share = use.uncaptured_rounds / max(engine.stats().batches, 1)
    yield Row("rounds that ran without", f"{use.uncaptured_rounds}, {share:.1%}; {use.uncaptured_prompts} prompts")
    again = serve(engine, asked, seed=1)
    more = engine.stats().captures.made - use.made
    yield Row("again, in other crowds", f"{differing(got, again)} differ, {more} captures more", ok=got == again)
    engine.close()
    yield Row("a closed engine leaves no pool", f"{pools_of_torch()} bytes", ok=pools_of_torch() == 0)
    sample = sorted(random.Random(7).sample(range(requests), min(requests, 80)))
    plain = captured_engine(made, graphs=False, most=16)
    wrong = differing([got[i] for i in sample], serve(plain, [asked[i] for i in sample]))
    plain.close()
    yield Row(f"{len(sample)} of them without graphs", f"{wrong} differ", ok=wrong == 0)
    if not ON_CPU:
        yield budget_row(made, asked[: requests // 5], got[: requests // 5], use.bytes // 3)


def budget_row(made: tuple[Pair, Any], asked: list[Asked], right: list[Any], budget: int) -> Row:
    """A third of what was needed: captures are evicted, the budget holds, tokens stay."""
    engine, seen = captured_engine(made, max_capture_bytes=budget), [0]
    got = serve(engine, asked, look=lambda: seen.append(pools_of_torch()))
    use = engine.stats().captures
    engine.close()
    found = f"{use}; torch's pools at most {max(seen) / 1e6:,.0f} MB; {differing(got, right)} differ"
    ok = max(use.bytes, *seen) <= budget and got == right and use.evicted > 0
    return Row("a third of the bytes", found, ok=ok)


@on_tape
def memory_rows(layers: int) -> Iterator[Row]:
    """Out of memory within one capture: once, which is tried again at once, and twice in a row."""
    made, right = subject(layers), None
    asked = requests_of(made, 12, seed=9)
    for failures in (0, 1, 2):
        engine = captured_engine(made, most=8)
        store = engine.steps.store
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
        use, wrong = engine.stats().captures, sum(differing(right, each) for each in outputs)
        waiting = len(store._waits)
        found = f"{wrong} differ; {use}; {waiting} shapes not captured"
        engine.close()
        yield Row(f"{failures} captures out of memory", found, ok=not wrong and use.refused == max(failures - 1, 0))


@on_tape
def steady_rows(layers: int) -> Iterator[Row]:
    """No wait for the host in steady rounds of every class, and as fast after an eviction as before."""
    made = subject(layers)
    for name, kinds in MIXES.items():
        engine = captured_engine(made, most=8)
        params = [SamplingParams(max_new_tokens=3000, ignore_eos=True, seed=1, **kind) for kind in kinds]
        streams: list[Any] = [engine.stream([1, 2, 3 + i], params[i % len(params)]) for i in range(8)]

        def steps(count: int, streams: list[Any] = streams) -> None:
            for _, stream in product(range(count), streams):
                next(stream)

        def milliseconds(engine: Engine = engine, steps: Callable[[int], None] = steps) -> float:
            before = engine.stats()
            steps(40)
            after = engine.stats()
            return 1e3 * (after.batch_seconds - before.batch_seconds) / (after.batches - before.batches)

        steps(30)
        yield waiting_row(f"steady {name} rounds", partial(steps, 30))
        first, store = milliseconds(), engine.steps.store
        made_before = store.stats().made
        engine._in_turn(lambda store=store: [store._evict(key) for key in list(store._captured)])
        steps(10)
        second, more = milliseconds(), store.stats().made - made_before
        found = f"{first:.2f} ms a round, {second:.2f} after eviction and recapture ({more} made)"
        yield Row(f"{name} rounds of 8, captured again", found, ok=second < 1.5 * first and more > 0)
        for stream in streams:
            stream.close()
        engine.close()
