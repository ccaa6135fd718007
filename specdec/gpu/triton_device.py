"""Whether Triton kernels can run on a device, and how large a program may be."""

from functools import cache

import torch

from specdec.gpu.triton_shim import INTERPRETED, triton

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


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
    dtypes = KERNEL_DTYPES[:2] if INTERPRETED else KERNEL_DTYPES  # the interpreter multiplies bfloat16 as integers
    if dtype not in dtypes:
        return f" works in {', '.join(map(str, dtypes))}, not {dtype}; use attention='torch'"
    return ""
