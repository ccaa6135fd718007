"""`triton` and `tl` where Triton is installed (Linux); elsewhere stand-ins, so that kernel files import.

Without Triton every launcher runs its plain-torch reference, and no kernel is launched. Every attribute of the stand-in
is the stand-in itself; it is false, and as a decorator it returns the function unchanged.
"""

from typing import Any

__all__ = ["INTERPRETED", "KEEP", "tl", "triton"]

try:
    import triton
    import triton.language as tl
except ImportError:

    class _Absent:
        def __getattr__(self, name: str) -> "_Absent":
            if name.startswith("__"):
                raise AttributeError(name)
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return args[0] if args and callable(args[0]) else self

        def __bool__(self) -> bool:
            return False

    triton = tl = _Absent()

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Do kernels run in Python, on a CPU? TRITON_INTERPRET decides when they are imported."""

KEEP = tl.constexpr("evict_last")
"""Cache hint for activations: keep them in the L2 cache, while weights and K/V, which are read once, stream through
it."""
