"""One step: a round of all requests that decode, then a group of prompt chunks, launched and settled.

NOTICE: every token of every request passes through this file. Do not add here: a branch on a model family, a kind of
drafter or a backend; state or device work of one feature (`rounds/`, `grammar_masks.py`, `prompt_scores.py`); a policy
(`scheduler.py`, `prompt_budget.py`, `draft_policy.py`); a wait for the device outside of settling.

Between two rounds, a decoding request waits for at most one group of chunks. With captured rounds the device always has
work: the next round is launched before the previous one is settled (`launches.py`), and needs no length that the host
does not know yet. Without captures, a step settles everything that it launches. A request whose prompt is complete
joins the next round, even if the host does not know its first token yet.
"""

import time
from collections.abc import Sequence
from itertools import chain

import numpy as np

from specdec.config import SpecConfig
from specdec.gpu.captures import CaptureStore
from specdec.gpu.mirrored_array import IntArray
from specdec.kvcache.page_pool import BoolArray
from specdec.kvcache.table import row_cells
from specdec.runtime.cpu_threads import CpuThreads
from specdec.runtime.drafts.draft_policy import DraftPolicy
from specdec.runtime.engine_stats import NO_DRAFT_STATS, EngineStats, stats_now
from specdec.runtime.grammar_masks import GrammarSteps, load_forced, prepare_masks
from specdec.runtime.launches import HostCopy, Launch, Launches
from specdec.runtime.prompts.prefill import Prefill
from specdec.runtime.prompts.prefixes import salt_of
from specdec.runtime.request import Request, restricted, table_rows
from specdec.runtime.rounds.captured_prompts import PromptForwards
from specdec.runtime.rounds.captured_rounds import Rounds
from specdec.runtime.rounds.device_state import DeviceState
from specdec.runtime.rounds.result import NO_DRAFT, DraftShape, RoundShape, covering_draft
from specdec.runtime.rounds.round_shapes import captured_shape, end_drafts, is_rare, round_shape, with_forced
from specdec.runtime.scheduler import RequestBatch, Scheduler


