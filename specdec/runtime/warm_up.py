"""Warm-up of an engine on a GPU before its first request: captures rounds, and times rounds and prompts.

    rounds     greedy, with the narrowest tables, for every batch size and every draft of the ladder
    wider      the largest round runs once at each wider table, so that no request waits for a compiler later
    prompts    short ones are captured, long ones only timed: the times decide the prompt tokens of a step
    parts      the parts of short forwards, which steps run one by one

Other shapes are captured when they first occur. The rows that are timed belong to no request: their slots are null
slots, and the state is reset afterwards. Times are read from the device's clock, so host time does not count.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from specdec.models.target import StatesNeeded
from specdec.progress import progress_bar
from specdec.runtime.drafts.draft_policy import RoundTimes
from specdec.runtime.prompts.prompt_budget import PromptGap, PromptLoad
from specdec.runtime.rounds.captured_prompts import PromptForwards
from specdec.runtime.rounds.captured_rounds import Rounds
from specdec.runtime.rounds.decode_round import DECODE_STAGES
from specdec.runtime.rounds.device_state import DeviceState
from specdec.runtime.rounds.drafter_lag import MAX_LAG
from specdec.runtime.rounds.prompt_sizes import SIZES_IN_PARTS, token_buckets
from specdec.runtime.rounds.result import NO_DRAFT, DraftShape, RoundShape
from specdec.runtime.rounds.round_shapes import batch_buckets, captured_shape, prefix_buckets, round_shape
from specdec.runtime.steps import Steps

REPEATS = 8
"""Rounds to run per shape; only the second half is timed."""

MAX_FEW_TOKENS = 256
"""Maximum tokens of a forward over few prompt tokens: all sizes up to it are timed and captured."""

MAX_PREFIX = 16384
"""Longest prefix in tokens after which a prompt is timed; `max_model_len` may shorten it."""

NO_ROWS = np.zeros(0, dtype=np.int64)


def warm_up(steps: Steps) -> None:
    """Capture and time rounds and prompts, with no row seated. Does nothing if rounds are not captured."""
    state, store = steps.state, steps.store
    if not store.captures:
        return
    own = NO_DRAFT if state.worker is None else DraftShape.from_spec(steps.spec)
    drafts = [own] if steps.draft_policy is None else steps.draft_policy.shapes
    shapes = [
        captured_shape(state, round_shape(state, NO_ROWS, [], draft, 0)._replace(batch=size))
        for size in reversed(batch_buckets(steps.table.max_requests))
        for draft in reversed(drafts)
    ]
    with state.on_device(), progress_bar("capturing rounds", len(shapes)) as update:
        for done, shape in enumerate(shapes, start=1):
            for _ in range(2):  # eagerly, then captured
                _run(steps, shape)
            update(done)
        for width in prefix_buckets(steps.table.slots.host.shape[1] - 1)[1:]:
            for shape in shapes[: len(drafts)]:
                _run(steps, shape._replace(max_committed_len=width))
        if state.lag is not None:
            for shape in shapes[:: len(drafts)]:  # one shape per batch size
                for _ in range(2):
                    steps.rounds.read_lag(shape, MAX_LAG)
    if state.cache.sanitizer is None:  # the sanitizer does not know rows without slots
        with state.on_device():
            if steps.draft_policy is not None:
                with progress_bar("timing rounds", len(shapes)) as update:
                    seconds = np.reshape(time_rounds(steps.rounds, shapes, update), (-1, len(drafts)))[:, ::-1]
                sizes = [shape.batch for shape in shapes[:: len(drafts)]]
                steps.draft_policy.times.update(zip(sizes, map(RoundTimes, seconds), strict=True))
            gap = steps.scheduler.prompt_gap
            [gap.longest_round] = time_rounds(steps.rounds, shapes[:1], lambda _: None)
            gap.learn_round(gap.longest_round)
            max_tokens = min(gap.budget.while_decoding, steps.table.max_requests * gap.budget.chunk)
            time_prompts(state, gap, steps.prefill.forwards, max_tokens)
            gap.cap_budget()
            _capture_parts(steps)
        steps.restart([])
    store.uncaptured["rounds"] = 0  # warm-up runs do not count


def _run(steps: Steps, shape: RoundShape) -> None:
    steps.state.seat(NO_ROWS)
    steps.state.flush()
    steps.rounds.run(shape)


def _capture_parts(steps: Steps) -> None:
    """Run each divided forward once. This captures it, so that no request waits for a capture later."""
    division = steps.scheduler.prompt_gap.division
    if division is None:
        return
    steps.state.flush()
    longest = min(steps.table.slots.host.shape[1] - 1, division.max_tokens)
    for needed in {steps.state.states_needed(scored=False, ends_prompt=ends) for ends in (False, True)}:
        for size in SIZES_IN_PARTS:
            rows, length = np.array([steps.table.padding_row]), np.array([min(size, longest)])
            steps.prefill.forwards.begin_forward(rows, length, needed, divided=True).run()


def time_rounds(rounds: Rounds, shapes: Sequence[RoundShape], done: Callable[[int], None]) -> list[float]:
    """Median seconds of a round of each of these captured, bucketed shapes. done: called with the number of finished
    shapes.

    Each round begins with random tokens: equal tokens would choose equal experts, and rows of short texts may draw the
    same token.
    """
    state = rounds.state
    table, generator = state.cache.table, torch.Generator().manual_seed(0)
    seconds = []
    for number, shape in enumerate(shapes, start=1):
        rows = np.arange(shape.batch, dtype=np.int64)
        table.committed_len.clear()
        state.seat(rows)
        state.max_drafts[rows] = np.full_like(rows, shape.depth)
        state.flush()
        room = (table.slots.host.shape[1] - 1) // shape.depth  # rounds until a row is full, if all drafts are right
        stamps = []
        for _ in range(min(REPEATS, room)):
            tokens = torch.randint(state.target.vocab_size, (shape.batch, 1), generator=generator, device="cpu")
            tokens = tokens.to(state.device)
            newest = table.committed_len.tensor[: shape.batch, None]
            state.tokens.tensor[: shape.batch].scatter_(1, newest, tokens)
            stamps.append(rounds.run(shape)[-len(DECODE_STAGES) - 1 :].clone())
        timed = torch.stack(stamps[len(stamps) // 2 :]).cpu()
        seconds.append(float((timed[:, -1] - timed[:, 0]).double().median()) / 1e9)
        done(number)
    return seconds


def time_prompts(state: DeviceState, gap: PromptGap, forwards: PromptForwards, max_tokens: int) -> None:
    """Time forwards over prompts for `gap`: few tokens; a quarter, half and all of `max_tokens`; few tokens after a
    long prefix. The fastest of three runs counts.

    These runs also capture the forwards over few tokens, so no request waits for a capture later.
    """
    table = state.cache.table
    longest = table.slots.host.shape[1] - 1

    def timed(count: int, prefix: int, needed: StatesNeeded) -> float:
        length = np.array([min(longest, count - first) for first in range(0, count, longest)], dtype=np.int64)
        rows = np.full_like(length, table.padding_row)
        table.committed_len[table.padding_row] = prefix
        state.cache.pad_states(prefix)
        state.flush()  # replays read the device's copy
        seconds = []
        for _ in range(4):
            state.clock.start("prefill")
            forwards.begin_forward(rows, length, needed).run()
            begin, end = state.clock.stop().tolist()
            seconds.append((end - begin) / 1e9)
        table.committed_len[table.padding_row] = 0
        fastest: float = max(1e-9, min(seconds[1:]))
        if needed is mid_prompt:
            gap.cost.time(PromptLoad.from_runs(np.full_like(length, prefix), length), fastest)
        return fastest

    mid_prompt, prompt_end = (state.states_needed(scored=False, ends_prompt=ends) for ends in (False, True))
    few = [count for count in token_buckets(MAX_FEW_TOKENS) if count <= min(longest, max_tokens)]
    for count in few:
        begin = timed(count, 0, mid_prompt)
        if prompt_end is not mid_prompt:
            gap.ending = max(gap.ending, timed(count, 0, prompt_end) - begin)
    for count in sorted({max(1, max_tokens // 4), max(2, max_tokens // 2), max(3, max_tokens)}):
        timed(count, 0, mid_prompt)
    runs = np.full(min(table.max_requests, max_tokens), table.padding_row, dtype=np.int64)
    for needed in {mid_prompt, prompt_end}:  # compiles the kernels for many short prompts
        forwards.begin_forward(runs, np.full_like(runs, min(longest, max_tokens // len(runs))), needed).run()
    if few and (prefix := min(longest - few[-1], MAX_PREFIX)) > 0:
        for count in sorted({few[len(few) // 2], few[-1]}):
            timed(count, prefix, mid_prompt)
