"""Turns: one thread at a time, in order of arrival. Whatever exception is raised, and wherever, the turn is given back
and the thread's torch modes are restored.

A turn is a new lock held by a `with` statement, so leaving the block gives everything back:

    with mine:                       held from before the turn begins until after it has ended
        _newest = mine               mine is in the queue: the next thread waits for it
        with the one before: pass    earlier threads had their turns, or gave up
        _present = mine              if `_present` is not locked, no thread has a turn

CPython (3.11 to 3.13) runs no signal handler between acquiring a built-in lock and entering the block that releases it.
A lock class written in Python would have instructions there (docs/decisions/0011).

Torch's inference and grad modes are the same after a turn as before it. If a signal handler raises within the
instructions of `torch.inference_mode()`, a guard stays half open: it lives as long as the traceback and restores old
modes when it dies. So a turn drops such guards when it ends, and then its own guard restores the modes.
"""

import os
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
        self._guard = threading.RLock()  # held for a few instructions, in which a signal handler or finalizer may run
        self._newest = self._present = threading.Lock()
        self._threads: dict[threading.Lock, int] = {}  # threads that have a turn or wait for one
        self._pid = os.getpid()

    def run(self, work: Callable[[], T]) -> T:
        """Wait for a turn and do this work in it.

        Raises SpecDecError if it would wait forever: this thread already has a turn or waits for one (a signal handler
        may call this), or the process is a fork, made while another thread had one.
        """
        here, mine = threading.get_ident(), threading.Lock()
        if here in list(self._threads.values()):
            raise SpecDecError(
                "this call would wait for the step in which it is made: a tokenizer, a callback or a signal handler "
                "called the engine during a step; call the engine after the step"
            )
        self._require_own_process()
        with mine:
            try:
                self._threads[mine] = here
                with self._guard:
                    before, self._newest = self._newest, mine
                with before:
                    pass
                while not self._take(mine):  # free at once, unless a thread gave up waiting or `attempt` holds it
                    with self._present:
                        pass
                return with_modes_restored(work)
            finally:
                del self._threads[mine]  # no call, so no exception can be raised here

    def attempt(self, work: Callable[[], object]) -> bool:
        """Do this work in a turn, unless a thread has one or waits for one. Never waits. Returns whether it was
        done."""
        if self._newest.locked():
            return False
        here, mine = threading.get_ident(), threading.Lock()
        with mine:
            try:
                self._threads[mine] = here
                if not self._take(mine):
                    return False
                with_modes_restored(work)
                return True
            finally:
                del self._threads[mine]

    def _require_own_process(self) -> None:
        # read before the process id, which another thread of a fork sets before its turn
        in_use = bool(self._threads) or self._newest.locked() or self._present.locked()
        if self._pid != os.getpid():
            if in_use:
                raise SpecDecError(
                    "this process was forked while another thread of its parent was in a step of this engine, which "
                    "never ends here; make an engine in this process, or fork between steps"
                )
            self._pid = os.getpid()

    def _take(self, mine: threading.Lock) -> bool:
        with self._guard:
            if self._present.locked():
                return False
            self._present = mine
            return True


def with_modes_restored(work: Callable[[], T]) -> T:
    """Do this work and restore the modes of this thread afterwards."""
    grad = torch.is_grad_enabled()
    saved = torch.inference_mode(torch.is_inference_mode_enabled())
    try:
        saved.__enter__()
        torch.set_grad_enabled(grad)  # entering changed it
        return work()
    except BaseException as error:
        _close_half_open(error)
        raise
    finally:
        del saved  # no call, so no exception can be raised here; the dying guard restores the modes


def _close_half_open(error: BaseException) -> None:
    """Clear the frames of `__enter__` and `__exit__` that this exception ended, so that their guards die."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name in ("__enter__", "__exit__"):
            frame.clear()
