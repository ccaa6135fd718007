"""Times an engine's captured rounds when it is made: each draft in each batch size, over rows of random tokens.

The rows are nobody's: their slots are the padding ones, and whoever calls empties the state behind it. Tokens are
random, since equal ones would choose equal experts, and a mixture of experts reads more weights for unlike rows. The
device's own clock is read (`StageClock`), so the host does not count.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from specdec.progress import progress_bar
from specdec.runtime.adaptive.cost_table import CostTable
from specdec.runtime.rounds.captured_rounds import RoundGraphs
from specdec.runtime.rounds.catching_up import CatchUps
from specdec.runtime.rounds.decode_round import DECODE_STAGES
from specdec.runtime.rounds.result import RoundShape
from specdec.runtime.rounds.round import Round

REPEATS, WARM = 5, 3
"""Rounds of a shape that are timed, and not timed before."""


def fill_cost_table(
    table: CostTable, graphs: RoundGraphs, catch_ups: CatchUps | None, shapes: Sequence[RoundShape]
) -> None:
    """Time these captured shapes: for each batch size a round with every draft of the table, and catching up if the
    drafter lags."""
    with progress_bar("timing rounds", len(shapes)) as update:
        seconds = dict(zip(shapes, time_rounds(graphs, shapes, update), strict=True))
    by_draft = {(shape.batch, shape.draft): spent for shape, spent in seconds.items()}
    for size in {shape.batch for shape in shapes}:
        table.timed[size] = np.array([by_draft[size, draft] for draft in table.shapes])
    if catch_ups is not None and graphs.round.unread is not None:
        table.catching_up.update(
            {shape.batch: time_catching_up(catch_ups, shape) for shape in shapes if shape.is_plain}
        )


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
        stamps = []
        for _ in range(min(WARM + REPEATS, room)):
            stamps.append(graphs.run(shape)[-len(DECODE_STAGES) - 1 :].clone())
        spent = [float(stamp[-1] - stamp[0]) / 1e9 for stamp in torch.stack(stamps).cpu()]
        seconds.append(float(np.median(spent[min(WARM, len(spent) - 1) :])))
        done(number)
    return seconds


def time_prompts(round: Round, most: int) -> dict[int, float]:
    """Seconds of forwards over prompts of a quarter of `most` tokens, of half and of all: the fastest of three."""
    seconds = {}
    longest = round.cache.table.slots.host.shape[1]
    for count in sorted({max(1, most // 4), max(2, most // 2), max(3, most)}):
        spent = []
        length = torch.tensor([min(longest, count - first) for first in range(0, count, longest)], device=round.device)
        nobody = torch.full_like(length, round.cache.table.padding_row)
        for _ in range(4):
            round.clock.start("prefill")
            round.read(nobody, length, count, round.final_states(scored=False, ends=True))
            begin, end = round.clock.stop().tolist()
            spent.append((end - begin) / 1e9)
        seconds[count] = min(spent[1:])
    return seconds


def time_catching_up(graphs: CatchUps, shape: RoundShape) -> float:
    """Seconds of one, captured, over rows that have nothing to read: it does the same work."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        graphs.run(shape)
    begin.record()
    for _ in range(5):
        graphs.run(shape)
    end.record()
    end.synchronize()
    spent: float = begin.elapsed_time(end)
    return spent / 5e3
