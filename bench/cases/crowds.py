"""Small engines under many requests: level memory, and crowds in captured rounds and in rounds as they are."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import wraps
from typing import Any
from unittest import mock

from bench.device import DEVICE, ON_CPU  # isort: skip - before triton
import cpu_capture
import torch
from crowd import each_alone, make_crowd, require_no_leak, serve_crowd, wrong_requests

import specdec.engine
from bench.report import Row
from bench.tiny_targets import CHAIN, TREE, VOCAB, Setting, tiny_engine, tiny_target
from bench.verify import attempt, level_row
from specdec.config import SamplingParams
from specdec.engine import Engine
from specdec.gpu.operations import choose_operations
from specdec.kvcache.sanitize import SETTING as SANITIZE
from specdec.models.target import TargetModel
from specdec.runtime.scheduler import slots_needed

DRAFTS = (("none", CHAIN), ("n-gram", CHAIN), ("MTP", CHAIN), ("MTP", TREE), ("EAGLE-3", TREE))
CROWD = [Setting(*draft, page) for draft, page in zip(DRAFTS, (16, 1, 16, 1, 16), strict=True)]


def on_tape(rows: Callable[..., Iterator[Row]]) -> Callable[..., Iterator[Row]]:
    """On a CPU the tape of the tests stands in for graphs while these rows are made."""

    @wraps(rows)
    def taped(*arguments: Any, **options: Any) -> Iterator[Row]:
        record = {"capture_for": lambda _, setting: cpu_capture.record if setting else None} if ON_CPU else {}
        with mock.patch.multiple(specdec.engine, **record) if record else nullcontext():
            yield from rows(*arguments, **options)

    return taped


def fused_target(family: str, head_dim: int) -> TargetModel:
    model = tiny_target(family, head_dim)
    return TargetModel(model, choose_operations("auto", "torch" if ON_CPU else "triton", DEVICE, torch.float32))


def level_rows(rounds: int) -> Iterator[Row]:
    """Captured rounds: a level of memory that stays, and no allocation by the driver."""
    engine = tiny_engine(TargetModel(tiny_target("gemma4-e2b", 64)), Setting("MTP", TREE, 1))
    short = SamplingParams(max_new_tokens=200, ignore_eos=True)

    def work() -> list[list[int]]:
        return [out.token_ids for out in engine.generate([[1, 2, 3 + i] for i in range(16)], short, progress=False)]

    def held() -> list[int]:
        stats = torch.cuda.memory_stats()
        return [stats["allocated_bytes.all.current"], stats["num_device_alloc"]]

    yield level_row(engine, work, rounds, held)


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
                name = f"crowd of {requests}, {family}, {setting.summary}"
                name += f"{', captured' if graphs else ''}{', sanitized' if sanitize else ''}"
                os.environ[SANITIZE] = str(int(sanitize))
                yield attempt(name, _crowd_row, name, bound, setting, asked, alone, graphs, longest)
    os.environ[SANITIZE] = "0"


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
        stats = engine.stats()
        drafts = sum(stats.accepted_counts)
        said.append(f"{stats.preemptions} preemptions, {stats.aborted} aborted, {drafts} drafts accepted")
        return engine

    require_no_leak(served)
    return Row(name, "; ".join(said), f"{time.perf_counter() - begin:.0f} s", len(said) == 1)
