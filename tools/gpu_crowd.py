"""A crowd on a GPU: 200 requests, 128 at once, prompts and outputs of 1 to 200 tokens, slots for a tenth of them.

Shared beginnings, mixed sampling and speculation, priorities, aborts at random: every one has the tokens of its lone
run, by plain decoding; the books hold, every slot is free or the prefix cache's, and a closed engine leaves nothing
behind. Captured rounds and rounds as they are, with the sanitizer and without; small random targets in float32.
"""

import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from gpu_setup import DEVICE, ON_CPU, ROOT  # isort: skip - before triton
import gpu_engine
import torch
from gpu_engine import CHAIN, TREE, VOCAB, Setting
from gpu_graphs import engine_of
from result_table import Row

from specdec.engine import Engine
from specdec.gpu.operations import choose_operations
from specdec.kvcache.sanitize import SETTING as SANITIZE
from specdec.models.target import TargetModel
from specdec.runtime.scheduler import slots_needed

sys.path.insert(0, str(ROOT / "tests"))
from crowd import each_alone, make_crowd, require_empty, require_no_leak, serve_crowd, wrong_requests

SETTINGS = [
    Setting("none", CHAIN, 16),
    Setting("n-gram", CHAIN, 1),
    Setting("MTP", CHAIN, 16),
    Setting("MTP", TREE, 1),
    Setting("EAGLE-3", TREE, 16),
]


def check_rows(quick: bool = False) -> Iterator[Row]:
    """One row a drafter, with graphs and without, sanitized and not."""
    count, longest = (6, 6) if quick else (200, 200)
    for family in ("gemma4-e2b",) if quick else ("gemma4-e2b", "llama"):
        model = gpu_engine.target(family, 16 if quick else 64)
        bound = TargetModel(model, choose_operations("auto", "auto", DEVICE, torch.float32))
        asked = make_crowd(count, longest, VOCAB)
        lone = engine_of(bound, SETTINGS[0], graphs=True, max_batch_size=1, max_model_len=2 * longest)
        alone = each_alone(lone, asked)
        lone.close()
        for setting in SETTINGS[2:3] if quick else SETTINGS:
            if setting.drafter == "MTP" and not family.startswith("gemma4"):
                continue
            for graphs, sanitize in ((True, True),) if quick else ((True, False), (True, True), (False, True)):
                shape = "" if setting.drafter in ("none", "n-gram") else " tree" if setting.spec is TREE else " chain"
                name = f"crowd of {count}, {family}, {setting.drafter}{shape}, pages of {setting.page_size}"
                name += f"{', captured' if graphs and not ON_CPU else ''}{', sanitized' if sanitize else ''}"
                yield row(name, bound, setting, asked, alone, graphs=graphs, sanitize=sanitize, longest=longest)


def row(
    name: str,
    bound: TargetModel,
    setting: Setting,
    asked: Any,
    alone: list[list[int]],
    *,
    graphs: bool,
    sanitize: bool,
    longest: int,
) -> Row:
    """One engine's crowd."""
    before = os.environ.get(SANITIZE)
    os.environ[SANITIZE] = str(int(sanitize))
    said: list[str] = []
    begin = time.perf_counter()

    def served() -> Engine:
        made: dict[str, Any] = {"max_model_len": 2 * longest, "prefill_chunk": 64}
        roomy = engine_of(bound, setting, graphs=False, max_batch_size=1, **made)
        sizes = [slots_needed(roomy.table, len(one.prompt), one.params.max_new_tokens) for one in asked]
        full, *windowed = (max(sum(some) // 10, max(some)) for some in zip(*sizes, strict=True))
        roomy.close()
        if windowed:  # a window each: they bound who is let in
            made["swa_slots"] = 3 * max(windowed)
        rows = max(len(asked) * 16 // 25, 1)
        engine = engine_of(bound, setting, graphs=graphs, max_batch_size=rows, full_slots=full, **made)
        outputs = serve_crowd(engine, asked)
        wrong = wrong_requests(asked, outputs, alone)
        if wrong:
            said.append(f"requests {wrong[:5]} and {len(wrong)} in all differ from their lone run")
        require_empty(engine)
        stats = engine.stats()
        said.append(
            f"{stats.preemptions} preemptions, {stats.aborted} aborted, {sum(stats.accepted_counts)} drafts accepted"
        )
        return engine

    try:
        require_no_leak(served)
    except Exception as exception:  # every setting, then the verdict
        return Row(name, f"{type(exception).__name__} {str(exception)[:300]}", ok=False)
    finally:
        os.environ.pop(SANITIZE)
        if before is not None:
            os.environ[SANITIZE] = before
    return Row(name, "; ".join(said), f"{time.perf_counter() - begin:.0f} s", ok=len(said) == 1)
