"""One step: a round of all requests that decode, then a group of prompt chunks, launched and settled.

NOTICE: every token of every request passes through this file. Do not add here: a branch on a model family, a kind of
drafter or a backend; state or device work of one feature (`rounds/`, `grammar_masks.py`, `prompt_scores.py`); a policy
(`scheduler.py`, `prompt_gap.py`, `adaptive/`); a wait for the device outside of settling.

A request that decodes waits for at most one group of chunks between two rounds. With captured rounds the device always
has work: the next round is launched before the previous one is settled, and needs no length that the host does not know
yet. Without them a step settles everything that it launches.

    device    | round 1 | round 2 | chunks | round 3 |
    host      launch 2, settle 1, launch chunks, settle 2, launch 3, settle chunks, ...

The device works in order, so slots that are freed while a round runs are written by others only after it. A request
that finished or was preempted may still have a row in the round already launched; its part of that result is discarded.
A request whose prompt is complete has a row in the next round, whether its first token is known here or not.
"""

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from specdec.config import MAX_FORCED_TOKENS, SpecConfig
from specdec.gpu.captures import CaptureUse
from specdec.gpu.mirrored_array import IntArray, upload
from specdec.models.target import FinalStates
from specdec.runtime.adaptive.cost_table import batch_in_table
from specdec.runtime.adaptive.draft_choice import NO_CHOICE, DraftChoice
from specdec.runtime.adaptive.draft_ladder import draft_ladder
from specdec.runtime.adaptive.reading_along import end_drafts, read_along
from specdec.runtime.cpu_threads import CpuThreads
from specdec.runtime.engine_stats import DraftWatch, EngineStats, PoolUse, device_use
from specdec.runtime.grammar_masks import GrammarSteps, prepare, root_masks
from specdec.runtime.launched_step import LaunchedStep, copy_to_host, event_now
from specdec.runtime.prompt_gap import PromptLoad
from specdec.runtime.prompt_reading import PromptReading
from specdec.runtime.prompt_scores import scoring_of
from specdec.runtime.request import Request, restricted, rows_of
from specdec.runtime.rounds.capture_classes import is_large
from specdec.runtime.rounds.captured_prompts import ChunkGraphs
from specdec.runtime.rounds.captured_rounds import Between, RoundGraphs, nothing, run_programs
from specdec.runtime.rounds.catching_up import CatchUps
from specdec.runtime.rounds.decode_round import DECODE_STAGES, decode_programs
from specdec.runtime.rounds.prompt_parts import single_layers, whole_chunk
from specdec.runtime.rounds.prompt_scoring import Scoring, score_chunk
from specdec.runtime.rounds.result import DraftShape, RoundResult, RoundShape
from specdec.runtime.rounds.round import PREFILL_STAGES, Chunk, Round
from specdec.runtime.rounds.round_shapes import NO_DRAFT, largest, round_shape, whole_draft, with_forced
from specdec.runtime.scheduler import Scheduler
from specdec.runtime.seating import keep_outputs, load_rows
from specdec.runtime.settling import commit_chunks, settle_chunks, settle_round
from specdec.sampling.log_probs import max_logprobs
from specdec.sampling.sampling_table import Uses


