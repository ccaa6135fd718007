"""Small integer arrays that the host plans with and the device computes with.

The host writes `host` at once; the next `flush` sends the changed cells of all arrays in one upload. With `adopt` the
host copies values that the device computed by itself (an accepted path brought forward, a longer committed length);
this sends nothing. Invariant: after a flush and every `adopt` that is due, the two sides are equal.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

IntArray = npt.NDArray[np.int64]


class MirroredArray:
    """int64 array with a host side (`host`, numpy) and a device side (`tensor`, torch), zero at the start."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.host: IntArray = np.zeros(shape, dtype=np.int64)
        self._tensor = torch.zeros(shape, dtype=torch.int64, device=device)
        self._axes = [np.broadcast_to(axis, shape) for axis in np.indices(shape, sparse=True)]  # each cell's indices
        self._changed: list[IntArray] = []  # flat indices of cells not yet sent to the device

    @property
    def tensor(self) -> torch.Tensor:
        """The device side, with all writes of the host."""
        if self._changed:
            flush([self])
        return self._tensor

    def __setitem__(self, index: Any, value: IntArray | int) -> None:
        cells = np.ravel_multi_index([axis[index] for axis in self._axes], self.host.shape).reshape(-1)
        if len(cells):
            self._changed.append(cells)  # before the write: sending a cell needlessly does no harm
            self.host[index] = value

    def adopt(self, index: Any, value: IntArray | int) -> None:
        """Copy values that the device computed by itself."""
        self.host[index] = value

    def clear(self) -> None:
        self._changed = []
        self.host[...] = 0
        self._tensor.zero_()

    def check(self) -> None:
        """Assert that the two sides are equal (synchronises with the device)."""
        differ = np.argwhere(self.tensor.cpu().numpy() != self.host)
        assert len(differ) == 0, f"host and device differ at {differ[:4].tolist()} and {len(differ)} cells in all"


def upload(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy an array to the device, with the same dtype and shape, without waiting."""
    host = torch.from_numpy(array)
    if device.type == "cuda":
        host = host.pin_memory()  # otherwise the copy would wait for the device's running work
    return host.to(device, non_blocking=True)


def flush(arrays: Sequence[MirroredArray]) -> None:
    """Send the host's changes in all of `arrays` (of one device), in one upload."""
    stale = [array for array in arrays if array._changed]
    if not stale:
        return
    cells = [np.concatenate(array._changed) for array in stale]  # a cell may repeat, with one value
    values = [array.host.reshape(-1)[flat] for array, flat in zip(stale, cells, strict=True)]
    packed = upload(np.stack([np.concatenate(cells), np.concatenate(values)]), stale[0]._tensor.device)  # [2, M]
    for array, part in zip(stale, packed.split([len(flat) for flat in cells], dim=1), strict=True):
        array._tensor.view(-1).index_copy_(0, part[0], part[1])
        array._changed = []
