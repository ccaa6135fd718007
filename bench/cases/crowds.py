"""Small engines under many requests: captured rounds against rounds as they are, level memory, crowds."""

import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import wraps
from typing import Any
from unittest import mock

from bench.device import DEVICE, ON_CPU, ROOT  # isort: skip - before triton
import torch

import specdec.engine
from bench.clock import waiting_row
from bench.report import Row
from bench.subjects import prompts_of
from bench.tiny_targets import CHAIN, TREE, VOCAB, Setting, tiny_engine, tiny_target
from bench.verify import attempt
from specdec.config import SamplingParams
from specdec.engine import Engine
from specdec.gpu.operations import choose_operations
from specdec.kvcache.sanitize import SETTING as SANITIZE
from specdec.models.target import TargetModel
from specdec.runtime.scheduler import slots_needed

sys.path.insert(0, str(ROOT / "tests"))
import tape
from crowd import each_alone, make_crowd, require_empty, require_no_leak, serve_crowd, wrong_requests

DRAFTS = (("none", CHAIN), ("n-gram", CHAIN), ("MTP", CHAIN), ("MTP", TREE), ("EAGLE-3", TREE))
GRAPHS = [Setting(*draft, page_size) for draft in DRAFTS for page_size in (1, 16)]
SHORT = {"max_batch_size": 32, "full_slots": 1600, "swa_slots": 1200}
CROWDED = [Setting(*draft, 16) for draft in (("MTP", TREE), ("MTP", CHAIN), ("EAGLE-3", TREE), ("n-gram", CHAIN))]
CROWD = [Setting(*draft, page) for draft, page in zip(DRAFTS, (16, 1, 16, 1, 16), strict=True)]


def on_tape(rows: Callable[..., Iterator[Row]]) -> Callable[..., Iterator[Row]]:
    """On a CPU the tape of the tests stands in for graphs while these rows are made."""

    @wraps(rows)
    def taped(*arguments: Any, **options: Any) -> Iterator[Row]:
        record = {"capture_for": lambda _, setting: tape.record if setting else None} if ON_CPU else {}
        with mock.patch.multiple(specdec.engine, **record) if record else nullcontext():
            yield from rows(*arguments, **options)

    return taped


def fused_target(family: str, head_dim: int) -> TargetModel:
    model = tiny_target(family, head_dim)
    return TargetModel(model, choose_operations("auto", "torch" if ON_CPU else "triton", DEVICE, torch.float32))


@on_tape
def parity_rows(families: tuple[str, ...], head_dim: int, few: int, many: int) -> Iterator[Row]:
    """Graphs against none: a few requests of every drafter, then `many` through pools for a tenth of them."""
    cases: list[Any] = [(family, setting, {}, few, 24) for family in families for setting in GRAPHS]
    cases += [("Gemma4Text", setting, SHORT, many, 80) for setting in CROWDED] if many else []
    if ON_CPU:
        cases = [("Gemma4Text", Setting("MTP", TREE, 1), {}, few, 4)]
    for family, setting, sizes, count, longest in cases:
        if setting.fits(family):
            name = f"graphs, {family}, {setting.words}, {count} requests"
            yield attempt(name, _parity_row, name, family, head_dim, setting, sizes, count, longest)


def _parity_row(name: str, family: str, head_dim: int, setting: Setting, sizes: Any, count: int, longest: int) -> Row:
    """Runs the requests in captured rounds, in rounds as they are, and in those of unfused layers."""
    draw = random.Random(count)
    prompts = prompts_of([draw.randint(1, longest) for _ in range(count)], VOCAB, count)
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

    def tokens(target: TargetModel, graphs: bool) -> tuple[list[list[int]], Engine]:
        engine = tiny_engine(target, setting, cuda_graphs="auto" if graphs else False, **sizes)
        outputs = engine.generate(prompts, params, progress=False)
        engine.table.check()
        assert engine.table.allocator.primary.held_pages == 0, "slots are held"
        return [out.token_ids for out in outputs], engine

    fused, begin = fused_target(family, head_dim), time.perf_counter()
    got, captured = tokens(fused, True)
    seconds = time.perf_counter() - begin
    others = tokens(fused, False)[0], tokens(TargetModel(fused.model), False)[0]
    wrong, apart = (sum(a != b for a, b in zip(got, other, strict=True)) for other in others)
    found = f"{wrong} of {count} requests differ from rounds as they are, {apart} from unfused layers"
    found += f"; {captured.stats().rounds} rounds, {captured.stats().preemptions} preemptions"
    return Row(name, found, f"{seconds:.1f} s", not wrong and not apart)


