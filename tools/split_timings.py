"""How long several GPUs take: exchanges by size, next to a copy and to NCCL, and steps of targets that are split.

For `gpu_tensor_parallel.py`, which prints each row as soon as it is measured. Layers are few, and what the published
depth takes is computed from two depths: `rest + layers * (difference / layers in between)`.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from gpu_setup import DEVICE  # isort: skip - before triton
import torch
import torch.distributed as dist
from gpu_bits import prompts_of
from result_table import Row
from torch import multiprocessing

from specdec.config import EngineConfig, SamplingParams, SpecConfig
from specdec.engine import Engine
from specdec.evaluation.model_shapes import Shrink, find_shape
from specdec.evaluation.phases.random_weights import make_drafter, make_target
from specdec.gpu import exchange_kernels
from specdec.gpu import ranks as ranks_module
from specdec.gpu.cuda_capture import CudaCapture
from specdec.gpu.operations import FAST
from specdec.gpu.ranks import PeerRanks, Ranks, make_ranks
from specdec.models.target import TargetModel

EXCHANGES = 84
SIZES = (1, 8, 16, 40, 160)
EXPERT_SIZES = (1, 8, 128)
WIDTH, PARTS = 4096, 2
EXPERT_WIDTH, TOP_K = 2816, 8  # of Gemma 4 26B-A4B
TIMED = {
    "llama-8b": (4, 8),
    "gemma4-31b": (6, 12),
    "gemma4-e4b": (6, 12),
    "gemma4-26b-a4b": (6, 12),
    "llama-70b": (3, 6),
}
CHAIN = SpecConfig(4, adaptive=False)


def synchronize(devices: Sequence[torch.device]) -> None:
    for device in devices:
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], Any], devices: Sequence[torch.device], repeats: int = 10) -> float:
    """Times one `work`, many in a row: the best of five."""
    best = float("inf")
    for _ in range(5):
        synchronize(devices)
        begin = time.perf_counter()
        for _ in range(repeats):
            work()
        synchronize(devices)
        best = min(best, (time.perf_counter() - begin) / repeats)
    return best


def not_exchanged(ranks: PeerRanks, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What `PeerRanks.gather` returns, without the exchange: whatever the buffers hold."""
    shape = (len(ranks) * len(parts[0]), *parts[0].shape[1:])
    return [buffer[: len(ranks) * parts[0].numel()].view(shape) for buffer in ranks._buffers]


def not_selected(ranks: PeerRanks, parts: Sequence[torch.Tensor], _owners: object) -> list[torch.Tensor]:
    """`PeerRanks.select`, likewise."""
    return [buffer[: parts[0].numel()].view(parts[0].shape) for buffer in ranks._buffers]


FORMS: dict[str, list[tuple[Any, dict[str, Any]]]] = {
    "one GPU": [],
    "a share": [(PeerRanks, {"gather": not_exchanged, "select": not_selected})],
    "TP=2": [],
    "all tagged": [(exchange_kernels, {"TAGGED": 2**26})],
    "flags": [(exchange_kernels, {"TAGGED": 0})],
    "two launches": [(PeerRanks, {"_halves": lambda _: ("push", "wait")})],
    "plain launches": [(ranks_module, {"pdl_options": lambda _: {"PDL": False}})],
}
"""What is timed, all but the first on two GPUs, and what is replaced for that. Of a share nothing is exchanged, so that
numbers are wrong; those after it differ in their exchanges."""
BASES, EXCHANGING = ("one GPU", "a share"), tuple(FORMS)[2:]


@contextmanager
def exchanging(form: str) -> Iterator[None]:
    """Engines made inside exchange as this form does."""
    with ExitStack() as patches:
        for owner, replaced in FORMS[form]:
            patches.enter_context(mock.patch.multiple(owner, **replaced))
        yield


def exchange_rows(size: int, forms: Sequence[str]) -> Iterator[Row]:
    """The parts of one row-parallel product of `size` rows."""
    kib = PARTS * size * WIDTH * 4 / 1024
    for form in forms:
        with exchanging(form):
            ranks = make_ranks(torch.device("cuda:0"), 2)
            ranks.reserve(2 * PARTS * size * WIDTH)
            parts = [torch.randn(PARTS, size, WIDTH, device=device) for device in ranks.devices]
            want = torch.cat([part.cpu() for part in parts])
            name = f"exchange, {size} rows, {kib:.0f} KiB a rank, {form}"
            yield from _exchange_rows(name, ranks, parts, partial(ranks.gather, parts), want)


def expert_rows(size: int, forms: Sequence[str]) -> Iterator[Row]:
    """The parts of the experts of `size` rows, of which each rank has about half."""
    kib = TOP_K * size * EXPERT_WIDTH * 4 / 1024
    for form in forms:
        with exchanging(form):
            ranks = make_ranks(torch.device("cuda:0"), 2)
            ranks.reserve(TOP_K * size * EXPERT_WIDTH)
            parts = [torch.randn(TOP_K, size, EXPERT_WIDTH, device=device) for device in ranks.devices]
            first = torch.randint(-1, 1, (size, TOP_K), dtype=torch.int32)
            owners = [own.to(device) for own, device in zip((first, -1 - first), ranks.devices, strict=True)]
            want = torch.where((first.t() >= 0)[..., None], *(part.cpu() for part in parts))
            name = f"experts, {size} rows, {kib:.0f} KiB in all, {form}"
            yield from _exchange_rows(name, ranks, parts, partial(ranks.select, parts, owners), want)


