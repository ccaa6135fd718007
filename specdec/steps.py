"""One step after the other: prompt chunks, or a round of everybody who decodes, launched and settled.

A step settles what it launches, but for captured rounds: with those the device is never without work. While one round
is under way the next is launched, which needs no length that the host does not know, and then the first is settled:

    device    | round 1 | round 2 | round 3 |
    host      launch 2, settle 1, launch 3, settle 2, ...

Whoever ended in a round has been seated in the one behind it as well; that part of its result is dropped. Prompts wait
until nothing is under way.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from specdec.config import SamplingParams
from specdec.kvcache.mirror import IntArray
from specdec.launch import Launcher, UnderWay
from specdec.request import Request, RequestState
from specdec.scheduler import Scheduler
from specdec.settle import settle_chunks, settle_round


class Steps:
    """`under_way`: rounds that are not settled, oldest first, with who was seated in them."""

    def __init__(self, scheduler: Scheduler, launcher: Launcher) -> None:
        self.scheduler = scheduler
        self.launcher = launcher
        self.round = launcher.round
        self.table = scheduler.table
        self.under_way: deque[tuple[list[Request], UnderWay]] = deque()

    def warm_up(self) -> Iterator[int]:
        """`Launcher.warm_up`, before anything else has run."""
        with self._on_device():
            yield from self.launcher.warm_up()

    def restart(self, requests: Sequence[Request]) -> None:
        """Begin again with these requests, oldest first, whatever state everything is in."""
        self.under_way.clear()
        self.round.reset()
        self.scheduler.restart(requests)

    def run(self) -> list[Request]:
        """One step, prompts first, so that a waiting one joins the batch as soon as it can. -> who ended in it."""
        finished: list[Request] = []
        with self._on_device():
            if self.scheduler.wants_prefill:
                finished += self._settle_rounds(0)
            for request in self.scheduler.admit():
                self.round.take(request.row, request.tokens, request.params, request.seed)
            requests, chunk_len = self.scheduler.next_prefill()
            if requests:
                return finished + self._prefill(requests, chunk_len)
            return finished + self._decode(self.scheduler.next_decode())

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Triton launches on the current device, whatever it is; K/V have the model's dtype, whatever autocast says."""
        device = self.round.device
        with torch.cuda.device_of(self.round.seats.tensor), torch.autocast(device.type, enabled=False):
            yield

    def _prefill(self, requests: Sequence[Request], chunk_len: IntArray) -> list[Request]:
        rows, params = _seats(requests)
        done = self.table.committed_len.host[rows]
        drawing = [
            i
            for i, request in enumerate(requests)
            if request.num_output == 0 and done[i] + chunk_len[i] == request.prefill_target
        ]
        result = self.launcher.prefill(rows, params, chunk_len, drawing).result()
        settle_chunks(self.table, self.round.tokens, requests, chunk_len, drawing, result)
        return self._release_finished(requests)

    def _decode(self, requests: Sequence[Request]) -> list[Request]:
        """Launch a round of those that it can bring anything; settle those before it, but for the launcher's lag."""
        sure = Counter(request.number for seated, _ in self.under_way for request in seated)  # a token a round
        to_go = {r.number: r.params.max_new_tokens - r.num_output - sure[r.number] for r in requests}
        going_on = [request for request in requests if to_go[request.number] > 0]
        if going_on:
            longest = max(to_go[request.number] for request in going_on)
            step = self.launcher.decode(*_seats(going_on), longest, len(self.under_way))
            self.under_way.append((going_on, step))
        return self._settle_rounds(self.launcher.lag if going_on else 0)

    def _settle_rounds(self, left: int) -> list[Request]:
        """Settle the oldest rounds under way, all but `left`; who was released meanwhile has no part in them."""
        finished: list[Request] = []
        while len(self.under_way) > left:
            requests, step = self.under_way.popleft()
            result = step.result()
            decoding = [i for i, request in enumerate(requests) if request.state is RequestState.DECODE]
            settled = [requests[i] for i in decoding]
            settle_round(self.table, self.round.tokens, settled, result.take(decoding))
            finished += self._release_finished(settled)
        return finished

    def _release_finished(self, requests: Sequence[Request]) -> list[Request]:
        finished = [request for request in requests if request.finished]
        for request in finished:
            self.scheduler.release(request)
        return finished


def _seats(requests: Sequence[Request]) -> tuple[IntArray, list[SamplingParams]]:
    """The rows [B] of requests, and how each of them samples."""
    return np.array([request.row for request in requests], dtype=np.int64), [request.params for request in requests]
