"""Prompt chunks that the target reads in parts: each part runs a few layers, and rounds run in between.

    layers  0 .. 2 | 3 .. 5 | ... | up to the last layer that stores K/V | the rest, for last tokens only

The state between two parts survives rounds but not other chunks, so one group of chunks is in progress at a time. No
token of the chunks is committed before the last part. If a row is lost or weights move, the finished parts are dropped.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from specdec.gpu.mirrored_array import IntArray, upload
from specdec.models.paused_forward import PausedForward
from specdec.models.target import StatesNeeded, TargetModel
from specdec.runtime.rounds.device_state import Chunk, DeviceState

LAYERS_A_PART = 3
"""Layers per captured part. Each part is a launch, so there should be few parts; yet a part of a long prompt should fit
half a round."""

LAST_LAYERS_A_PART = 3
"""A part whose layers run only for last tokens has this many times as many layers."""


class PartShare(NamedTuple):
    """A part's share of a forward's time: `forward`, everything but attention over the prefix; `pairs`, that attention;
    `ending`, the layers that run only for last tokens."""

    forward: float = 1.0
    pairs: float = 1.0
    ending: float = 0.0


class PromptParts(NamedTuple):
    """The parts that read some chunks: time share and program of each. read: returns the result after the last part.
    generation: of the weights."""

    shares: Sequence[PartShare]
    programs: Sequence[Callable[[], object]]
    read: Callable[[], Chunk]
    generation: int


def divide(
    target: TargetModel, aux_layers: Sequence[int], needed: StatesNeeded, layers_a_part: int
) -> tuple[list[int], list[PartShare]]:
    """Divide a forward into parts of at most `layers_a_part` layers. Returns the layer number at which each part ends,
    and its share of the time: in proportion to its layers; for attention, to those layers in which every token sees the
    whole prefix."""
    num_layers = len(target.layout.layers)
    narrow = target.narrows_at(aux_layers)
    every = num_layers if needed is StatesNeeded.EVERY or narrow is None else narrow + 1
    narrowed = None if needed is StatesNeeded.EVERY else narrow
    sees_all = [target.windows[layer] is None and layer != narrowed for layer in range(every)]
    layer_ends, shares = _evenly(0, every, layers_a_part), []
    for begin, end in pairwise([0, *layer_ends]):
        forward = (end - begin) / every
        shares.append(PartShare(forward, sum(sees_all[begin:end]) / sum(sees_all) if any(sees_all) else forward))
    if needed is StatesNeeded.LAST and every < num_layers:
        last = _evenly(every, num_layers, layers_a_part * LAST_LAYERS_A_PART)
        shares += [PartShare(0.0, 0.0, (end - begin) / (num_layers - every)) for begin, end in pairwise([every, *last])]
        layer_ends += last
    return layer_ends, shares


def _evenly(begin: int, end: int, max_layers: int) -> list[int]:
    """Divide these layers into as few parts of at most `max_layers` as possible. Returns the ends of the parts."""
    count = -(-(end - begin) // max_layers)
    return [begin + (end - begin) * number // count for number in range(1, count + 1)]


def whole_chunk(read: Callable[[], Chunk], generation: int) -> PromptParts:
    """A forward as a single part."""
    found: list[Chunk] = []
    return PromptParts([PartShare()], [lambda: found.append(read())], found.pop, generation)


def single_layers(state: DeviceState, rows: IntArray, chunk_len: IntArray, needed: StatesNeeded) -> PromptParts:
    """Divide a forward that is not captured: each layer is a part."""
    layer_ends, shares = divide(state.target, state.aux_layers, needed, 1)
    runs = upload(np.stack([rows, chunk_len]), state.device)
    paused: list[PausedForward[Chunk]] = []

    @torch.inference_mode()
    def part(end: int) -> None:
        if not paused:
            paused.append(state.begin_reading(runs[0], runs[1], int(chunk_len.sum()), needed))
        paused[0].advance(end)

    @torch.inference_mode()
    def read() -> Chunk:
        return paused[0].finish()

    return PromptParts(shares, [partial(part, end) for end in layer_ends], read, state.weights.generation())
