"""How many CPU threads a forward uses: as many as its work is worth.

    weights up to 64 MB, up to 64 tokens      one thread, whatever torch is set to
    more weights, or more tokens              one for every 64 MB, up to torch's own number

Threads wait for each other at every matrix product. On a busy machine this wait can last a scheduler slice:
milliseconds for a product of microseconds. The number depends on sizes only, never on timing, so it is the same in
every run.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from specdec.models.weight_storage import stored_weights

BYTES_OF_A_THREAD = 64 << 20

WEIGHTS_BOUND = 64
"""Up to this many tokens, a forward takes as long as reading its weights."""


class CpuThreads:
    """Chooses the threads of forwards of one model. Does nothing on a GPU."""

    def __init__(self, model: nn.Module, device: torch.device, *, deterministic: bool = False) -> None:
        self._bytes = stored_weights(model).bytes if device.type == "cpu" else 0
        self._by_tokens = not deterministic  # bits may depend on how threads divide a product
        self._most = 1

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Within the block, forwards use as many threads as a small one, until `fit` sets more. Afterwards the thread's
        earlier number is restored."""
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
