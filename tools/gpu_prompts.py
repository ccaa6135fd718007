"""What skipping the last layers of prompts saves: `python tools/gpu_prompts.py`.

    bits     at the widths of Gemma 4 E4B, 12 layers, deterministic=True: tokens and log-probabilities of prompts whose
             last layers ran for every token, and for the last one alone, must be equal
    times    at the shape of E4B, random bf16 weights, no drafter: milliseconds from `submit` to the first token, every
             layer for every token -> the last layers for the last token; of several prompts: the mean and the last
    in order the same first tokens with deterministic=True, and how much longer they take
    load     256 requests of 512 + 128 tokens, so many of them running: tokens a second, and
             how many shapes of prompts were captured
    gap      32 streams while a prompt of 32,768 arrives: the time between two tokens, against before and against what
             `stats()` says; how much the host's own code slowed down in the longest steps
             (`Yardstick`); and the same by the device's clock. The bits of a prompt's first token, its forwards divided
             among steps and whole, must be equal
    kernels  what the time of a prompt of --length goes to, by kernel, in any order -> in order (only when asked for)

The same engine serves both, in turn. The prefix cache is off, and each prompt is read a few times before it is timed.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from gpu_bits import prompts_of

from gpu_setup import DEVICE, ON_CPU, device_option, machine, require_device  # isort: skip - before triton
import torch
import triton
from result_table import ResultTable, Row

from specdec.config import EngineConfig, SamplingParams
from specdec.engine import Engine
from specdec.evaluation.model_shapes import Shrink, find_shape
from specdec.evaluation.phases.random_weights import make_target
from specdec.gpu.operations import FAST
from specdec.models.target import FinalStates, TargetModel
from specdec.runtime.rounds.round import Round

DTYPE = torch.float32 if ON_CPU else torch.bfloat16
LOADS = {"8": (8, 1), "3 x 5": (5, 3)} if ON_CPU else {str(n): (n, 1) for n in (512, 2048, 8192, 32768)}
LOADS |= {} if ON_CPU else {"16 x 2048": (2048, 16), "16 x 128": (128, 16)}
UNTIMED, TIMED = (0, 1) if ON_CPU else (3, 3)

FEWEST_STATES = Round.final_states


def read_every_state(every: bool) -> None:
    """Choose the final states of all engines from now on: every one, or the fewest."""
    Round.final_states = (lambda self, *, scored, ends: FinalStates.EVERY) if every else FEWEST_STATES  # type: ignore[method-assign]


def bit_rows() -> list[Row]:
    shrink = Shrink(8 if ON_CPU else 12, 16 if ON_CPU else 1)
    model = make_target(find_shape("gemma4-e4b"), shrink, DEVICE, DTYPE, 0)
    target = TargetModel(model, FAST, deterministic=True)
    config = {"deterministic": True, "fused": True, "attention": "triton", "prefix_cache": False}
    prompts = prompts_of((5, 9) if ON_CPU else (700, 33, 1, 260, 1100), target.vocab_size, 0)
    params = SamplingParams(max_new_tokens=2, logprobs=5, ignore_eos=True)
    found = []
    for every in (True, False):
        read_every_state(every)
        with Engine(
            target, None, config=EngineConfig(max_model_len=64 if ON_CPU else 2048, prefill_chunk=512, **config)
        ) as engine:
            found.append([(out.token_ids, out.logprobs) for out in engine.generate(prompts, params)])
    first = target.narrows_at()
    what = f"prompts of {', '.join(str(len(prompt)) for prompt in prompts)}; from layer {first} on, one token a prompt"
    equal = found[0] == found[1] and first is not None
    return [Row(what, "bits equal" if equal else "OTHER BITS", ok=equal)]


def first_token_ms(engine: Engine, prompts: list[list[int]]) -> tuple[float, float]:
    """Milliseconds until the first token, the mean of these prompts, and the last one's."""
    params = SamplingParams(max_new_tokens=1, ignore_eos=True)
    if not ON_CPU:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    handles = engine.submit_many(prompts, [params] * len(prompts))
    waiting, times = list(handles), []
    while waiting:
        engine.step()
        now = (time.perf_counter() - begin) * 1e3
        done = [handle for handle in waiting if handle.finished]
        times += [now] * len(done)
        waiting = [handle for handle in waiting if not handle.finished]
    return statistics.mean(times), max(times)


