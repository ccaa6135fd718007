"""Captures of a program that launches on several devices: a graph a device, which are launched together.

They wait for each other by flags in memory (`exchange_kernels.py`), not by edges, so no graph knows of another. Graphs
are instantiated when all have been recorded. What they take is counted by device, and the fullest device is what counts
against the budget, which is of one device.
"""

import gc
import warnings
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from specdec.gpu.captures import CudaCapture, Program, Replay, taken_beside_torch


class SplitCapture(CudaCapture):
    """Captures into one CUDA graph of each device; those of one `pool` share its memory there."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        super().__init__()
        self._devices = tuple(devices)
        self._device_pools: dict[str, list[Any]] = {}
        self._beside_of: list[weakref.WeakKeyDictionary[torch.cuda.CUDAGraph, int]] = [
            weakref.WeakKeyDictionary() for _ in devices
        ]
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
        before = []
        for device in self._devices:
            with torch.cuda.device(device):
                torch.cuda.empty_cache()  # so that what is missing below is the capture's
                before.append(taken_beside_torch())
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
                self._beside_of[number][graph] = max(taken_beside_torch() - before[number], 0)

        def replay() -> None:
            for device, graph in zip(self._devices, graphs, strict=True):
                with torch.cuda.device(device):
                    graph.replay()

        return replay, out

    def held_bytes(self) -> int:
        """On the device that holds most: the budget is of one."""
        held = [sum(beside.values()) for beside in self._beside_of]
        number_of = {tuple(pool): number for each in self._device_pools.values() for number, pool in enumerate(each)}
        for segment in torch.cuda.memory_snapshot():
            number = number_of.get(tuple(segment["segment_pool_id"]))
            if number is not None:
                held[number] += segment["total_size"]
        return max(held)

    def wait(self) -> None:
        for device in self._devices:
            torch.cuda.synchronize(device)

    def close(self, pool: str) -> None:
        self._device_pools.pop(pool, None)
        for device in self._devices:
            with torch.cuda.device(device):
                torch.cuda.empty_cache()