class Steps:
    """The steps of one engine. `under_way`: those launched and not settled, oldest first.

    graphs, chunks, catch_ups: None where nothing is captured. `lag`: rounds that may be unsettled when one more is
    launched. `choice`: which draft a round has; None: always the engine's own.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        round: Round,
        spec: SpecConfig,
        graphs: RoundGraphs | None,
        chunks: ChunkGraphs | None,
        catch_ups: CatchUps | None,
    ) -> None:
        self.scheduler = scheduler
        self.round = round
        self.spec = spec
        self.graphs = graphs
        self.chunks = chunks
        self.catch_ups = catch_ups
        self.lag = 0 if graphs is None else 1
        self.table = scheduler.table
        self.totals = EngineStats()
        self.threads = CpuThreads(round.target.model, round.device, deterministic=round.target.deterministic)
        self.under_way: deque[LaunchedStep] = deque()
        adaptive = spec.adaptive and round.worker is not None
        shapes = draft_ladder(spec, lookup=round.has_lookup)
        self.choice = DraftChoice(shapes, self.table.max_requests + 1) if adaptive else None
        self._watch = DraftWatch()
        self.reading: PromptReading | None = None  # a prompt forward of which some parts have run
        self._ended: int | None = None  # the newest settled round, on the device's clock; None: chunks came after it
        round.masks.max_nodes = max(spec.num_nodes, 1 + MAX_FORCED_TOKENS)

    def restart(self, requests: Sequence[Request]) -> None:
        """Drop all launched work and restart from these requests; safe after a fault anywhere in a step."""
        self.under_way.clear()
        self.reading = self._ended = None
        self.round.reset()
        self.scheduler.restart(requests)

    def drop_lost(self) -> None:
        """Drop launched work whose rows are lost or whose weights have moved, since no step may follow soon."""
        if self.reading is not None and not self.reading.holds(self.round.weights_generation()):
            self.reading = None
        self._settle_all(left=len(self.under_way))  # drops the oldest launches that no request owns any more

    def clear_captures(self) -> None:
        for captures in (self.graphs, self.chunks, self.catch_ups):
            if captures is not None:
                captures.clear()

    def stats(self) -> EngineStats:
        """A copy of the sums, with the state of this moment."""
        scheduler, allocator = self.scheduler, self.table.allocator
        return replace(
            self.totals,
            accepted_counts=list(self.totals.accepted_counts),
            drafted_counts=list(self.totals.drafted_counts),
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            full_slots=PoolUse.of([allocator.primary], allocator.page_size),
            swa_slots=PoolUse.of(allocator.pools.values[1:], allocator.page_size),
            captures=CaptureUse() if self.graphs is None else self.graphs.store.use(),
            drafts=NO_CHOICE if self.choice is None else self.choice.use(),
            prompt_gap_ms=1e3 * scheduler.prompt_gap.promised(scheduler.prompt_room, scheduler.max_model_len),
            devices=device_use(self.round.target, self.round.cache),
        )

    def run(self) -> list[Request]:
        """Run one step -> the requests that ended in it. Those that end in the round make room for prompts."""
        with self.round.on_device(), self.round.one_look(), self.threads.limited():
            finished: list[Request] = []
            if restricted(self.scheduler.running):
                finished += self._settle_all()  # a grammar's mask needs every earlier token
                finished += self._release_finished(prepare(self.scheduler.running))
            decoding, begin = self.scheduler.next_decode(), time.perf_counter()
            finished += self._decode(decoding)
            if decoding and self.graphs is None:
                self.scheduler.prompt_gap.learn_round(time.perf_counter() - begin)
            if admitted := self.scheduler.admit():
                load_rows(self.round, admitted)
                if self.choice is not None:
                    self.choice.begin(rows_of(admitted))
                finished += self._release_finished(prepare(admitted))
            return finished + self._read_prompts(streams=bool(decoding))

    def _decode(self, requests: Sequence[Request]) -> list[Request]:
        """Launch a round of the requests that may still get a token from it, then settle (`_settle`)."""
        sure = Counter(request.number for launched in self.under_way for request in launched.gaining())
        to_go = [request.to_go - sure.get(request.number, 0) for request in requests]
        going_on = [request for request, most in zip(requests, to_go, strict=True) if most > 0]
        if going_on:
            self.launch_round(going_on, [most for most in to_go if most > 0])
        return self._settle(busy=bool(going_on))

    def launch_round(self, requests: Sequence[Request], to_go: Sequence[int]) -> None:
        """Launch one round of these requests. to_go: tokens that each may still get, at least 1."""
        rows, params = rows_of(requests), [request.params for request in requests]
        ending = end_drafts(self.round, rows, self._unsettled_nodes() + 1 + self.spec.depth)
        shape = self.shape_for(requests, to_go)
        masked = len(restricted(requests)) > 0  # a request's rules may have ended before it does
        shape = shape._replace(uses=shape.uses._replace(masked=masked))
        forced = np.zeros_like(rows)
        if masked:
            forced[:] = [len(request.forced) for request in requests]
        if forced.any():
            shape = with_forced(shape, self.round, rows, int(forced.max()), self.graphs)
            forced = forced.clip(max=shape.width - 1)
        if self.graphs is not None:
            shape = self.graphs.bucket(shape)
        self.round.seat(rows)
        self.round.sampling.load_biases(rows, params, shape.uses)
        if shape.forced:
            for request, count in zip(requests, forced.tolist(), strict=True):
                tokens = np.array([count, *request.forced[:count]], dtype=np.int64)
                self.round.forced[request.row, : 1 + count] = tokens
        self.round.flush()
        self.threads.fit(shape.batch * shape.width)
        drafts = self.round.max_drafts.host[rows].clip(max=shape.draft.depth)  # before rows are lost to the drafter
        read_along(self.round, self.catch_ups, self.choice, shape, rows, ending)
        between: Between = nothing
        if masked:
            between = GrammarSteps(self.round, shape, [request.place for request in requests]).between
        if self.graphs is None:
            packed = run_programs(decode_programs(self.round, shape), between)
        else:
            packed = self.graphs.run(shape, between)
        self._launched(requests, None, shape, DECODE_STAGES, packed, drafts, forced, None)

    def shape_for(self, requests: Sequence[Request], to_go: Sequence[int]) -> RoundShape:
        """Shape of the next round of these requests. Captured rounds have few shapes of drafts: the engine's own, none,
        and those of the draft ladder."""
        rows, whole, eager = rows_of(requests), whole_draft(self.spec), self.graphs is None
        sizes = [each.draft_size(most) if eager else whole for each, most in zip(requests, to_go, strict=True)]
        drafting = self.round.max_drafts.host[rows] > 0  # 0: without drafts, or past the drafter's positions
        drafts = [size if drafts else NO_DRAFT for size, drafts in zip(sizes, drafting, strict=True)]
        params = [request.params for request in requests]
        shape = round_shape(self.round, rows, params, drafts, self._unsettled_nodes())
        if self.choice is None or shape.num_steps == 0:
            return shape
        return self._what_pays(self.choice, shape, requests, to_go, drafts)

    def _unsettled_nodes(self) -> int:
        """Tokens by which a row may be longer than the host knows."""
        unsettled = sum(launched.drawing is None for launched in self.under_way)
        return unsettled * (1 if self.round.worker is None else self.spec.num_nodes)

    def _what_pays(
        self,
        choice: DraftChoice,
        shape: RoundShape,
        requests: Sequence[Request],
        to_go: Sequence[int],
        drafts: Sequence[DraftShape],
    ) -> RoundShape:
        """This shape with the draft that `choice` selects. Large captured rounds have one draft only."""
        bucket = shape if self.graphs is None else self.graphs.bucket(shape)
        if self.graphs is not None and is_large(bucket):
            return shape
        batch = batch_in_table(bucket.batch, captured=self.graphs is not None)
        fixed = [draft for draft, request in zip(drafts, requests, strict=True) if request.has_fixed_draft]
        rows = rows_of(requests)
        most = np.minimum(self.round.max_drafts.host[rows], np.array(to_go, dtype=np.int64) - 1)
        context = int(self.table.committed_len.host[rows].sum())
        unread = 0 if self.round.unread is None else self.round.unread.due(rows, 0)
        unsettled = [launched.shape.draft for launched in self.under_way if launched.drawing is None]
        least = largest(fixed)
        return shape.with_draft(choice.choose(rows, most, batch, context, least, unread=unread, unsettled=unsettled))

    def _read_prompts(self, *, streams: bool) -> list[Request]:
        """Launch this step's prompt chunks, whole or some of their layers. streams: other requests decode."""
        self.drop_lost()
        reading = self.reading
        if reading is None:
            requests, chunk_len = self.scheduler.next_prefill()
            if not requests:
                return []
            self.round.flush()
            reading = self.reading = self._begin_reading(requests, chunk_len, streams=streams)
        self.threads.fit(int(reading.chunk_len.sum()))
        gap, budget = self.scheduler.prompt_gap, None
        if streams:
            budget = gap.budget(self.scheduler.prompt_room, self.scheduler.num_waiting, reading.load)
        self.round.clock.start(*PREFILL_STAGES)
        reading.advance(gap, budget, waits=self.round.device.type == "cpu")
        if not reading.is_through:
            return self._pause(reading)
        self.reading = None
        begin = time.perf_counter()
        self.prefill(reading.requests, reading.chunk_len, reading)
        finished = self._settle(busy=None in [launched.drawing for launched in self.under_way])
        if self.graphs is None:
            gap.cost.learn(reading.load, reading.seconds + time.perf_counter() - begin)
        return finished

    def _begin_reading(self, requests: Sequence[Request], chunk_len: IntArray, *, streams: bool) -> PromptReading:
        """Begin to read `chunk_len` [B] tokens of these prompts, in parts if decoding requests would wait too long."""
        rows, epochs = rows_of(requests), [request.row_epoch for request in requests]
        done = self.table.committed_len.host[rows]
        scoring = scoring_of([request.scores for request in requests], done, chunk_len)
        ends = any(done[i] + chunk_len[i] == request.prefill_target for i, request in enumerate(requests))
        states = self.round.final_states(scored=scoring is not None, ends=ends)
        room, load = self.scheduler.prompt_room, PromptLoad.of(done, chunk_len)
        divided = streams and self.scheduler.prompt_gap.budget(room, self.scheduler.num_waiting, load) is not None
        found = None
        if divided and self.chunks is not None:
            found = self.chunks.begin_in_parts(rows, chunk_len, states)
        elif divided:
            found = single_layers(self.round, rows, chunk_len, states)
        if found is None:
            found = whole_chunk(lambda: self.read(rows, chunk_len, states), self.round.weights_generation())
        return PromptReading(requests, chunk_len, done, found, row_epochs=epochs)

    def _pause(self, reading: PromptReading) -> list[Request]:
        """Leave the other parts to later steps, and settle the round before them while the device runs these parts, so
        that every step brings a token."""
        stamps = self.round.clock.stop()
        spent = stamps[1] - stamps[0]
        reading.earlier = spent if reading.earlier is None else reading.earlier + spent
        finished = self._settle_all()
        self._ended = None
        return finished

    def prefill(self, requests: Sequence[Request], chunk_len: IntArray, reading: PromptReading) -> None:
        """Launch the draws and the commit after `chunk_len` [B] prompt tokens were read: a request whose prompt ends
        with them draws its first token."""
        rows, done = rows_of(requests), reading.done
        read_len = done + chunk_len
        drawing = [i for i, one in enumerate(requests) if one.num_output == 0 and read_len[i] == one.prefill_target]
        drawn = [requests[i] for i in drawing]
        params = [request.params for request in drawn]
        shape = RoundShape(len(drawn), 0, 0, 1, 1, Uses.of(params), max_logprobs(params))
        chosen = np.array(drawing, dtype=np.int64)
        self.round.sampling.load_biases(rows[chosen], params, shape.uses)
        self.round.flush()
        scoring = scoring_of([request.scores for request in requests], done, chunk_len)
        chunk, scores = reading.parts.read(), None
        if scoring is not None:
            cells = upload(scoring.cells(), self.round.device)
            scores = scoring, copy_to_host(score_chunk(self.round, chunk, cells, scoring.alternatives))
        longest = int(read_len[chosen].max(initial=0))
        masks = root_masks([request.place for request in drawn])
        packed = self.round.prefill(chunk, chosen, longest, shape, masks, reading.earlier, begins=int(done.min()))
        none = np.zeros(len(drawn), dtype=np.int64)
        self._launched(requests, drawing, shape, PREFILL_STAGES, packed, none, none, scores)
        commit_chunks(self.table, self.scheduler.prefixes, requests, chunk_len)

    def read(self, rows: IntArray, chunk_len: IntArray, states: FinalStates) -> Chunk:
        """Run the target over prompt chunks, captured where they are short; states: see `Chunk`."""
        chunk = None if self.chunks is None else self.chunks.read(rows, chunk_len, states)
        if chunk is None:
            runs = upload(np.stack([rows, chunk_len]), self.round.device)
            chunk = self.round.read(runs[0], runs[1], int(chunk_len.sum()), states)
        return chunk

    def _launched(
        self,
        requests: Sequence[Request],
        drawing: list[int] | None,
        shape: RoundShape,
        stages: tuple[str, ...],
        packed: torch.Tensor,
        drafts: IntArray,
        forced: IntArray,
        scores: tuple[Scoring, torch.Tensor] | None,
    ) -> None:
        epochs = [request.row_epoch for request in requests]
        on_host, done, ranks = copy_to_host(packed), event_now(packed.device), self.round.target.ranks
        done = done if ranks is None else ranks.guarded(done)
        launched = LaunchedStep(requests, epochs, drawing, shape, stages, on_host, drafts, forced, scores, done)
        self.under_way.append(launched)

    def _settle(self, busy: bool) -> list[Request]:
        """Settle launched work, oldest first, except for the last `lag` launches.

        busy: the device has a round to run meanwhile. If it has none and a launch brings a token, everything is
        settled: otherwise the device would idle while the token waits for the next step.
        """
        gaining = not busy and any(launched.gaining() for launched in self.under_way)
        return self._settle_all(0 if gaining else self.lag)

    def _settle_all(self, left: int = 0) -> list[Request]:
        """Settle launched work, oldest first, except for the last `left` launches."""
        finished: list[Request] = []
        while self.under_way and (len(self.under_way) > left or not self.under_way[0].present()):
            launched = self.under_way.popleft()
            if not (present := launched.present()):
                self._ended = None
                continue
            requests = [launched.requests[i] for i in present]
            if launched.drawing is None:
                result = launched.result()
                if len(present) < len(launched.requests):
                    result = result.select_requests(present)
                drafts = launched.shape.num_steps > 0
                before = sum(request.num_output for request in requests) if drafts else 0
                settle_round(self.round, requests, result)
                gained = sum(request.num_output for request in requests) - before if drafts else 0
                self._learn(launched.shape, requests, result, gained)
                self._note(requests, result, by_lookup=launched.shape.by_lookup)
            else:
                settle_chunks(self.round, launched, present)
                self._ended = None
            finished += self._release_finished(requests)
        return finished

    def _learn(self, shape: RoundShape, requests: Sequence[Request], result: RoundResult, gained: int) -> None:
        """Update the draft policy from a settled round. gained: output tokens of all its requests together."""
        (began, ended), before, self._ended = result.ran, self._ended, result.ran[1]
        if self.choice is None or shape.forced or (self.graphs is not None and is_large(shape)):
            return
        rows = rows_of(requests)
        batch = batch_in_table(shape.batch, captured=self.graphs is not None)
        context = int(self.table.committed_len.host[rows].sum() - result.length.sum())  # before it
        drafting = result.drafts > 0
        given = rows[drafting], result.length[drafting] - 1, result.drafts[drafting]
        since = None if before is None else ((began - before) / 1e9, (ended - before) / 1e9)
        chosen = not any(request.has_fixed_draft for request in requests)
        brought = gained / len(requests) if chosen else 0.0
        self.choice.learn(shape.draft, batch, context, result.seconds, *given, since, brought=brought)

    def _note(self, requests: Sequence[Request], result: RoundResult, *, by_lookup: bool) -> None:
        """Count a settled round and its accepted drafts, if they are the drafter's and not a lookup's next to it."""
        self.totals.batches += 1
        self.totals.batch_seconds += sum(result.seconds.values())
        if self.graphs is not None:  # the host is hidden then
            self.scheduler.prompt_gap.learn_round(sum(result.seconds.values()))
        if not by_lookup:
            drafted = (result.drafts > 0) & (result.forced == 0)
            rounds = sum(request.draft is not None for request in requests)
            self._watch.count(rounds, int(drafted.sum()), int((drafted & (result.length > 1)).sum()))

    def _release_finished(self, requests: Sequence[Request]) -> list[Request]:
        finished = [request for request in requests if request.settled.finish_reason]
        if finished:
            keep_outputs(self.round, finished)
            self.scheduler.release(*finished)
        return finished
