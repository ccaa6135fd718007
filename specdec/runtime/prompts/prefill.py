"""The prompt side of a step: the target reads a group of prompt chunks, then first tokens are drawn.

    step        round | parts 0, 1    round | part 2    round | part 3, first token
    committed                                                     all its tokens, at once

    advance   takes the scheduler's chunks, divides their forward if decoding requests would wait too long for it, and
              runs the parts that fit this step
    launch    after the last part: draws, scores and commits; the host already knows the lengths

`Launches` settles the result. A forward that has run in part is kept from step to step; no token of it is committed
before its last part is launched. If one of its requests loses its row (its slots may then belong to another request),
or if weights have moved, the forward is dropped and its chunks are read again.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specdec.gpu.mirrored_array import IntArray, upload
from specdec.runtime.cpu_threads import CpuThreads
from specdec.runtime.grammar_masks import root_masks
from specdec.runtime.launches import HostCopy, Launch, copy_to_host
from specdec.runtime.prompts.prompt_budget import Division, PromptGap, PromptLoad
from specdec.runtime.prompts.prompt_scores import ChunkScoring, scoring_of
from specdec.runtime.request import Request
from specdec.runtime.rounds.captured_prompts import PromptForwards, PromptParts
from specdec.runtime.rounds.device_state import DeviceState
from specdec.runtime.rounds.prompt_chunks import (
    PREFILL_STAGES,
    divide,
    draw_first_tokens,
    score_chunk,
)
from specdec.runtime.rounds.prompt_sizes import SIZES_IN_PARTS
from specdec.runtime.rounds.result import NO_DRAFT, RoundShape
from specdec.runtime.scheduler import RequestBatch, Scheduler
from specdec.sampling.log_probs import max_logprobs
from specdec.sampling.sampling_table import SamplerFeatures


@dataclass(slots=True)
class PromptReading:
    """The forward over the next `chunk_len` [B] tokens of a batch of requests, after `done` [B] earlier ones.

    scoring: prompt tokens to score; None: there are none. earlier: device nanoseconds of the parts run in earlier
    steps; None: there were none. seconds: host time so far.
    """

    batch: RequestBatch
    chunk_len: IntArray
    done: IntArray
    scoring: ChunkScoring | None
    parts: PromptParts
    num_parts_run: int = 0  # parts that have run
    earlier: torch.Tensor | None = None
    seconds: float = 0.0

    @property
    def load(self) -> PromptLoad:
        return PromptLoad.from_runs(self.done, self.chunk_len)

    @property
    def is_complete(self) -> bool:
        return self.num_parts_run == len(self.parts.programs)

    @torch.inference_mode()
    def advance(self, gap: PromptGap, budget: float | None, *, waits: bool) -> None:
        """Run the next part, and further ones that are expected to end within `budget` seconds (None: all of them).

        waits: each call returns when its part has run, so the host's clock measures it.
        """
        begin, spent = time.perf_counter(), 0.0
        while not self.is_complete:
            share = self.parts.shares[self.num_parts_run]
            expected = 0.0 if budget is None else gap.part_seconds(self.load, share)
            if budget is not None and spent > 0.0 and spent + expected > budget:
                break
            self.parts.programs[self.num_parts_run]()
            self.num_parts_run += 1
            spent = time.perf_counter() - begin if waits else spent + expected
        self.seconds += time.perf_counter() - begin


class Prefill:
    """Reads the prompts of one engine. `reading`: a forward that has run in part; None: there is none."""

    def __init__(self, scheduler: Scheduler, state: DeviceState, forwards: PromptForwards, threads: CpuThreads) -> None:
        self.forwards = forwards
        self.reading: PromptReading | None = None
        self._scheduler = scheduler
        self._state = state
        self._threads = threads

    def drop_lost(self) -> None:
        """Drop the forward in progress if its rows are lost or weights have moved. Its chunks will be read again."""
        reading = self.reading
        if reading is None:
            return
        has_rows = len(reading.batch.present()) == len(reading.batch.requests)
        if not has_rows or reading.parts.generation != self._state.weights.generation():
            self.reading = None

    def advance(self, *, others_decode: bool) -> PromptReading | None:
        """Run as much of the forward over prompt chunks as this step has time for; all of it if no request decodes.

        others_decode: other requests decode. Returns the chunks in progress, for `launch` if all parts have run; None:
        there are none.
        """
        if self.reading is None:
            requests, chunk_len = self._scheduler.next_prefill()
            if not requests:
                return None
            self._state.flush()
            self.reading = self._begin_reading(requests, chunk_len, others_decode=others_decode)
        reading = self.reading
        self._threads.fit(int(reading.chunk_len.sum()))
        gap, num_waiting = self._scheduler.prompt_gap, self._scheduler.num_waiting
        seconds = gap.seconds_allowed(num_waiting, reading.load) if others_decode else None
        self._state.clock.start(*PREFILL_STAGES)
        reading.advance(gap, seconds, waits=self._state.device.type == "cpu")
        if reading.is_complete:
            self.reading = None
        else:
            begin, end = self._state.clock.stop()
            reading.earlier = end - begin if reading.earlier is None else reading.earlier + (end - begin)
        return reading

    def launch(self, reading: PromptReading) -> Launch:
        """Launch the draws and the commit after all parts have run. Requests whose prompts end with these chunks draw
        their first token."""
        batch, chunk_len, done, state = reading.batch, reading.chunk_len, reading.done, self._state
        requests, rows, read_len = batch.requests, batch.rows, done + chunk_len
        drawing = [i for i, one in enumerate(requests) if one.num_output == 0 and read_len[i] == one.prefill_target]
        drawn = [requests[i] for i in drawing]
        params = [request.params for request in drawn]
        shape = RoundShape(len(drawn), 0, NO_DRAFT, SamplerFeatures.from_params(params), max_logprobs(params))
        chosen = np.array(drawing, dtype=np.int64)
        state.sampling.load_biases(rows[chosen], params, shape.features)
        state.flush()
        chunk, scoring, scores = reading.parts.read(), reading.scoring, None
        if scoring is not None:
            cells = upload(scoring.cells(), state.device)
            scores = scoring, copy_to_host(score_chunk(state, chunk, cells, scoring.alternatives))
        max_prompt_len = int(read_len[chosen].max(initial=0))
        masks = root_masks([request.grammar_state for request in drawn])
        packed = draw_first_tokens(
            state, chunk, chosen, max_prompt_len, shape, masks, reading.earlier, first_position=int(done.min())
        )
        none = np.zeros_like(chosen)  # no drafts, and no forced tokens
        launched = Launch(batch, drawing, shape, HostCopy(packed, state.target.ranks), none, none, scores)
        self._scheduler.commit_chunks(requests, chunk_len)
        return launched

    def _begin_reading(self, requests: Sequence[Request], chunk_len: IntArray, *, others_decode: bool) -> PromptReading:
        """Begin to read `chunk_len` [B] tokens of these prompts, in parts if decoding requests would otherwise wait too
        long."""
        batch = RequestBatch(requests)
        rows = batch.rows
        done = self._scheduler.table.committed_len.host[rows]
        scoring = scoring_of([request.scores for request in requests], done, chunk_len)
        ends_prompt = any(done[i] + chunk_len[i] == request.prefill_target for i, request in enumerate(requests))
        needed = self._state.states_needed(scored=scoring is not None, ends_prompt=ends_prompt)
        gap, load = self._scheduler.prompt_gap, PromptLoad.from_runs(done, chunk_len)
        divided = others_decode and gap.seconds_allowed(self._scheduler.num_waiting, load) is not None
        parts = self.forwards.begin_forward(rows, chunk_len, needed, divided=divided)
        return PromptReading(batch, chunk_len, done, scoring, parts)


def division_of(state: DeviceState, *, captured: bool) -> Division | None:
    """How forwards over prompts are divided among steps; None: they are not.

    A GPU takes as long for one token as for 64, and reads 256 in two or three steps; on a CPU each token takes time.
    """
    if not state.target.can_pause or not (captured or state.device.type == "cpu"):
        return None
    states = state.states_needed(scored=False, ends_prompt=False)
    shares = divide(state, states, captured=captured)[1]
    return Division(shares, SIZES_IN_PARTS[-1], SIZES_IN_PARTS[0]) if captured else Division(shares, 32, 1)
