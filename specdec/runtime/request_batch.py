"""The requests of a step with their rows, parameters and lengths as arrays. Rebuilt only when the set of requests
changes."""

from collections import deque
from collections.abc import Sequence

import numpy as np

from specdec.gpu.mirrored_array import IntArray
from specdec.runtime.request import Request, table_rows

KEPT = 3
"""Number of batches kept: one of all running requests, one of those that decode, one of those in the next round."""


class RequestBatch:
    """Requests, with the epochs, rows [B] and parameters that they had. max_total_len [B]: their lengths if only
    max_new_tokens ends them. constrained: those with a grammar or rules about tokens. fixed [B]: do they fix their
    draft?"""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._checked = Request.row_loss_epoch  # as of which all have their rows
        self._all = list(range(len(requests)))
        self.requests = list(requests)
        self.epochs = [request.row_epoch for request in requests]
        self.rows: IntArray = table_rows(requests)
        self.params = [request.params for request in requests]
        self.logprobs = [each.logprobs for each in self.params]
        self.max_total_len: IntArray = np.array([request.max_total_len for request in requests], dtype=np.int64)
        self.constrained = [request for request in requests if request.settled.grammar_state is not None]
        self.fixed = np.array([request.has_fixed_draft for request in requests], dtype=np.bool_)

    def present(self) -> list[int]:
        """Numbers of the requests that still have their row."""
        row_loss_epoch = Request.row_loss_epoch
        if self._checked != row_loss_epoch:
            epochs = [request.row_epoch for request in self.requests]
            if epochs != self.epochs:
                return [i for i, (now, then) in enumerate(zip(epochs, self.epochs, strict=True)) if now == then]
            self._checked = row_loss_epoch
        return self._all


class Batches:
    """The newest batches: a step whose requests are those of the step before makes none."""

    def __init__(self) -> None:
        self._newest: deque[RequestBatch] = deque(maxlen=KEPT)

    def batch_of(self, requests: Sequence[Request]) -> RequestBatch:
        """The batch of these requests, each of which has a row."""
        for batch in self._newest:
            same = requests is batch.requests or requests == batch.requests
            if same and len(batch.present()) == len(requests):
                return batch
        self._newest.append(RequestBatch(requests))
        return self._newest[-1]
