"""Memory goes back to the system half a minute after large work, circles included."""

import ctypes
import gc
import subprocess
import sys
import threading
import weakref

import pytest

from specdec.serving import server as serving
from specdec.serving.http import trimming
from specdec.serving.http.trimming import GROWN_BYTES, LATER_SECONDS, Trimmer, give_back, resident_bytes


class Held:
    """Bytes that a process holds, and what it does about it."""

    def __init__(self) -> None:
        self.bytes = 500 << 20
        self.times = 0

    def give_back(self) -> None:
        self.times += 1
        self.bytes -= 10 << 20


def test_what_has_grown_is_given_back_half_a_minute_later() -> None:
    """At once it was in use, and was never asked for again: a server stayed 130 MB larger for a minute."""
    held = Held()
    trimmer, asked = Trimmer(lambda: held.bytes, held.give_back), []

    def look(now: float) -> None:
        before = held.times
        trimmer.look(now)
        for thread in threading.enumerate():
            if thread.name == "specdec-trim":
                thread.join()
        asked.extend([now] * (held.times - before))

    look(5.0)
    held.bytes += GROWN_BYTES
    for now in range(10, 200):
        look(float(now))
    held.bytes -= 100 << 20  # the least since is what counts
    look(200.0)
    held.bytes += GROWN_BYTES
    for now in range(201, 300):
        look(float(now))
    assert asked == [10.0 + LATER_SECONDS, 201.0 + LATER_SECONDS]


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


def test_a_server_serves_with_its_settings_of_the_process() -> None:
    """The engine's thread gets Python's lock soon, nothing that stays is looked through, and both end with it."""
    before = sys.getswitchinterval()
    with serving._settings_of_process():
        assert sys.getswitchinterval() == pytest.approx(serving.SWITCH_SECONDS) and gc.get_freeze_count() > 10_000
    assert (sys.getswitchinterval(), gc.get_freeze_count()) == (pytest.approx(before), 0)


def test_the_system_tells_what_is_held() -> None:
    assert resident_bytes() > 50 << 20 or not sys.platform.startswith("linux")


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
