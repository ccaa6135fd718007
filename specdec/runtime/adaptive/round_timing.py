"""Times an engine's captured rounds when it is made: each draft in each batch size, over rows of random tokens.

The rows are nobody's: their slots are the padding ones, and whoever calls empties the state behind it. Tokens are
random, since equal ones would choose equal experts, and a mixture of experts reads more weights for unlike rows. The
device's own clock is read (`StageClock`), so the host does not count.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from specdec.gpu.mirrored_array import IntArray
from specdec.models.target import FinalStates
from specdec.progress import progress_bar
from specdec.runtime.adaptive.cost_table import CostTable
from specdec.runtime.prompt_gap import PromptGap, PromptLoad
from specdec.runtime.rounds.captured_prompts import token_buckets
from specdec.runtime.rounds.captured_rounds import RoundGraphs
from specdec.runtime.rounds.catching_up import CatchUps
from specdec.runtime.rounds.decode_round import DECODE_STAGES
from specdec.runtime.rounds.result import RoundShape
from specdec.runtime.rounds.round import Round

REPEATS, WARM = 5, 3
"""Rounds of a shape that are timed, and not timed before."""

MAX_FEW_TOKENS = 256
"""Up to this many prompt tokens are read in a step while others decode: all sizes up to it are timed and captured."""

MAX_PREFIX = 16384
"""Longest prefix after which a prompt is timed; shorter where `max_model_len` is."""


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


def time_prompts(
    round: Round, gap: PromptGap, read: Callable[[IntArray, IntArray, FinalStates], object], most: int
) -> None:
    """Tell `gap` what forwards over prompts take, the fastest of three each: of few tokens, of a quarter, half and all
    of `most`, and of few after a long prefix. read: rows [R], their lengths, and whose final states.

    Those of few tokens are captured by that, so that no request waits for it later.
    """
    table = round.cache.table
    longest = table.slots.host.shape[1] - 1

    def spent(count: int, prefix: int, states: FinalStates) -> float:
        length = np.array([min(longest, count - first) for first in range(0, count, longest)], dtype=np.int64)
        rows = np.full_like(length, table.padding_row)
        table.committed_len[table.padding_row] = prefix
        round.flush()  # what is replayed reads the device's side as it is
        seconds = []
        for _ in range(4):
            round.clock.start("prefill")
            read(rows, length, states)
            begin, end = round.clock.stop().tolist()
            seconds.append((end - begin) / 1e9)
        table.committed_len[table.padding_row] = 0
        fastest: float = max(1e-9, min(seconds[1:]))
        if states is within:
            gap.cost.time(PromptLoad.from_runs(np.full_like(length, prefix), length), fastest)
        return fastest

    within, ending = (round.final_states(scored=False, ends=ends) for ends in (False, True))
    few = [count for count in token_buckets(MAX_FEW_TOKENS) if count <= min(longest, most)]
    for count in few:
        begin = spent(count, 0, within)
        if ending is not within:
            gap.ending = max(gap.ending, spent(count, 0, ending) - begin)
    for count in sorted({max(1, most // 4), max(2, most // 2), max(3, most)}):
        spent(count, 0, within)
    runs = np.full(min(table.max_requests, most), table.padding_row, dtype=np.int64)
    for states in {within, ending}:  # many short prompts have kernels of their own, which are compiled here
        read(runs, np.full_like(runs, min(longest, most // len(runs))), states)
    if few and (prefix := min(longest - few[-1], MAX_PREFIX)) > 0:
        for count in sorted({few[len(few) // 2], few[-1]}):
            spent(count, prefix, within)


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