def time_rows(prefill_chunk: int | None, max_prefill_tokens: int | None) -> list[Row]:
    shape = find_shape("gemma4-e4b")
    model = make_target(shape, Shrink(8, 16) if ON_CPU else Shrink(), DEVICE, DTYPE, 0)
    target = TargetModel(model, FAST)
    longest = max(length for length, _ in LOADS.values())
    config = EngineConfig(
        max_batch_size=16,
        max_model_len=longest + 64,
        prefix_cache=False,
        fused=True,
        attention="triton",
        prefill_chunk=prefill_chunk,
        max_prefill_tokens=max_prefill_tokens,
    )
    rows = []
    with Engine(target, None, config=config) as engine:
        for name, (length, count) in LOADS.items():
            prompts = prompts_of([length] * count, target.vocab_size, length)
            cells = []
            for every in (True, False):
                read_every_state(every)
                times = [first_token_ms(engine, prompts) for _ in range(UNTIMED + TIMED)][UNTIMED:]
                cells.append([statistics.median(column) for column in zip(*times, strict=True)])
            found = ", ".join(
                f"{what} {before:.1f} -> {now:.1f} ms ({now / before - 1:+.0%})"
                for what, before, now in zip(("mean", "last"), *cells, strict=True)
            )
            rows.append(Row(f"first token, prompts of {name}", found))
    return rows


def engine_of(target: TargetModel, batch: int, longest: int, **config: Any) -> Engine:
    usual = {"prefix_cache": False, "fused": True, "attention": "triton"}
    return Engine(target, None, config=EngineConfig(max_batch_size=batch, max_model_len=longest, **usual, **config))


def usual_ms(target: TargetModel, *, deterministic: bool) -> dict[str, float]:
    """Milliseconds to the last first token, by load, as an engine is by default."""
    longest = max(length for length, _ in LOADS.values())
    found = {}
    with engine_of(target, 16, longest + 64, deterministic=deterministic) as engine:
        for name, (length, count) in LOADS.items():
            prompts = prompts_of([length] * count, target.vocab_size, length)
            times = [first_token_ms(engine, prompts)[1] for _ in range(UNTIMED + TIMED)][UNTIMED:]
            found[name] = statistics.median(times)
    return found


def order_rows() -> list[Row]:
    read_every_state(False)
    model = make_target(find_shape("gemma4-e4b"), Shrink(8, 16) if ON_CPU else Shrink(), DEVICE, DTYPE, 0)
    usual = usual_ms(TargetModel(model, FAST), deterministic=False)
    exact = usual_ms(TargetModel(model, FAST, deterministic=True), deterministic=True)
    return [
        Row(
            f"in order, prompts of {name}",
            f"{usual[name]:.1f} -> {exact[name]:.1f} ms ({exact[name] / usual[name]:.2f}x)",
        )
        for name in usual
    ]


def load_rows() -> list[Row]:
    model = make_target(find_shape("gemma4-e4b"), Shrink(8, 16) if ON_CPU else Shrink(), DEVICE, DTYPE, 0)
    target = TargetModel(model, FAST)
    count, length, new = (4, 5, 3) if ON_CPU else (256, 512, 128)
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    rows = []
    for running in (2, 4) if ON_CPU else (128, 256):
        with engine_of(target, running, length + new + 64) as engine:
            for _ in range(2):  # the first time shapes are captured
                begin = time.perf_counter()
                engine.generate(prompts_of([length] * count, target.vocab_size, 1), params)
                spent = time.perf_counter() - begin
            use = engine.stats().captures
            rows.append(Row(f"{count} of {length} + {new}, {running} running", f"{count * new / spent:,.0f} tokens/s"))
            shapes = len(engine.steps.prefill.chunks._captured) if engine.steps.prefill.chunks is not None else 0
            rows.append(Row("shapes of prompts, all captures", f"{shapes}, {use.bytes / 1e6:,.0f} MB", ok=shapes <= 40))
    return rows


class CollectorPauses:
    """Milliseconds of each pass of Python's garbage collector, from when it is made."""

    def __init__(self) -> None:
        self.ms: list[float] = []
        self._begin = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, _info: object) -> None:
        if phase == "start":
            self._begin = time.perf_counter()
        else:
            self.ms.append((time.perf_counter() - self._begin) * 1e3)


def uses(engine: Engine) -> tuple[int, int]:
    """Captures so far, and rounds and forwards over prompts that ran without."""
    use = engine.stats().captures
    return use.made + use.refused, use.uncaptured_rounds + use.uncaptured_prompts


class Yardstick:
    """Milliseconds that a host takes for the same few thousand steps of Python and cells of memory, whatever it does
    besides: where they take many times as long, the host was slow, not what it ran."""

    def __init__(self) -> None:
        self._cells = [[number] for number in range(20_000)]
        self.usual = statistics.median(self.ms() for _ in range(50))

    def ms(self) -> float:
        begin = time.perf_counter()
        sum(cell[0] for cell in self._cells[::10])
        return (time.perf_counter() - begin) * 1e3


