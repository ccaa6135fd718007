"""Bytes of captures per device, like the budget, including libraries' memory outside torch; and capture streams."""

import gc
import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from specdec.gpu import captures
from specdec.gpu.captures import default_budget
from specdec.gpu.cuda_capture import CudaCapture, DeviceGraphs

DEVICES = (torch.device("cuda", 0), torch.device("cuda", 1))
pytestmark = pytest.mark.usefixtures("quick_collections")


class TwoDevices:
    """In the place of `torch.cuda`: a graph takes 100 bytes of its pool on device 0 and 30 on device 1, and 7 and 40
    outside of torch once it is instantiated. All that is not of a capture is another pool's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = self.handles = self.streams = 0
        self.segments: list[dict[str, Any]] = [{"total_size": 1 << 20, "segment_pool_id": (0, 0)}]
        self.outside_allocator = [0, 0]
        self.launched: list[tuple[int, str]] = []
        self.while_replayed: Callable[[], None] = lambda: None
        world = self

        class Graph:
            def __init__(self, keep_graph: bool) -> None:
                pass

            def capture_begin(self, pool: tuple[int, int], capture_error_mode: str) -> None:
                size = (100, 30)[world.current]
                world.segments.append({"total_size": size, "segment_pool_id": pool})

            def capture_end(self) -> None:
                pass

            def instantiate(self) -> None:
                world.outside_allocator[world.current] += (7, 40)[world.current]
                world.launched.append((threading.get_ident(), "instantiate"))

            def replay(self) -> None:
                world.launched.append((threading.get_ident(), "replay"))
                world.while_replayed()

        @contextmanager
        def on(device: torch.device) -> Any:
            before, world.current = world.current, device.index
            yield
            world.current = before

        @contextmanager
        def streaming(stream: Any) -> Any:
            yield

        stand_ins = {
            "CUDAGraph": Graph,
            "Stream": self.stream_of,
            "device": on,
            "stream": streaming,
            "synchronize": lambda device=None: None,
            "empty_cache": lambda: self.launched.append((threading.get_ident(), "empty_cache")),
            "graph_pool_handle": self.next_handle,
            "memory_snapshot": lambda: self.segments,
            "mem_get_info": lambda: (1000 - self.outside_allocator[self.current], 1000),
            "memory_reserved": lambda: 0,
        }
        for name, stand_in in stand_ins.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(DeviceGraphs, "_warm", lambda self: None)

    def stream_of(self, device: torch.device) -> object:
        self.streams += 1
        return object()

    def next_handle(self) -> tuple[int, int]:
        self.handles += 1
        return 0, self.handles


def program() -> torch.Tensor:
    return torch.zeros(1)


def test_captures_of_two_devices_take_what_the_fuller_one_holds(monkeypatch):
    """They took the sum, against the budget of one: two devices had half of it each. And nothing outside of torch."""
    TwoDevices(monkeypatch)
    capture = CudaCapture(*DEVICES)
    capture.pool = "rounds"
    first = capture(program)
    assert capture.held_bytes() == 107  # and 70 on the second
    capture.pool = "prompts"
    second = capture(program)
    assert capture.held_bytes() == 214
    capture.close("rounds")
    del first
    assert capture.held_bytes() == 107
    capture.close("prompts")
    del second
    assert capture.held_bytes() == 0


def test_the_device_that_holds_most_may_be_another_than_the_first(monkeypatch):
    world = TwoDevices(monkeypatch)
    capture = CudaCapture(*DEVICES)
    kept = capture(program)
    assert kept[0] is not None
    world.segments.append({"total_size": 500, "segment_pool_id": (0, 2)})  # of the second device's pool
    assert capture.held_bytes() == 570


def test_an_evicted_capture_leaves_its_streams_to_the_next(monkeypatch):
    """cuBLAS keeps a workspace for each stream: every engine that a process made, and closed, left 35 MB after."""
    world = TwoDevices(monkeypatch)
    for _ in range(3):
        capture = CudaCapture(*DEVICES)
        replay, _ = capture(program)
        other = CudaCapture(*DEVICES)  # at the same time: streams of its own
        del capture, other
        third = CudaCapture(*DEVICES)  # what is captured may still run
        assert world.streams <= 6
        del replay, third
    assert world.streams <= 6


def test_after_a_capture_that_failed_the_next_has_a_pool_of_its_own(monkeypatch):
    """Torch frees a pool with its last graph, that of a failed capture too, and cannot record into it again: nothing
    was captured any more on several devices."""
    world = TwoDevices(monkeypatch)
    capture = CudaCapture(*DEVICES)

    def failing() -> torch.Tensor:
        raise torch.OutOfMemoryError

    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            capture(failing)
        gc.collect()
    kept = [capture(program) for _ in range(2)]
    used = [segment["segment_pool_id"] for segment in world.segments[1:]]
    assert used == [(0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (0, 6), (0, 5), (0, 6)]
    assert capture.held_bytes() == 214
    kept.clear()


def test_an_engine_that_was_dropped_is_not_destroyed_while_a_graph_is_recorded(monkeypatch):
    """The collector destroyed its graphs within a recording. CUDA then failed the recording: an H100 ran the rounds of
    a new engine without graphs."""
    TwoDevices(monkeypatch)
    destroyed: list[str] = []

    class DroppedEngine:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            destroyed.append("while recording" if recording else "later")

    def collecting() -> torch.Tensor:
        nonlocal recording
        recording = True
        DroppedEngine()
        cycles = [[] for _ in range(1000)]  # a container each: the collector would be due
        recording = not cycles
        return program()

    recording = False
    threshold = gc.get_threshold()
    gc.set_threshold(50, 1, 1)
    try:
        CudaCapture(*DEVICES)(collecting)
    finally:
        gc.set_threshold(*threshold)
    assert gc.isenabled()
    gc.collect()
    assert destroyed == ["later"]


def test_the_budget_is_what_the_fullest_device_can_give(monkeypatch):
    monkeypatch.setattr(captures, "all_bytes", lambda device: 1000)
    monkeypatch.setattr(captures, "free_bytes", lambda device: (150, 90)[device.index])
    assert default_budget(DEVICES[0]) == 75
    assert default_budget(*DEVICES) == 45
    assert default_budget(torch.device("cpu")) is None


@pytest.mark.parametrize("action", ["replays", "captures", "closes"])
def test_what_another_thread_does_waits_until_graphs_of_all_devices_are_launched(action, monkeypatch):
    """Graphs of two engines on the same devices waited for each other for ever if their launches were interleaved, and
    a capture or an end of a whole engine on one of them waited for a graph that waited for the next launch."""
    world = TwoDevices(monkeypatch)
    (first, _), (second, _) = (CudaCapture(*DEVICES)(program) for _ in range(2))
    whole = CudaCapture(DEVICES[0])
    actions = {"replays": second, "captures": lambda: whole(program), "closes": lambda: whole.close("draft")}
    other = threading.Thread(target=actions[action])

    def start_other() -> None:
        world.while_replayed = lambda: None
        other.start()
        other.join(timeout=0.1)

    world.launched.clear()
    world.while_replayed = start_other
    first()
    other.join()
    here = threading.get_ident()
    assert [thread == here for thread, _ in world.launched] == [True] * 2 + [False] * (len(world.launched) - 2)
    assert len(world.launched) > 2
