"""Warm-up of an engine on a GPU before its first request: captures rounds, and times rounds and prompts.

    rounds     greedy, with the narrowest tables, for every batch size and every draft of the ladder
    wider      the largest round runs once at each wider table, so that no request waits for a compiler later
    prompts    short ones are captured, long ones only timed: the times decide the prompt tokens of a step
    parts      the parts of short forwards, which steps run one by one

Other shapes are captured when they first occur.
"""

import numpy as np

from specdec.progress import progress_bar
from specdec.runtime.draft_policy.round_times import RoundTimes
from specdec.runtime.rounds.captured_prompts import SIZES_IN_PARTS
from specdec.runtime.rounds.captured_rounds import RoundGraphs, batch_buckets, prefix_buckets
from specdec.runtime.rounds.result import RoundShape
from specdec.runtime.rounds.round_shapes import NO_DRAFT, round_shape, whole_draft
from specdec.runtime.startup_timing import time_prompts, time_rounds
from specdec.runtime.steps import Steps

NO_ROWS = np.zeros(0, dtype=np.int64)


def warm_up(steps: Steps) -> None:
    """Capture and time rounds and prompts, with no row seated. Does nothing if rounds are not captured."""
    graphs, state = steps.graphs, steps.state
    if graphs is None:
        return
    own = NO_DRAFT if state.worker is None else whole_draft(steps.spec)
    drafts = [own] if steps.choice is None else steps.choice.shapes
    shapes = [
        graphs.bucket(round_shape(state, NO_ROWS, [], [draft], 0)._replace(batch=size))
        for size in reversed(batch_buckets(steps.table.max_requests))
        for draft in reversed(drafts)
    ]
    with steps.state.on_device(), progress_bar("capturing rounds", len(shapes)) as update:
        for done, shape in enumerate(shapes, start=1):
            for _ in range(2):  # eagerly, then captured
                _run(steps, graphs, shape)
            update(done)
        for width in prefix_buckets(steps.table.slots.host.shape[1] - 1)[1:]:
            for shape in shapes[: len(drafts)]:
                _run(steps, graphs, shape._replace(longest=width))
        if state.unread is not None:
            for shape in shapes[:: len(drafts)]:  # one shape per batch size
                for _ in range(2):
                    graphs.catch_up(shape)
    if state.cache.sanitizer is None:  # the sanitizer does not know rows without slots
        with steps.state.on_device():
            if steps.choice is not None:
                with progress_bar("timing rounds", len(shapes)) as update:
                    seconds = np.reshape(time_rounds(graphs, shapes, update), (-1, len(drafts)))[:, ::-1]
                sizes = [shape.batch for shape in shapes[:: len(drafts)]]
                steps.choice.times.update(zip(sizes, map(RoundTimes, seconds), strict=True))
            _time_prompts(steps, graphs, shapes[0])
        steps.restart([])
    graphs.store.uncaptured["rounds"] = 0  # warm-up runs do not count


def _run(steps: Steps, graphs: RoundGraphs, shape: RoundShape) -> None:
    steps.state.seat(NO_ROWS)
    steps.state.flush()
    graphs.run(shape)


def _time_prompts(steps: Steps, graphs: RoundGraphs, largest: RoundShape) -> None:
    """Time prompts, and fit the prompt tokens of a step to these times."""
    [longest] = time_rounds(graphs, [largest], lambda _: None)
    gap, room = steps.scheduler.prompt_gap, steps.scheduler.prompt_room
    gap.longest_round = longest
    gap.learn_round(longest)
    time_prompts(steps.state, gap, steps.prefill.read, min(room.busy, steps.table.max_requests * room.chunk))
    steps.scheduler.prompt_room = gap.capped(room)
    _capture_parts(steps)


def _capture_parts(steps: Steps) -> None:
    """Run each divided forward once. This captures it, so that no request waits for a capture later."""
    division, chunks = steps.scheduler.prompt_gap.division, steps.prefill.chunks
    if division is None or chunks is None:
        return
    steps.state.flush()
    longest = min(steps.table.slots.host.shape[1] - 1, division.max_tokens)
    for states in {steps.state.final_states(scored=False, ends=ends) for ends in (False, True)}:
        for size in SIZES_IN_PARTS:
            rows, length = np.array([steps.table.padding_row]), np.array([min(size, longest)])
            found = chunks.begin_forward(rows, length, states, divided=True)
            if found is not None:
                for program in found.programs:
                    program()
                found.read()
