"""How large a round is: enough for every request in it, and no larger.

    draft      steps, topk and nodes: the most that any of its requests can use
    forced     nodes where grammars force tokens: as many as every row has slots for
    longest    no committed prefix is longer, rounds included that are not settled yet

It knows rows and counts, no request.
"""

from collections.abc import Sequence

import numpy as np

from specdec.config import SamplingParams, SpecConfig
from specdec.gpu.mirrored_array import IntArray
from specdec.runtime.rounds.captured_rounds import RoundGraphs
from specdec.runtime.rounds.result import RoundShape
from specdec.runtime.rounds.round import Round

NO_DRAFT = (0, 1, 1)
"""Steps, topk and nodes of a draft that is the root alone."""


def whole_draft(spec: SpecConfig) -> tuple[int, int, int]:
    """(steps, topk, nodes) of drafts that nothing shortens."""
    num_steps, num_nodes = spec.shortened(spec.depth)
    return num_steps, spec.topk, num_nodes


def round_shape(
    round: Round,
    rows: IntArray,
    params: Sequence[SamplingParams],
    drafts: Sequence[tuple[int, int, int]],
    unsettled_nodes: int,
) -> RoundShape:
    """drafts: (steps, topk, nodes) of each request. unsettled_nodes: by so much may a prefix be longer than the host
    knows."""
    num_steps, topk, num_nodes = (max(size) for size in zip(NO_DRAFT, *drafts, strict=True))
    longest = int(round.cache.table.committed_len.host[rows].max(initial=0)) + unsettled_nodes
    uses, logprobs = round.sampling.uses(params), max_logprobs([p.logprobs for p in params])
    return RoundShape(len(rows), longest, num_steps, topk, num_nodes, uses, logprobs)


def with_forced(
    shape: RoundShape, round: Round, rows: IntArray, most_forced: int, graphs: RoundGraphs | None
) -> RoundShape:
    """With room for forced tokens, as far as all rows have slots; captured rounds have few sizes."""
    table = round.cache.table
    last = np.minimum(table.capacity[rows], table.slots.host.shape[1] - 1)
    room = int((last - table.committed_len.host[rows]).min())
    width = min(1 + most_forced, room)
    if graphs is not None:
        width = graphs.forced_width(width, room, shape.num_nodes)
    return shape._replace(forced=max(shape.num_nodes, width))


def max_logprobs(asked: Sequence[int | None]) -> int | None:
    """Most alternatives that any request asks for; None: none asks for log-probabilities."""
    return max((count for count in asked if count is not None), default=None)
