"""`triton` and `tl` where Triton is installed (Linux); elsewhere stand-ins, so that kernel files import.

Without Triton every launcher takes its plain-torch reference: no kernel is ever launched. The stand-in answers every
attribute with itself, is false, and as a decorator returns the function unchanged.
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
"""Kernels run in Python, on a CPU: decided by TRITON_INTERPRET when they are imported."""

KEEP = tl.constexpr("evict_last")
"""Cache hint for activations: to stay in the L2 cache, through which weights and K/V stream that are read once."""
