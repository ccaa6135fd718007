"""Exchanges between two GPUs by size, next to a copy and to NCCL. Steps of split targets: `rounds --devices 2`."""

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing

from bench.clock import synchronize, wall_seconds
from bench.report import Row
from specdec.gpu.cuda_capture import CudaCapture
from specdec.gpu.ranks import Ranks, make_ranks

EXCHANGES = 84
WIDTH, PARTS = 4096, 2
EXPERT_WIDTH = 2816
"""Hidden size of Gemma 4 26B-A4B."""
TOP_K = 8
"""Experts a token of that model."""


def exchange_rows(rows: Sequence[int], expert_rows: Sequence[int]) -> Iterator[Row]:
    """The parts of a row-parallel product, and of experts, of which each rank has about half."""
    ranks = make_ranks(torch.device("cuda:0"), 2)
    ranks.reserve(max(*(2 * PARTS * size * WIDTH for size in rows), *(TOP_K * s * EXPERT_WIDTH for s in expert_rows)))
    for size in rows:
        parts = [torch.randn(PARTS, size, WIDTH, device=device) for device in ranks.devices]
        want = torch.cat([part.cpu() for part in parts])
        name = f"{size} rows, {PARTS * size * WIDTH * 4 / 1024:.0f} KiB a rank"
        yield from _exchanges(name, ranks, parts, partial(ranks.gather, parts), want)
    for size in expert_rows:
        parts = [torch.randn(TOP_K, size, EXPERT_WIDTH, device=device) for device in ranks.devices]
        first = torch.randint(-1, 1, (size, TOP_K), dtype=torch.int32)
        owners = [own.to(device) for own, device in zip((first, -1 - first), ranks.devices, strict=True)]
        want = torch.where((first.t() >= 0)[..., None], *(part.cpu() for part in parts))
        name = f"experts of {size} rows, {TOP_K * size * EXPERT_WIDTH * 4 / 1024:.0f} KiB in all"
        yield from _exchanges(name, ranks, parts, partial(ranks.select, parts, owners), want)


def _exchanges(
    name: str, ranks: Ranks, parts: Sequence[torch.Tensor], meet: Callable[[], list[torch.Tensor]], want: torch.Tensor
) -> Iterator[Row]:
    """Many in a captured graph of each device: whether all devices hold the right bits, and the time of one."""
    found: list[torch.Tensor] = []

    def exchanged() -> torch.Tensor:
        ranks.begin()
        for _ in range(EXCHANGES):
            found[:] = meet()
        ranks.end()
        return parts[0]

    def copied() -> torch.Tensor:
        for rank, part in enumerate(parts):
            with ranks.on(rank):
                for _ in range(EXCHANGES):
                    part.clone()
        return parts[0]

    def is_right() -> bool:
        synchronize(ranks.devices)
        ranks.check()
        return all(torch.equal(out.cpu(), want) for out in found)

    exchanged()
    equal = is_right()
    yield Row(f"{name}, not captured", "right" if equal else "WRONG", ok=equal)
    times = []
    for body in (exchanged, copied):
        replay, _ = CudaCapture(*ranks.devices)(body)
        replay()
        times.append(wall_seconds(replay, ranks.devices) / EXCHANGES * 1e6)
    equal &= is_right()
    yield Row(name, "right" if equal else "WRONG", f"{times[0]:.2f} us, a copy alone {times[1]:.2f}", equal)


def _nccl_process(rank: int, sizes: Sequence[int], store: str, found: str) -> None:
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
        times.append(wall_seconds(graph.replay, [device], 3) / EXCHANGES * 1e6)
        del graph
    if rank == 0:
        Path(found).write_text(json.dumps(times), "utf-8")
    dist.barrier()
    dist.destroy_process_group()


def nccl_rows(rows: Sequence[int]) -> Iterator[Row]:
    """An all-reduce of bfloat16 rows over two devices, a process for each, as other engines have it."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "found.json")
        multiprocessing.spawn(_nccl_process, (tuple(rows), f"{folder}/store", str(found)), nprocs=2)
        for size, us in zip(rows, json.loads(found.read_text("utf-8")), strict=True):
            yield Row(f"NCCL, all-reduce of {size} rows, captured", "", f"{us:.2f} us")
