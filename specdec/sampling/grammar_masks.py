"""Which tokens grammars allow at the nodes of a round: one buffer on the device, at one address, for all shapes.

Bits of a mask are tokens, bit v % 32 of word v // 32. Rows that have no grammar are filled on the device, so the host
computes and sends the masks of those that have one.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from specdec.gpu.mirrored_array import IntArray, upload

FREE = -1
"""All bits: every token is allowed."""


class RowMasks(NamedTuple):
    """words [M, N, ceil(V / 32)] int32 of those M rows of a batch, numbers rows [M], that have a grammar."""

    rows: IntArray
    words: npt.NDArray[np.int32]


class MaskBuffer:
    """Made when the first grammar comes, for the largest round of the engine, and never replaced: captured rounds read
    it. most_rows, most_nodes: of that round."""

    def __init__(self, vocab_size: int, most_rows: int, device: torch.device) -> None:
        self.num_words = -(-vocab_size // 32)
        self.most_nodes = 1
        self._most_rows = most_rows
        self._device = device
        self._words: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return 0 if self._words is None else self._words.nbytes

    def at(self, batch: int, num_nodes: int) -> torch.Tensor:
        """[B, N, ceil(V / 32)] int32 that rounds of this size read: a view of the one buffer."""
        size = batch * num_nodes * self.num_words
        if self._words is None:
            most = max(self._most_rows * self.most_nodes * self.num_words, size)
            self._words = torch.full((most,), FREE, dtype=torch.int32, device=self._device)
        assert size <= self._words.numel(), f"{batch=} {num_nodes=} {self.most_nodes=}"
        return self._words[:size].view(batch, num_nodes, self.num_words)


def write_masks(target: torch.Tensor, masks: RowMasks) -> None:
    """Into target [B, N, words], behind what is under way and without waiting for it; other rows are free."""
    target.fill_(FREE)
    target.index_copy_(0, upload(masks.rows, target.device), upload(np.ascontiguousarray(masks.words), target.device))
