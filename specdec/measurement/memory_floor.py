"""The memory floor of a round: the bytes that it must stream, divided by the read bandwidth of this machine.

    weights      every parameter of the target once, packed ones as words and scales. An embedding table counts by the
                 rows that are looked up, unless it is also the head
    experts      only the experts of a mixture that are chosen: E (1 - (1 - k / E) ** rows) of E on average
    kv           keys and values that a request's rows can see, in every layer that attends to them; in a sliding layer
                 those of its window
    states       the state of every recurrent layer of a request, read and written, without its records
    drafts       weights and K/V of each forward of the MTP modules, and the head once per draft

Activations, other drafters' reads and the K/V of the new rows are not counted, so no round is faster than its floor.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import nn

from specdec.draft_models.base import Drafter
from specdec.draft_models.native_mtp.mtp_drafter import NativeMtpDrafter
from specdec.layers.packed.packed_modules import PackedExperts, packed_of
from specdec.models.described_model import ModelOnMeta
from specdec.models.target import TargetModel

MIN_READ_BYTES = 256 << 20
"""Bytes of a timed read on a CPU, and at least on a GPU."""
MAX_READ_BYTES = 4 << 30
"""Upper bound on the bytes of a timed read on a GPU."""
READS = 10
"""Timed reads of each kind, of which the fastest counts."""


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes that one round streams. rows: of embedding tables. drafts: 0 in a plain step."""

    weights: int
    experts: int
    rows: int
    kv: int
    states: int = 0
    drafts: int = 0

    @property
    def total(self) -> int:
        return sum(astuple(self))


def step_bytes(target: TargetModel | ModelOnMeta, batch: int, nodes: int, context: int) -> StepBytes:
    """Bytes that a step streams for `batch` requests, each with `nodes` rows and `context` committed tokens."""
    head: nn.Module = target.model.get_output_embeddings()  # the user's modules: fused ones may hold merged weights
    weights, experts, rows = weight_bytes([target.user_decoder, head], head, target, batch * nodes)
    dtype, attending = target.dtype, [spec for spec in target.layout.layers if not spec.recurrent]
    kept = sum(min(context, spec.window or context) * field.bytes(dtype) for spec in attending for field in spec.fields)
    return StepBytes(weights, experts, rows, batch * kept, 2 * batch * target.layout.state_bytes(dtype))


def weight_bytes(
    read: Sequence[nn.Module], head: nn.Module, target: TargetModel | ModelOnMeta, rows: int
) -> tuple[int, int, int]:
    """Bytes of these modules that a step of `rows` rows streams: (weights, experts, rows of embedding tables)."""
    weights = experts = tables = 0
    whole = {id(weight) for weight in head.parameters()}
    parts = [part for module in read for part in module.modules()]
    owners = {weight: part for part in reversed(parts) for weight in part.parameters(recurse=False)}
    for weight, part in owners.items():
        if isinstance(part, nn.Embedding) and id(weight) not in whole:
            tables += rows * weight.nbytes // len(weight)
        elif type(part).__name__.endswith("Experts") and len(weight) == getattr(part, "num_experts", None):
            experts += round(expected_experts(target, len(weight), rows) * weight.nbytes / len(weight))
        else:
            weights += weight.nbytes
    for part in dict.fromkeys(parts):
        packed = sum(weight.nbytes for weight in packed_of(part))
        if isinstance(part, PackedExperts):
            experts += round(expected_experts(target, part.num_experts, rows) * packed / part.num_experts)
        else:
            weights += packed
    return weights, experts, tables


def draft_bytes(drafter: Drafter | None, target: TargetModel, batch: int, steps: int, context: int) -> int:
    """Bytes that MTP modules stream for `steps` drafts per request; 0 for other drafters.

    Module i, from 0 on, runs 1 + min(i, steps - 1) times a round: once over the newly committed tokens, then once
    over each draft before its own. In form R the module runs once for each draft.
    """
    if not isinstance(drafter, NativeMtpDrafter):
        return 0
    total, count = 0, len(drafter.modules)
    for number, module in enumerate(drafter.modules):
        forwards = steps if drafter.form == "R" else 1 + min(number, steps - 1)
        own = module.parts()
        head = own.pop("head", target.model.get_output_embeddings())
        spec = target.layout.layers[drafter.family.like]
        kept = min(context, spec.window or context) * sum(field.bytes(target.dtype) for field in spec.fields)
        heads = steps if count == 1 else int(number < steps)
        total += forwards * (sum(weight_bytes([*own.values()], head, target, batch)) + batch * kept)
        total += heads * sum(weight_bytes([head], head, target, batch))
    return total


def expected_experts(target: TargetModel | ModelOnMeta, experts: int, rows: int) -> float:
    """Expected number of distinct experts that `rows` rows choose, if each row chooses evenly."""
    names = ("num_experts_per_tok", "top_k_experts")
    chosen = next(filter(None, (getattr(target.config, name, None) for name in names)), experts)
    return float(experts * (1 - (1 - chosen / experts) ** rows))


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second of the fastest way to read a tensor larger than any cache; each is tried `READS` times."""
    size, on_gpu = MIN_READ_BYTES, device.type == "cuda"
    if on_gpu:
        size = max(size, min(MAX_READ_BYTES, torch.cuda.mem_get_info(device)[0] // 4))
    x = torch.ones(size // 4, dtype=torch.float32, device=device)
    reads: list[tuple[int, Callable[[], object]]] = [(1, x.sum), (1, x.amax)]
    if on_gpu:
        y = torch.empty_like(x)
        reads.append((2, lambda: torch.mul(x, 1.5, out=y)))  # reads and writes
    return max(count * x.nbytes / _seconds(call, device) for _ in range(READS) for count, call in reads)


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
