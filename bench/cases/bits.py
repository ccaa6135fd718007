"""`deterministic=True`: the same bits in any company, on one device and on several, and what that costs."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from bench.device import ON_CPU  # isort: skip - before triton
from bench.plants import HiddenTruth
from bench.report import Row
from bench.subjects import (
    CHAIN,
    OPERATIONS,
    TREE,
    Answer,
    answers,
    engine_of,
    few_layers,
    mixed_params,
    pair_of,
    prompt_ms,
    prompts_of,
    read_answers,
    round_ms,
)
from bench.verify import answers_row, attempt
from specdec.config import SamplingParams, SpecConfig
from specdec.engine import Engine
from specdec.models.target import TargetModel

LENGTHS = (5, 30) if ON_CPU else (700, 33, 1, 260, 15, 512, 90, 1100)
NEW = 8 if ON_CPU else 20
CROWD = [3 + 11 * i % 300 for i in range(3 if ON_CPU else 72)]
QUIET = SamplingParams(max_new_tokens=NEW // 2 + 1, temperature=0.5, seed=3)
ROOM = 20 if ON_CPU else 400
TIGHT = {"full_slots": max(LENGTHS) + ROOM, "swa_slots": max(LENGTHS) + ROOM, "max_batch_size": 64}
UNCAPTURED = {"cuda_graphs": False}
DEEP, WIDE = SpecConfig(15, 2, 16, adaptive=False), SpecConfig(20, 20, 200, adaptive=False)
COMPANY: tuple[tuple[str, str, SpecConfig, dict[str, Any], bool], ...] = (
    ("alone", "none", CHAIN, {"max_batch_size": 1}, False),
    ("own drafter, chain of 4, among 80", "own", CHAIN, {"max_batch_size": 32}, True),
    ("accepted trees of 16", "hidden", DEEP, UNCAPTURED, False),
    ("among 80, chunks of 256", "none", CHAIN, {"max_batch_size": 64, "prefill_chunk": 256}, True),
    ("chunks of 16, pages of 16", "none", CHAIN, {"prefill_chunk": 16, "page_size": 16}, False),
    ("own drafter, tree of 16, among 80", "own", TREE, {"max_batch_size": 32}, True),
    ("n-gram, among 80", "ngram", CHAIN, {"max_batch_size": 32}, True),
    ("no graphs", "none", CHAIN, UNCAPTURED, False),
    ("own drafter, tree of 200", "own", SpecConfig(6, 8, 200, adaptive=False), {}, False),
    ("accepted trees of 16, pages of 16", "hidden", DEEP, {**UNCAPTURED, "page_size": 16}, False),
    ("accepted trees of 200", "hidden", WIDE, UNCAPTURED, False),
)
"""What, drafter, draft, fields of the engine's config, and whether a crowd runs at the same time."""
EARLY = 7
"""How many of them come before requests that are preempted, cached or read again."""
BOUNDS = {1: 1.05, 8: 1.05, 32: 1.2}
"""How much longer a round may take with the same bits in any company, by requests."""
PROMPT_BOUND = 1.5


def company_rows(shapes: Sequence[str], devices: int, companies: int, kv_dtype: str) -> Iterator[Row]:
    """Answers of each request alone on one device, and in every company; companies: how many of them."""
    for name in shapes:
        yield from _companies(name, devices, companies, kv_dtype)


