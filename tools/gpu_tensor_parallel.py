"""Two GPUs, the same bits: `python tools/gpu_tensor_parallel.py`, on a host with two or more.

    exchange  84 exchanges in a captured graph of each device, by size: whether all devices hold the right bits, and the
              time of one; of sums, and of experts
    bits      TP = 2 and TP = 1 with `deterministic=True`, at the widths of published shapes, few layers: tokens and
              log-probabilities must be equal, alone and among 80, chains and trees, chunks, cached, preempted
    times     plain steps and rounds at context 1,024, batch 1 and 8, at two depths: what a layer takes
    scene     Gemma 4 26B-A4B at full depth, 200 requests with MTP drafts, 128 at once, on two GPUs: each equal to its
              lone run on one
    load      a checkpoint of 8 layers: each device holds its share, never more than one tensor beyond it, same bits
    packed    FP8, INT4 and MXFP4 weights on two GPUs with the bits of one
    long      rounds of four requests, `--rounds` in all (500; 10,000 take minutes): level memory, the same answers
    stalled   a device that is busy for longer than a wait lasts: DeviceLostError in less than 10 s, and another engine
              of the process goes on
    nccl      NCCL's all-reduce of as many rows, captured so, in a process for each device

A row is printed when it is known. `--device cpu` runs the bits on ranks
that share the CPU, in Triton's interpreter. A failed part is a row that failed.
"""

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gpu_setup import DEVICE, ON_CPU, device_option, machine, require_device  # isort: skip - before triton
import torch
from gpu_bits import Planted, answers, answers_again, preempted_answers, prompts_of
from result_table import ResultTable, Row
from split_parts import PACKED, load_rows, long_rows, packed_rows
from split_timings import (
    CHAIN,
    EXCHANGING,
    EXPERT_SIZES,
    SIZES,
    TIMED,
    exchange_rows,
    expert_rows,
    nccl_rows,
    synchronize,
    time_rows,
)

from specdec.config import EngineConfig, SamplingParams, SpecConfig
from specdec.draft_models.ngram import NgramDrafter
from specdec.engine import Engine
from specdec.errors import DeviceLostError
from specdec.evaluation.model_shapes import Shrink, find_shape
from specdec.evaluation.phases.random_weights import make_drafter, make_target
from specdec.gpu.operations import FAST
from specdec.models.target import TargetModel

SHAPES = {"gemma4-e4b": 8, "gemma4-26b-a4b": 4, "gpt-oss-20b": 3, "gemma4-31b": 6, "llama-8b": 2, "qwen3-30b-a3b": 2}
LENGTHS = (700, 33, 1, 260, 15, 512, 90, 1100)
NEW = 20
KINDS = ("plain", "round of 4")
PARTS = ("exchange", "bits", "load", "packed", "times", "scene", "long", "stalled", "nccl")
HERE_TOO = ("load", "packed", "long")
"""Run with `--device cpu`, besides bits."""


def engine_of(target: TargetModel, drafter: Any, spec: SpecConfig, count: int, **config: Any) -> Engine:
    settings = {"max_model_len": 64 if ON_CPU else 2048, "attention": "triton", "deterministic": True, **config}
    return Engine(target, drafter, spec=spec, config=EngineConfig(tensor_parallel=count, **settings))


