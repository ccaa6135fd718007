"""Logit biases as cells of int64: a token id and the bits of a float32 each, so that one upload brings them."""

from collections.abc import Mapping

import numpy as np
import torch

from specdec.gpu.mirrored_array import IntArray


def bias_room(entries: int) -> int:
    """Room for so many entries of a bias: 0, 16, 32, 64, ..., so that few rounds differ by it."""
    return max(16, 1 << (entries - 1).bit_length()) if entries else 0


def pack_bias(bias: Mapping[int, float], room: int) -> IntArray:
    """[room] entries: the token id in the low half, the bits of a float32 in the high one; what is left over is 0."""
    cells = np.zeros((room, 2), dtype=np.int32)
    cells[: len(bias), 0] = list(bias)
    cells[: len(bias), 1] = np.array(list(bias.values()), dtype=np.float32).view(np.int32)
    return cells.view("<i8")[:, 0]


def unpack_bias(cells: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cells [B, K] -> token ids int64 and values float32, [B, K] each."""
    halves = cells.view(torch.int32).unflatten(1, (-1, 2))
    return halves[..., 0].long(), halves[..., 1].contiguous().view(torch.float32)