class CompiledKernels:
    """Names of the kernels that Triton compiles, or loads compiled, from when it is made."""

    def __init__(self) -> None:
        self.names: list[str] = []
        triton.knobs.runtime.jit_post_compile_hook = self._note

    def _note(self, *_: object, fn: Any, **__: object) -> None:
        self.names.append(fn.name)


class RoundEnds:
    """When each round of an engine ended, in milliseconds of the device's clock, from when it is made."""

    def __init__(self, engine: Engine) -> None:
        self.ms: list[float] = []
        count = engine.steps.launches._count

        def noted(requests: Any, result: Any, **options: Any) -> None:
            self.ms.append(result.ran[1] / 1e6)
            count(requests, result, **options)

        engine.steps.launches._count = noted  # type: ignore[method-assign]

    def compared(self, begun: int, ended: int) -> str:
        """The first `begun` rounds, but for a few, against those up to `ended`."""
        between = [after - before for before, after in pairwise(self.ms)]
        alone, beside = between[5 : begun - 1], sorted(between[begun : ended - 1])
        usual = statistics.median(alone)
        middle, rare, longest = (beside[int(share * len(beside))] for share in (0.5, 0.99, 1 - 1e-9))
        return (
            f"alone median {usual:.2f} ms, longest {max(alone):.2f}; beside the prompt median {middle:.2f} "
            f"({middle / usual:.2f}x), 99th percentile {rare:.2f} ({rare / usual:.2f}x), longest {longest:.2f} "
            f"({longest / max(alone):.2f}x the longest alone)"
        )


def divided_row(engine: Engine, prompt: list[int]) -> Row:
    """Bits of a prompt's first token, read in parts beside streams and then as whole forwards over as many tokens."""
    gap, found, paused = engine.scheduler.prompt_gap, [], 0
    gap.tokens = lambda *_: 8 if ON_CPU else 256  # type: ignore[method-assign]
    for budget in (0.0, None):
        gap.budget = lambda *_, budget=budget: budget  # type: ignore[method-assign]
        handle = engine.submit(prompt, SamplingParams(max_new_tokens=1, logprobs=5))
        while not handle.finished:
            engine.step()
            paused += engine.steps.prefill.reading is not None
        found.append((handle.output().token_ids, handle.output().logprobs))
    del gap.tokens, gap.budget
    equal = found[0] == found[1] and paused > 0
    what = f"first token of a prompt of {len(prompt)}, {paused} pauses in its forwards"
    return Row(what, "bits equal" if equal else "OTHER BITS", ok=equal)


