"""Torch's modes of a thread, inference mode and grad mode, are the same after a turn as before it.

A signal handler that raises within `torch.inference_mode()`'s own instructions leaves a guard half open, which lives as
long as the traceback and restores old modes when it dies (docs/decisions/0011). So guards that a turn has left half
open are let go when it ends, and then its own guard puts back what was there before.
"""

import traceback
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


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
