"""Tells whether this thread holds a weights lock. If so, a finalizer must not begin anything that needs one.

The garbage collector may run anywhere, also within `Weights.generation`, and may close an abandoned stream of another
engine there. That engine's next turn then releases the stream's memory, which needs a weights lock. In this thread it
would wait for a lock held by this thread, or by a thread that waits for this one.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Held(threading.local):
    depth = 0


_HELD = _Held()


@contextmanager
def holds_weights_lock() -> Iterator[None]:
    """Context manager or decorator for code that takes a weights lock."""
    _HELD.depth += 1
    try:
        yield
    finally:
        _HELD.depth -= 1


def weights_lock_held() -> bool:
    """Does this thread hold a weights lock?"""
    return _HELD.depth > 0
