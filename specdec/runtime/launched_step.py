"""A launched step: a round or a group of prompt chunks, from its launch until its result is settled."""

from dataclasses import dataclass

import torch

from specdec.gpu.mirrored_array import IntArray
from specdec.gpu.ranks import Ranks
from specdec.runtime.prompts.prompt_scores import ChunkScoring, ScoredSpan
from specdec.runtime.request import Request
from specdec.runtime.rounds.decode_round import DECODE_STAGES
from specdec.runtime.rounds.prompt_chunks import PREFILL_STAGES
from specdec.runtime.rounds.result import RoundResult, RoundShape, unpack_round_result
from specdec.runtime.scheduler import RequestBatch
from specdec.sampling.log_probs import TokenScores


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A round or a group of prompt chunks on the device, and the requests that had a row in it.

    batch: the requests; if one has lost its row since the launch, its result is ignored. drawing: batch indices of the
    requests whose prompt ends here and that draw their first token; None for a round. packed: the result, being copied
    to the host; `shape` says how to read it. draft_depth [B]: deepest draft that each request could accept. forced [B]:
    number of tokens that each request's grammar forced. done: the CUDA event of the copy; None: there is nothing to
    wait for. scores: requested log-probabilities of prompt tokens. catch_up_seconds: see `Steps.launch_round`.
    """

    batch: RequestBatch
    drawing: list[int] | None
    shape: RoundShape
    packed: torch.Tensor
    draft_depth: IntArray
    forced: IntArray
    done: torch.cuda.Event | None
    scores: tuple[ChunkScoring, torch.Tensor] | None = None
    catch_up_seconds: float = 0.0

    @property
    def is_round(self) -> bool:
        return self.drawing is None

    @property
    def requests(self) -> list[Request]:
        return self.batch.requests

    def present(self) -> list[int]:
        """Batch indices of the requests that still have their row."""
        return self.batch.present()

    def gaining(self) -> list[Request]:
        """Present requests that are certain to get a token."""
        return [self.requests[i] for i in self.present() if self.drawing is None or i in self.drawing]

    def result(self) -> RoundResult:
        """The result for all requests of a round, or for those that draw after prompt chunks. Waits for the device."""
        asked = self.batch.logprobs
        if self.drawing is not None:
            asked = [asked[i] for i in self.drawing]
        stages = DECODE_STAGES if self.is_round else PREFILL_STAGES
        return unpack_round_result(self._on_host(self.packed), self.shape, stages, asked, self.draft_depth, self.forced)

    def prompt_scores(self) -> list[tuple[ScoredSpan, TokenScores]]:
        return [] if self.scores is None else self.scores[0].split(self._on_host(self.scores[1]))

    def _on_host(self, numbers: torch.Tensor) -> IntArray:
        if self.done is not None:
            self.done.synchronize()
        array: IntArray = numbers.numpy()
        return array


def copy_to_host(numbers: torch.Tensor) -> torch.Tensor:
    """Start a copy of `numbers` to the host. It is complete once a later `event_now` is reached; later launches cannot
    overwrite it."""
    if numbers.device.type != "cuda":
        return numbers.clone()
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    return host.copy_(numbers, non_blocking=True)


def event_now(device: torch.device, ranks: Ranks | None = None) -> torch.cuda.Event | None:
    """An event that is reached when everything launched so far has run; None: it has run already. ranks: if they shared
    the work, waiting for it raises DeviceLostError if one of them does not answer."""
    if device.type != "cuda":
        return None
    done = torch.cuda.Event()
    done.record()
    return done if ranks is None else ranks.guarded(done)
