"""Prompts at the shape of Gemma 4 E4B, no drafter: skipped layers, load, and a prompt next to streams.

    bits     12 layers, deterministic=True: tokens and log-probabilities of prompts whose last layers ran for every
             token, and for the last one alone, must be equal
    times    milliseconds from `submit` to the first token, every layer for every token -> the last layers for the last
             token; of several prompts: the mean and the last
    load     many requests, at most `running` of them at a time: tokens a second, and how many shapes of prompts were
             captured
    gap      streams while a long prompt arrives: the time between two tokens, against before and against what `stats()`
             says; how much the host's own code slowed down in the longest steps; the same by the device's clock

The prefix cache is off, and each prompt is read a few times before it is timed. What `deterministic=True` costs a
prompt: `bits-cost`.
"""

import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

from bench.device import ON_CPU  # isort: skip - before triton
import triton

from bench.report import Row
from bench.subjects import OPERATIONS, answers, engine_of, first_token_ms, pair_of, prompts_of
from bench.verify import answers_row
from specdec.config import SamplingParams
from specdec.engine import Engine
from specdec.models.target import StatesNeeded, TargetModel
from specdec.runtime.rounds.captured_prompts import ChunkShape
from specdec.runtime.rounds.device_state import DeviceState

SHAPE = "gemma4-e4b"
UNTIMED = 0 if ON_CPU else 3  # forwards
TIMED = 1 if ON_CPU else 3
Load = tuple[int, int]
"""Tokens of a prompt, and how many prompts at once."""


def every_state() -> AbstractContextManager[Any]:
    """Inside, engines read every final state of a prompt, not the fewest."""
    return patch.object(DeviceState, "states_needed", lambda *_, **__: StatesNeeded.EVERY)


def prompt_engine(target: TargetModel, batch: int, longest: int, **config: Any) -> Engine:
    sizes = {"max_batch_size": batch, "max_model_len": longest + 64, "prefix_cache": False, "fused": True}
    return engine_of(target, None, **sizes, **config)


def loads_of(loads: Sequence[str]) -> dict[str, Load]:
    """Parse "2048" or "16x128"."""
    parts = {str(load): str(load).rpartition("x") for load in loads}
    return {load: (int(length), int(count or 1)) for load, (count, _, length) in parts.items()}


def bits_rows(lengths: Sequence[int]) -> Iterator[Row]:
    pair = pair_of(SHAPE, 12, on_cpu=8, deterministic=True)
    prompts = prompts_of(lengths, pair.target.vocab_size, 0)
    params = [SamplingParams(max_new_tokens=2, logprobs=5, ignore_eos=True)] * len(prompts)

    def found() -> Any:
        return answers(prompt_engine(pair.target, 8, max(lengths), prefill_chunk=512), prompts, params)

    with every_state():
        want = found()
    first = pair.target.narrows_at()
    name = f"prompts of {', '.join(map(str, lengths))}; from layer {first} on, one token a prompt"
    yield answers_row(name, found(), want, ok=first is not None)


def first_tokens(engine: Engine, load: Load) -> list[float]:
    """Median milliseconds until the first token of these prompts: the mean, and the last."""
    length, count = load
    prompts = prompts_of([length] * count, engine.target.vocab_size, length)
    times = [first_token_ms(engine, prompts) for _ in range(UNTIMED + TIMED)][UNTIMED:]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def times_rows(loads: Sequence[str], prefill_chunk: int, max_prefill_tokens: int) -> Iterator[Row]:
    asked, target = loads_of(loads), pair_of(SHAPE, operations=OPERATIONS).target
    sizes = {"prefill_chunk": prefill_chunk or None, "max_prefill_tokens": max_prefill_tokens or None}
    with prompt_engine(target, 16, max(length for length, _ in asked.values()), **sizes) as engine:
        for name, load in asked.items():
            with every_state():
                before = first_tokens(engine, load)
            now = first_tokens(engine, load)
            pairs = zip(("mean", "last"), before, now, strict=True)
            found = ", ".join(f"{what} {a:.1f} -> {b:.1f} ms ({b / a - 1:+.0%})" for what, a, b in pairs)
            yield Row(f"first token, prompts of {name}", found)