def gap_rows() -> list[Row]:
    model = make_target(find_shape("gemma4-e4b"), Shrink(8, 16) if ON_CPU else Shrink(), DEVICE, DTYPE, 0)
    target = TargetModel(model, FAST)
    length, new, long, streams = (5, 95, 40, 2) if ON_CPU else (512, 3072, 32768, 32)
    with engine_of(target, streams + 1, long + 64) as engine:
        gc.collect()
        gc.freeze()  # as the server does: of a process that has imported transformers, a whole pass takes 0.2 to 0.4 s
        texts = prompts_of([length] * streams, target.vocab_size, 2)
        handles = engine.submit_many(texts, [SamplingParams(max_new_tokens=new, ignore_eos=True)] * streams)
        while not all(handle.num_output for handle in handles):  # their own prompts are no part of what is compared
            engine.step()
        before: list[float] = []
        meanwhile: list[float] = []
        late, pauses, compiled, yardstick = None, CollectorPauses(), CompiledKernels(), Yardstick()
        slowed: list[float] = []  # of each step meanwhile, how many times as long the host took for the yardstick
        divided, begun, clock = 0, 0, RoundEnds(engine)
        events: dict[int, str] = {}  # what was compiled or captured in a step
        for step in range(30 if ON_CPU else 1600):
            if step == (10 if ON_CPU else 500):  # as many as the prompt takes: maxima of few are smaller
                begun = len(clock.ms)
                late = engine.submit(prompts_of([long], target.vocab_size, 3)[0], SamplingParams(max_new_tokens=1))
            arriving = late is None or not late.finished
            known = len(compiled.names), *uses(engine)
            begin = time.perf_counter()
            engine.step()
            spent = (time.perf_counter() - begin) * 1e3
            divided += engine.steps.prefill.reading is not None
            now = len(compiled.names), *uses(engine)
            if late is not None and now != known:
                names = compiled.names[known[0] :]
                made, without = now[1] - known[1], now[2] - known[2]
                events[len(meanwhile)] = f", {made} captured, {without} uncaptured, compiled {names}"
            if step > 5 and arriving:
                (before if late is None else meanwhile).append(spent)
            if step > 5 and arriving and late is not None:
                slowed.append(yardstick.ms() / yardstick.usual)
            if not arriving:
                break
        ended = len(clock.ms)
        if late is not None:
            late.abort()  # where it is not through
        rows = [
            Row(f"{streams} streams, between the ends of rounds, by the device", clock.compared(begun, ended)),
            divided_row(engine, prompts_of([40 if ON_CPU else 4096], target.vocab_size, 4)[0]),
        ]
        said, gap = engine.stats().prompt_gap_ms, engine.scheduler.prompt_gap
        parts = f"round {gap.longest_round * 1e3:.1f}, ending {gap.ending * 1e3:.1f}"
        for handle in handles:
            handle.abort()
    slowest = sorted(range(len(meanwhile)), key=lambda step: -meanwhile[step])[:5]
    named = ", ".join(
        f"{meanwhile[step]:.1f} (step {step}, host {slowed[step]:.1f}x{events.get(step, '')})" for step in slowest
    )
    steady = sorted(spent for spent, slow in zip(meanwhile, slowed, strict=True) if slow < 2) or [0.0]
    usual, now = statistics.median(before), statistics.median(meanwhile)
    found = (
        f"longest {max(before):.1f} ms, median {usual:.2f}; while {long} arrive in {len(meanwhile)} steps, "
        f"{divided} in the middle of a forward: median {now:.2f} ({now / usual:.2f}x), longest {named}; "
        f"of {len(steady)} steps with a steady host longest {steady[-1]:.2f}, "
        f"99th percentile {steady[int(0.99 * len(steady))]:.2f}; "
        f"said {said:.1f} ({parts}); the collector at most {max(pauses.ms, default=0):.1f}"
    )
    return [Row(f"{streams} streams, a step", found), *rows]


def kernel_rows(length: int) -> list[Row]:
    """Which kernels the time of a prompt of `length` tokens goes to, in any order -> in order."""
    model = make_target(find_shape("gemma4-e4b"), Shrink(8, 16) if ON_CPU else Shrink(), DEVICE, DTYPE, 0)
    spent: dict[str, list[float]] = {}
    for mode, deterministic in enumerate((False, True)):
        target = TargetModel(model, FAST, deterministic=deterministic)
        prompts = prompts_of([length], target.vocab_size, length)
        with engine_of(target, 1, length + 64, deterministic=deterministic) as engine:
            for _ in range(UNTIMED):
                first_token_ms(engine, prompts)
            activity = torch.profiler.ProfilerActivity.CPU if ON_CPU else torch.profiler.ProfilerActivity.CUDA
            with torch.profiler.profile(activities=[activity]) as profile:
                first_token_ms(engine, prompts)
        for event in profile.key_averages():
            us = event.self_cpu_time_total if ON_CPU else event.self_device_time_total
            spent.setdefault(event.key[:70], [0.0, 0.0])[mode] = us / 1e3
    rows = [
        Row(
            f"kernels of a prompt of {length}, in all",
            "{:.1f} -> {:.1f} ms".format(*map(sum, zip(*spent.values(), strict=True))),
        )
    ]
    for name, (loose, exact) in sorted(spent.items(), key=lambda item: -sum(item[1]))[:24]:
        rows.append(Row(name, f"{loose:.2f} -> {exact:.2f} ms"))
    return rows


PARTS = {"bits": bit_rows, "order": order_rows, "load": load_rows, "gap": gap_rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, parents=[device_option])
    parser.add_argument("--prefill-chunk", type=int)
    parser.add_argument("--max-prefill-tokens", type=int)
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=("times", "kernels", *PARTS),
        default=["bits", "times", "order", "load", "gap"],
    )
    parser.add_argument("--length", type=int, default=8192, help="of the prompt of kernels")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    require_device()
    sizes = f"chunks of {args.prefill_chunk or 'usual'}, {args.max_prefill_tokens or 'usual'} tokens a step"
    title = f"{machine()}; {sizes}"
    table = ResultTable(title)
    parts: dict[str, Callable[[], list[Row]]] = {
        "times": lambda: time_rows(args.prefill_chunk, args.max_prefill_tokens),
        "kernels": lambda: kernel_rows(30 if ON_CPU else args.length),
        **PARTS,
    }
    for part in args.parts:
        table.add(parts[part]())
    return table.finish(args.out)


if __name__ == "__main__":
    sys.exit(main())
