"""The memory floor of a step: bytes that one verify step must stream, over the read bandwidth of this machine.

    weights      every parameter of the target once, packed ones as words and scales; of embedding tables only rows,
                 unless the head is that table
    experts      of a mixture only those that are chosen: E (1 - (1 - k / E) ** rows) of E are expected to be
    kv           keys and values that a request's rows can see, of every layer that attends to them: of a sliding layer
                 its window
    states       the state of every recurrent layer of a request, read and written; its records are left out

Activations, what a drafter reads and the K/V of the new rows are left out: nothing is faster than the floor.
"""

import time
from collections.abc import Callable
from dataclasses import astuple, dataclass

import torch
from torch import nn

from specdec.layers.packed.packed_experts import PackedExperts, packed_of
from specdec.models.model_on_meta import ModelOnMeta
from specdec.models.target import TargetModel

MIN_READ_BYTES = 256 << 20
"""Bytes of a timed read on a CPU, and at least on a GPU."""
MAX_READ_BYTES = 4 << 30
"""Upper bound on the bytes of a timed read on a GPU."""
READS = 10
"""Timed reads of each kind, of which the fastest counts."""


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes that one verify step streams. rows: of embedding tables."""

    weights: int
    experts: int
    rows: int
    kv: int
    states: int

    @property
    def total(self) -> int:
        return sum(astuple(self))


def step_bytes(target: TargetModel | ModelOnMeta, batch: int, nodes: int, context: int) -> StepBytes:
    """Bytes of a step of `batch` requests of `nodes` rows each, with `context` committed tokens."""
    weights = experts = rows = 0
    head_module: nn.Module = target.model.get_output_embeddings()  # the user's modules: ours may hold weights merged
    head = {id(weight) for weight in head_module.parameters()}
    parts = [*target.user_decoder.modules(), *head_module.modules()]
    owners = {weight: part for part in reversed(parts) for weight in part.parameters(recurse=False)}
    for weight, part in owners.items():
        if isinstance(part, nn.Embedding) and id(weight) not in head:
            rows += batch * nodes * weight.nbytes // len(weight)
        elif type(part).__name__.endswith("Experts") and len(weight) == getattr(part, "num_experts", None):
            experts += round(expected_experts(target, len(weight), batch * nodes) * weight.nbytes / len(weight))
        else:
            weights += weight.nbytes
    for part in dict.fromkeys(parts):
        packed = sum(weight.nbytes for weight in packed_of(part))
        if isinstance(part, PackedExperts):
            chosen = expected_experts(target, part.num_experts, batch * nodes)
            experts += round(chosen * packed / part.num_experts)
        else:
            weights += packed
    dtype, attending = target.dtype, [spec for spec in target.layout.layers if not spec.recurrent]
    kept = sum(min(context, spec.window or context) * field.bytes(dtype) for spec in attending for field in spec.fields)
    return StepBytes(weights, experts, rows, batch * kept, 2 * batch * target.layout.state_bytes(dtype))


def expected_experts(target: TargetModel | ModelOnMeta, experts: int, rows: int) -> float:
    """Distinct ones among those that rows choose, if each chooses evenly."""
    for name in ("num_experts_per_tok", "top_k_experts"):
        chosen = getattr(target.config, name, None)
        if chosen:
            return float(experts * (1 - (1 - chosen / experts) ** rows))
    return float(experts)


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second, the best of several ways and tries to read more than any cache holds."""
    size, on_gpu = MIN_READ_BYTES, device.type == "cuda"
    if on_gpu:
        size = max(size, min(MAX_READ_BYTES, torch.cuda.mem_get_info(device)[0] // 4))
    x = torch.ones(size // 4, device=device)
    ways: list[tuple[int, Callable[[], object]]] = [(1, x.sum), (1, x.amax)]
    if on_gpu:
        y = torch.empty_like(x)
        ways.append((2, lambda: torch.mul(x, 1.5, out=y)))  # reads and writes
    return max(count * x.nbytes / _seconds(call, device) for _ in range(READS) for count, call in ways)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
