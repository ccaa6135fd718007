"""One step after the other: a round of everybody who decodes, then a group of prompt chunks, launched and settled.

So nobody who decodes waits for more than one group of chunks. A step settles what it launches, but for captured rounds:
with those the device is never without work. While one thing is under way the next is launched, which needs no length
that the host does not know, and then the first is settled:

    device    | round 1 | round 2 | chunks | round 3 |
    host      launch 2, settle 1, launch chunks, settle 2, launch 3, settle chunks, ...

The order on the device protects what is under way: slots that are freed meanwhile are written by others behind it.
Whoever ended in a round, or lost its row, is seated in what was launched before that was known; that part of the result
is dropped. Whose prompt is through is seated in the next round, whether its first token is known here or not.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from specdec.config import SamplingParams
from specdec.errors import is_fault
from specdec.gpu.mirrored_array import IntArray
from specdec.progress import progress_bar
from specdec.runtime.chunk_scores import scoring_of, settle_scores
from specdec.runtime.engine_stats import Health
from specdec.runtime.launcher import Launcher, UnderWay, Wanted
from specdec.runtime.request import Request, RequestState
from specdec.runtime.rounds.captured_rounds import batch_sizes
from specdec.runtime.scheduler import Scheduler
from specdec.runtime.settling import commit_chunks, settle_first, settle_round
from specdec.sampling.grammars.grammar import make_masks


@dataclass(frozen=True, slots=True)
class Launched:
    """A step under way, who had part in it, and under which tenure of a row.

    drawing: of prompt chunks, those requests, by number in the batch, that draw a first token; None: it is a round.
    """

    requests: Sequence[Request]
    tenures: list[int]
    step: UnderWay
    drawing: list[int] | None

    @classmethod
    def of(cls, requests: Sequence[Request], step: UnderWay, drawing: list[int] | None = None) -> "Launched":
        return cls(requests, [request.tenure for request in requests], step, drawing)

    def present(self) -> list[int]:
        """Who still has the row, by number in the batch."""
        seats = enumerate(zip(self.requests, self.tenures, strict=True))
        return [i for i, (request, tenure) in seats if request.tenure == tenure]

    def gaining(self) -> list[Request]:
        """Those of them that it is sure to bring a token."""
        return [self.requests[i] for i in self.present() if self.drawing is None or i in self.drawing]


class Steps:
    """`under_way`: what is not settled, oldest first."""

    def __init__(self, scheduler: Scheduler, launcher: Launcher) -> None:
        self.scheduler = scheduler
        self.launcher = launcher
        self.round = launcher.round
        self.health = Health(scheduler, launcher.capture_use)
        self.table = scheduler.table
        self.under_way: deque[Launched] = deque()

    def warm_up(self) -> None:
        """`Launcher.warm_up`, before anything else has run."""
        sizes = batch_sizes(self.table.max_requests)
        with self._on_device(), progress_bar("capturing rounds", len(sizes)) as update:
            for done, _ in enumerate(self.launcher.warm_up(), start=1):
                update(done)

    def restart(self, requests: Sequence[Request]) -> None:
        """Begin again with these requests, whatever state everything is in."""
        self.under_way.clear()
        self.round.reset()
        self.scheduler.restart(requests)

    def run(self) -> list[Request]:
        """One step -> who ended in it. Prompts come second, so that who ends in the round makes room for them."""
        with self._on_device(), self.round.one_look():
            self.scheduler.prefixes.next_step()
            finished: list[Request] = []
            if any(request.place for request in self.scheduler.running):
                finished += self._settle_all()  # what a grammar allows is known when all that is in front of it is
                finished += self._make_masks(self.scheduler.running)
            finished += self._decode(self.scheduler.next_decode())
            if admitted := self.scheduler.admit():
                self.launcher.load(admitted)
                finished += self._make_masks(admitted)
            requests, chunk_len = self.scheduler.next_prefill()
            if requests:
                for chosen in self.launcher.group(chunk_len):
                    self._prefill([requests[i] for i in chosen], chunk_len[chosen])
                finished += self._settle(busy=None in [launched.drawing for launched in self.under_way])
            return finished

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Triton launches on the current device, whatever it is; K/V have the model's dtype, whatever autocast says."""
        device = self.round.device
        with torch.cuda.device_of(self.round.seats.tensor), torch.autocast(device.type, enabled=False):
            yield

    def _make_masks(self, requests: Sequence[Request]) -> list[Request]:
        """What grammars allow next and force, before anything is launched -> those that end here: theirs raised."""
        guided = [request for request in requests if request.place is not None]
        if not guided:
            return []
        try:
            make_masks([request.place for request in guided])
        except BaseException as error:
            if not is_fault(error):
                raise  # else one of them is at fault, and found below
        for request in guided:
            try:
                assert request.place is not None
                request.place.mask  # noqa: B018 - made once, and kept there
                if request.state is RequestState.DECODE:
                    request.forced  # noqa: B018
            except BaseException as error:
                if not is_fault(error):
                    raise
                request.fail("grammar", error)
        return self._release_finished(guided)

    def _decode(self, requests: Sequence[Request]) -> list[Request]:
        """Launch a round of those that it can bring anything."""
        sure = Counter(request.number for launched in self.under_way for request in launched.gaining())
        going_on: list[Request] = []
        drafts: list[Wanted] = []
        for request in requests:
            to_go = request.params.max_new_tokens - request.num_output - sure[request.number]
            if to_go > 0:
                going_on.append(request)
                drafts.append(Wanted(request.draft, to_go, request.place, request.forced))
        if going_on:
            rounds = sum(launched.drawing is None for launched in self.under_way)
            step = self.launcher.decode(*_seats(going_on), drafts, rounds)
            self.under_way.append(Launched.of(going_on, step))
        return self._settle(busy=bool(going_on))

    def _prefill(self, requests: Sequence[Request], chunk_len: IntArray) -> None:
        """Launch prompt chunks."""
        rows, params = _seats(requests)
        done = self.table.committed_len.host[rows]
        drawing = [
            i
            for i, request in enumerate(requests)
            if request.num_output == 0 and done[i] + chunk_len[i] == request.prefill_target
        ]
        places = [requests[i].place for i in drawing]
        step = self.launcher.prefill(rows, params, chunk_len, drawing, places, scoring_of(requests, done, chunk_len))
        commit_chunks(self.table, self.scheduler.prefixes, requests, chunk_len)
        self.under_way.append(Launched.of(requests, step, drawing))

    def _settle(self, busy: bool) -> list[Request]:
        """Settle what is under way, oldest first, but for the launcher's lag.

        busy: the device has a round to do meanwhile. Else nothing is left that brings anybody a token: it would come
        a step late, and the device would have nothing to do either.
        """
        gaining = [launched for launched in self.under_way if launched.gaining()]
        return self._settle_all(self.launcher.lag if busy or not gaining else 0)

    def _settle_all(self, left: int = 0) -> list[Request]:
        """Settle what is under way, oldest first, but for `left`."""
        finished: list[Request] = []
        while self.under_way and (len(self.under_way) > left or not self.under_way[0].present()):
            launched = self.under_way.popleft()
            if not (present := launched.present()):
                continue
            result = launched.step.result()
            requests = [launched.requests[i] for i in present]
            if launched.drawing is None:
                if len(present) < len(launched.requests):
                    result = result.take(present)
                settle_round(self.table, self.round.tokens, requests, result)
                self.health.round_settled(requests, result)
            else:
                for request in requests:
                    request.stats.prefill_seconds += result.seconds["prefill"] / len(launched.requests)
                settle_scores(launched.requests, present, launched.step)
                for place, number in enumerate(launched.drawing):
                    if number in present:
                        settle_first(self.round.tokens, launched.requests[number], result, place)
            finished += self._release_finished(requests)
        return finished

    def _release_finished(self, requests: Sequence[Request]) -> list[Request]:
        finished = [request for request in requests if request.finished]
        self.scheduler.release(*finished)
        return finished


def _seats(requests: Sequence[Request]) -> tuple[IntArray, list[SamplingParams]]:
    """The rows [B] of requests, and how each of them samples."""
    return np.array([request.row for request in requests], dtype=np.int64), [request.params for request in requests]
