"""Times an engine's captured rounds when it is made: each draft in each batch size, over rows of random tokens.

The rows belong to no request: their slots are the padding ones, and the caller empties the state afterwards. Tokens are
random, since equal ones would choose equal experts. The device's own clock is read, so the host does not count.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from specdec.progress import progress_bar
from specdec.runtime.draft_policy.round_times import RoundTimes
from specdec.runtime.rounds.captured_rounds import RoundGraphs
from specdec.runtime.rounds.catching_up import CatchUps
from specdec.runtime.rounds.decode_round import DECODE_STAGES
from specdec.runtime.rounds.result import DraftShape, RoundShape

REPEATS = 8
"""Rounds of a shape that run; the later half of them is timed."""


def fill_times(
    times: RoundTimes,
    drafts: Sequence[DraftShape],
    graphs: RoundGraphs,
    catch_ups: CatchUps | None,
    shapes: Sequence[RoundShape],
) -> None:
    """Time these captured shapes: for each batch size a round with every draft, and catching up if the drafter lags."""
    with progress_bar("timing rounds", len(shapes)) as update:
        seconds = dict(zip(shapes, time_rounds(graphs, shapes, update), strict=True))
    by_draft = {(shape.batch, shape.draft): spent for shape, spent in seconds.items()}
    for size in {shape.batch for shape in shapes}:
        times.timed[size] = np.array([by_draft[size, draft] for draft in drafts])
    if catch_ups is not None and graphs.round.unread is not None:
        for shape in shapes:
            if shape.is_plain:
                times.catching_up[shape.batch] = time_catching_up(catch_ups, shape)


def time_rounds(graphs: RoundGraphs, shapes: Sequence[RoundShape], done: Callable[[int], None]) -> list[float]:
    """Median seconds of a round of each of these captured shapes, which are bucketed. done: is told how many are."""
    round = graphs.round
    table, generator = round.cache.table, torch.Generator().manual_seed(0)
    seconds = []
    for number, shape in enumerate(shapes, start=1):
        rows = np.arange(shape.batch, dtype=np.int64)
        table.committed_len.clear()
        round.seat(rows)
        round.max_drafts[rows] = np.full_like(rows, shape.depth)
        round.flush()
        tokens = torch.randint(round.target.vocab_size, (shape.batch, 1), generator=generator)
        round.tokens.tensor[: shape.batch, :1] = tokens.to(round.device)
        room = (table.slots.host.shape[1] - 1) // shape.depth  # rounds until a row is full, if all drafts are right
        stamps = [graphs.run(shape)[-len(DECODE_STAGES) - 1 :].clone() for _ in range(min(REPEATS, room))]
        seconds.append(_median_seconds(stamps))
        done(number)
    return seconds


def time_catching_up(graphs: CatchUps, shape: RoundShape) -> float:
    """Median seconds of one, captured, over rows that have nothing to read: it does the same work."""
    stamps, clock = [], graphs.round.clock
    for _ in range(REPEATS):
        clock.start("other")
        graphs.run(shape)
        stamps.append(clock.stop().clone())
    return _median_seconds(stamps)


def _median_seconds(stamps: Sequence[torch.Tensor]) -> float:
    """From the first stamp to the last of each run, of the later half of the runs."""
    on_host = torch.stack(list(stamps[len(stamps) // 2 :])).cpu()
    return float((on_host[:, -1] - on_host[:, 0]).double().median()) / 1e9
