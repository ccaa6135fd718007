"""Two GPUs, the same bits: `python tools/gpu_tensor_parallel.py`, on a host with two or more.

    exchange  84 gathers in a captured graph of each device, by size: whether all devices hold the right bits, and the
              time of one
    bits      TP = 2 and TP = 1 with `deterministic=True`, at the widths of published shapes, few layers: tokens and
              log-probabilities must be equal, alone and among 80, chains and trees, chunks, cached, preempted
    times     plain steps at context 1,024, batch 1 and 8, with few layers and with more: what a layer takes
    stalled   a device that is busy for longer than a wait lasts: DeviceLostError in less than 10 s, and another engine
              of the process goes on
    nccl      NCCL's all-reduce of as many rows, in such graphs where it can be captured; last, since it may hang there

`--device cpu` runs the bits on ranks that share the CPU, in Triton's interpreter. A failed part is a row that failed.
"""

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gpu_setup import DEVICE, ON_CPU, device_option, machine, require_device  # isort: skip - before triton
import torch
from gpu_bits import Planted, answers, answers_again, preempted_answers, prompts_of
from result_table import ResultTable, Row

from specdec.config import EngineConfig, SamplingParams, SpecConfig
from specdec.draft_models.ngram import NgramDrafter
from specdec.engine import Engine
from specdec.errors import DeviceLostError
from specdec.evaluation.model_shapes import Shrink, find_shape
from specdec.evaluation.phases.random_weights import make_drafter, make_target
from specdec.gpu.operations import FAST
from specdec.gpu.ranks import make_ranks
from specdec.gpu.split_capture import SplitCapture
from specdec.models.target import TargetModel

EXCHANGES = 84
SIZES = (1, 5, 8, 40, 160, 2048)
WIDTH, PARTS = 4096, 2
SHAPES = {"llama-8b": 2, "gemma4-e4b": 8, "gemma4-31b": 6, "qwen3-8b": 2}
TIMED = {"gemma4-31b": (6, 12), "llama-70b": (3, 6), "llama-8b": (8, 16)}
LENGTHS = (700, 33, 1, 260, 15, 512, 90, 1100)
NEW = 20
CHAIN = SpecConfig(4, adaptive=False)


def synchronize(devices: Sequence[torch.device]) -> None:
    for device in devices:
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], Any], devices: Sequence[torch.device], repeats: int = 20) -> float:
    """Of one `work`, many in a row: the best of five."""
    best = float("inf")
    for _ in range(5):
        synchronize(devices)
        begin = time.perf_counter()
        for _ in range(repeats):
            work()
        synchronize(devices)
        best = min(best, (time.perf_counter() - begin) / repeats)
    return best


def exchange_rows(size: int) -> list[Row]:
    ranks = make_ranks(torch.device("cuda:0"), 2)
    ranks.reserve(2 * PARTS * size * WIDTH)
    parts = [torch.randn(PARTS, size, WIDTH, device=device) for device in ranks.devices]
    want = torch.cat([part.cpu() for part in parts])
    found: list[Any] = []

    def program() -> torch.Tensor:
        ranks.begin()
        for _ in range(EXCHANGES):
            found[:] = ranks.gather(parts)
        ranks.end()
        return parts[0]

    def alone() -> torch.Tensor:
        for rank, part in enumerate(parts):
            with ranks.on(rank):
                for _ in range(EXCHANGES):
                    part.clone()
        return parts[0]

    program()
    synchronize(ranks.devices)
    ranks.check()
    equal = all(torch.equal(out.cpu(), want) for out in found)
    times = []
    for body in (program, alone):
        replay, _ = SplitCapture(ranks.devices)(body)
        replay()
        times.append(seconds_of(replay, ranks.devices) / EXCHANGES * 1e6)
    ranks.check()
    equal &= all(torch.equal(out.cpu(), want) for out in found)
    kib = PARTS * size * WIDTH * 4 / 1024
    note = f"{times[0]:.2f} us, a copy alone {times[1]:.2f}"
    return [Row(f"exchange, {size} rows, {kib:.0f} KiB a rank", "right" if equal else "WRONG", note, equal)]


def nccl_rows(size: int) -> list[Row]:
    """An all-reduce of bfloat16 rows over the devices of this process."""
    from torch.cuda import nccl

    devices = [torch.device("cuda", index) for index in range(2)]
    rows = [torch.randn(size, WIDTH, device=device, dtype=torch.bfloat16) for device in devices]
    nccl.all_reduce(rows)
    synchronize(devices)

    def program() -> torch.Tensor:
        for _ in range(EXCHANGES):
            nccl.all_reduce(rows)
        return rows[0]

    try:
        work, how = SplitCapture(devices)(program)[0], "captured"
        work()
    except Exception as error:
        work, how = program, f"not captured, {type(error).__name__}"
    microseconds = seconds_of(work, devices, 3) / EXCHANGES * 1e6
    return [Row(f"NCCL, all-reduce of {size} rows", how, f"{microseconds:.2f} us")]


