"""Fused operations: each kernel launcher declares the plain torch function that it equals.

    @op(reference=reference_softcap)
    def softcap(logits, cap): ...

    ops(softcap)(logits, 30.0)      ops: one of the three below, chosen once, when a model is fused

    REFERENCE   plain torch                                      runs anywhere, and is the oracle of every kernel
    KERNELS     the kernels                                      a row's bits do not depend on the number of rows
    FAST        the kernels, whose sums have any order           faster prefill and large batches, without that
                (`has_orders`), and the vendor's products        property

A launcher takes the arguments of its reference. Its others (in_order, tiles, ...) are keywords with defaults; they
choose how it computes, not what. References may wait for the device; kernels never do.
"""

from collections import ChainMap
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from typing import Any, TypeVar, cast

import torch

from specdec.errors import ConfigError
from specdec.gpu.triton_shim import triton_obstacle

Operation = TypeVar("Operation", bound=Callable[..., Any])
StandIns = MutableMapping[Callable[..., Any], Callable[..., Any]]

_references: StandIns = {}
_in_any_order: StandIns = {}


def op(*, reference: Callable[..., Any], has_orders: bool = False) -> Callable[[Operation], Operation]:
    """Declare an operation. has_orders: in `FAST` it is called with in_order=False."""

    def declare(kernel: Operation) -> Operation:
        _references[kernel] = reference
        if has_orders:
            _in_any_order[kernel] = partial(kernel, in_order=False)
        return kernel

    return declare


class Operations:
    """One way of running every operation. stand_ins: functions that replace operations."""

    def __init__(self, stand_ins: StandIns) -> None:
        self._stand_ins = stand_ins

    def __call__(self, operation: Operation) -> Operation:
        """The function that runs instead of this operation."""
        assert operation in _references, f"{operation} is no operation: it has no @op"
        return cast(Operation, self._stand_ins.get(operation, operation))

    def replacing(self, changes: Mapping[Callable[..., Any], Callable[..., Any]]) -> "Operations":
        return Operations(ChainMap(dict(changes), self._stand_ins))


REFERENCE = Operations(_references)
KERNELS = Operations({})
FAST = Operations(_in_any_order)


def choose_operations(fused: str | bool, attention: str, device: torch.device, dtype: torch.dtype) -> Operations | None:
    """The operations that `EngineConfig.fused` and `EngineConfig.attention` mean; None: Hugging Face's own modules.

    Raises ConfigError when attention is "triton" and the kernels cannot run here.
    """
    if not fused or (fused == "auto" and device.type != "cuda"):
        return None
    if attention == "triton" or (attention == "auto" and device.type == "cuda"):
        obstacle = triton_obstacle(device, dtype)
        if not obstacle:
            return FAST
        if attention == "triton":
            raise ConfigError(f"attention='triton'{obstacle}")
    return None if fused == "auto" else REFERENCE
