"""Returns freed memory that the C library keeps to the operating system.

glibc keeps memory that bodies and grammars free on threads, each with its own arena, and a compiled grammar is part of
a reference cycle until Python collects cycles. So if the process has grown, cycles are collected and `malloc_trim`
returns the memory; where there is no such call, only cycles are collected.
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
"""A trim is worth its time if the process has grown by this much above its minimum since the last trim."""
LATER_SECONDS = 30.0
"""Seconds between this growth and the trim: memory that is used briefly, such as a refused body, is free by then."""

ARENAS = 8
MAPPED_BYTES = 1 << 20
SPARE_BYTES = 1 << 20
M_ARENA_MAX, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -8, -3, -1
"""glibc's numbers for these settings (malloc.h)."""


def resident_bytes() -> int:
    """Resident memory of this process; 0 if the system does not report it."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[1])
        import resource
    except (OSError, ImportError):
        return 0
    return pages * resource.getpagesize()


@contextmanager
def objects_frozen() -> Iterator[None]:
    """Within the block, Python's cycle collection skips all objects that exist now."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def give_back() -> None:
    """Collect cycles, and let glibc (if present) return free memory; that call releases Python's lock."""
    gc.collect()
    if sys.platform.startswith("linux"):
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def give_back_when_freed() -> None:
    """Make three settings of glibc; must run before there are threads.

    Blocks of at least MAPPED_BYTES are mapped one by one: otherwise the first such block to be freed raises that limit,
    and later large blocks lie between small ones that stay. Pieces of bodies and tensors of a round are smaller, so
    that the system need not map their pages anew; so are the SPARE_BYTES that an arena keeps. Threads share ARENAS
    arenas: otherwise each of dozens keeps freed memory that no other thread can use."""
    if sys.platform.startswith("linux"):
        with suppress(OSError, AttributeError):
            library = ctypes.CDLL(None)
            library.mallopt(M_ARENA_MAX, ARENAS)
            library.mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
            library.mallopt(M_TRIM_THRESHOLD, SPARE_BYTES)


class Trimmer:
    """Trims memory. Call `look` regularly on one thread; the work runs on another."""

    def __init__(self, held: Callable[[], int] = resident_bytes, work: Callable[[], object] = give_back) -> None:
        self._held = held
        self._give_back = work
        self._least = held()  # minimum since the last trim
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
