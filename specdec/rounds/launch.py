"""Starts rounds and prompt chunks on the device and brings back what came out, in one copy.

It chooses the shape of a round, seats the rows, sends what the host has changed in one upload, and runs the round as it
is or, on a GPU, as a captured one. A round under way is waited for only when its result is asked for, and captured
rounds may be launched before the one in front has been settled: `lag` of them, for which slots are reserved.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specdec.config import SamplingParams, SpecConfig
from specdec.kvcache.mirror import IntArray
from specdec.rounds.graphs import RoundGraphs, batch_sizes
from specdec.rounds.result import RoundResult, RoundShape, unpack
from specdec.rounds.round import DECODE_STAGES, PREFILL_STAGES, Round
from specdec.rounds.sampling import Uses

FULL_DEPTH = 1 << 30
WORTH_A_FORWARD = 256
"""Positions of padding: to compute them takes about as long as to launch one more forward."""

Wanted = tuple[SpecConfig | None, int]
"""How a request speculates (None: not at all), and how many tokens it has to go."""


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A launched step: its result is on its way to the host, and there once `done` is reached."""

    packed: torch.Tensor
    done: torch.cuda.Event | None
    shape: RoundShape
    stages: tuple[str, ...]
    asked: list[int | None]  # of each request: alternatives to every token that it wants

    def result(self) -> RoundResult:
        """Waits for the device."""
        if self.done is not None:
            self.done.synchronize()
        packed: IntArray = self.packed.numpy()
        return unpack(packed, self.shape, self.stages, self.asked)


class Launcher:
    """Runs the steps of one engine. graphs: None where rounds are not captured."""

    def __init__(self, round: Round, spec: SpecConfig, graphs: RoundGraphs | None) -> None:
        self.round = round
        self.spec = spec
        self.graphs = graphs

    @property
    def lag(self) -> int:
        """Rounds that may be under way when one more is launched."""
        return 0 if self.graphs is None else 1

    def warm_up(self) -> Iterator[int]:
        """Capture greedy rounds of full drafts at the shortest tables, the largest batch first; nobody is seated.

        Yields the sizes, each when it is done. Other shapes are captured when they come.
        """
        if self.graphs is None:
            return
        nobody = np.zeros(0, dtype=np.int64)
        draft = None if self.round.worker is None else self.spec
        for size in reversed(batch_sizes(self.round.cache.table.max_requests)):
            shape = self.graphs.bucket(self._shape(nobody, [], [(draft, FULL_DEPTH)], 0)._replace(batch=size))
            for _ in range(2):  # as it is, then captured
                self.round.seat(nobody)
                self.round.flush()
                self.graphs.run(shape)
            yield size

    def prefill(
        self, rows: IntArray, params: Sequence[SamplingParams], chunk_len: IntArray, through: Sequence[int]
    ) -> UnderWay:
        """Prompt chunks of `chunk_len` [B] tokens; the result is that of the rows numbered `through`."""
        drawing = [params[i] for i in through]
        uses, logprobs = Uses.of(drawing), _most_logprobs(drawing)
        shape = RoundShape(len(drawing), 0, 0, 1, 1, uses, logprobs)
        chosen = np.array(through, dtype=np.int64)
        self.round.sampling.bring(rows[chosen], drawing, uses)
        self.round.flush()
        packed = self.round.prefill(rows, chunk_len, chosen, uses, logprobs)
        return _fetch(packed, shape, PREFILL_STAGES, drawing)

    def decode(
        self, rows: IntArray, params: Sequence[SamplingParams], drafts: Sequence[Wanted], under_way: int
    ) -> UnderWay:
        """One round of these rows, behind `under_way` others."""
        shape = self._shape(rows, params, drafts, under_way)
        if self.graphs is not None:
            shape = self.graphs.bucket(shape)
        self.round.seat(rows)
        self.round.sampling.bring(rows, params, shape.uses)
        self.round.flush()
        packed = self.round.decode(shape) if self.graphs is None else self.graphs.run(shape)
        return _fetch(packed, shape, DECODE_STAGES, params)

    def _shape(
        self, rows: IntArray, params: Sequence[SamplingParams], drafts: Sequence[Wanted], under_way: int
    ) -> RoundShape:
        num_steps, topk, num_nodes = self._draft_shape(drafts)
        most_nodes = 1 if self.round.worker is None else self.spec.num_nodes
        longest = int(self.round.cache.table.committed_len.host[rows].max(initial=0))
        return RoundShape(
            batch=len(rows),
            longest=longest + under_way * most_nodes,  # the host learns of those later
            num_steps=num_steps,
            topk=topk,
            num_nodes=num_nodes,
            uses=Uses.of(params),
            logprobs=_most_logprobs(params),
        )

    def _draft_shape(self, drafts: Sequence[Wanted]) -> tuple[int, int, int]:
        """(steps, topk, nodes) of a draft that is enough for each: the largest of what they want.

        Captured rounds have two, the engine's and none, so that few are captured.
        """
        wanted = [(spec, to_go) for spec, to_go in drafts if spec is not None]
        if wanted and self.graphs is not None:
            wanted = [(self.spec, FULL_DEPTH)]
        # no request can use more drafts than it has tokens to go, less the bonus
        sizes = [(*spec.shortened(to_go - 1), spec.topk) for spec, to_go in wanted]
        num_steps, num_nodes, topk = (max(size) for size in zip((0, 1, 1), *sizes, strict=True))
        return num_steps, topk, num_nodes


def alike(chunk_len: IntArray) -> list[IntArray]:
    """Numbers of the chunks [B] that share a forward: all are padded to the longest of it, so the short ones go apart.

    lengths 300 280 10 20 10     ->     (300 280) (20 10 10): 840 positions less, for one forward more
    """
    return _split(np.argsort(-chunk_len, kind="stable"), chunk_len)


def _split(order: IntArray, chunk_len: IntArray) -> list[IntArray]:
    """Chunks in `order`, the longest first, cut where that saves most padding, as long as it saves enough."""
    lengths = chunk_len[order]
    saved = (lengths[0] - lengths) * (len(order) - np.arange(len(order)))
    at = int(saved.argmax())
    if saved[at] < WORTH_A_FORWARD:
        return [order]
    return _split(order[:at], chunk_len) + _split(order[at:], chunk_len)


def _fetch(
    packed: torch.Tensor, shape: RoundShape, stages: tuple[str, ...], params: Sequence[SamplingParams]
) -> UnderWay:
    """Send the packed result to the host, before anything overwrites it."""
    asked = [p.logprobs for p in params]
    if packed.device.type != "cuda":
        return UnderWay(packed.clone(), None, shape, stages, asked)
    host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
    host.copy_(packed, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    return UnderWay(host, done, shape, stages, asked)


def _most_logprobs(params: Sequence[SamplingParams]) -> int | None:
    return max((p.logprobs for p in params if p.logprobs is not None), default=None)
