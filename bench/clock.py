"""Times. On a GPU: medians of replayed captures, whose calls rotate over inputs that exceed the L2 together.

In Triton's interpreter nothing is timed: every call runs once, and its time is 0.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, TypeVar

from bench.device import DEVICE, ON_CPU  # isort: skip - before triton
import torch

from bench.report import Row
from specdec.measurement.memory_floor import read_bandwidth
from specdec.measurement.timed_rounds import idle_within, profiled_spans

T = TypeVar("T")

COLD_BYTES = 400_000_000
"""Bytes of inputs in turn, together: several times the L2 cache."""


def graph_seconds(calls: Sequence[Callable[[], object]], replays: int = 20) -> float:
    """Median seconds of one call, all of them replayed in turn from one CUDA graph, on a GPU kept busy before."""
    for call in calls[: 1 if ON_CPU else 2]:
        call()
    if ON_CPU:
        return 0.0
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for number in range(2 * replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        if number >= replays:  # the first half is for the clock, and is not waited for
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(times)


def microseconds(call: Callable[..., object], inputs: Sequence[Any] | None = None) -> float:
    """Time of one call: four of them, or one with each of the inputs in turn."""
    bound = [call] * 4 if inputs is None else [partial(call, each) for each in inputs]
    return graph_seconds(bound) * 1e6


def copies_of(num_bytes: float, most: int = 64) -> int:
    """How many inputs of that size exceed the L2 cache together."""
    return 1 if ON_CPU else int(max(2, min(most, -(-COLD_BYTES // max(1, num_bytes)))))


def wall_seconds(work: Callable[[], Any], devices: Sequence[torch.device]) -> float:
    """Seconds of one `work`, ten in a row, by the host's clock: the best of five."""
    best = float("inf")
    for _ in range(5):
        synchronize(devices)
        begin = time.perf_counter()
        for _ in range(10):
            work()
        synchronize(devices)
        best = min(best, (time.perf_counter() - begin) / 10)
    return best


def synchronize(devices: Sequence[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


@cache
def bandwidth() -> float:
    """Bytes read in a second, measured once a run; 1 where nothing is timed."""
    return 1.0 if ON_CPU else read_bandwidth(DEVICE)


def floor_us(num_bytes: float) -> float:
    """Microseconds that reading these bytes takes at the measured bandwidth."""
    return num_bytes / bandwidth() * 1e6


def bandwidth_row() -> Row:
    return Row("measured bandwidth", "", f"{bandwidth() / 1e9:.0f} GB/s are read")


def timed_row(name: str, us: float, num_bytes: float, peer_us: float | None = None, note: str = "") -> Row:
    """One kernel's time next to the floor of its bytes, and to a peer's time."""
    floor = floor_us(num_bytes)
    figures: dict[str, object] = {"us": f"{us:.2f}", "floor": f"{floor:.1f}" if num_bytes else ""}
    figures["x floor"] = f"{us / floor:.2f}" if num_bytes else ""
    figures["peer"] = "" if peer_us is None else f"{peer_us:.1f} ({peer_us / max(us, 1e-9):.2f}x)"
    return Row(name, figures={**figures, "note": note})


def best_tiles(
    candidates: Sequence[Any],
    make: Callable[[Any], Sequence[Callable[[], torch.Tensor]]],
    want: torch.Tensor | None,
) -> tuple[str, bool]:
    """Times every tiling that fits the device: the best four in words, and whether all had the bits of `want`.

    make: tiles -> calls that are timed in turn, the first on the inputs of `want`.
    """
    found, equal, failed = [], True, []
    for tiles in candidates[: 1 if ON_CPU else None]:
        try:
            calls = make(tiles)
            equal &= want is None or torch.equal(calls[0](), want)
            found.append((graph_seconds(calls, 8) * 1e6, str(tuple(tiles))))
        except Exception as error:  # too large for the device
            failed.append(type(error).__name__)
    cells = ", ".join(f"{us:.1f} us {tiles}" for us, tiles in sorted(found)[:4])
    return cells + (f"; {len(failed)} did not run ({', '.join(sorted(set(failed)))})" if failed else ""), equal


def waiting_row(name: str, work: Callable[[], None]) -> Row:
    """Does `work`, which is these rounds, make the host wait for the device? Nothing else may be under way."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
        error = ""
    except RuntimeError as exception:
        error = str(exception)[:200]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return Row(f"{name} under set_sync_debug_mode('error')", error or "none waits", ok=not error)


def profiled(call: Callable[[], T]) -> tuple[T, float, dict[str, tuple[float, int]]]:
    """What a call returns, milliseconds between its first and its last kernel in which none runs, and by kernel its
    milliseconds and calls."""
    results: list[T] = []
    spans, kernels = profiled_spans(lambda: results.append(call()), DEVICE), dict[str, tuple[float, int]]()
    for name, begin, end in spans:
        ms, calls = kernels.get(name[:70], (0.0, 0))
        kernels[name[:70]] = ms + 1e3 * (end - begin), calls + 1
    return results[0], 1e3 * idle_within([span[1:] for span in spans]), kernels