def steady_rows(rounds: int) -> Iterator[Row]:
    """No wait for the host but for results, no allocation by the driver, and a level of memory that stays."""
    bound = TargetModel(tiny_target("Gemma4Text", 64))
    engine = tiny_engine(bound, Setting("MTP", TREE, 1), max_model_len=1 << 14, full_slots=1 << 16)
    endless = SamplingParams(max_new_tokens=(1 << 14) - 64, ignore_eos=True)
    streams = [engine.stream([1, 2, 3 + i], endless) for i in range(4)]

    def steps(count: int) -> None:
        for _ in range(count):
            for stream in streams:
                next(stream)

    steps(60)
    yield waiting_row("steady rounds", lambda: steps(50))
    for stream in streams:
        stream.close()  # type: ignore[attr-defined]
    short = SamplingParams(max_new_tokens=200, ignore_eos=True)
    levels, begin = [], time.perf_counter()
    while engine.stats().rounds < rounds * len(streams):  # counted by request, of which four share a round
        engine.generate([[1, 2, 3 + i] for i in range(16)], short, progress=False)
        stats = torch.cuda.memory_stats()
        levels.append((stats["allocated_bytes.all.current"], stats["num_device_alloc"]))
    half = levels[len(levels) // 2 :]
    grown, called = (half[-1][i] - half[0][i] for i in range(2))
    found = f"{grown} bytes more in the second half, {called} calls of the driver"
    name = f"memory over {engine.stats().rounds // len(streams)} rounds"
    yield Row(name, found, f"{time.perf_counter() - begin:.0f} s", grown <= 0 and not called)


@on_tape
def crowd_rows(families: tuple[str, ...], head_dim: int, requests: int, longest: int) -> Iterator[Row]:
    """Shared beginnings, mixed sampling and speculation, priorities, aborts at random: every request has the tokens of
    its lone run, every slot is free or the prefix cache's, and a closed engine leaves nothing."""
    for family in families:
        bound = fused_target(family, head_dim)
        asked = make_crowd(requests, longest, VOCAB)
        lone = tiny_engine(bound, CROWD[0], max_batch_size=1, max_model_len=2 * longest)
        alone = each_alone(lone, asked)
        lone.close()
        for setting in CROWD[2:3] if ON_CPU else CROWD:
            if not setting.fits(family):
                continue
            for graphs, sanitize in ((True, True),) if ON_CPU else ((True, False), (True, True), (False, True)):
                name = f"crowd of {requests}, {family}, {setting.words}"
                name += f"{', captured' if graphs else ''}{', sanitized' if sanitize else ''}"
                with_sanitizer(sanitize)
                yield attempt(name, _crowd_row, name, bound, setting, asked, alone, graphs, longest)
    with_sanitizer(False)


def with_sanitizer(on: bool) -> None:
    os.environ[SANITIZE] = str(int(on))


def _crowd_row(
    name: str, bound: TargetModel, setting: Setting, asked: Any, alone: list[list[int]], graphs: bool, longest: int
) -> Row:
    """One engine's crowd, in slots for a tenth of it."""
    said: list[str] = []
    begin = time.perf_counter()

    def served() -> Engine:
        made: dict[str, Any] = {"max_model_len": 2 * longest, "cuda_graphs": "auto" if graphs else False}
        roomy = tiny_engine(bound, setting, **{**made, "cuda_graphs": False, "max_batch_size": 1})
        sizes = [slots_needed(roomy.table, len(one.prompt), one.params.max_new_tokens) for one in asked]
        full, *windowed = (max(sum(some) // 10, max(some)) for some in zip(*sizes, strict=True))
        roomy.close()
        if windowed:  # a window each: they bound how many are admitted
            made["swa_slots"] = 3 * max(windowed)
        rows = max(len(asked) * 16 // 25, 1)
        engine = tiny_engine(bound, setting, max_batch_size=rows, full_slots=full, **made)
        outputs = serve_crowd(engine, asked)
        wrong = wrong_requests(asked, outputs, alone)
        if wrong:
            said.append(f"requests {wrong[:5]} and {len(wrong)} in all differ from their lone run")
        require_empty(engine)
        stats = engine.stats()
        drafts = sum(stats.accepted_counts)
        said.append(f"{stats.preemptions} preemptions, {stats.aborted} aborted, {drafts} drafts accepted")
        return engine

    require_no_leak(served)
    return Row(name, "; ".join(said), f"{time.perf_counter() - begin:.0f} s", len(said) == 1)