class Steps:
    """Runs the steps of one engine. `launches` holds unsettled work; `prefill` reads prompts.

    store: captures of rounds and prompts. `draft_policy`: chooses each round's draft; None: always the engine's own
    draft.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        state: DeviceState,
        spec: SpecConfig,
        draft_policy: DraftPolicy | None,
        store: CaptureStore,
    ) -> None:
        self.scheduler = scheduler
        self.state = state
        self.spec = spec
        self.draft_policy = draft_policy
        self.store = store
        self.rounds = Rounds(state, store)
        self.table = scheduler.table
        self.threads = CpuThreads(state.target.model, state.device, deterministic=state.target.deterministic)
        self.launches = Launches(scheduler, state, draft_policy, captured=store.captures)
        self.prefill = Prefill(scheduler, state, PromptForwards(state, store), self.threads)

    def restart(self, requests: Sequence[Request]) -> None:
        """Drop all launched work and restart from these requests; safe after a fault anywhere in a step."""
        self.launches.clear()
        self.prefill.reading = None
        self.state.reset()
        self.scheduler.restart(requests)

    def drop_lost(self) -> None:
        """Drop launched work whose rows are lost or whose weights have moved, without waiting for the next step."""
        self.prefill.drop_lost()
        self.launches.settle_all(left=len(self.launches.unsettled))  # the oldest whose rows are all lost

    def stats(self) -> EngineStats:
        """A copy of the sums, with the engine's present state."""
        drafts = NO_DRAFT_STATS if self.draft_policy is None else self.draft_policy.stats()
        return stats_now(self.launches.totals, self.scheduler, self.state, self.store.stats(), drafts)

    def run(self) -> list[Request]:
        """Run one step. Returns the requests that ended; those that end in the round make room for prompts."""
        with self.state.on_device(), self.state.weights.cached_lookups(), self.threads.limited():
            finished: list[Request] = []
            if restricted(self.scheduler.batch_of(self.scheduler.running).constrained):
                finished += self.launches.settle_all()  # a grammar's mask depends on every earlier token
                finished += self.launches.release_finished(prepare_masks(self.scheduler.running))
            decoding, begin = self.scheduler.next_decode(), time.perf_counter()
            finished += self._decode(decoding)
            if decoding and not self.store.captures:
                self.scheduler.prompt_gap.learn_round(time.perf_counter() - begin)
            if admitted := self.scheduler.admit_requests():
                self._load_rows(admitted)
                finished += self.launches.release_finished(prepare_masks(admitted))
            return finished + self._read_prompts(others_decode=bool(decoding))

    def _load_rows(self, requests: Sequence[Request]) -> None:
        """Write the tokens and parameters of admitted requests to their rows. The next upload sends them."""
        rows, state = table_rows(requests), self.state
        length = np.array([request.settled.num_tokens for request in requests], dtype=np.int64)
        tokens = chain.from_iterable(request.tokens for request in requests)
        state.tokens[row_cells(rows, np.zeros_like(rows), length)] = np.fromiter(tokens, dtype=np.int64)
        state.sampling.load(rows, [(request.params, request.seed) for request in requests])
        state.max_drafts[rows] = np.array([request.max_drafts for request in requests], dtype=np.int64)
        state.prompt_len[rows] = np.array([len(request.prompt) for request in requests], dtype=np.int64)
        if state.lag is not None:
            state.lag.clear_rows(rows)
        if state.finished is not None:
            for request in requests:
                state.finished.set_salt(request.row, salt_of(request))
        if state.seen_bits is not None:
            held = [request for request in requests if request.params.repetition_penalty != 1]
            state.seen_bits.load(table_rows(held), [request.tokens for request in held])
        self.launches.row_totals = self.launches.row_totals.without(rows)
        if self.draft_policy is not None:
            self.draft_policy.acceptance.begin_rows(rows)

    def _decode(self, requests: Sequence[Request]) -> list[Request]:
        """Launch a round of the requests that can still get a token from it, then settle the launches that are due."""
        batch = self.scheduler.batch_of(requests)
        # + 1: the newest token, drawn but perhaps not settled, has no K/V yet
        known = self.table.committed_len.host[batch.rows] + 1
        remaining = (batch.max_total_len - known - self.launches.rounds_due()[batch.rows]).tolist()
        if remaining and min(remaining) <= 0:
            going_on = [request for request, left in zip(requests, remaining, strict=True) if left > 0]
            batch, remaining = self.scheduler.batch_of(going_on), [left for left in remaining if left > 0]
        if batch.requests:
            self.launch_round(batch, remaining)
        return self.launches.settle(busy=bool(batch.requests) or self.scheduler.reads_prompts)

    def _read_prompts(self, *, others_decode: bool) -> list[Request]:
        """Read this step's prompt chunks, and launch their draws when all parts have run. others_decode: other requests
        decode."""
        self.drop_lost()
        reading = self.prefill.advance(others_decode=others_decode)
        if reading is None:
            return []
        if not reading.is_complete:
            return self.launches.settle_before_parts()
        begin = time.perf_counter()
        self.launches.unsettled.append(self.prefill.launch(reading))
        finished = self.launches.settle(busy=self.launches.num_rounds > 0 or self.scheduler.reads_prompts)
        if not self.store.captures:
            self.scheduler.prompt_gap.cost.learn(reading.load, reading.seconds + time.perf_counter() - begin)
        return finished

    def launch_round(self, batch: RequestBatch, remaining: Sequence[int]) -> None:
        """Launch one round of these requests. remaining: tokens that each may still get, at least 1."""
        requests, rows = batch.requests, batch.rows
        ending = end_drafts(self.state, rows, self._unsettled_nodes() + 1 + self.spec.depth)
        shape = self.shape_for(batch, remaining)
        masked = len(restricted(batch.constrained)) > 0  # token rules may end before the request does
        shape = shape._replace(features=shape.features._replace(masked=masked))
        forced = np.array([len(request.forced) if masked else 0 for request in requests], dtype=np.int64)
        if forced.any():
            shape = with_forced(shape, self.state, rows, int(forced.max()), captured=self.store.captures)
            forced = forced.clip(max=shape.width - 1)
        if self.store.captures:
            shape = captured_shape(self.state, shape)
        self.state.seat(rows)
        self.state.sampling.load_biases(rows, batch.params, shape.features)
        if shape.forced:
            load_forced(self.state, requests, forced)
        self.state.flush()
        self.threads.fit(shape.batch * shape.width)
        draft_depth = self.state.max_drafts.host[rows].clip(max=shape.draft.depth)
        lag_seconds = self._read_lag(shape, rows, ending)
        between = None
        if masked:
            between = GrammarSteps(self.state, shape, [request.grammar_state for request in requests]).between
        result = HostCopy(self.rounds.run(shape, between), self.state.target.ranks)
        launched = Launch(batch, None, shape, result, draft_depth, forced, lag_seconds=lag_seconds)
        self.launches.unsettled.append(launched)

    def _read_lag(self, shape: RoundShape, rows: IntArray, ending: IntArray) -> float:
        """Let the drafter read these rows' lag if a round of this shape requires it. Returns the seconds that it
        took; 0 if rounds are captured."""
        begin, lag = time.perf_counter(), self.state.lag
        if lag is not None and (most := lag.before_round(shape, rows, ending)):
            self.rounds.read_lag(shape, most)
        return 0.0 if self.store.captures else time.perf_counter() - begin

    def shape_for(self, batch: RequestBatch, remaining: Sequence[int]) -> RoundShape:
        """Shape of the next round of these requests. If their drafts are adaptive, the draft policy chooses its draft.

        Captured rounds have few draft shapes: none, the engine's own, and those of the draft ladder; rare ones have
        only the first two.
        """
        rows, policy, captured = batch.rows, self.draft_policy, self.store.captures
        drafting = self.state.max_drafts.host[rows] > 0  # 0: no drafts, or after the drafter's last position
        draft = self._full_or_covering_draft(batch, remaining, drafting)
        shape = round_shape(self.state, rows, batch.params, draft, self._unsettled_nodes())
        if policy is None or not draft.num_steps:
            return shape
        bucket = captured_shape(self.state, shape) if captured else shape
        if captured and is_rare(bucket):
            return shape
        min_draft = self._full_or_covering_draft(batch, remaining, drafting & batch.fixed)
        max_drafts = np.minimum(self.state.max_drafts.host[rows], np.array(remaining, dtype=np.int64) - 1)
        unsettled = [launched.shape.draft for launched in self.launches.unsettled if launched.is_round]
        chosen = policy.choose(rows, max_drafts, bucket.batch, min_draft, unsettled)
        if chosen.num_steps and not captured:  # no deeper than any request can use
            chosen = draft._replace(by_lookup=chosen.by_lookup)
        return shape._replace(draft=chosen)

    def _full_or_covering_draft(self, batch: RequestBatch, remaining: Sequence[int], drafting: BoolArray) -> DraftShape:
        """The draft for the requests that are `drafting` [B]: the smallest that covers what each of them can use.
        If rounds are captured, it is the engine's full draft, or none if no request drafts."""
        if self.store.captures:
            return DraftShape.from_spec(self.spec) if drafting.any() else NO_DRAFT
        each = zip(batch.requests, remaining, drafting, strict=True)
        usable = [(request.spec, left - 1) for request, left, drafts in each if drafts]  # without the bonus token
        return covering_draft({DraftShape.from_spec(spec, depth) for spec, depth in usable if spec is not None})

    def _unsettled_nodes(self) -> int:
        """Upper bound on the tokens of a row that the host does not know yet."""
        return self.launches.num_rounds * (1 if self.state.worker is None else self.spec.num_nodes)
