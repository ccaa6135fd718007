"""Access to an engine's internals for tests: leaks, prompt chunks, captures. Tests import internal names from here."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cpu_capture import record

import specdec.engine
from specdec import Engine
from specdec.gpu.operations import REFERENCE
from specdec.kvcache.prefix_cache import PrefixCache
from specdec.layers.packed.packed_modules import PackedExperts, PackedLinear
from specdec.layers.packed.packed_weight import dequantised
from specdec.models.target import StatesNeeded, TargetModel
from specdec.modules.weight_watch import StorageWatch
from specdec.runtime.launches import settle_round
from specdec.runtime.prompts.prefill import Prefill
from specdec.runtime.prompts.prefixes import WORTH_WAITING, PrefixPolicy
from specdec.runtime.prompts.prompt_budget import IDLE_STEPS, Division, PromptBudget, PromptGap, PromptLoad
from specdec.runtime.prompts.prompt_scores import PromptLogProbs
from specdec.runtime.request import Request, RequestState, restricted
from specdec.runtime.request_output import RequestStats
from specdec.runtime.rounds.captured_prompts import ChunkShape
from specdec.runtime.rounds.prompt_chunks import divide
from specdec.runtime.rounds.prompt_sizes import PartShare
from specdec.runtime.rounds.result import RoundResult, RoundShape
from specdec.runtime.scheduler import Scheduler, rank, slots_needed
from specdec.text.detokenize import Detokenizer


def state_cache_of(engine: Engine) -> PrefixCache:
    """Return the prefix cache of an engine over recurrent layers."""
    cache = engine.table.allocator.cache
    assert isinstance(cache, PrefixCache) and cache.states is not None
    return cache


def assert_idle(engine: Engine) -> None:
    """Assert that no request is left, nor anything that one may hold: rows, pages, a prompt forward, a frozen view."""
    engine.table.check()
    assert engine.scheduler.idle and engine.inbox.is_idle and engine.steps.prefill.reading is None
    allocator = engine.table.allocator
    assert not any(pool.held_pages for pool in allocator.pools)
    assert not allocator.frozen and not engine.table.active_rows.size


def record_round(stats: RequestStats, emitted: int, accepted: int, num_drafts: int) -> None:
    """Count a round with drafts `num_drafts` deep: its emitted tokens, of which the first `accepted` were drafts."""
    one = RequestStats(rounds=1, round_tokens=emitted)
    if num_drafts:
        one.drafted_rounds, one.drafted_round_tokens, one.draft_tokens = 1, emitted, num_drafts
        one.accepted_counts, one.drafted_counts = [1] * accepted + [0] * (num_drafts - accepted), [1] * num_drafts
    stats.add(one)


@contextmanager
def prompt_chunks() -> Iterator[list[int]]:
    """Collect the lengths of all prompt chunks that engines compute in the block."""
    lengths: list[int] = []
    launch = Prefill.launch

    def counted(self: Prefill, reading: Any) -> Any:
        lengths.extend(reading.chunk_len.tolist())
        return launch(self, reading)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Prefill, "launch", counted)
        yield lengths


def capture_on_cpu(patch: pytest.MonkeyPatch, captured: bool = True) -> None:
    """Make later engines capture rounds and prompts on a CPU, or capture nothing."""
    patch.setattr(specdec.engine, "capture_for", lambda *_: record if captured else None)


def captured_rounds(engine: Engine) -> dict[Any, Any]:
    """Return the captured rounds that can be replayed, by shape."""
    return captures_of(engine, RoundShape)


def captured_prompts(engine: Engine) -> dict[Any, Any]:
    """Return the captured prompt forwards that can be replayed, by shape."""
    return captures_of(engine, ChunkShape)


def captures_of(engine: Engine, kind: type) -> dict[Any, Any]:
    """Return the captures that can be replayed and whose shape is of this type."""
    return {shape: one for shape, one in engine.steps.store._captured.items() if isinstance(shape, kind)}


def packed_values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the dequantised weights of packed modules, by the name of the plain parameter."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            found[f"{name}.weight"] = dequantised(module.packed, torch.float32)
        if isinstance(module, PackedExperts):
            for which in ("gate_up", "down"):
                weights = getattr(module.experts, which)
                each = [dequantised(weights[i], torch.float32) for i in range(len(weights))]
                found[f"{name}.{which}_proj"] = torch.stack(each)
    return found
