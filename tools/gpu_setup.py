"""What the GPU scripts share: the device, and `specdec` from an installation or from the checkout around this file.

Import it before torch, triton and specdec. `--device cpu` on the command line runs the kernels in Triton's interpreter:
to see that a script works, not what a GPU does. Timings are left out there.
"""

import argparse
import importlib.util
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

from result_table import Row

ROOT = Path(__file__).resolve().parent.parent

device_option = argparse.ArgumentParser(add_help=False)
device_option.add_argument(
    "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: in Triton's interpreter, to debug a script"
)
ON_CPU = device_option.parse_known_args()[0].device == "cpu"
if ON_CPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")

if importlib.util.find_spec("specdec") is None:
    sys.path.insert(0, str(ROOT))
if importlib.util.find_spec("rich") is None:  # draws progress bars, nothing here needs
    sys.modules |= {name: MagicMock() for name in ("rich", "rich.box", "rich.console", "rich.progress", "rich.table")}

import torch  # noqa: E402
import triton  # noqa: E402

DEVICE = torch.device("cpu" if ON_CPU else "cuda")


def require_device() -> None:
    """Exit with 2, saying so, where there is no GPU to check anything on."""
    if not ON_CPU and not torch.cuda.is_available():
        print("no CUDA device: nothing was checked", file=sys.stderr)
        sys.exit(2)


def waiting_row(name: str, work: Callable[[], None]) -> Row:
    """Does `work`, which is these rounds, make the host wait for the device? Nothing else may be under way."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
        error = ""
    except RuntimeError as exception:
        error = str(exception)[:200]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return Row(f"{name} under set_sync_debug_mode('error')", error or "none waits", ok=not error)


def microseconds(call: Callable[[], object], replays: int = 20, calls: int = 4) -> float:
    """Times one call: the median of replays of a CUDA graph of several; inputs lie in the L2 as far as they fit."""
    if ON_CPU:
        call()
        return 0.0
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / calls * 1e3)
    return statistics.median(times)


def machine() -> str:
    """The device and the versions, in words."""
    name = "CPU, Triton's interpreter" if ON_CPU else torch.cuda.get_device_name()
    return f"{name}, torch {torch.__version__}, triton {triton.__version__}"