def load_rows(requests: int, prompt: int, tokens: int, running: Sequence[int]) -> Iterator[Row]:
    target = pair_of(SHAPE, operations=OPERATIONS).target
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    prompts = prompts_of([prompt] * requests, target.vocab_size, 1)
    for at_once in running:
        with prompt_engine(target, at_once, prompt + tokens) as engine:
            for _ in range(2):  # the first time shapes are captured
                begin = time.perf_counter()
                engine.generate(prompts, params, progress=False)
                spent = time.perf_counter() - begin
            use = engine.stats().captures
            shapes = sum(isinstance(shape, ChunkShape) for shape in engine.steps.store._captured)
        name, speed = f"{requests} of {prompt} + {tokens}, {at_once} running", requests * tokens / spent
        found = f"{shapes} shapes of prompts, all captures {use.bytes / 1e6:,.0f} MB"
        yield Row(name, found, f"{speed:,.0f} tokens/s", shapes <= 52)


class Yardstick:
    """Milliseconds that a host takes for the same few thousand steps of Python and cells of memory: where they take
    many times as long, the host was slow, not what it ran."""

    def __init__(self) -> None:
        self._cells = [[number] for number in range(20_000)]
        self.usual = statistics.median(self.ms() for _ in range(50))

    def ms(self) -> float:
        begin = time.perf_counter()
        sum(cell[0] for cell in self._cells[::10])
        return (time.perf_counter() - begin) * 1e3


class Watch:
    """What else happens in the steps of an engine, from when it is made: passes of the garbage collector, kernels that
    are compiled, captures, and the ends of rounds by the device's clock."""

    def __init__(self, engine: Engine) -> None:
        self.pauses: list[float] = []  # ms of each pass of the collector
        self.kernels: list[str] = []
        self.ends: list[float] = []  # ms
        self._engine, self._pass = engine, 0.0
        gc.callbacks.append(self._collected)
        triton.knobs.runtime.jit_post_compile_hook = lambda *_, fn, **__: self.kernels.append(fn.name)
        note = engine.steps.launches._count

        def noted(requests: Any, result: Any, **options: Any) -> None:
            self.ends.append(result.ended / 1e6)
            note(requests, result, **options)

        engine.steps.launches._count = noted  # type: ignore[method-assign]

    def _collected(self, phase: str, _info: object) -> None:
        if phase == "start":
            self._pass = time.perf_counter()
        else:
            self.pauses.append((time.perf_counter() - self._pass) * 1e3)

    def uses(self) -> tuple[int, int, int]:
        """Kernels and captures so far, and rounds and forwards over prompts that ran without."""
        use = self._engine.stats().captures
        return len(self.kernels), use.made + use.refused, use.uncaptured_rounds + use.uncaptured_prompts

    def close(self) -> None:
        gc.callbacks.remove(self._collected)
        triton.knobs.runtime.jit_post_compile_hook = None

    def by_device(self, begun: int, ended: int) -> str:
        """The first `begun` rounds, but for a few, against those up to `ended`."""
        between = [after - before for before, after in pairwise(self.ends)]
        alone, beside = between[5 : begun - 1], sorted(between[begun : ended - 1])
        if not alone or not beside:
            return "too few rounds"
        usual = statistics.median(alone)
        middle, rare, longest = (beside[int(share * len(beside))] for share in (0.5, 0.99, 1 - 1e-9))
        return (
            f"alone median {usual:.2f} ms, longest {max(alone):.2f}; with the prompt median {middle:.2f} "
            f"({middle / usual:.2f}x), 99th percentile {rare:.2f} ({rare / usual:.2f}x), longest {longest:.2f} "
            f"({longest / max(alone):.2f}x the longest alone)"
        )


