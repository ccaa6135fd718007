"""A small integer array that the host decides and the device reads.

The host is the only writer, so the two copies cannot diverge: every change goes through `__setitem__`, which updates
both. On the CPU the device tensor *is* the host memory.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]


class MirroredArray:
    """int64 array with a host side (`host`, numpy) and a device side (`tensor`, torch), zero at the start."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.host: IntArray = np.zeros(shape, dtype=np.int64)
        aliased = device.type == "cpu"
        self.tensor = torch.from_numpy(self.host) if aliased else torch.zeros(shape, dtype=torch.int64, device=device)
        self._aliased = aliased

    def __setitem__(self, index: Any, value: IntArray | int) -> None:
        self.host[index] = value
        if self._aliased:
            return
        on_device = index if isinstance(index, tuple) else (index,)
        torch_index = tuple(self._upload(i) if isinstance(i, np.ndarray) else i for i in on_device)
        self.tensor[torch_index] = self._upload(value) if isinstance(value, np.ndarray) else value

    def _upload(self, array: IntArray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.tensor.device, non_blocking=True)
