"""A group of prompt chunks that the target reads in parts, a few layers each, with rounds in between.

    layers  0 .. 2 | 3 .. 5 | ... | up to the one that stores the last K/V | the rest, for last tokens only

The state between two parts survives rounds, but not another group of chunks, so one group is in progress at a time. No
token of the chunks is committed before the last part. If a row is lost, or weights move, the finished parts are
dropped.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from specdec.gpu.mirrored_array import IntArray, upload
from specdec.models.target import FinalStates, TargetModel
from specdec.runtime.rounds.round import Chunk, PausedChunk, Round

LAYERS_A_PART = 3
"""Layers of a captured part. Each part is a launch, so they are few; but a part of a long prompt should fit half a
round."""

LAST_LAYERS_A_PART = 3
"""A part has this many times as many layers if they run for last tokens only."""


class PartShare(NamedTuple):
    """Shares of a forward's time that a part takes: `forward`, of all but attention over the prefix; `pairs`, of that
    attention; `ending`, of the layers that run for last tokens only."""

    forward: float = 1.0
    pairs: float = 1.0
    ending: float = 0.0


class PromptParts(NamedTuple):
    """Chunks in the parts that read them: the time share and the program of each. read: returns the result of the last
    part. generation: of the weights."""

    shares: Sequence[PartShare]
    programs: Sequence[Callable[[], object]]
    read: Callable[[], Chunk]
    generation: int


def part_ends(target: TargetModel, aux_layers: Sequence[int], states: FinalStates, layers_a_part: int) -> list[int]:
    """Ends of the parts, as numbers of layers."""
    num_layers = len(target.layout.layers)
    narrow = target.narrows_at(aux_layers)
    every = num_layers if states is FinalStates.EVERY or narrow is None else narrow + 1
    ends = _evenly(0, every, layers_a_part)
    if states is FinalStates.LAST and every < num_layers:
        ends += _evenly(every, num_layers, layers_a_part * LAST_LAYERS_A_PART)
    return ends


def _evenly(begin: int, end: int, max_layers: int) -> list[int]:
    """Divide these layers into as few parts as possible, each of at most `max_layers` layers -> the ends of the
    parts."""
    count = -(-(end - begin) // max_layers)
    return [begin + (end - begin) * number // count for number in range(1, count + 1)]


def part_shares(
    target: TargetModel, aux_layers: Sequence[int], states: FinalStates, ends: Sequence[int]
) -> list[PartShare]:
    """Shares of the parts that end at `ends`: by number of layers, and for attention by number of layers that see the
    whole prefix for every token."""
    narrow = target.narrows_at(aux_layers)
    narrowed = states is not FinalStates.EVERY and narrow is not None
    every = narrow + 1 if narrowed and narrow is not None else len(target.layout.layers)
    sees_all = [target.windows[layer] is None and not (narrowed and layer == narrow) for layer in range(every)]
    seeing = sum(sees_all)
    shares, last_layers = [], len(target.layout.layers) - every
    for begin, end in pairwise([0, *ends]):
        if begin >= every:
            shares.append(PartShare(0.0, 0.0, (end - begin) / last_layers))
            continue
        forward = (end - begin) / every
        shares.append(PartShare(forward, sum(sees_all[begin:end]) / seeing if seeing else forward))
    return shares


def whole_chunk(read: Callable[[], Chunk], generation: int) -> PromptParts:
    """A forward in one part."""
    found: list[Chunk] = []
    return PromptParts([PartShare()], [lambda: found.append(read())], found.pop, generation)


def single_layers(round: Round, rows: IntArray, chunk_len: IntArray, states: FinalStates) -> PromptParts:
    """Divides a forward that is not captured: each layer is a part."""
    ends = part_ends(round.target, round.aux_layers, states, 1)
    runs = upload(np.stack([rows, chunk_len]), round.device)
    paused: list[PausedChunk] = []

    def part(end: int) -> None:
        if not paused:
            paused.append(round.begin_reading(runs[0], runs[1], int(chunk_len.sum()), states))
        paused[0].advance(end)

    shares = part_shares(round.target, round.aux_layers, states, ends)
    programs = [partial(part, end) for end in ends]
    return PromptParts(shares, programs, lambda: paused[0].finish(), round.weights.generation())
