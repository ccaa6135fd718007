"""Captures into CUDA graphs: one graph per device that a program launches on; they are launched together.

Graphs of several devices wait for each other by flags in memory (`exchange_kernels.py`), not by edges, so each graph is
independent. They are instantiated when all have been recorded. Their memory is counted per device, and the fullest
device counts against the budget.
"""

import gc
import threading
import warnings
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from specdec.gpu.captures import CaptureMemory, Program, Replay

_idle_streams: defaultdict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)
"""Streams of past captures, for reuse. cuBLAS keeps a workspace (32 MiB on an H100) per stream that it ever ran on,
until the process ends, so a new stream per engine would leak memory."""

_LAUNCHING = threading.RLock()
"""Held while graphs of several devices are launched. If two threads launched theirs in another order on each device,
each of the first graphs would wait for one that is queued after the other. A capture, which waits for its device and
frees memory, holds it, too: between two launches it would wait for a graph that waits for the second one."""


class GraphPool(NamedTuple):
    """Memory that graphs share. Torch frees it with the last of its graphs, failed recordings included, and its handle
    is then invalid."""

    handle: Any
    graphs: weakref.WeakSet[torch.cuda.CUDAGraph]


class DeviceGraphs:
    """Memory that captures hold on one device. pools: by name. outside_allocator: bytes of graphs outside torch's
    allocator."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pools: dict[str, GraphPool] = {}
        self.outside_allocator: weakref.WeakKeyDictionary[torch.cuda.CUDAGraph, int] = weakref.WeakKeyDictionary()
        idle = _idle_streams[device]
        self.stream = idle.pop() if idle else torch.cuda.Stream(device)
        weakref.finalize(self, idle.append, self.stream).atexit = False

    def begin(self, pool: str) -> tuple[torch.cuda.CUDAGraph, int]:
        """A graph to record into, and the bytes taken outside torch before the recording."""
        with torch.cuda.device(self.device):
            if pool not in self.pools or not self.pools[pool].graphs:
                self.pools[pool] = GraphPool(torch.cuda.graph_pool_handle(), weakref.WeakSet())
            self._warm()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # so that any memory missing below is the capture's
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            self.pools[pool].graphs.add(graph)
            return graph, taken_beside_torch()

    def end(self, graph: torch.cuda.CUDAGraph, before: int) -> None:
        """Finish a recorded graph."""
        with torch.cuda.device(self.device):
            graph.instantiate()
            self.outside_allocator[graph] = max(taken_beside_torch() - before, 0)

    def _warm(self) -> None:
        """Make cuBLAS allocate its workspace for this thread and stream before a recording. Otherwise it would allocate
        from the pool, and torch would keep the workspace there after all captures are gone."""
        with torch.cuda.stream(self.stream):
            square = torch.ones((16, 16), dtype=torch.bfloat16, device=self.device)
            torch.addmm(square[0], square, square)


@contextmanager
def _recorded(graph: torch.cuda.CUDAGraph, on: DeviceGraphs, pool: str, *, alone: bool) -> Iterator[None]:
    """Records the launches within the block."""
    with torch.cuda.device(on.device):
        # another thread may use the device meanwhile; with several devices, each is idle while another records
        graph.capture_begin(pool=on.pools[pool].handle, capture_error_mode="thread_local" if alone else "relaxed")
    try:
        yield
    finally:
        with warnings.catch_warnings(), torch.cuda.device(on.device), torch.cuda.stream(on.stream):
            warnings.simplefilter("ignore")  # warning about a graph without launches, as a draft has on other devices
            graph.capture_end()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Within the block, objects in cycles stay. A collection could destroy the graphs of an engine that was dropped
    earlier, and CUDA permits no destruction of a graph while another is recorded: the recording would fail."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def taken_beside_torch() -> int:
    """Bytes in use on the current device outside this process's torch allocator."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


class CudaCapture(CaptureMemory):
    """Captures programs that launch on these devices, the current one first."""

    def __init__(self, *devices: torch.device) -> None:
        self._each = [DeviceGraphs(device) for device in devices]

    def __call__(self, program: Program) -> tuple[Replay, torch.Tensor]:
        with _LAUNCHING:
            begun = [each.begin(self.pool) for each in self._each]
        with ExitStack() as recording:
            recording.enter_context(_no_garbage_collection())
            for each in reversed(self._each):  # ends with the first device as the current one
                recording.enter_context(torch.cuda.stream(each.stream))
            for each, (graph, _) in zip(self._each, begun, strict=True):
                recording.enter_context(_recorded(graph, each, self.pool, alone=len(begun) == 1))
            out = program()
        with _LAUNCHING:
            for each, (graph, before) in zip(self._each, begun, strict=True):
                each.end(graph, before)

        def replay() -> None:
            with nullcontext() if len(begun) == 1 else _LAUNCHING:
                for each, (graph, _) in zip(self._each, begun, strict=True):
                    with torch.cuda.device(each.device):
                        graph.replay()

        return replay, out

    def held_bytes(self) -> int:
        """Bytes on the device that holds most."""
        held = [sum(each.outside_allocator.values()) for each in self._each]
        number_of = {tuple(pool.handle): i for i, each in enumerate(self._each) for pool in each.pools.values()}
        for segment in torch.cuda.memory_snapshot():
            number = number_of.get(tuple(segment["segment_pool_id"]))
            if number is not None:
                held[number] += segment["total_size"]
        return max(held)

    def wait(self) -> None:
        for each in self._each:
            torch.cuda.synchronize(each.device)

    def close(self, pool: str) -> None:
        for each in self._each:
            each.pools.pop(pool, None)
            with _LAUNCHING, torch.cuda.device(each.device):
                torch.cuda.empty_cache()
