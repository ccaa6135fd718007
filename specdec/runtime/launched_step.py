"""A round or a group of prompt chunks on the device, until its result is on the host and settled."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specdec.gpu.mirrored_array import IntArray
from specdec.gpu.ranks import Ranks
from specdec.runtime.request import Request
from specdec.runtime.rounds.prompt_scoring import ChunkScoring, ScoredSpan
from specdec.runtime.rounds.result import RoundResult, RoundShape, unpack_round_result
from specdec.sampling.log_probs import TokenScores


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A round or a group of prompt chunks on the device, and the requests that had a row in it.

    row_epochs: `row_epoch` of each request at the launch; the result of a request that has lost its row since is
    ignored. drawing: batch indices of the requests whose prompt ends here and that draw their first token; None for a
    round. packed: the result, on its way to the host; `shape` and `stages` say how to read it. drafts [B]: deepest
    draft that each request could accept. forced [B]: tokens of each request that its grammar forced. scores: requested
    log-probabilities of prompt tokens. done: the CUDA event of the copy to the host; None: there is nothing to wait
    for.
    """

    requests: Sequence[Request]
    row_epochs: list[int]
    drawing: list[int] | None
    shape: RoundShape
    stages: tuple[str, ...]
    packed: torch.Tensor
    drafts: IntArray
    forced: IntArray
    scores: tuple[ChunkScoring, torch.Tensor] | None
    done: torch.cuda.Event | None

    def present(self) -> list[int]:
        """Batch indices of the requests that still have their row."""
        epochs = [request.row_epoch for request in self.requests]
        if epochs == self.row_epochs:
            return list(range(len(epochs)))
        seats = enumerate(zip(self.requests, self.row_epochs, strict=True))
        return [i for i, (request, epoch) in seats if request.row_epoch == epoch]

    def gaining(self) -> list[Request]:
        """Present requests that are sure to get a token."""
        return [self.requests[i] for i in self.present() if self.drawing is None or i in self.drawing]

    def result(self) -> RoundResult:
        """Result of all requests of a round, or of those that draw after prompt chunks. Waits for the device."""
        drawn = self.requests if self.drawing is None else [self.requests[i] for i in self.drawing]
        asked = [request.params.logprobs for request in drawn]
        return unpack_round_result(self._on_host(self.packed), self.shape, self.stages, asked, self.drafts, self.forced)

    def prompt_scores(self) -> list[tuple[ScoredSpan, TokenScores]]:
        return [] if self.scores is None else self.scores[0].split(self._on_host(self.scores[1]))

    def _on_host(self, numbers: torch.Tensor) -> IntArray:
        if self.done is not None:
            self.done.synchronize()
        array: IntArray = numbers.numpy()
        return array


def launched_now(
    requests: Sequence[Request],
    drawing: list[int] | None,
    shape: RoundShape,
    stages: tuple[str, ...],
    packed: torch.Tensor,
    ranks: Ranks | None,
    *,
    drafts: IntArray | None = None,
    forced: IntArray | None = None,
    scores: tuple[ChunkScoring, torch.Tensor] | None = None,
) -> LaunchedStep:
    """Begin to copy the result of what was just launched to the host. drafts, forced: None where there are none."""
    epochs, none = [request.row_epoch for request in requests], np.zeros(shape.batch, dtype=np.int64)
    drafts, forced = none if drafts is None else drafts, none if forced is None else forced
    on_host, done = copy_to_host(packed), event_now(packed.device)
    done = done if ranks is None else ranks.guarded(done)
    return LaunchedStep(requests, epochs, drawing, shape, stages, on_host, drafts, forced, scores, done)


def copy_to_host(numbers: torch.Tensor) -> torch.Tensor:
    """A copy on the host, before anything overwrites them: complete once an `event_now` recorded later is reached."""
    if numbers.device.type != "cuda":
        return numbers.clone()
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    return host.copy_(numbers, non_blocking=True)


def event_now(device: torch.device) -> torch.cuda.Event | None:
    """Reached when everything launched so far has run; None: it has."""
    if device.type != "cuda":
        return None
    done = torch.cuda.Event()
    done.record()
    return done
