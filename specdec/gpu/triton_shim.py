"""The base of all kernels: Triton or a stand-in, the limits of a device, and dependent launches.

`triton` and `tl` are Triton's where it is installed (Linux); elsewhere stand-ins, so that kernel files import. Without
Triton every launcher runs its plain-torch reference, and no kernel is launched. Every attribute of the stand-in is the
stand-in itself; it is false, and as a decorator it returns the function unchanged.

Programmatic dependent launch overlaps a kernel's start with the end of the kernel before. On Hopper and later a kernel
may start while its predecessor still runs. Every kernel here then goes through

    trigger          the next kernel may start, as soon as all programs of this one have
    weights, gains   read: no kernel of this forward writes them
    wait             until the kernel before has ended and its writes are visible
    the rest         activations are read, and all results written, after the wait

Every program waits, so by induction all earlier kernels have ended, not only the last one. The wait comes before any
loop over K: inside a loop, Triton would hoist loads above it (#11905). It is off before Hopper and in the interpreter.

Two kernels may agree to overlap across the kernels between them:

    holds    starts the next launch after its own wait, so that one may read all that was written before this launch
    early    in a later launch, programs that read nothing newer; they wait last, and no kernel between the two
             uses the memory that they write

A short kernel between two products of many rows triggers `late`, after its own wait. Otherwise the second product's
programs would start while the first one's last programs run, most of them on the few multiprocessors that are free by
then (docs/results/2026-11-29-h200.md).
"""

from functools import cache
from typing import Any

import torch

__all__ = ["tl", "triton"]  # the names that are imported here for others

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

LATE = tl.constexpr(2)
"""PDL of a kernel that triggers late: see above."""


@cache
def device_limits(device: torch.device) -> tuple[int, int]:
    """(multiprocessors, bytes of shared memory that one program may use)."""
    if device.type != "cuda":
        return 8, 227 << 10  # any numbers will do in the interpreter
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return properties["multiprocessor_count"], properties["max_shared_mem"]


def triton_obstacle(device: torch.device, dtype: torch.dtype) -> str:
    """Why kernels cannot run and what to do, as the end of a sentence; empty: they can run."""
    if not triton:
        return ": Triton is not installed; install it, or use attention='torch'"
    if triton.knobs.runtime.interpret != INTERPRETED or not (INTERPRETED or device.type == "cuda"):
        return (
            f" needs a CUDA device, and this model is on {device}; use attention='torch', or set "
            "TRITON_INTERPRET=1 before Python starts to run the kernels, slowly, in Triton's interpreter"
        )
    if not INTERPRETED:
        try:
            device_limits(device)
        except Exception as error:  # of any type: Triton compiles its launcher when it starts
            return f": Triton does not start ({error}); it needs a C compiler and Python.h, or use attention='torch'"
    if device.type == "cuda" and (torch.version.cuda is None or torch.cuda.get_device_capability(device) < (8, 0)):
        return " needs an NVIDIA GPU of compute capability 8.0 (Ampere) or later; use attention='torch'"
    # the interpreter multiplies bfloat16 as integers
    dtypes = [dtype for dtype in TL_DTYPES if not (INTERPRETED and dtype == torch.bfloat16)]
    if dtype not in dtypes:
        return f" works in {', '.join(map(str, dtypes))}, not {dtype}; use attention='torch'"
    return ""


TL_DTYPES: dict[torch.dtype, Any] = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def trigger_next(PDL: tl.constexpr) -> None:
    """Let the next kernel start."""
    if PDL and PDL != LATE:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr) -> None:
    """Wait; before this, nothing that an earlier kernel wrote may be read, and nothing may be written."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    if PDL == LATE:
        tl.extra.cuda.gdc_launch_dependents()


def pdl_options(device: torch.device, *, after_library: bool = False, late: bool = False) -> dict[str, Any]:
    """The launch options of every kernel.

    after_library: the kernel before never triggers early; a plain launch is then faster. late: see above.
    """
    if not has_pdl(device):
        return {"PDL": False}
    return {"PDL": LATE.value if late else True, "launch_pdl": not after_library}


@cache
def has_pdl(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (9,)
