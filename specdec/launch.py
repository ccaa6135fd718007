"""Starts rounds and prompt chunks on the device and brings back what came out, in one copy.

It chooses the shape of a round, seats the rows, sends what the host has changed in one upload, and runs the round as it
is or, on a GPU, as a captured one. A round under way is waited for only when its result is asked for.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from specdec.clock import StageClock
from specdec.config import SamplingParams, SpecConfig
from specdec.graphs import RoundGraphs
from specdec.kvcache.mirror import IntArray
from specdec.result import RoundResult, RoundShape, unpack
from specdec.round import Round
from specdec.sampling import Uses

FULL_DEPTH = 1 << 30


class Launcher:
    """Runs the rounds of one engine. graphs: None on a device that has none."""

    def __init__(self, round: Round, spec: SpecConfig, graphs: RoundGraphs | None) -> None:
        self.round = round
        self.spec = spec
        self.graphs = graphs
        self._clock = StageClock(round.device)

    def prefill(
        self, rows: IntArray, params: Sequence[SamplingParams], chunk_len: IntArray, through: Sequence[int]
    ) -> RoundResult:
        """Prompt chunks of `chunk_len` [B] tokens; the result is that of the rows numbered `through`."""
        drawing = [params[i] for i in through]
        self.round.flush()
        packed = self.round.prefill(
            rows, chunk_len, np.array(through, dtype=np.int64), Uses.of(drawing), _most_logprobs(drawing), self._clock
        )
        host = Fetched.of(packed).wait()
        asked = [p.logprobs for p in drawing]
        return unpack(host, 1, 1, asked, num_steps=0, seconds=self._clock.seconds())

    def decode(self, rows: IntArray, params: Sequence[SamplingParams], to_go: int) -> RoundResult:
        """One round of these rows, of which none can use more than `to_go` tokens."""
        shape = self._shape(rows, params, to_go)
        if self.graphs is not None:
            shape = self.graphs.bucket(shape)
        self.round.seat(rows, shape.batch)
        self.round.flush()
        captured = None if self.graphs is None else self.graphs.replay(shape)
        if captured is None:
            packed, clock = self.round.decode(shape, self._clock), self._clock
        else:
            packed, clock = captured.packed, captured.clock
        host = Fetched.of(packed).wait()
        return unpack(
            host,
            shape.num_nodes,
            shape.depth,
            [p.logprobs for p in params],
            num_steps=shape.num_steps,
            seconds=clock.seconds(),
        )

    def _shape(self, rows: IntArray, params: Sequence[SamplingParams], to_go: int) -> RoundShape:
        num_steps, num_nodes = 0, 1
        if self.round.worker is not None:  # no request can use more drafts than it has tokens to go, less the bonus
            num_steps, num_nodes = self.spec.shortened(FULL_DEPTH if self.graphs is not None else to_go - 1)
        return RoundShape(
            batch=len(rows),
            longest=int(self.round.cache.table.committed_len.host[rows].max(initial=0)),
            num_steps=num_steps,
            topk=self.spec.topk,
            num_nodes=num_nodes,
            uses=Uses.of(params),
            logprobs=_most_logprobs(params),
        )


class Fetched(NamedTuple):
    """A copy on its way to the host; `done` is reached when it is there."""

    host: torch.Tensor
    done: torch.cuda.Event | None

    @classmethod
    def of(cls, packed: torch.Tensor) -> "Fetched":
        if packed.device.type != "cuda":
            return cls(packed, None)
        host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        host.copy_(packed, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return cls(host, done)

    def wait(self) -> IntArray:
        if self.done is not None:
            self.done.synchronize()
        array: IntArray = self.host.numpy()
        return array


def _most_logprobs(params: Sequence[SamplingParams]) -> int | None:
    return max((p.logprobs for p in params if p.logprobs is not None), default=None)
