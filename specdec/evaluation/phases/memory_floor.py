"""The memory floor of a step: bytes that one verify step must stream, over the read bandwidth of this machine.

    weights      every parameter of the target once; of embedding tables only rows, unless the head is that table
    experts      of a mixture only those that are chosen: E (1 - (1 - k / E) ** rows) of E are expected to be
    kv           keys and values that a request's rows can see, of every layer that attends to them: of a sliding layer
                 its window

Activations, what a drafter reads and the K/V of the new rows are left out: nothing is faster than the floor.
"""

import time
from dataclasses import dataclass

import torch
from torch import nn

from specdec.models.target import TargetModel

READ_BYTES = {"cuda": 4 << 30}
MIN_READ_BYTES = 256 << 20
READS = 10


@dataclass(frozen=True, slots=True)
class StepBytes:
    """What one verify step streams. rows: of embedding tables."""

    weights: int
    experts: int
    rows: int
    kv: int

    @property
    def total(self) -> int:
        return self.weights + self.experts + self.rows + self.kv


def step_bytes(target: TargetModel, batch: int, nodes: int, context: int) -> StepBytes:
    """For `batch` requests of `nodes` rows each, with `context` committed tokens."""
    weights = experts = rows = 0
    head_module: nn.Module = target.model.get_output_embeddings()  # the user's modules: ours may hold weights merged
    head = {id(weight) for weight in head_module.parameters()}
    seen: set[int] = set()
    for part in [*target.user_decoder.modules(), *head_module.modules()]:
        for weight in part.parameters(recurse=False):
            if id(weight) in seen:
                continue
            seen.add(id(weight))
            if isinstance(part, nn.Embedding) and id(weight) not in head:
                rows += batch * nodes * weight.nbytes // len(weight)
            elif type(part).__name__.endswith("Experts") and len(weight) == getattr(part, "num_experts", None):
                experts += round(expected_experts(target, len(weight), batch * nodes) * weight.nbytes / len(weight))
            else:
                weights += weight.nbytes
    keys = 0
    for spec in target.layout.layers:
        visible = context if spec.window is None else min(context, spec.window)
        keys += visible * 2 * spec.num_kv_heads * spec.head_dim
    return StepBytes(weights, experts, rows, batch * keys * target.dtype.itemsize)


def expected_experts(target: TargetModel, experts: int, rows: int) -> float:
    """Distinct ones among those that rows choose, if each chooses evenly."""
    for name in ("num_experts_per_tok", "top_k_experts"):
        chosen = getattr(target.config, name, None)
        if chosen:
            return float(experts * (1 - (1 - chosen / experts) ** rows))
    return float(experts)


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second, the best of several ways and tries to read more than any cache holds."""
    size = READ_BYTES.get(device.type, MIN_READ_BYTES)
    if device.type == "cuda":
        size = max(MIN_READ_BYTES, min(size, torch.cuda.mem_get_info(device)[0] // 4))
    x = torch.ones(size // 4, device=device)
    y = torch.empty_like(x) if device.type == "cuda" else None
    best = 0.0
    for _ in range(READS):
        best = max(best, x.nbytes / _seconds(lambda: x.sum(), device), x.nbytes / _seconds(lambda: x.amax(), device))
        if y is not None:
            best = max(best, 2 * x.nbytes / _seconds(lambda: torch.mul(x, 1.5, out=y), device))
    return best


def _seconds(call: "object", device: torch.device) -> float:
    assert callable(call)
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