def _companies(name: str, devices: int, count: int, kv_dtype: str) -> Iterator[Row]:
    begin = time.perf_counter()
    layers = few_layers(name)
    pair = pair_of(name, layers, deterministic=True, operations=OPERATIONS)
    vocab = pair.target.vocab_size
    prompts, crowd = prompts_of(LENGTHS, vocab, 0), prompts_of(CROWD, vocab, 1)
    params = mixed_params(len(prompts), NEW, logprobs=8)
    want = answers(engine_of(pair.target, max_batch_size=1, kv_dtype=kv_dtype or None), prompts, params)
    hidden = HiddenTruth([prompt + tokens for prompt, (tokens, _) in zip(prompts, want, strict=True)], vocab)

    kept = f"K/V in {kv_dtype}, " if kv_dtype else ""

    def row(what: str, find: Callable[[], tuple[Sequence[Answer], str, bool]]) -> Row:
        title = f"{name}, {layers} layers, {kept}{devices} devices: {what}"

        def compared() -> Row:
            started = time.perf_counter()
            found, note, ok = find()
            return answers_row(title, found, want, f"{note}, {time.perf_counter() - started:.0f} s", ok=ok)

        return attempt(title, compared)

    def split_engine(drafter: Any = None, spec: SpecConfig = CHAIN, **config: Any) -> Engine:
        steps = min(spec.num_steps, getattr(drafter, "max_steps", None) or spec.num_steps)
        nodes = None if spec.topk == 1 else min(spec.num_draft_tokens, 1 + spec.topk * (1 + spec.topk * (steps - 1)))
        fitted = replace(spec, num_steps=steps, num_draft_tokens=nodes)
        return engine_of(pair.target, drafter, fitted, tensor_parallel=devices, kv_dtype=kv_dtype or None, **config)

    def in_company(
        kind: str, spec: SpecConfig, config: dict[str, Any], crowded: bool
    ) -> tuple[Sequence[Answer], str, bool]:
        others = crowd if crowded else []
        engine = split_engine(hidden if kind == "hidden" else pair.drafter(kind), spec, **config)
        found = answers(engine, [*prompts, *others], [*params, *[QUIET] * len(others)])[: len(prompts)]
        stats = engine.stats()
        note = f"acceptance length {stats.acceptance_length:.2f}, {stats.preemptions} preempted"
        made, refused, uncaptured = stats.captures.made, stats.captures.refused, stats.captures.uncaptured_rounds
        return found, f"{note}, {made} captured, {refused} refused, {uncaptured} rounds not captured", True

    def preempted() -> tuple[Sequence[Answer], str, bool]:
        """Requests that have begun when a crowd of higher rank takes their slots."""
        with split_engine(**TIGHT) as engine:
            handles = engine.submit_many(prompts, params, priority=1)
            while all(handle.num_output < 2 for handle in handles):
                engine.step()
            engine.submit_many(crowd, SamplingParams(max_new_tokens=8 if ON_CPU else 100, ignore_eos=True))
            outputs = [handle.output() for handle in handles]
        lost = sum(out.stats.preemptions > 0 for out in outputs)
        return read_answers(outputs), f"{lost} preempted", lost > 0

    def cached(kind: str, spec: SpecConfig) -> tuple[Sequence[Answer], str, bool]:
        """The second time, with what the prefix cache holds by then."""
        with split_engine(pair.drafter(kind), spec) as engine:
            engine.generate(prompts, params, progress=False)
            outputs = engine.generate(prompts, params, progress=False)
        hits = sum(out.stats.cached_tokens > 0 for out in outputs)
        return read_answers(outputs), f"{hits} found in the prefix cache", hits > 0

    def read_again(scored: bool) -> tuple[Sequence[Answer], str, bool]:
        """Answers that were cut, and are the ends of prompts now. scored: the log-probabilities of these tokens are
        those of the prompt."""
        kept = [1 + 7 * number % (NEW - 1) for number in range(len(prompts))]
        again = [prompt + tokens[:cut] for prompt, (tokens, _), cut in zip(prompts, want, kept, strict=True)]
        extra = {"prompt_logprobs": 8} if scored else {}
        rest = [replace(one, max_new_tokens=NEW - cut, **extra) for one, cut in zip(params, kept, strict=True)]
        with split_engine(pair.drafter("own"), TREE) as engine:
            engine.generate(prompts, params, progress=False)
            outputs = engine.generate(again, rest, progress=False)
        found = []
        for (tokens, logprobs), out, cut in zip(want, outputs, kept, strict=True):
            before = out.prompt_logprobs[-cut:] if scored else logprobs[:cut]
            found.append((tokens[:cut] + out.token_ids, before + out.logprobs))
        return found, f"{sum(out.stats.cached_tokens for out in outputs)} tokens cached", True

    rows: list[tuple[str, Callable[[], tuple[Sequence[Answer], str, bool]]]] = []
    rows += [(what, partial(in_company, *company)) for what, *company in COMPANY[:EARLY]]
    rows += [("preempted", preempted), ("cached", partial(cached, "none", CHAIN))]
    rows += [("tree of 16, cached", partial(cached, "own", TREE)), ("answers read again", partial(read_again, False))]
    rows += [("answers scored as prompts", partial(read_again, True))]
    rows += [(what, partial(in_company, *company)) for what, *company in COMPANY[EARLY:]]
    for what, find in rows[:count]:
        yield row(what, find)
    if count > len(rows):
        engine = engine_of(TargetModel(pair.target.model, pair.target.ops), max_batch_size=64)
        default = answers(engine, [*prompts, *crowd], [*params, *[QUIET] * len(crowd)])
        same = sum(a == b for a, b in zip(default, want, strict=False))
        took = time.perf_counter() - begin
        yield Row(f"{name}: the default among 80", f"{same} of {len(want)} equal", f"{took:.0f} s for this shape")


def cost_rows(shape: str, layers: int, context: int, prompt: int) -> Iterator[Row]:
    """Plain steps, rounds of 4 drafts and prompts: by default -> with the same bits in any company. Bounds hold
    at full depth."""
    pair = pair_of(shape, layers, operations=OPERATIONS)
    targets = pair.target, pair.target.as_deterministic()

    def row(what: str, ms: Sequence[float], bound: float) -> Row:
        ratio = ms[1] / ms[0]
        found = f"{ms[0]:.3f} -> {ms[1]:.3f} ms, {ratio - 1:+.1%}"
        return Row(f"{shape}, {what}", found, f"at most {bound - 1:.0%}", ON_CPU or layers > 0 or ratio <= bound)

    for batch, bound in list(BOUNDS.items())[: 1 if ON_CPU else None]:
        prompts = prompts_of([context] * batch, pair.target.vocab_size, batch)
        for what, kind in (("plain step", "none"), ("round of 4 drafts", "own")):
            took = []
            for target in targets:
                drafter = replace(pair, target=target).drafter(kind)
                with engine_of(target, drafter, max_batch_size=batch) as engine:
                    took.append(round_ms(engine, prompts))
            yield row(f"{what}, {batch} requests", took, bound)
    for chunk in (prompt // 4, prompt):
        [ids] = prompts_of([prompt], pair.target.vocab_size, 5)
        sizes: dict[str, Any] = {"max_model_len": prompt + 64, "prefill_chunk": chunk, "max_batch_size": 1}
        took = []
        for target in targets:
            with engine_of(target, prefix_cache=False, **sizes) as engine:
                took.append(prompt_ms(engine, ids))
        yield row(f"a prompt of {prompt}, chunks of {chunk}", took, PROMPT_BOUND)
