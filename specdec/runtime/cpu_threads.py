"""How many threads of a CPU a forward uses: as many as it has work for.

    weights up to 64 MB, up to 64 tokens      one thread, whatever torch is set to
    more weights, or more tokens              one for every 64 MB, up to torch's own number

Threads wait for each other at every product. On a machine that is busy with other work such a wait can take a slice of
the scheduler's time, milliseconds where the product takes microseconds. The number depends on sizes alone, never on a
timing, so it is the same in every run.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from specdec.models.weight_storage import stored_weights

BYTES_OF_A_THREAD = 64 << 20

WEIGHTS_BOUND = 64
"""Tokens of a forward up to which its time is that of reading its weights."""


class CpuThreads:
    """Chooses the threads of forwards of one model. Does nothing on a GPU."""

    def __init__(self, model: nn.Module, device: torch.device, *, deterministic: bool = False) -> None:
        self._bytes = stored_weights(model).bytes if device.type == "cpu" else 0
        self._by_tokens = not deterministic  # the threads that divide a product may decide its bits
        self._most = 1

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Within, forwards have the threads of a small one until `fit` says more; afterwards this thread's number is
        what it was."""
        self._most = torch.get_num_threads()
        self.fit(1)
        try:
            yield
        finally:
            if torch.get_num_threads() != self._most:
                torch.set_num_threads(self._most)

    def fit(self, tokens: int) -> None:
        """Set the threads for the next forward, over `tokens` tokens."""
        if self._bytes and (threads := self.fitting(tokens)) != torch.get_num_threads():
            torch.set_num_threads(threads)

    def fitting(self, tokens: int) -> int:
        work = self._bytes * (max(1.0, tokens / WEIGHTS_BOUND) if self._by_tokens else 1.0)
        return max(1, min(self._most, round(work / BYTES_OF_A_THREAD)))