def engine_of(target: TargetModel, drafter: Any, spec: SpecConfig, count: int, **config: Any) -> Engine:
    settings = {"max_model_len": 64 if ON_CPU else 2048, "attention": "triton", "deterministic": True, **config}
    return Engine(target, drafter, spec=spec, config=EngineConfig(tensor_parallel=count, **settings))


def bits_of_shape(name: str, layers: int) -> list[Row]:
    shape, shrink = find_shape(name), Shrink(2 if ON_CPU else layers, 4 if ON_CPU else 1)
    model = make_target(shape, shrink, DEVICE, torch.float32 if ON_CPU else torch.bfloat16, 0)
    target = TargetModel(model, FAST, deterministic=True)
    vocab = target.vocab_size
    prompts = prompts_of((5, 9) if ON_CPU else LENGTHS, vocab, 0)
    params = [
        SamplingParams(max_new_tokens=2 if ON_CPU else NEW, logprobs=8, temperature=(i % 2) * 0.8, top_p=0.95, seed=i)
        for i in range(len(prompts))
    ]
    want = answers(engine_of(target, None, CHAIN, 1, max_batch_size=1), prompts, params)
    truths = [prompt + tokens for prompt, (tokens, _) in zip(prompts, want, strict=True)]
    planted = Planted(truths, vocab)
    crowd = prompts_of([3 + 11 * i % 300 for i in range(1 if ON_CPU else 72)], vocab, 1)
    quiet = SamplingParams(max_new_tokens=2 if ON_CPU else NEW // 2 + 1, temperature=0.5, seed=3)
    uncaptured: dict[str, Any] = {"cuda_graphs": False}
    cases: list[tuple[str, Any, SpecConfig, dict[str, Any], bool]] = [
        ("alone, no graphs", None, CHAIN, {"max_batch_size": 1, **uncaptured}, False),
        ("alone", None, CHAIN, {"max_batch_size": 1}, False),
        ("among 80, chunks of 256", None, CHAIN, {"max_batch_size": 64, "prefill_chunk": 256}, True),
        ("n-gram, among 80", NgramDrafter(), CHAIN, {"max_batch_size": 32}, True),
        ("accepted trees of 16", planted, SpecConfig(15, 2, 16, adaptive=False), uncaptured, False),
        ("accepted trees of 200", planted, SpecConfig(20, 20, 200, adaptive=False), uncaptured, False),
    ]
    if not name.startswith("gemma4") and not ON_CPU:  # whose assistants read K/V of all heads
        drafter = make_drafter(shape, shrink, target, 1)
        cases.append(("EAGLE-3, chain, among 80", drafter, CHAIN, {"max_batch_size": 32}, True))
        cases.append(("EAGLE-3, tree of 16", drafter, SpecConfig(4, 4, 16, adaptive=False), {}, False))
    rows = []

    def compare(what: str, find: Callable[[], tuple[Sequence[Any], str]]) -> None:
        begin = time.perf_counter()
        try:
            found, note = find()
            equal = sum(a == b for a, b in zip(found, want, strict=True))
            cells = f"{equal} of {len(want)} equal", f"{note}, {time.perf_counter() - begin:.0f} s"
            rows.append(Row(f"{name}, TP=2: {what}", *cells, ok=equal == len(want)))
        except Exception as error:
            traceback.print_exc()
            rows.append(Row(f"{name}, TP=2: {what}", f"{type(error).__name__}: {str(error)[:200]}", ok=False))

    def in_company(drafter: Any, spec: SpecConfig, config: dict[str, Any], crowded: bool) -> tuple[Sequence[Any], str]:
        others = crowd if crowded else []
        engine = engine_of(target, drafter, spec, 2, **config)
        found = answers(engine, [*prompts, *others], [*params, *[quiet] * len(others)])[: len(prompts)]
        use = engine.stats().captures
        note = f"acceptance length {engine.stats().acceptance_length:.2f}, {use.made} captured, {use.refused} refused"
        return found, note

    for what, *case in cases[:: 3 if ON_CPU else 1]:
        compare(what, lambda case=case: in_company(*case))
    if not ON_CPU:
        tight = {"full_slots": max(LENGTHS) + 400, "swa_slots": max(LENGTHS) + 400, "max_batch_size": 64}

        def preempted() -> tuple[Sequence[Any], str]:
            found, lost = preempted_answers(engine_of(target, None, CHAIN, 2, **tight), prompts, params, crowd)
            return found, f"{lost} preempted"

        def cached() -> tuple[Sequence[Any], str]:
            found, hits = answers_again(engine_of(target, None, CHAIN, 2), prompts, params)
            return found, f"{hits} found in the prefix cache"

        compare("preempted", preempted)
        compare("cached", cached)
    return rows


def step_ms(target: TargetModel, count: int, batch: int) -> float:
    """A plain step of requests that all decode behind 1,024 tokens: the best of five runs of 20."""
    config = {"max_batch_size": batch, "deterministic": target.deterministic}
    with engine_of(target, None, CHAIN, count, **config) as engine:
        params = SamplingParams(max_new_tokens=400, ignore_eos=True)
        handles = engine.submit_many(prompts_of([1024] * batch, target.vocab_size, batch), params)
        while any(handle.num_output < 20 for handle in handles):
            engine.step()
        devices = [torch.device("cuda", rank) for rank in range(count)]

        def steps() -> None:
            for _ in range(20):
                engine.step()

        return seconds_of(steps, devices, 1) / 20 * 1e3


def time_rows(name: str) -> list[Row]:
    rows = []
    few, more = TIMED[name]
    took: dict[tuple[int, int, int], float] = {}
    for layers in (few, more):
        model = make_target(find_shape(name), Shrink(layers), DEVICE, torch.bfloat16, 0)
        target = TargetModel(model, FAST, deterministic=True)
        for count in (1, 2):
            for batch in (1, 8):
                took[layers, count, batch] = step_ms(target, count, batch)
        del model, target
        torch.cuda.empty_cache()
    for batch in (1, 8):
        layer = {count: (took[more, count, batch] - took[few, count, batch]) / (more - few) for count in (1, 2)}
        text = f"{layer[1] * 1e3:.1f} -> {layer[2] * 1e3:.1f} us a layer"
        extra = (layer[2] - layer[1] / 2) * 1e3 / 2
        steps = "; ".join(f"{n} layers {took[n, 1, batch]:.3f} -> {took[n, 2, batch]:.3f} ms" for n in (few, more))
        rows.append(Row(f"{name}, plain, batch {batch}", text, f"{steps}; {extra:.1f} us a sum above half", ok=True))
    return rows


def stalled_rows() -> list[Row]:
    model = make_target(find_shape("llama-8b"), Shrink(2), DEVICE, torch.bfloat16, 0)
    target = TargetModel(model, FAST, deterministic=True)
    other = engine_of(target, None, CHAIN, 1, max_batch_size=1)
    prompt = prompts_of([64], target.vocab_size, 0)[0]
    params = SamplingParams(max_new_tokens=200, ignore_eos=True)
    rows = []
    for busy in (1, 0):
        engine = engine_of(target, None, CHAIN, 2, max_batch_size=1)
        [handle] = engine.submit_many([prompt], params)
        while handle.num_output < 20:
            engine.step()
        with torch.cuda.device(busy):
            torch.cuda._sleep(int(30e9))  # cycles: 15 to 20 s
        begin = time.perf_counter()
        error = "no error"
        try:
            while engine.step():
                pass
        except DeviceLostError as lost:
            error = str(lost)
        seconds = time.perf_counter() - begin
        ok = error != "no error" and seconds < 10
        rows.append(Row(f"device {busy} busy", error, f"after {seconds:.2f} s", ok=ok))
        synchronize([torch.device("cuda", 0), torch.device("cuda", 1)])
        begin = time.perf_counter()
        engine.close()
        rows.append(Row("closing it", "done", f"{time.perf_counter() - begin:.2f} s"))
        [out] = other.generate([prompt], params)
        rows.append(Row("another engine", f"{len(out.token_ids)} tokens", ok=len(out.token_ids) == 200))
    return rows


def guarded(name: str, part: Callable[[], list[Row]]) -> list[Row]:
    """A part that raises is a row that failed."""
    try:
        return part()
    except Exception as error:
        traceback.print_exc()
        return [Row(name, f"{type(error).__name__}: {str(error)[:300]}", ok=False)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[device_option]
    )
    parser.add_argument("--parts", nargs="*", default=["exchange", "bits", "times", "stalled", "nccl"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    require_device()
    torch.manual_seed(0)
    parts: list[tuple[str, Callable[[], list[Row]]]] = []
    if "exchange" in options.parts and not ON_CPU:
        parts += [(f"exchange of {size}", lambda size=size: exchange_rows(size)) for size in SIZES]
    if "bits" in options.parts:
        shapes = list(SHAPES.items())[: 1 if ON_CPU else None]
        parts += [(f"bits of {shape}", lambda pair=(shape, n): bits_of_shape(*pair)) for shape, n in shapes]
    if "times" in options.parts and not ON_CPU:
        parts += [(f"times of {shape}", lambda shape=shape: time_rows(shape)) for shape in TIMED]
    if "stalled" in options.parts and not ON_CPU:
        parts.append(("stalled", stalled_rows))
    if "nccl" in options.parts and not ON_CPU:
        parts += [(f"NCCL of {size}", lambda size=size: nccl_rows(size)) for size in SIZES]
    results = ResultTable(f"{machine()}, {0 if ON_CPU else torch.cuda.device_count()} GPUs")
    for name, part in parts:
        with torch.no_grad():
            results.add(guarded(name, part))
        if not ON_CPU:
            torch.cuda.empty_cache()
    return results.finish(options.out)


if __name__ == "__main__":
    sys.exit(main())
