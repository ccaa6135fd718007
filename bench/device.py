"""The device of a run, and packages that the machine of a GPU may lack. Imported before torch and triton.

`--device cpu` runs kernels in Triton's interpreter: to see that a case works, not what a GPU does. Times are left out.
"""

import gc
import importlib.util
import os
import sys
from itertools import pairwise
from pathlib import Path
from unittest.mock import MagicMock

ROOT = Path(__file__).resolve().parent.parent
ON_CPU = ("--device", "cpu") in pairwise(sys.argv) or "--device=cpu" in sys.argv
if ON_CPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if importlib.util.find_spec("specdec") is None:
    sys.path.insert(0, str(ROOT))
sys.path.append(str(ROOT / "tests"))  # some cases have models and scenes of the tests
if importlib.util.find_spec("rich") is None:  # it draws progress bars, which nothing here needs
    sys.modules |= {name: MagicMock() for name in ("rich", "rich.box", "rich.console", "rich.progress", "rich.table")}

import torch  # noqa: E402
import triton  # noqa: E402

if ON_CPU:
    import quick_interpreter  # noqa: F401 - else a row's bits depend on its tile and on the CPU

DEVICE = torch.device("cpu" if ON_CPU else "cuda")
DTYPE = torch.float32 if ON_CPU else torch.bfloat16
"""Dtype of models; the interpreter has no bfloat16."""
DIVISOR = 16 if ON_CPU else 1
"""Widths of published shapes are divided by it."""


def machine() -> str:
    """The device and the versions, in words."""
    if ON_CPU or not torch.cuda.is_available():
        name = "CPU, Triton's interpreter" if ON_CPU else "CPU"
    else:
        name = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return f"{name}, torch {torch.__version__}, triton {triton.__version__}"


def free_memory() -> None:
    """Give back what the part before has left to the allocator."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
