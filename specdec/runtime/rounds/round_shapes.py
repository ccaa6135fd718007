"""The smallest shape of a round that suffices for all of its requests.

    draft      steps, topk and nodes: the largest that any request can use
    forced     number of nodes if grammars force tokens: limited by the slots of every row
    longest    upper bound on committed prefixes, unsettled rounds included

This file knows rows and counts, no request.
"""

from collections.abc import Collection, Sequence

import numpy as np

from specdec.config import SamplingParams, SpecConfig
from specdec.gpu.mirrored_array import IntArray
from specdec.runtime.rounds.captured_rounds import CapturedRounds
from specdec.runtime.rounds.device_state import DeviceState
from specdec.runtime.rounds.result import DraftShape, RoundShape
from specdec.sampling.log_probs import max_logprobs

NO_DRAFT = DraftShape(0, 1, 1)
"""No draft: the root only."""


def whole_draft(spec: SpecConfig) -> DraftShape:
    """The draft of these settings before any request shortens it."""
    num_steps, num_nodes = spec.shortened(spec.depth)
    return DraftShape(num_steps, spec.topk, num_nodes)


def largest(drafts: Collection[DraftShape]) -> DraftShape:
    """The smallest draft that covers all of these; no draft if there are none."""
    return DraftShape(*(max(size) for size in zip(NO_DRAFT, *set(drafts), strict=True)))


def round_shape(
    state: DeviceState,
    rows: IntArray,
    params: Sequence[SamplingParams],
    drafts: Collection[DraftShape],
    unsettled_nodes: int,
) -> RoundShape:
    """Shape of a round of these rows, given each request's draft. unsettled_nodes: upper bound on the tokens of a
    prefix that the host does not know yet."""
    max_committed_len = int(state.cache.table.committed_len.host[rows].max(initial=0)) + unsettled_nodes
    asked = state.sampling.features_of(params), max_logprobs(params)
    return RoundShape(len(rows), max_committed_len, *NO_DRAFT[:3], *asked).with_draft(largest(drafts))


def end_drafts(state: DeviceState, rows: IntArray, ahead: int) -> IntArray:
    """Turn off drafts for rows within `ahead` tokens of the drafter's last position. Returns those of them that must
    catch up a last time: none if the drafter never reads late."""
    if state.max_positions is None:
        return rows[:0]
    reached = rows[state.cache.table.committed_len.host[rows] + ahead > state.max_positions]
    state.max_drafts[reached[state.max_drafts.host[reached] > 0]] = 0
    return rows[:0] if state.unread is None else reached[~state.unread.ended[reached]]


def with_forced(
    shape: RoundShape, state: DeviceState, rows: IntArray, most_forced: int, captured_rounds: CapturedRounds | None
) -> RoundShape:
    """This shape with nodes for forced tokens, within the slots that all rows have. Captured rounds have few sizes."""
    table = state.cache.table
    last = np.minimum(table.capacity[rows], table.slots.host.shape[1] - 1)
    room = int((last - table.committed_len.host[rows]).min())
    width = min(1 + most_forced, room)
    if captured_rounds is not None:
        width = captured_rounds.forced_width(width, room, shape.num_nodes)
    return shape._replace(forced=max(shape.num_nodes, width))
