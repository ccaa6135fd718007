"""One thread at a time, in the order of arrival; no exception, wherever it strikes, leaves a turn taken or the modes of
a thread changed.

A turn is a new lock, held by a `with` statement. There is nothing else to give back:

    with mine:                       held from before the turn begins until after it has ended
        _newest = mine               mine is in the queue: the next thread waits for it
        with the one before: pass    those that arrived earlier had their turns, or gave up
        _present = mine              where `_present` is not locked, no thread has a turn

CPython (3.11 to 3.13) runs no signal handler between the acquisition of a lock of its own and the block that releases
it; a lock that wraps another in Python has instructions there (docs/decisions/0011).

Torch's inference and grad mode are the same after a turn as before it. A signal handler that raises within
`torch.inference_mode()`'s own instructions leaves a guard half open, which lives as long as the traceback and restores
old modes when it dies. So guards that a turn has left half open are let go when it ends, and then its own guard puts
back what was there before.
"""

import threading
import traceback
from collections.abc import Callable
from typing import TypeVar

import torch

from specdec.errors import SpecDecError

T = TypeVar("T")


class Turns:
    """The turns of one engine."""

    def __init__(self) -> None:
        self._guard = threading.RLock()  # for a few instructions, which a signal handler or finalizer may interrupt
        self._newest = self._present = threading.Lock()
        self._threads: dict[threading.Lock, int] = {}  # whose turns are under way, or waited for

    @property
    def awaited(self) -> bool:
        return self._newest is not self._present and self._newest.locked()

    def run(self, work: Callable[[], T]) -> T:
        """Wait for a turn and do this work in it.

        Raises SpecDecError within a turn of the same thread, or while that thread waits for one, as a signal handler
        may: neither would end.
        """
        here, mine = threading.get_ident(), threading.Lock()
        if here in list(self._threads.values()):
            raise SpecDecError(
                "this call waits for the step that it is made in: a tokenizer, a callback or a signal handler "
                "called the engine that it interrupts; call it when the step is over"
            )
        with mine:
            try:
                self._threads[mine] = here
                with self._guard:
                    before, self._newest = self._newest, mine
                with before:
                    pass
                while not self._take(mine):  # free at once, unless a thread gave up waiting, or `attempt` has it
                    with self._present:
                        pass
                return work()
            finally:
                del self._threads[mine]  # no call, so nothing strikes here

    def attempt(self, work: Callable[[], object]) -> bool:
        """Do this work in a turn, unless a thread has one or waits for one. Never waits for a turn. -> was it done?"""
        if self._newest.locked():
            return False
        here, mine = threading.get_ident(), threading.Lock()
        with mine:
            try:
                self._threads[mine] = here
                if not self._take(mine):
                    return False
                work()
                return True
            finally:
                del self._threads[mine]

    def _take(self, mine: threading.Lock) -> bool:
        with self._guard:
            if self._present.locked():
                return False
            self._present = mine
            return True


def with_modes_restored(work: Callable[[], T]) -> T:
    """Do this work, and leave the modes of this thread as they were."""
    grad = torch.is_grad_enabled()
    saved = torch.inference_mode(torch.is_inference_mode_enabled())
    try:
        saved.__enter__()
        torch.set_grad_enabled(grad)  # which entering has changed
        return work()
    except BaseException as error:
        _close_half_open(error)
        raise
    finally:
        del saved  # no call, so nothing strikes here: its guard restores the modes when it dies


def _close_half_open(error: BaseException) -> None:
    """Let go of what the frames of `__enter__` and `__exit__` hold that this exception has ended."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name in ("__enter__", "__exit__"):
            frame.clear()
