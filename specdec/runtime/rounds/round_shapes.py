"""Shapes of rounds: the smallest that suffices for all of a round's requests, and the captured one that covers it.

    draft      steps, topk and nodes: the largest that any request can use
    forced     number of nodes if grammars force tokens: limited by the slots of every row
    prefix     upper bound on committed prefixes, unsettled rounds included; captured: few widths of page tables
    batch      number of seats; captured: few sizes
    sampling   what the round's parameters need; captured: few classes, since kernels read parameters as data

    class       what its rounds can do                                              cost beyond the previous class
    plain       temperature, filters and seed of each row                           -
    penalised   the repetition penalty                                              three small launches
    edited      presence and frequency penalty, logit bias (up to 512 entries)      logits as float32, about ten times
                                                                                    over the vocabulary of every node
    scored      log-probabilities, up to 20 alternatives                            about ten times more
    grammar     the mask of a grammar, with edited or scored                        three programs, the host between

Without kernels, "plain" is two classes, greedy and sampled, since torch sorts the vocabulary for top-k and top-p. A row
draws the same token in any class that covers it: penalties of 1 and 0, empty biases and empty masks change no bit of a
logit. Larger biases have classes of 8 times as many entries each; more alternatives have classes by powers of two.

This file knows rows and counts, no request.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np

from specdec.config import MAX_FORCED_TOKENS, SamplingParams
from specdec.gpu.captures import next_power_of_two
from specdec.gpu.mirrored_array import IntArray
from specdec.runtime.rounds.device_state import DeviceState
from specdec.runtime.rounds.result import DraftShape, RoundShape
from specdec.sampling.log_probs import max_logprobs
from specdec.sampling.sampling_table import SAMPLED, SamplerFeatures

GREEDY = SamplerFeatures(sampled=False)

BIAS_ENTRIES = 512
"""Logit-bias entries in the smallest class of edited rounds."""

FEW_ALTERNATIVES = 20
"""Alternatives per token in the smallest class of scored rounds."""

MIN_TABLE_WIDTH = 4096
"""Width in tokens of the narrowest page tables in a captured round. Narrower ones save nothing."""


def round_shape(
    state: DeviceState,
    rows: IntArray,
    params: Sequence[SamplingParams],
    draft: DraftShape,
    unsettled_nodes: int,
) -> RoundShape:
    """Shape of a round of these rows with this draft. unsettled_nodes: upper bound on the tokens of a prefix that the
    host does not know yet."""
    max_committed_len = int(state.cache.table.committed_len.host[rows].max(initial=0)) + unsettled_nodes
    asked = state.sampling.features_of(params), max_logprobs(params)
    return RoundShape(len(rows), max_committed_len, draft, *asked)


def end_drafts(state: DeviceState, rows: IntArray, ahead: int) -> IntArray:
    """Turn off drafts for rows within `ahead` tokens of the drafter's last position. Returns these rows, which catch up
    a last time; none if the drafter never reads late."""
    if state.max_positions is None:
        return rows[:0]
    reached = rows[state.cache.table.committed_len.host[rows] + ahead > state.max_positions]
    state.max_drafts[reached[state.max_drafts.host[reached] > 0]] = 0
    return rows[:0] if state.lag is None else reached


def with_forced(
    shape: RoundShape, state: DeviceState, rows: IntArray, most_forced: int, *, captured: bool
) -> RoundShape:
    """This shape with nodes for `most_forced` forced tokens, within the slots that all rows have. Captured rounds have
    one size, unless rows lack the slots."""
    table = state.cache.table
    last = np.minimum(table.capacity[rows], table.slots.host.shape[1] - 1)
    room = int((last - table.committed_len.host[rows]).min())
    width = min(1 + most_forced, room)
    if captured:
        max_width = max(shape.draft.num_nodes, 1 + MAX_FORCED_TOKENS)
        width = max_width if max_width <= room else min(next_power_of_two(width), 1 << room.bit_length() - 1)
    return shape._replace(forced=max(shape.draft.num_nodes, width))


def captured_shape(state: DeviceState, shape: RoundShape) -> RoundShape:
    """The captured shape for a round: padded to the next size, with the parameters of its class."""
    table = state.cache.table
    features, logprobs = widen_to_class(shape.features, shape.logprobs, on_kernels=state.on_kernels)
    shape = shape._replace(features=features, logprobs=logprobs)
    sizes = few_batch_buckets(table.max_requests) if is_rare(shape) else batch_buckets(table.max_requests)
    batch = min(size for size in sizes if size >= shape.batch)
    if shape.features.masked and shape.draft.num_nodes > MAX_FORCED_TOKENS:  # forced tokens need no extra nodes
        shape = shape._replace(forced=shape.draft.num_nodes)
    row_len = table.slots.host.shape[1] - 1  # unsettled rounds count in full, so the bound may exceed a row
    bound = min(shape.max_committed_len, row_len)
    max_committed_len = min(width for width in prefix_buckets(row_len) if width >= bound)
    return shape._replace(batch=batch, max_committed_len=max_committed_len)


def widen_to_class(
    features: SamplerFeatures, logprobs: int | None, *, on_kernels: bool
) -> tuple[SamplerFeatures, int | None]:
    """Find the smallest class that covers these uses and alternatives. Returns its uses and alternatives.

    on_kernels: kernels draw the tokens, without a sort.
    """
    if not (features.edits or logprobs is not None):
        if features.penalty:
            return SAMPLED._replace(penalty=True), None
        return (SAMPLED if on_kernels or features.sampled else GREEDY), None
    room = BIAS_ENTRIES
    while room < features.bias:
        room *= 8
    edited = SAMPLED._replace(penalty=True, counts=True, bias=room, masked=features.masked)
    if logprobs is None:
        return edited, None
    return edited, FEW_ALTERNATIVES if logprobs <= FEW_ALTERNATIVES else next_power_of_two(logprobs)


def is_rare(shape: RoundShape) -> bool:
    """Does a round change or report logits, or verify tokens that a grammar forces? Such rounds have fewer sizes."""
    return shape.features.edits or shape.features.penalty or shape.logprobs is not None or shape.forced > 0


@cache
def batch_buckets(limit: int) -> Sequence[int]:
    """Captured numbers of seats: 1, 2, 4, 8, then multiples of 8 up to 64, multiples of 32 after that, and `limit`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, limit + 32, 32)]
    return [size for size in sizes if size < limit] + [limit]


@cache
def few_batch_buckets(limit: int) -> Sequence[int]:
    """Captured numbers of seats for rare rounds (they change or report logits): 1, 4, 8, 16, 32, ..., `limit`."""
    sizes = [1, *(1 << i for i in range(2, limit.bit_length()))]
    return [size for size in sizes if size < limit] + [limit]


@cache
def prefix_buckets(limit: int) -> Sequence[int]:
    """Captured table widths in tokens: 4096, 32768, 262144, ..., `limit`. Few are enough, since a wide table costs
    kernels no time: they stop where a row ends. One is not enough, since the buffer of attention's partial results
    grows with the width."""
    widths, width = [], MIN_TABLE_WIDTH
    while width < limit:
        widths.append(width)
        width *= 8
    return [*widths, limit]
