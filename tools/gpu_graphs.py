"""Captured rounds on a GPU: the tokens of rounds that run as they are, no wait for the host, a level memory.

Small random targets in float32. Who joins and leaves, short pools that preempt, and every drafter; then a steady engine
under `torch.cuda.set_sync_debug_mode("error")`, and ten thousand rounds of it.
"""

import random
import time
from collections.abc import Iterator
from typing import Any

from gpu_setup import DEVICE, ON_CPU, ROOT, waiting_row  # isort: skip - before triton
import gpu_engine
import torch
from gpu_engine import CHAIN, TREE, VOCAB, Setting
from result_table import Row

import specdec.engine
from specdec.config import EngineConfig, SamplingParams
from specdec.engine import Engine
from specdec.gpu.operations import choose_operations
from specdec.models.target import TargetModel

FAMILIES = ("gemma4-e2b", "gpt_oss", "llama")
SETTINGS = [
    Setting(name, spec, page_size)
    for name, spec in (("none", CHAIN), ("n-gram", CHAIN), ("MTP", CHAIN), ("MTP", TREE), ("EAGLE-3", TREE))
    for page_size in (1, 16)
]
ROUNDS = 10_000


def engine_of(bound: TargetModel, setting: Setting, *, graphs: bool, **sizes: Any) -> Engine:
    config = EngineConfig(
        attention="torch" if ON_CPU else "triton",
        cuda_graphs=graphs and not ON_CPU,
        page_size=setting.page_size,
        **{"max_batch_size": 4, "max_model_len": 256, "prefill_chunk": 64, **sizes},
    )
    return Engine(bound, gpu_engine.drafter(setting.drafter, bound), spec=setting.spec, config=config)


def requests(count: int, longest: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts and outputs of 1 to `longest` tokens, greedy and sampled, some with penalties and log-probabilities."""
    draw = random.Random(count)
    prompts = [[draw.randrange(VOCAB) for _ in range(draw.randint(1, longest))] for _ in range(count)]
    params = [
        SamplingParams(
            max_new_tokens=draw.randint(1, longest),
            temperature=draw.choice((0.0, 0.0, 0.8)),
            top_k=draw.choice((0, 8)),
            repetition_penalty=draw.choice((1.0, 1.0, 1.2)),
            logprobs=draw.choice((None, None, 2)),
            seed=i,
            ignore_eos=True,
        )
        for i in range(count)
    ]
    return prompts, params


def tokens_of(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    outputs = engine.generate(prompts, params, progress=False)
    engine.table.check()
    assert engine.table.allocator.primary.held_pages == 0, "slots are held"
    return [out.token_ids for out in outputs]


def parity_rows(quick: bool) -> Iterator[Row]:
    """Graphs against none: a few requests of every drafter, then 200 through pools for a tenth of them."""
    cases = [(family, setting, {}, 6, 24) for family in FAMILIES for setting in SETTINGS]
    short = {"max_batch_size": 32, "full_slots": 1600, "swa_slots": 1200}
    crowd = (("MTP", TREE), ("MTP", CHAIN), ("EAGLE-3", TREE), ("n-gram", CHAIN))
    cases += [("gemma4-e2b", Setting(*drafter, 16), short, 200, 80) for drafter in crowd]
    if quick:
        cases = [("gemma4-e2b", Setting("MTP", TREE, 1), {}, 2, 4)]
    for family, setting, sizes, count, longest in cases:
        if setting.drafter == "MTP" and not family.startswith("gemma4"):
            continue
        shape = "" if setting.drafter in ("none", "n-gram") else " tree" if setting.spec is TREE else " chain"
        name = f"graphs, {family}, {setting.drafter}{shape}, pages of {setting.page_size}, {count} requests"
        model = gpu_engine.target(family, 16 if quick else 64)
        fused = TargetModel(model, choose_operations("auto", "triton", DEVICE, torch.float32))
        asked = requests(count, longest)
        try:
            begin = time.perf_counter()
            captured = engine_of(fused, setting, graphs=True, **sizes)
            got = tokens_of(captured, *asked)
            seconds = time.perf_counter() - begin
            as_it_is = tokens_of(engine_of(fused, setting, graphs=False, **sizes), *asked)
            unfused = tokens_of(engine_of(TargetModel(model), setting, graphs=False, **sizes), *asked)
        except Exception as exception:  # every setting, then the verdict
            yield Row(name, f"{type(exception).__name__} {str(exception)[:200]}", ok=False)
            continue
        wrong, apart = (sum(a != b for a, b in zip(got, other, strict=True)) for other in (as_it_is, unfused))
        error = f"{wrong} of {count} requests differ from rounds as they are, {apart} from unfused layers"
        error += f"; {captured.stats().rounds} rounds, {captured.stats().preemptions} preemptions"
        yield Row(name, error, f"{seconds:.1f} s", ok=not wrong and not apart)


def steady_rows() -> Iterator[Row]:
    """No wait for the host but for results, no allocation by the driver, and a level of memory that stays."""
    bound = TargetModel(gpu_engine.target("gemma4-e2b", 64))
    engine = engine_of(bound, Setting("MTP", TREE, 1), graphs=True, max_model_len=1 << 14, full_slots=1 << 16)
    endless = SamplingParams(max_new_tokens=(1 << 14) - 64, ignore_eos=True)
    streams = [engine.stream([1, 2, 3 + i], endless) for i in range(4)]

    def steps(count: int) -> None:
        for _ in range(count):
            for stream in streams:
                next(stream)

    steps(60)
    yield waiting_row("steady rounds", lambda: steps(50))
    for stream in streams:
        stream.close()

    short = SamplingParams(max_new_tokens=200, ignore_eos=True)
    levels, begin = [], time.perf_counter()
    while engine.stats().rounds < ROUNDS * len(streams):  # counted by request, of which so many share a round
        engine.generate([[1, 2, 3 + i] for i in range(16)], short, progress=False)
        stats = torch.cuda.memory_stats()
        levels.append((stats["allocated_bytes.all.current"], stats["num_device_alloc"]))
    seconds = time.perf_counter() - begin
    half = levels[len(levels) // 2 :]
    grown = half[-1][0] - half[0][0]
    yield Row(
        f"memory over {engine.stats().rounds // len(streams)} rounds",
        f"{grown} bytes more in the second half, {half[-1][1] - half[0][1]} calls of the driver",
        f"{seconds:.0f} s",
        ok=grown <= 0 and half[-1][1] == half[0][1],
    )


def check_rows(quick: bool = False) -> Iterator[Row]:
    """All of the above; on a CPU the tape of the tests stands in for graphs."""
    if ON_CPU:
        import sys

        sys.path.insert(0, str(ROOT / "tests"))
        from tape import record

        specdec.engine.capture_for = lambda device, setting: record  # type: ignore[assignment,misc]
    if DEVICE.type == "cuda" and not quick:  # first: the others take minutes
        yield from steady_rows()
    yield from parity_rows(quick)
