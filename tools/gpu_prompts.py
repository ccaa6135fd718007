"""What skipping the last layers of prompts saves: `python tools/gpu_prompts.py`.

    bits     at the widths of Gemma 4 E4B, 12 layers, deterministic=True: tokens and log-probabilities of prompts whose
             last layers ran for every token, and for the last one alone, must be equal
    times    at the shape of E4B, random bf16 weights, no drafter: milliseconds from `submit` to the first token, every
             layer for every token -> the last layers for the last token; of several prompts: the mean and the last
    in order the same first tokens with deterministic=True, and how much longer they take
    load     256 requests of 512 + 128 tokens, so many of them running: tokens a second
    gap      32 streams while a prompt of 32,768 arrives: the longest time between two tokens, against before and
             against what `stats()` says; and how many shapes of prompts were captured

The same engine serves both, in turn. The prefix cache is off, and each prompt is read a few times before it is timed.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from gpu_bits import prompts_of

from gpu_setup import DEVICE, ON_CPU, device_option, machine, require_device  # isort: skip - before triton
import torch
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

FEWEST = Round.final_states


def read_every_state(every: bool) -> None:
    """Of all engines from now on."""
    Round.final_states = (lambda self, *, scored, ends: FinalStates.EVERY) if every else FEWEST  # type: ignore[method-assign]


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
    count, length, new, long, streams = (4, 5, 3, 40, 2) if ON_CPU else (256, 512, 128, 32768, 32)
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
            shapes = len(engine.steps.chunks._captured) if engine.steps.chunks is not None else 0
            rows.append(Row("shapes of prompts, all captures", f"{shapes}, {use.bytes / 1e6:,.0f} MB", ok=shapes <= 40))
    with engine_of(target, streams + 1, long + 64) as engine:
        texts = prompts_of([length] * streams, target.vocab_size, 2)
        handles = engine.submit_many(
            texts, [SamplingParams(max_new_tokens=40 if ON_CPU else 2048, ignore_eos=True)] * streams
        )
        gaps: dict[str, list[float]] = {"before": [], "while": []}
        late = None
        for step in range(30 if ON_CPU else 1200):
            if step == (10 if ON_CPU else 100):
                late = engine.submit(prompts_of([long], target.vocab_size, 3)[0], SamplingParams(max_new_tokens=1))
            arriving = late is None or not late.finished
            begin = time.perf_counter()
            engine.step()
            spent = (time.perf_counter() - begin) * 1e3
            if step > 5 and arriving:
                gaps["before" if late is None else "while"].append(spent)
            if not arriving:
                break
        said = engine.stats().prompt_gap_ms
        for handle in handles:
            handle.abort()
        before, meanwhile = max(gaps["before"]), max(gaps["while"])
        rows.append(
            Row(
                f"{streams} streams, longest step",
                f"{before:.1f} ms, while {long} arrive {meanwhile:.1f} in {len(gaps['while'])} steps, "
                f"the median {statistics.median(gaps['while']):.1f} (said: {said:.1f})",
            )
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, parents=[device_option])
    parser.add_argument("--prefill-chunk", type=int)
    parser.add_argument("--max-prefill-tokens", type=int)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    require_device()
    sizes = f"chunks of {args.prefill_chunk or 'usual'}, {args.max_prefill_tokens or 'usual'} tokens a step"
    title = f"{machine()}; {sizes}"
    table = ResultTable(title)
    table.add(bit_rows())
    if not table.failed:
        table.add(time_rows(args.prefill_chunk, args.max_prefill_tokens))
        table.add(order_rows())
        table.add(load_rows())
    return table.finish(args.out)


if __name__ == "__main__":
    sys.exit(main())