def _exchange_rows(
    name: str, ranks: Ranks, parts: Sequence[torch.Tensor], meet: Callable[[], list[torch.Tensor]], want: torch.Tensor
) -> Iterator[Row]:
    found: list[torch.Tensor] = []

    def program() -> torch.Tensor:
        ranks.begin()
        for _ in range(EXCHANGES):
            found[:] = meet()
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
    yield Row(f"{name}, not captured", "right" if equal else "WRONG", ok=equal)
    times = []
    for body in (program, alone):
        replay, _ = CudaCapture(*ranks.devices)(body)
        replay()
        times.append(seconds_of(replay, ranks.devices) / EXCHANGES * 1e6)
    ranks.check()
    equal &= all(torch.equal(out.cpu(), want) for out in found)
    yield Row(name, "right" if equal else "WRONG", f"{times[0]:.2f} us, a copy alone {times[1]:.2f}", equal)


def nccl_row_times(rank: int, sizes: Sequence[int], store: str, found: str) -> None:
    """One process a device: microseconds of an all-reduce of bfloat16 rows, captured; rank 0 writes them to `found`."""
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # no multicast, as in ours
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", world_size=2, rank=rank, device_id=device)
    times = []
    for size in sizes:
        rows = torch.zeros(size, WIDTH, device=device, dtype=torch.bfloat16)
        for _ in range(3):
            dist.all_reduce(rows)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(EXCHANGES):
                dist.all_reduce(rows)
        graph.replay()
        dist.barrier()
        times.append(seconds_of(graph.replay, [device], 3) / EXCHANGES * 1e6)
        del graph
    if rank == 0:
        Path(found).write_text(json.dumps(times), "utf-8")
    dist.barrier()
    dist.destroy_process_group()


def nccl_rows(sizes: Sequence[int] = SIZES) -> Iterator[Row]:
    """An all-reduce of bfloat16 rows over two devices, a process for each, as other engines have it."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "found.json")
        multiprocessing.spawn(nccl_row_times, (tuple(sizes), f"{folder}/store", str(found)), nprocs=2)
        for size, microseconds in zip(sizes, json.loads(found.read_text("utf-8")), strict=True):
            yield Row(f"NCCL, all-reduce of {size} rows, captured", f"{microseconds:.2f} us")


def step_ms(target: TargetModel, drafter: Any, count: int, batch: int) -> float:
    """A plain step, or a round of 4 drafts, of requests that all decode after 1,024 tokens: the best of five runs."""
    config = EngineConfig(
        tensor_parallel=count, max_model_len=2048, attention="triton", deterministic=True, max_batch_size=batch
    )
    with Engine(target, drafter, spec=CHAIN, config=config) as engine:
        params = SamplingParams(max_new_tokens=900, ignore_eos=True)
        handles = engine.submit_many(prompts_of([1024] * batch, target.vocab_size, batch), params)
        while any(handle.num_output < 10 for handle in handles):
            engine.step()
        devices = [torch.device("cuda", rank) for rank in range(count)]

        def steps() -> None:
            for _ in range(16):
                engine.step()

        return seconds_of(steps, devices, 1) / 16 * 1e3


def time_rows(name: str, batches: Sequence[int], kinds: Sequence[str], forms: Sequence[str]) -> Iterator[Row]:
    """Plain steps and rounds of one and of two GPUs, at two depths, and what follows for the published one."""
    forms = (*BASES, *forms)
    few, more = TIMED[name]
    shape = find_shape(name)
    depth = shape.target(Shrink()).num_hidden_layers
    took: dict[tuple[str, int, str, int], float] = {}
    for layers in (more, few):
        model = make_target(shape, Shrink(layers), DEVICE, torch.bfloat16, 0)
        target = TargetModel(model, FAST, deterministic=True)
        drafters = {"plain": None, "round of 4": make_drafter(shape, Shrink(layers), target, 1)}
        for kind in kinds:
            for batch in batches:
                for form in forms:
                    with exchanging(form):
                        ms = step_ms(target, drafters[kind], 1 if form == "one GPU" else 2, batch)
                    took[kind, layers, form, batch] = ms
                    yield Row(f"{name}, {layers} layers, {kind}, batch {batch}, {form}", f"{ms:.3f} ms")
        del model, target, drafters
        torch.cuda.empty_cache()
    for kind in kinds:
        for batch in batches:
            layer, whole = {}, {}
            for form in forms:
                short, long = (took[kind, layers, form, batch] for layers in (few, more))
                layer[form] = (long - short) / (more - few) * 1e3
                whole[form] = short + layer[form] / 1e3 * (depth - few)
            for form in forms:
                half, share = ((layer[form] - less) / 2 for less in (layer["one GPU"] / 2, layer["a share"]))
                yield Row(
                    f"{name}, {kind}, batch {batch}, by layers, {form}",
                    f"{layer[form]:.1f} us a layer; a sum {half:.1f} us above half, {share:.1f} above a share",
                    f"of {depth} layers {whole[form]:.2f} ms",
                )