def bits_of_shape(name: str, layers: int, quick: bool) -> Iterator[Row]:
    """quick: few cases, those that exchange most."""
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
    paged = {**uncaptured, "page_size": 16}
    yield Row(f"{name}, {layers} layers", f"{len(want)} answers of one GPU")
    drafter = make_drafter(shape, shrink, target, 1)
    draws = "MTP" if name.startswith("gemma4") else "EAGLE-3"
    batch: dict[str, Any] = {"max_batch_size": 32}
    cases: list[tuple[str, Any, SpecConfig, dict[str, Any], bool]] = [
        ("alone", None, CHAIN, {"max_batch_size": 1}, False),
        (f"{draws}, chain, among 80", drafter, CHAIN, batch, True),
        ("accepted trees of 16", planted, SpecConfig(15, 2, 16, adaptive=False), uncaptured, False),
        ("among 80, chunks of 256", None, CHAIN, {"max_batch_size": 64, "prefill_chunk": 256}, True),
        ("alone, no graphs", None, CHAIN, {"max_batch_size": 1, **uncaptured}, False),
        (f"{draws}, tree of 16", drafter, SpecConfig(4, 4, 16, adaptive=False), {}, False),
        ("accepted trees of 16, pages of 16", planted, SpecConfig(15, 2, 16, adaptive=False), paged, False),
        ("n-gram, among 80", NgramDrafter(), CHAIN, batch, True),
        ("accepted trees of 200", planted, SpecConfig(20, 20, 200, adaptive=False), uncaptured, False),
    ]

    def compare(what: str, find: Callable[[], tuple[Sequence[Any], str]]) -> Row:
        begin = time.perf_counter()
        try:
            found, note = find()
            pairs = zip(prompts, found, want, strict=True)
            wrong = [len(prompt) for prompt, a, b in pairs if a != b]
            lengths = f"; not those of prompts of {wrong} tokens" if wrong else ""
            cells = (
                f"{len(want) - len(wrong)} of {len(want)} equal{lengths}",
                f"{note}, {time.perf_counter() - begin:.0f} s",
            )
            return Row(f"{name}, TP=2: {what}", *cells, ok=not wrong)
        except Exception as error:
            traceback.print_exc()
            return Row(f"{name}, TP=2: {what}", f"{type(error).__name__}: {str(error)[:200]}", ok=False)

    def in_company(drafter: Any, spec: SpecConfig, config: dict[str, Any], crowded: bool) -> tuple[Sequence[Any], str]:
        others = crowd if crowded else []
        engine = engine_of(target, drafter, spec, 2, **config)
        found = answers(engine, [*prompts, *others], [*params, *[quiet] * len(others)])[: len(prompts)]
        use = engine.stats().captures
        note = f"acceptance length {engine.stats().acceptance_length:.2f}, {use.made} captured, {use.refused} refused"
        return found, note

    for what, *case in cases[: 3 if quick or ON_CPU else None]:
        yield compare(what, lambda case=case: in_company(*case))
    if not quick and not ON_CPU:
        tight = {"full_slots": max(LENGTHS) + 400, "swa_slots": max(LENGTHS) + 400, "max_batch_size": 64}

        def preempted() -> tuple[Sequence[Any], str]:
            found, lost = preempted_answers(engine_of(target, None, CHAIN, 2, **tight), prompts, params, crowd)
            return found, f"{lost} preempted"

        def cached() -> tuple[Sequence[Any], str]:
            found, hits = answers_again(engine_of(target, None, CHAIN, 2), prompts, params)
            return found, f"{hits} found in the prefix cache"

        yield compare("preempted", preempted)
        yield compare("cached", cached)


def scene_rows(num_requests: int = 200, at_once: int = 128) -> Iterator[Row]:
    """The scene of the project's first bug."""
    name = "gemma4-26b-a4b"
    shape = find_shape(name)
    begin = time.perf_counter()
    target = TargetModel(make_target(shape, Shrink(), DEVICE, torch.bfloat16, 0), FAST, deterministic=True)
    drafter = make_drafter(shape, Shrink(), target, 1)
    yield Row(f"{name}, full depth", "made", f"{time.perf_counter() - begin:.0f} s")
    prompts = prompts_of([3 + 37 * i % 900 for i in range(num_requests)], target.vocab_size, 2)
    params = [
        SamplingParams(max_new_tokens=12, logprobs=4, temperature=(i % 2) * 0.8, seed=i, ignore_eos=True)
        for i in range(num_requests)
    ]
    begin = time.perf_counter()
    engine = engine_of(target, drafter, CHAIN, 2, max_batch_size=at_once, max_model_len=1024)
    found = answers(engine, prompts, params)
    yield Row(
        f"{num_requests} requests, {at_once} at once, TP=2", "all succeed", f"{time.perf_counter() - begin:.0f} s"
    )
    begin = time.perf_counter()
    lone = engine_of(target, None, CHAIN, 1, max_batch_size=1, max_model_len=1024)
    equal = sum(a == b for a, b in zip(found, answers(lone, prompts, params), strict=True))
    cells = f"{equal} of {num_requests} equal", f"{time.perf_counter() - begin:.0f} s"
    yield Row("each next to its lone run on one GPU", *cells, ok=equal == num_requests)


