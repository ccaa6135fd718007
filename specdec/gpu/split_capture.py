"""Captures of a program that launches on several devices: a graph a device, which are launched together.

They wait for each other by flags in memory (`exchange_kernels.py`), not by edges, so no graph knows of another. Graphs
are instantiated when all have been recorded.
"""

import gc
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from specdec.gpu.captures import CudaCapture, Program, Replay


class SplitCapture(CudaCapture):
    """Captures into one CUDA graph of each device; those of one `pool` share its memory there."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        super().__init__()
        self._devices = tuple(devices)
        self._device_pools: dict[str, list[Any]] = {}
        self._streams = [torch.cuda.Stream(device) for device in devices]

    def __call__(self, program: Program) -> tuple[Replay, torch.Tensor]:
        pools = self._device_pools.setdefault(self.pool, [])
        for device in self._devices[len(pools) :]:
            with torch.cuda.device(device):
                pools.append(torch.cuda.graph_pool_handle())
        graphs = [torch.cuda.CUDAGraph(keep_graph=True) for _ in self._devices]
        for device, stream in zip(self._devices, self._streams, strict=True):
            self._stream = stream
            with torch.cuda.device(device):
                self._warm_stream()
        self.wait()
        gc.collect()
        for device in self._devices:
            with torch.cuda.device(device):
                torch.cuda.empty_cache()
        recording: list[int] = []
        try:
            with ExitStack() as streams:
                for stream in reversed(self._streams):  # the first device is the current one in the end
                    streams.enter_context(torch.cuda.stream(stream))
                for number, (graph, pool) in enumerate(zip(graphs, pools, strict=True)):
                    with torch.cuda.device(self._devices[number]):
                        graph.capture_begin(pool=pool, capture_error_mode="relaxed")
                    recording.append(number)
                out = program()
        finally:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a graph without launches, as a draft has on other devices
                for number in recording:
                    with torch.cuda.device(self._devices[number]), torch.cuda.stream(self._streams[number]):
                        graphs[number].capture_end()
        for number, graph in enumerate(graphs):
            with torch.cuda.device(self._devices[number]):
                graph.instantiate()

        def replay() -> None:
            for device, graph in zip(self._devices, graphs, strict=True):
                with torch.cuda.device(device):
                    graph.replay()

        return replay, out

    def held_bytes(self) -> int:
        segments = torch.cuda.memory_snapshot()
        pools = {tuple(pool) for each in self._device_pools.values() for pool in each}
        return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) in pools)

    def wait(self) -> None:
        for device in self._devices:
            torch.cuda.synchronize(device)

    def close(self, pool: str) -> None:
        self._device_pools.pop(pool, None)
        for device in self._devices:
            with torch.cuda.device(device):
                torch.cuda.empty_cache()
