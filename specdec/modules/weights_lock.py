"""Whether this thread holds a lock over weights. If so, a finalizer must not begin anything that needs one.

The garbage collector may run anywhere, also within `Weights.generation`, and may close an abandoned stream of another
engine there. That engine's next turn then releases what the stream held: releasing looks at the weights, so in this
thread it would wait for a lock that this thread, or one that waits for it, holds.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Held(threading.local):
    depth = 0


_HELD = _Held()


@contextmanager
def holds_weights_lock() -> Iterator[None]:
    """Around what takes a lock over weights, or as a decorator of it."""
    _HELD.depth += 1
    try:
        yield
    finally:
        _HELD.depth -= 1


def weights_lock_held() -> bool:
    """Does this thread hold one?"""
    return _HELD.depth > 0
