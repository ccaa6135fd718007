"""A CUDA graph on the CPU: records what a program does to tensors, and does it again without the program.

    replay, out = record(program)     runs the program, then undoes its writes
    replay()                          runs the same operators on the same memory; outputs keep their addresses

Like a captured graph it freezes the decisions of Python code, has fixed addresses, and refuses what a capture cannot
hold: a value read back to the host, a shape that depends on data, Python numbers uploaded inside. Kernels of Triton's
interpreter are recorded too, and a replay reads the clock again, as the kernel of a time stamp does.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import compress
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from specdec.gpu import stage_clock
from specdec.gpu.triton_shim import triton

READS = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "unique", "equal", "lift_fresh")


class NotCapturable(RuntimeError):
    """The program does something that a graph cannot hold."""


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of arguments or results in order. Several times as fast as torch's functions for trees."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


class Tape(TorchDispatchMode):
    """Records every operator as it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], None]] = []
        self.written: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # storages of others, as they were
        self._made: set[int] = set()
        self._kept: list[Any] = []  # nothing recorded is freed, so no address is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        if name.startswith(READS) and not name.startswith("item_"):
            raise NotCapturable(f"{name} inside of a captured round")
        if name in ("index", "index_put_", "index_put") and any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        ):
            raise NotCapturable(f"{name} by a mask: its shape depends on data")
        if func._schema.is_mutable:
            for tensor in self._mutated(func, args, kwargs):
                self.keep(tensor)
        out = func(*args, **kwargs)
        self._kept.append((args, kwargs, out))
        ins = {t.untyped_storage().data_ptr() for t in tensors_in((args, kwargs))}
        outs = list(tensors_in(out))
        fresh = [t.untyped_storage().data_ptr() not in ins for t in outs]  # or a view of what went in
        if func._schema.is_mutable:
            self.steps.append(lambda: func(*args, **kwargs))
        elif any(fresh):
            self._made |= {t.untyped_storage().data_ptr() for t in compress(outs, fresh)}
            self.steps.append(lambda: _rewrite(outs, func(*args, **kwargs), fresh))
        return out

    def keep(self, tensor: torch.Tensor) -> None:
        """Remember the contents of a storage that the program did not make, before they are overwritten."""
        place = tensor.untyped_storage().data_ptr()
        if place not in self._made and place not in self.written:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            self.written[place] = (whole, whole.clone())

    @staticmethod
    def _mutated(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
        for i, argument in enumerate(func._schema.arguments):
            if argument.is_write:
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                yield from tensors_in(value)


def _rewrite(outs: list[torch.Tensor], again: Any, fresh: list[bool]) -> None:
    for old, new, wanted in zip(outs, tensors_in(again), fresh, strict=True):
        if wanted:
            old.copy_(new)


def record(program: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """Record a program, in place of a CUDA capture: a `Capture` of `specdec.gpu.captures`."""
    tape = Tape()
    try:
        with torch.inference_mode(), _kernels_on(tape), tape:
            out = program()
    finally:  # a capture that fails has run nothing either
        with torch.inference_mode():
            for whole, before in tape.written.values():
                whole.copy_(before)

    def replay() -> None:
        with torch.inference_mode():
            for step in tape.steps:
                step()

    return replay, out


@contextmanager
def _kernels_on(tape: Tape) -> Iterator[None]:
    """Launches of interpreted kernels are recorded too, and time stamps as a whole: the operator that writes one holds
    the time of the recording."""

    def recorded(launch: Callable[[], None], *arguments: Any) -> None:
        for tensor in tensors_in(arguments):
            tape.keep(tensor)
        tape._kept.append(arguments)
        launch()
        tape.steps.append(launch)

    stamp = stage_clock.stamp_by_host

    def stamped(*args: Any) -> None:
        with _disable_current_modes():
            recorded(lambda: stamp(*args), args)

    with around_launches(recorded), mock.patch.object(stage_clock, "stamp_by_host", stamped):
        yield


@contextmanager
def around_launches(run: Callable[..., None]) -> Iterator[None]:
    """Call `run(launch, args, kwargs, executor)` for each launch of an interpreted kernel, with torch's modes off."""
    if not triton:
        yield
        return
    from triton.runtime.interpreter import GridExecutor  # not imported on a GPU

    own = GridExecutor.__call__

    def launched(executor: Any, *args: Any, **kwargs: Any) -> None:
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            run(lambda: own(executor, *args, **kwargs), args, kwargs, executor)

    with mock.patch.object(GridExecutor, "__call__", launched):
        yield
