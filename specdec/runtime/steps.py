"""One step: a round of all requests that decode, then a group of prompt chunks, launched and settled.

A request that decodes waits for at most one group of chunks between two rounds. A step settles what it launches, except
for captured rounds: with those the device always has work. The next round is launched before the one before it is
settled, which needs no length that the host does not know yet:

    device    | round 1 | round 2 | chunks | round 3 |
    host      launch 2, settle 1, launch chunks, settle 2, launch 3, settle chunks, ...

The device works in order, so slots that are freed while a round runs are written by others only after it. A request
that finished or was preempted may still have a row in the round already launched; its part of that result is discarded.
A request whose prompt is complete has a row in the next round, whether its first token is known here or not.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from specdec.errors import is_fault
from specdec.gpu.mirrored_array import IntArray
from specdec.progress import progress_bar
from specdec.runtime.chunk_scores import scoring_of, settle_scores
from specdec.runtime.engine_stats import Health
from specdec.runtime.launcher import LaunchedStep, Launcher
from specdec.runtime.request import Request, RequestState, rows_of
from specdec.runtime.rounds.captured_rounds import batch_sizes
from specdec.runtime.scheduler import Scheduler
from specdec.runtime.settling import commit_chunks, settle_first, settle_round
from specdec.sampling.grammars.grammar import make_masks


class Steps:
    """The steps of one engine. `under_way`: those launched and not settled, oldest first."""

    def __init__(self, scheduler: Scheduler, launcher: Launcher) -> None:
        self.scheduler = scheduler
        self.launcher = launcher
        self.round = launcher.round
        self.health = Health(scheduler, launcher.capture_use)
        self.table = scheduler.table
        self.under_way: deque[LaunchedStep] = deque()

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
        """One step -> the requests that ended in it. Prompts come second, so that those that end make room for them."""
        with self._on_device(), self.round.one_look():
            self.scheduler.prefixes.next_step()
            finished: list[Request] = []
            if any(request.place for request in self.scheduler.running):
                finished += self._settle_all()  # what a grammar allows is known when all earlier tokens are
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
        """Launch a round of the requests that may still get a token from it."""
        sure = Counter(request.number for launched in self.under_way for request in launched.gaining())
        to_go = [request.params.max_new_tokens - request.num_output - sure[request.number] for request in requests]
        going_on = [request for request, most in zip(requests, to_go, strict=True) if most > 0]
        if going_on:
            rounds = sum(launched.drawing is None for launched in self.under_way)
            self.under_way.append(self.launcher.decode(going_on, [most for most in to_go if most > 0], rounds))
        return self._settle(busy=bool(going_on))

    def _prefill(self, requests: Sequence[Request], chunk_len: IntArray) -> None:
        """Launch prompt chunks."""
        done = self.table.committed_len.host[rows_of(requests)]
        drawing = [
            i
            for i, request in enumerate(requests)
            if request.num_output == 0 and done[i] + chunk_len[i] == request.prefill_target
        ]
        step = self.launcher.prefill(requests, chunk_len, drawing, scoring_of(requests, done, chunk_len))
        commit_chunks(self.table, self.scheduler.prefixes, requests, chunk_len)
        self.under_way.append(step)

    def _settle(self, busy: bool) -> list[Request]:
        """Settle what is under way, oldest first, except for the launcher's lag.

        busy: the device has a round to run meanwhile. If it has none, everything is settled as soon as nothing under
        way would bring a token: a result would be read a step late while the device idles.
        """
        gaining = [launched for launched in self.under_way if launched.gaining()]
        return self._settle_all(self.launcher.lag if busy or not gaining else 0)

    def _settle_all(self, left: int = 0) -> list[Request]:
        """Settle what is under way, oldest first, except for the last `left`."""
        finished: list[Request] = []
        while self.under_way and (len(self.under_way) > left or not self.under_way[0].present()):
            launched = self.under_way.popleft()
            if not (present := launched.present()):
                continue
            result = launched.result()
            requests = [launched.requests[i] for i in present]
            if launched.drawing is None:
                if len(present) < len(launched.requests):
                    result = result.take(present)
                settle_round(self.table, self.round.tokens, requests, result)
                self.health.round_settled(requests, result)
            else:
                for request in requests:
                    request.stats.prefill_seconds += result.seconds["prefill"] / len(launched.requests)
                settle_scores(launched, present)
                for place, number in enumerate(launched.drawing):
                    if number in present:
                        settle_first(self.round.tokens, launched.requests[number], result, place)
            finished += self._release_finished(requests)
        return finished

    def _release_finished(self, requests: Sequence[Request]) -> list[Request]:
        finished = [request for request in requests if request.finished]
        self.scheduler.release(*finished)
        return finished
