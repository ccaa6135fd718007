"""Does this thread hold a lock over weights? Then a finalizer must not begin anything that needs one.

The garbage collector may run anywhere, within `Weights.generation` too, and there it may close an abandoned stream of
another engine. What that stream held is then released by that engine's next turn, and not by this thread: releasing
looks at the weights, so it would wait for a lock that this thread, or one that waits for it, holds.
"""

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class _Held(threading.local):
    depth = 0


_HELD = _Held()


def holds_weights_lock(function: Callable[P, T]) -> Callable[P, T]:
    """For functions that take a lock over weights."""

    @functools.wraps(function)
    def held(*args: P.args, **kwargs: P.kwargs) -> T:
        _HELD.depth += 1
        try:
            return function(*args, **kwargs)
        finally:
            _HELD.depth -= 1

    return held


def weights_lock_held() -> bool:
    """By this thread."""
    return _HELD.depth > 0
