"""Whether this thread holds a lock over weights. If so, a finalizer must not begin anything that needs one.

The garbage collector may run anywhere, also within `Weights.generation`, and may close an abandoned stream of another
engine there. That engine's next turn then releases what the stream held: releasing looks at the weights, so in this
thread it would wait for a lock that this thread, or one that waits for it, holds.
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
    """Decorates functions that take a lock over weights."""

    @functools.wraps(function)
    def held(*args: P.args, **kwargs: P.kwargs) -> T:
        _HELD.depth += 1
        try:
            return function(*args, **kwargs)
        finally:
            _HELD.depth -= 1

    return held


def weights_lock_held() -> bool:
    """Does this thread hold one?"""
    return _HELD.depth > 0
