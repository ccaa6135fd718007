"""Checks that a block can be captured in a CUDA graph. It runs anywhere, the CPU included.

    with capturable():
        tree = worker.propose(batch)

raises `HostWork` if the block waits for the device (`.item()`, `.tolist()`, `if tensor:`, a shape that depends on
values), or makes a tensor from host data (`torch.tensor([..])`, `torch.from_numpy`, indexing by a list, a factory
without `device=`). On a CPU, device and host are the same, so the check looks at the operations called, not at the
places of tensors. On a GPU it also refuses copies between host and device. It ignores what Triton's interpreter does
for a kernel.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from cpu_capture import around_launches, record, tensors_in
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

TO_HOST = {torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.__array__}
FROM_HOST = {torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor, torch.Tensor.new_tensor}
FACTORIES = {torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.ones, torch.rand, torch.zeros}
DEPENDS_ON_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
INDEXING = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)


class HostWork(AssertionError):
    """An operation that no CUDA graph can hold."""


@contextmanager
def capturable() -> Iterator[None]:
    """Raise `HostWork` in the block at the first operation that no CUDA graph can hold."""
    with _Functions(), _Operators(), around_launches(lambda launch, *_: launch()):
        yield


def capture(program: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """Record a program on a tape, as an engine captures it on a GPU; raises `HostWork` too."""
    with capturable():
        return record(program)


class _Functions(TorchFunctionMode):
    """Checks the functions that Python calls."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in TO_HOST:
            raise HostWork(f"Tensor.{func.__name__} waits for the device")
        if func in FROM_HOST:
            raise HostWork(f"{func.__name__} makes a tensor out of host data")
        if func in FACTORIES and kwargs.get("device") is None:
            raise HostWork(f"torch.{func.__name__} without device= makes its tensor on the host")
        return func(*args, **kwargs)


class _Operators(TorchDispatchMode):
    """Checks the operators that run, composite ones taken apart."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.lift_fresh.default and args[0].dim():  # a lone number travels with the launch
            raise HostWork("a tensor is made out of host data")
        if func.overloadpacket in INDEXING:
            if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]):
                raise HostWork(f"{func} by a mask has a shape that depends on values; use where or masked_fill")
        elif any(tag in func.tags for tag in DEPENDS_ON_VALUES):
            raise HostWork(f"{func} waits for the device")
        with self:
            out = func.decompose(*args, **kwargs)
        if out is NotImplemented:
            out = func(*args, **kwargs)
            tensors = [x for x in tensors_in((args, kwargs, out)) if x.dim()]
            if len({tensor.device.type for tensor in tensors}) > 1:
                raise HostWork(f"{func} copies between host and device")
        return out
