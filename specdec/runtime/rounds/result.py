"""The shape of a round, fixed before it runs, and its result, packed into one array for the host.

    B rows    length   path [N]   tokens [D]   and if any request asks for log-probabilities, for each of the D tokens:
                                               its own, the K highest at its position, and their token ids
    then      the stamps of the round's clock

Everything is int64, so that one copy moves it to the host; a float is stored as the bits of a float64.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from specdec.config import MAX_TREE_NODES, SpecConfig
from specdec.gpu.mirrored_array import IntArray
from specdec.gpu.stage_clock import seconds_by_stage
from specdec.sampling.log_probs import LogProbs, TokenLogprob
from specdec.sampling.sampling_table import SamplerFeatures


class DraftShape(NamedTuple):
    """A draft of `num_steps` levels and `topk` branches per node; `num_nodes` nodes are verified, root included.
    by_lookup: the lookup drafts it, not the model next to the lookup."""

    num_steps: int
    topk: int
    num_nodes: int
    by_lookup: bool = False

    @classmethod
    def from_spec(cls, spec: SpecConfig, max_depth: int = MAX_TREE_NODES) -> "DraftShape":
        """The draft of these settings for requests that can use at most `max_depth` levels."""
        num_steps, num_nodes = spec.shortened(max_depth)
        return cls(num_steps, spec.topk, num_nodes)

    @property
    def depth(self) -> int:
        """Upper bound on the drafts that a round can accept."""
        return min(self.num_steps, self.num_nodes - 1)

    def covers(self, other: "DraftShape") -> bool:
        """Is it from the same drafter as `other`, and at least as large in every number?"""
        return self.by_lookup == other.by_lookup and all(has >= wants for has, wants in zip(self, other, strict=True))

    def __str__(self) -> str:
        if self.num_nodes == 1:
            return "no draft"
        drafted = f"a chain of {self.num_steps}" if self.topk == 1 else f"a tree of {self.num_nodes} nodes"
        return f"{drafted} by lookup" if self.by_lookup else drafted


NO_DRAFT = DraftShape(0, 1, 1)
"""No draft: the root only."""


def covering_draft(drafts: Collection[DraftShape]) -> DraftShape:
    """The smallest draft that covers all of these; no draft if there are none."""
    return DraftShape(*(max(size) for size in zip(NO_DRAFT, *drafts, strict=True)))


class RoundShape(NamedTuple):
    """Key of a captured round: all parameters of a round that are not data on the device.

    batch: seats, padding included.
    max_committed_len: upper bound on committed prefixes.
    features: sampling parameters that some row uses.
    logprobs: most alternatives that a request asks for; None: no request asks.
    forced: nodes of the round (at least those of its draft) if a grammar forces tokens; 0: none does.
    """

    batch: int
    max_committed_len: int
    draft: DraftShape
    features: SamplerFeatures
    logprobs: int | None
    forced: int = 0

    @property
    def width(self) -> int:
        return self.forced or self.draft.num_nodes

    @property
    def depth(self) -> int:
        """Upper bound on the tokens that a request can gain, and on the length of a path."""
        return self.forced or 1 + self.draft.depth


class RoundResult(NamedTuple):
    """Result of a round: the accepted path of nodes [B, N] and its length [B]; the first `length` of tokens [B, D] are
    emitted.

    logprobs: log-probabilities of each request's D tokens; empty if it did not ask.
    draft_depth [B]: deepest draft that each row could accept.
    seconds: time of each stage.
    forced [B]: leading tokens that the grammar forced.
    ended: end of the round, in nanoseconds of the device's clock.
    """

    length: IntArray
    path: IntArray
    tokens: IntArray
    logprobs: list[list[TokenLogprob]]
    draft_depth: IntArray
    seconds: dict[str, float]
    forced: IntArray
    ended: int = 0

    def select_requests(self, chosen: Sequence[int]) -> "RoundResult":
        logprobs = [self.logprobs[i] for i in chosen]
        arrays = {name: getattr(self, name)[chosen] for name in ("length", "path", "tokens", "draft_depth", "forced")}
        return self._replace(**arrays, logprobs=logprobs)


def empty_result(
    shape: RoundShape, num_stamps: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Allocate a packed result without log-probabilities. Returns the whole int64 array, and views of its rows [B, 1 +
    N + D] and its stamps [M]."""
    columns = 1 + shape.width + shape.depth
    numbers = torch.empty(shape.batch * columns + num_stamps, dtype=torch.int64, device=device)
    return numbers, numbers[:-num_stamps].view(shape.batch, columns), numbers[-num_stamps:]


def pack_round_result(rows: torch.Tensor, scores: LogProbs | None, stamps: torch.Tensor) -> torch.Tensor:
    """Pack rows [B, 1 + N + D] of length, path and tokens, the scores, and stamps [M] into int64 [B * W + M]."""
    if scores is not None:
        columns = [rows, _bits(scores.chosen), _bits(scores.values.flatten(1)), scores.ids.flatten(1)]
        rows = torch.cat(columns, dim=1)
    return torch.cat([rows.flatten(), stamps])


def unpack_round_result(
    packed: IntArray,
    shape: RoundShape,
    stages: Sequence[str],
    asked: Sequence[int | None],
    drafts: IntArray,
    forced: IntArray,
) -> RoundResult:
    """Read the result of the first len(asked) of `shape.batch` rows.

    asked: for each request, how many alternatives it asks for at each token; None: no log-probabilities. drafts,
    forced: see RoundResult.
    """
    stamps = packed[len(packed) - len(stages) - 1 :]
    depth, numbers = shape.depth, len(packed) - len(stamps)
    width = numbers // shape.batch if shape.batch else 1 + shape.width + depth
    rows = packed[:numbers].reshape(shape.batch, width)[: len(asked)]
    of_path, end = 1 + shape.width, 1 + shape.width + depth
    length, path, tokens, rest = rows[:, 0], rows[:, 1:of_path], rows[:, of_path:end], rows[:, end:]
    logprobs: list[list[TokenLogprob]] = [[]] * len(asked)  # replaced below
    if rest.shape[1]:
        count = (rest.shape[1] // depth - 1) // 2
        of_chosen, of_best, ids = np.split(rest, np.cumsum([depth, depth * count]), axis=1)
        chosen, values = _floats(of_chosen), _floats(of_best).reshape(len(asked), depth, count)
        ids = ids.reshape(len(asked), depth, count)
        for i, wanted in enumerate(asked):
            if wanted is not None:
                best = [
                    dict(zip(ids[i, s, :wanted].tolist(), values[i, s, :wanted].tolist(), strict=True))
                    for s in range(depth)
                ]
                of_tokens = zip(tokens[i].tolist(), chosen[i].tolist(), best, strict=True)
                logprobs[i] = [TokenLogprob(*one) for one in of_tokens]
    seconds = seconds_by_stage(stages, stamps)
    return RoundResult(length, path, tokens, logprobs, drafts, seconds, forced, int(stamps[-1]))


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.double().view(torch.int64)


def _floats(bits: IntArray) -> npt.NDArray[np.float64]:
    return np.ascontiguousarray(bits).view(np.float64)
