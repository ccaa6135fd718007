"""Memory goes back to the system: after large work, at most every two seconds, circles included."""

import ctypes
import gc
import inspect
import subprocess
import sys
import weakref

import pytest

from specdec.cli.bodies import run_server
from specdec.serving import server as serving
from specdec.serving.http import trimming
from specdec.serving.http.trimming import (
    EVERY_SECONDS,
    GROWN_BYTES,
    Trimmer,
    give_back,
    resident_bytes,
    without_what_stays,
)


class Held:
    """Bytes that a process holds, and what it does about it."""

    def __init__(self) -> None:
        self.bytes = 500 << 20
        self.times = 0

    def give_back(self) -> None:
        self.times += 1
        self.bytes -= 10 << 20


def look(trimmer: Trimmer, now: float) -> None:
    trimmer.look(now)
    if trimmer._thread is not None:
        trimmer._thread.join()


def test_what_has_grown_is_given_back_at_once_and_again_later() -> None:
    """What was in use when it was asked for was never asked for again: a server stayed 130 MB larger for a minute."""
    held = Held()
    trimmer = Trimmer(lambda: held.bytes, held.give_back)
    look(trimmer, 10.0)
    assert held.times == 0
    held.bytes += GROWN_BYTES
    look(trimmer, 11.0)
    assert held.times == 1
    times = []
    for now in range(12, 400):
        before = held.times
        look(trimmer, float(now))
        times += [now] * (held.times - before)
    assert times == [15, 23, 39, 71]  # 4, 8, 16 and 32 s after the one before
    held.bytes += GROWN_BYTES
    look(trimmer, 400.0)
    assert held.times == 6


def test_what_grows_all_the_time_is_asked_for_every_two_seconds() -> None:
    held = Held()
    trimmer = Trimmer(lambda: held.bytes, held.give_back)
    for tenth in range(100):
        held.bytes += GROWN_BYTES
        look(trimmer, 10.0 + tenth / 10)
    assert held.times == 10 / EVERY_SECONDS


def test_the_smallest_size_since_is_what_counts() -> None:
    held = Held()
    trimmer = Trimmer(lambda: held.bytes, held.give_back)
    held.bytes -= 100 << 20
    look(trimmer, 10.0)
    held.bytes += GROWN_BYTES
    look(trimmer, 20.0)
    assert held.times == 1


def test_circles_are_collected_and_glibc_is_asked(monkeypatch) -> None:
    """What a compiled grammar hung on was a circle: tens of megabytes that Python did not look for."""
    asked = []
    monkeypatch.setattr(trimming.ctypes, "CDLL", lambda name: asked.append(name) or ctypes.PyDLL(name))
    one = Held()
    one.itself = one  # type: ignore[attr-defined]
    there = weakref.ref(one)
    gc.disable()
    try:
        del one
        assert there() is not None
        give_back()
        assert there() is None
    finally:
        gc.enable()
    assert bool(asked) == sys.platform.startswith("linux")


def test_what_a_server_begins_with_is_set_aside_while_it_serves() -> None:
    with without_what_stays():
        assert gc.get_freeze_count() > 10_000
        assert len(gc.get_objects()) < gc.get_freeze_count()
    assert gc.get_freeze_count() == 0


@pytest.mark.deep
def test_a_server_serves_with_its_settings_of_the_process(monkeypatch) -> None:
    """The engine's thread gets Python's lock soon, nothing that stays is looked through, and both end with it."""
    before, seen = sys.getswitchinterval(), []

    class Engine:
        async def close(self) -> None: ...

    class Server:
        died = None
        deadline = type("Timer", (), {"cancel": staticmethod(lambda: None)})

        def __init__(self, *given: object) -> None: ...

        def run(self, sockets: object) -> None:
            seen.append((sys.getswitchinterval(), gc.get_freeze_count() > 0))

    nothing = type("Nothing", (), {"__getattr__": lambda self, name: nothing(), "__call__": lambda self, *a, **b: self})
    for name, value in {"Server": Server, "Connections": nothing, "create_app": nothing(), "Reporter": nothing}.items():
        monkeypatch.setattr(serving, name, value if name == "Server" else lambda *given, **named: nothing())
    monkeypatch.setattr(serving.uvicorn, "Config", lambda *given, **named: None)
    monkeypatch.setattr(serving, "describe", lambda state: "")
    settings = type("Settings", (), {"ssl_certfile": None, "stop_seconds": 0, "stats_seconds": 0, "ssl_keyfile": None})
    settings.timeout_keep_alive = 1  # type: ignore[attr-defined]
    assert serving.run_app(Engine(), settings, nothing(), lambda: None) is None  # type: ignore[arg-type]
    assert seen == [(pytest.approx(serving.SWITCH_SECONDS), True)]
    assert (sys.getswitchinterval(), gc.get_freeze_count()) == (pytest.approx(before), 0)


def test_the_system_tells_what_is_held() -> None:
    assert resident_bytes() > 50 << 20 or not sys.platform.startswith("linux")


def test_a_server_sets_malloc_before_it_has_threads(monkeypatch) -> None:
    """Each of many threads kept a part of what hostile grammars had freed to itself."""
    asked = []
    library = type("Library", (), {"mallopt": staticmethod(lambda *given: asked.append(given))})
    monkeypatch.setattr(trimming.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(trimming.sys, "platform", "linux")
    trimming.give_back_when_freed()
    assert asked == [(-8, trimming.ARENAS), (-3, trimming.MAPPED_BYTES), (-1, trimming.SPARE_BYTES)]
    source = inspect.getsource(run_server)
    assert 0 < source.index("give_back_when_freed()") < source.index("config = engine_config(")


MAPPED_BLOCKS = """
import ctypes
from specdec.serving.http.trimming import give_back_when_freed
class Figures(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks rest".split()]
    _fields_ += [("more", ctypes.c_size_t * 2)]
library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.free.argtypes, library.mallinfo2.restype = [ctypes.c_void_p], Figures
give_back_when_freed()
library.free(library.malloc(30 << 20))
before = library.mallinfo2().hblks
kept = [library.malloc(1 << 20) for _ in range(4)]
print(library.mallinfo2().hblks - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
def test_blocks_of_a_megabyte_go_back_to_the_system_when_they_are_freed() -> None:
    """After one of 30 MB was freed they came from the heap, and a server that had compiled hostile grammars stayed
    80 MB larger, more than a tenth."""
    told = subprocess.run([sys.executable, "-c", MAPPED_BLOCKS], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["4"]