def divided_row(engine: Engine, prompt: list[int]) -> Row:
    """Bits of a prompt's first token, read in parts next to streams and then as whole forwards over as many tokens.

    Its length is a multiple of theirs: a rest of 88 tokens is read in 128 places in parts and in 96 as a whole, and in
    any order bits depend on the number of places."""
    gap, found, pauses = engine.scheduler.prompt_gap, [], 0
    gap.tokens = lambda *_: 8 if ON_CPU else 256  # type: ignore[method-assign]
    for budget in (0.0, None):
        gap.seconds_allowed = lambda *_, budget=budget: budget  # type: ignore[method-assign]
        handle = engine.submit(prompt, SamplingParams(max_new_tokens=1, logprobs=5))
        while not handle.finished:
            engine.step()
            pauses += engine.steps.prefill.reading is not None
        found.append([(handle.output().token_ids, handle.output().logprobs)])
    del gap.tokens, gap.seconds_allowed
    name = f"first token of a prompt of {len(prompt)}, {pauses} pauses in its forwards"
    return answers_row(name, *found, ok=pauses > 0)


def gap_rows(streams: int, prompt: int, tokens: int, arriving: int, steps: int) -> Iterator[Row]:
    """`streams` of `prompt` + `tokens`; after a third of the steps a prompt of `arriving` tokens arrives."""
    target = pair_of(SHAPE, operations=OPERATIONS).target
    with prompt_engine(target, streams + 1, max(arriving, prompt + tokens)) as engine:
        gc.collect()
        gc.freeze()  # as the server does: of a process that has imported transformers, a whole pass takes 0.2 to 0.4 s
        texts = prompts_of([prompt] * streams, target.vocab_size, 2)
        handles = engine.submit_many(texts, [SamplingParams(max_new_tokens=tokens, ignore_eos=True)] * streams)
        while not all(handle.num_output for handle in handles):  # their own prompts are no part of what is compared
            engine.step()
        watch, yardstick = Watch(engine), Yardstick()
        before: list[float] = []
        during: list[tuple[float, float, str]] = []  # ms, how many times as long the host took, what was compiled
        late, divided, begun = None, 0, 0
        for step in range(steps):
            if step == steps // 3:  # as many as the prompt takes: maxima of few are smaller
                begun = len(watch.ends)
                late = engine.submit(prompts_of([arriving], target.vocab_size, 3)[0], SamplingParams(max_new_tokens=1))
            if late is not None and late.finished:
                break
            known, begin = watch.uses(), time.perf_counter()
            engine.step()
            spent = (time.perf_counter() - begin) * 1e3
            divided += engine.steps.prefill.reading is not None
            now = watch.uses()
            made = (
                f", {now[1] - known[1]} captured, {now[2] - known[2]} uncaptured, compiled {watch.kernels[known[0] :]}"
            )
            if late is not None:
                during.append((spent, yardstick.ms() / yardstick.usual, made if now != known else ""))
            elif step > 5:
                before.append(spent)
        ended = len(watch.ends)
        if late is not None:
            late.abort()  # where it is not through
        yield Row(f"{streams} streams, between the ends of rounds, by the device", watch.by_device(begun, ended))
        yield divided_row(engine, prompts_of([40 if ON_CPU else 4096], target.vocab_size, 4)[0])
        said, gap = engine.stats().prompt_gap_ms, engine.scheduler.prompt_gap
        parts = f"round {gap.longest_round * 1e3:.1f}, ending {gap.ending * 1e3:.1f}"
        for handle in handles:
            handle.abort()
        watch.close()
    times = [ms for ms, _, _ in during]
    longest = ", ".join(f"{ms:.1f} (host {slow:.1f}x{made})" for ms, slow, made in sorted(during, reverse=True)[:5])
    steady = sorted(ms for ms, slow, _ in during if slow < 2) or [0.0]
    usual, now_ms = statistics.median(before), statistics.median(times)
    found = (
        f"longest {max(before):.1f} ms, median {usual:.2f}; while {arriving} arrive in {len(times)} steps, {divided} "
        f"in the middle of a forward: median {now_ms:.2f} ({now_ms / usual:.2f}x), longest {longest}; of {len(steady)} "
        f"steps with a steady host longest {steady[-1]:.2f}, 99th percentile {steady[int(0.99 * len(steady))]:.2f}; "
        f"said {said:.1f} ({parts}); the collector at most {max(watch.pauses, default=0):.1f}"
    )
    yield Row(f"{streams} streams, a step", found)