def stalled_rows() -> Iterator[Row]:
    model = make_target(find_shape("llama-8b"), Shrink(2), DEVICE, torch.bfloat16, 0)
    target = TargetModel(model, FAST, deterministic=True)
    other = engine_of(target, None, CHAIN, 1, max_batch_size=1)
    prompt = prompts_of([64], target.vocab_size, 0)[0]
    params = SamplingParams(max_new_tokens=200, ignore_eos=True)
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
        yield Row(f"device {busy} busy", error, f"after {seconds:.2f} s", ok=ok)
        synchronize([torch.device("cuda", 0), torch.device("cuda", 1)])
        begin = time.perf_counter()
        engine.close()
        yield Row("closing it", "done", f"{time.perf_counter() - begin:.2f} s")
        [out] = other.generate([prompt], params)
        yield Row("another engine", f"{len(out.token_ids)} tokens", ok=len(out.token_ids) == 200)


def guarded(name: str, part: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    """The rows of a part as they come; one that raises is a row that failed."""
    try:
        yield from part()
    except Exception as error:
        traceback.print_exc()
        yield Row(name, f"{type(error).__name__}: {str(error)[:300]}", ok=False)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[device_option]
    )
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--shapes", nargs="*", choices=SHAPES, default=["llama-8b"] if ON_CPU else list(SHAPES), help="of bits"
    )
    parser.add_argument("--timed", nargs="*", choices=TIMED, default=list(TIMED), help="shapes of times")
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8], help="of times")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS, help="of times")
    parser.add_argument("--forms", nargs="*", choices=EXCHANGING, default=EXCHANGING[:1], help="of exchange, times")
    parser.add_argument("--packed", nargs="*", choices=PACKED, default=list(PACKED), help="of packed")
    parser.add_argument("--rounds", type=int, default=20 if ON_CPU else 500, help="of long")
    parser.add_argument("--quick", action="store_true", help="the first cases of bits only")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    require_device()
    torch.manual_seed(0)
    parts: list[tuple[str, Callable[[], Iterable[Row]]]] = []
    for kind in options.parts:  # in the order that was asked for
        if kind == "bits":
            for shape in options.shapes:
                layers = SHAPES[shape]
                parts.append((f"bits of {shape}", lambda s=shape, n=layers: bits_of_shape(s, n, options.quick)))
        elif ON_CPU and kind not in HERE_TOO:
            continue
        elif kind == "packed":
            parts += [(f"packed {pair}", lambda pair=pair: packed_rows(pair)) for pair in options.packed]
        elif kind == "long":
            parts.append((kind, lambda: long_rows(options.rounds)))
        elif kind == "exchange":
            parts += [(f"exchange of {size}", partial(exchange_rows, size, options.forms)) for size in SIZES]
            parts += [(f"experts of {size}", partial(expert_rows, size, options.forms)) for size in EXPERT_SIZES]
        elif kind == "times":
            for shape in options.timed:
                times = partial(time_rows, shape, options.batches, options.kinds, options.forms)
                parts.append((f"times of {shape}", times))
        elif kind == "nccl":
            parts.append(("NCCL", nccl_rows))
        else:
            parts.append((kind, {"load": load_rows, "scene": scene_rows, "stalled": stalled_rows}[kind]))
    print(f"imported after {time.process_time():.0f} s of the processor", flush=True)
    results = ResultTable(f"{machine()}, {0 if ON_CPU else torch.cuda.device_count()} GPUs")
    for name, part in parts:
        with torch.no_grad():
            results.add(guarded(name, part))
        if not ON_CPU:
            torch.cuda.empty_cache()
    return results.finish(options.out)


if __name__ == "__main__":
    sys.exit(main())
