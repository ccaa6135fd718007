"""Warm-up of an engine on a GPU before its first request: captures rounds, and times rounds and prompts.

    rounds     greedy, with the narrowest tables, for every batch size and every draft of the ladder
    wider      the largest round runs once at each wider table, so that no request waits for a compiler later
    prompts    short ones are captured, long ones only timed: the times decide the prompt tokens of a step
    parts      the parts of short forwards, which steps run one by one

Other shapes are captured when they first occur.
"""

import numpy as np

from specdec.progress import progress_bar
from specdec.runtime.draft_policy import RoundTimes
from specdec.runtime.rounds.captured_rounds import CapturedRounds
from specdec.runtime.rounds.prompt_sizes import SIZES_IN_PARTS
from specdec.runtime.rounds.result import NO_DRAFT, RoundShape, whole_draft
from specdec.runtime.rounds.round_shapes import batch_buckets, captured_shape, prefix_buckets, round_shape
from specdec.runtime.startup_timing import time_prompts, time_rounds
from specdec.runtime.steps import Steps

NO_ROWS = np.zeros(0, dtype=np.int64)


def warm_up(steps: Steps) -> None:
    """Capture and time rounds and prompts, with no row seated. Does nothing if rounds are not captured."""
    captured_rounds, state = steps.captured_rounds, steps.state
    if captured_rounds is None:
        return
    own = NO_DRAFT if state.worker is None else whole_draft(steps.spec)
    drafts = [own] if steps.draft_policy is None else steps.draft_policy.shapes
    shapes = [
        captured_shape(state, round_shape(state, NO_ROWS, [], draft, 0)._replace(batch=size))
        for size in reversed(batch_buckets(steps.table.max_requests))
        for draft in reversed(drafts)
    ]
    with steps.state.on_device(), progress_bar("capturing rounds", len(shapes)) as update:
        for done, shape in enumerate(shapes, start=1):
            for _ in range(2):  # eagerly, then captured
                _run(steps, captured_rounds, shape)
            update(done)
        for width in prefix_buckets(steps.table.slots.host.shape[1] - 1)[1:]:
            for shape in shapes[: len(drafts)]:
                _run(steps, captured_rounds, shape._replace(max_committed_len=width))
        if state.unread is not None:
            for shape in shapes[:: len(drafts)]:  # one shape per batch size
                for _ in range(2):
                    captured_rounds.catch_up(shape)
    if state.cache.sanitizer is None:  # the sanitizer does not know rows without slots
        with steps.state.on_device():
            if steps.draft_policy is not None:
                with progress_bar("timing rounds", len(shapes)) as update:
                    seconds = np.reshape(time_rounds(captured_rounds, shapes, update), (-1, len(drafts)))[:, ::-1]
                sizes = [shape.batch for shape in shapes[:: len(drafts)]]
                steps.draft_policy.times.update(zip(sizes, map(RoundTimes, seconds), strict=True))
            _time_prompts(steps, captured_rounds, shapes[0])
        steps.restart([])
    captured_rounds.store.uncaptured["rounds"] = 0  # warm-up runs do not count


def _run(steps: Steps, captured_rounds: CapturedRounds, shape: RoundShape) -> None:
    steps.state.seat(NO_ROWS)
    steps.state.flush()
    captured_rounds.run(shape)


def _time_prompts(steps: Steps, captured_rounds: CapturedRounds, largest: RoundShape) -> None:
    """Time prompts, and fit the prompt tokens of a step to these times."""
    [longest] = time_rounds(captured_rounds, [largest], lambda _: None)
    gap, room = steps.scheduler.prompt_gap, steps.scheduler.prompt_budget
    gap.longest_round = longest
    gap.learn_round(longest)
    time_prompts(steps.state, gap, steps.prefill.read, min(room.while_decoding, steps.table.max_requests * room.chunk))
    steps.scheduler.prompt_budget = gap.capped(room)
    _capture_parts(steps)


def _capture_parts(steps: Steps) -> None:
    """Run each divided forward once. This captures it, so that no request waits for a capture later."""
    division, captured_prompts = steps.scheduler.prompt_gap.division, steps.prefill.captured_prompts
    if division is None or captured_prompts is None:
        return
    steps.state.flush()
    longest = min(steps.table.slots.host.shape[1] - 1, division.max_tokens)
    for needed in {steps.state.states_needed(scored=False, ends_prompt=ends) for ends in (False, True)}:
        for size in SIZES_IN_PARTS:
            rows, length = np.array([steps.table.padding_row]), np.array([min(size, longest)])
            found = captured_prompts.begin_forward(rows, length, needed, divided=True)
            if found is not None:
                found.run()
