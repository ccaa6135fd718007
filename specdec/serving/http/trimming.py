"""Gives back to the system what the C library keeps of memory that was freed.

glibc keeps what bodies and grammars free, each on a thread with an arena of its own, and a compiled grammar hangs on a
circle of small objects until Python looks for circles. So where the process has grown, circles are collected, and the
rest is asked back (`malloc_trim`). Where there is no such call, only circles are.
"""

import ctypes
import gc
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

GROWN_BYTES = 16 << 20
"""Growth since the last trim, above the least that the process held, from which on another is worth its time."""
LATER_SECONDS = 30.0
"""Time between this growth and the trim: what is in use only for a moment, such as a refused body, is free by then."""

ARENAS = 8
MAPPED_BYTES = 1 << 20
SPARE_BYTES = 1 << 20
M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -8, -3, -1
"""glibc's numbers of these settings (malloc.h)."""


def resident_bytes() -> int:
    """Memory of this process; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[1])
        import resource
    except (OSError, ImportError):
        return 0
    return pages * resource.getpagesize()


@contextmanager
def objects_frozen() -> Iterator[None]:
    """Within, what is there now is no part of what Python looks through for circles."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def give_back() -> None:
    """Collect circles, and have glibc, where it is that, give back what is free; that call lets go of Python's lock."""
    gc.collect()
    if sys.platform.startswith("linux"):
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def give_back_when_freed() -> None:
    """Three settings of glibc, made before there are threads.

    Blocks from MAPPED_BYTES on come from the system one by one: otherwise the first one that is freed raises that
    bound, and such blocks lie between small ones that stay. Pieces of bodies and tensors of a round are smaller, or the
    system would hand out each of their pages anew, and so are SPARE_BYTES that an arena keeps. And threads share
    ARENAS: otherwise each of dozens keeps a part of what it freed that no other can use."""
    if sys.platform.startswith("linux"):
        with suppress(OSError, AttributeError):
            library = ctypes.CDLL(None)
            library.mallopt(M_ARENA_MAX, ARENAS)
            library.mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
            library.mallopt(M_TRIM_THRESHOLD, SPARE_BYTES)


class Trimmer:
    """`look` is called now and then, on one thread; the work is done on another."""

    def __init__(self, held: Callable[[], int] = resident_bytes, work: Callable[[], object] = give_back) -> None:
        self._held = held
        self._give_back = work
        self._least = held()  # since the last time
        self._due = math.inf

    def look(self, now: float | None = None) -> None:
        now = time.monotonic() if now is None else now
        held = self._held()
        self._least = min(self._least, held)
        if held >= self._least + GROWN_BYTES:
            self._due = min(self._due, now + LATER_SECONDS)
        if now >= self._due:
            self._due = math.inf
            threading.Thread(target=self._work, name="specdec-trim", daemon=True).start()

    def _work(self) -> None:
        self._give_back()
        self._least = self._held()
