"""Prompt chunks on the device: the target reads them, whole or in parts; first tokens are drawn, the drafter observes.

    layers  0 .. 2 | 3 .. 5 | ... | up to the last layer that stores K/V | the rest, for last tokens only

A part runs a few layers, and rounds run in between. The state between two parts survives rounds but not other chunks,
so one group of chunks is in progress at a time. No token of the chunks is committed before the last part. If a row is
lost or weights move, the finished parts are dropped.

    chunk      s ................ e          tokens whose K/V the forward makes, and whose states it has
    scored       s + 1 ............ e + 1    each state predicts the token after its own

The logits of a whole chunk would take V numbers per token, so scores are computed a few rows at a time. If the target
is deterministic, a row's numbers do not depend on other rows: head and softmax work row by row as in a round
(`LogProbs`), so a token has the same score in an output and in a prompt. The host never waits here.
"""

from collections.abc import Generator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from specdec.attention.plan import Pack, plan_last, plan_packed
from specdec.draft_models.base import PromptObservation
from specdec.gpu.mirrored_array import IntArray, upload
from specdec.kvcache.table import Rows
from specdec.models.target import StatesNeeded
from specdec.runtime.rounds.device_state import DeviceState
from specdec.runtime.rounds.prompt_sizes import PartShare
from specdec.runtime.rounds.result import RoundShape, pack_round_result
from specdec.sampling.log_probs import LogProbs
from specdec.sampling.token_bitmaps import RowMasks, mark_seen, write_masks

PREFILL_STAGES = ("prefill",)
"""Stages of a group of prompt chunks that the clock times."""

LAYERS_A_PART = 3
"""Layers per captured part. Each part is a launch, so there should be few parts; yet a part of a long prompt should fit
half a round."""

LAST_LAYERS_A_PART = 3
"""A part whose layers run only for last tokens has this many times as many layers."""

MAX_LOGITS = 1 << 24
"""Logits per tile: 64 rows of a vocabulary of 262,144. Reducing them takes about 24 bytes of memory per logit."""


class Chunk(NamedTuple):
    """Prompt tokens that the target has read, and its final states at them.

    pack: the runs of R requests in T places. tokens [T]: their tokens, 0 on padding. hidden: [T, H] if `needed` is
    EVERY, the last state of each run [R, H] if it is LAST, zeros [R, H] if it is NONE. aux_states: [T, A * H].
    """

    pack: Pack
    tokens: torch.Tensor
    hidden: torch.Tensor
    aux_states: torch.Tensor | None
    needed: StatesNeeded

    def last_hidden(self) -> torch.Tensor:
        """Final states at the end of each run [R, H]; zeros if none were made."""
        return self.hidden[self.pack.last] if self.needed is StatesNeeded.EVERY else self.hidden


def read_chunk(
    state: DeviceState,
    rows: torch.Tensor,
    length: torch.Tensor,
    num_places: int,
    needed: StatesNeeded,
    layer_ends: Sequence[int],
) -> Generator[None, None, Chunk]:
    """Run the target over the next `length` [R] tokens of rows [R], at most `num_places` together.

    Makes their K/V and the final states that `needed` names. Layers that are needed for neither do not run. layer_ends:
    the layer before which each part ends; it pauses after each but the last. Empty: it runs as a whole.
    """
    table, target = state.cache.table, state.target
    pack = Pack.from_lengths(rows, table.committed_len.tensor[rows], length, num_places)
    plan = plan_packed(state.backend, table, pack)
    last_column = state.tokens.tensor.shape[1] - 1
    tokens = state.tokens.tensor[rows[pack.run_of], pack.positions.clamp(max=last_column)]  # [T]
    tokens = tokens.masked_fill(~pack.exists, 0)
    fewer: dict[str, Any] = {}
    if needed is StatesNeeded.LAST:
        fewer = {"last_plan": plan_last(state.backend, table, pack)}
    elif needed is StatesNeeded.NONE:
        fewer = {"kv_only": True}
    inputs = tokens[None], plan, state.view, state.aux_layers
    if layer_ends:
        hidden, aux_states = yield from target.forward_in_parts(*inputs, layer_ends, **fewer)
    else:
        hidden, aux_states = target.forward(*inputs, **fewer)
    hidden = hidden[0].expand(len(rows), -1) if needed is StatesNeeded.NONE else hidden[0]
    return Chunk(pack, tokens, hidden, None if aux_states is None else aux_states[0], needed)


def divide(state: DeviceState, needed: StatesNeeded, *, captured: bool) -> tuple[list[int], list[PartShare]]:
    """Divide a forward into parts: of one layer, or of at most LAYERS_A_PART if it is captured. Returns the layer
    number at which each part ends, and its share of the time: in proportion to its layers; for attention, to those
    layers in which every token sees the whole prefix."""
    target, layers_a_part = state.target, LAYERS_A_PART if captured else 1
    num_layers = len(target.layout.layers)
    narrow = None if needed is StatesNeeded.EVERY else target.narrows_at(state.aux_layers)
    every = num_layers if narrow is None else narrow + 1
    sees_all = [target.windows[layer] is None and layer != narrow for layer in range(every)]
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


@torch.inference_mode()
def draw_first_tokens(
    state: DeviceState,
    chunk: Chunk,
    ending: IntArray,
    max_prompt_len: int,
    shape: RoundShape,
    allowed: RowMasks | None,
    earlier: torch.Tensor | None,
    *,
    first_position: int,
) -> torch.Tensor:
    """Draw the first token after the chunks with indices `ending` [B], which end their prompts, and show all
    chunks to the drafter. Returns the packed result, like that of a round of one node for B rows.

    max_prompt_len: tokens of the longest of these prompts.
    allowed: masks of the requests with a grammar.
    earlier: device nanoseconds of parts that ran in earlier steps.
    first_position: the first position that was read.

    Drawn tokens are written to `state.tokens`, so a round may follow. The host commits the chunks after the launch; the
    drafter observes them as committed.
    """
    pack, last_hidden = chunk.pack, chunk.last_hidden()
    first, scores = pack.rows.new_zeros((0, 1)), None
    if len(ending):
        chosen = upload(ending, state.device)
        logits, softcap = state.logits(last_hidden[chosen][:, None], shape.logprobs)  # [B, 1, V]
        drawing = Rows(pack.rows[chosen], max_prompt_len)
        history_len = (pack.start + pack.length)[chosen]
        bits = None
        if allowed is not None:
            bits = chosen.new_empty((len(ending), 1, state.masks.num_words), dtype=torch.int32)
            write_masks(bits, allowed)
        inputs = state.edit_inputs(drawing, history_len, shape, None, bits)
        first = state.sampler_of(drawing, shape).draw(logits, history_len[:, None], inputs, softcap)  # [B, 1]
        state.tokens.tensor[drawing.index, history_len] = first[:, 0]
        if state.seen_bits is not None and shape.features.penalty:
            mark_seen(state.seen_bits.bits, drawing.index, first, torch.ones_like(first[:, 0]))
        scores = None if shape.logprobs is None else LogProbs.from_logits(logits, first, shape.logprobs)
    _observe_prompts(state, chunk, last_hidden, first_position)
    one_node = torch.cat([torch.ones_like(first), torch.zeros_like(first), first], dim=1)
    stamps = state.clock.stop()
    if earlier is not None:
        stamps = torch.stack([stamps[0] - earlier, stamps[1]])
    return pack_round_result(one_node, scores, stamps)


def _observe_prompts(state: DeviceState, chunk: Chunk, last_hidden: torch.Tensor, first_position: int) -> None:
    """Show the drafter the chunks and the target's states, unless all are after the drafter's last position."""
    if state.worker is None:
        return
    pack = chunk.pack
    if state.lag is not None:
        state.lag.read[pack.rows] = pack.start + pack.length
    if state.max_positions is not None and first_position >= state.max_positions:
        return
    column = (pack.positions + 1).clamp(max=state.tokens.tensor.shape[1] - 1)
    seen = PromptObservation(
        pack=pack,
        tokens=chunk.tokens,
        following=state.tokens.tensor[pack.rows[pack.run_of], column],
        hidden=chunk.hidden if chunk.needed is StatesNeeded.EVERY else None,
        last_hidden=last_hidden,
        aux_states=chunk.aux_states,
    )
    state.worker.observe_prompts(seen)


@torch.inference_mode()
def score_chunk(state: DeviceState, chunk: Chunk, cells: torch.Tensor, alternatives: int) -> torch.Tensor:
    """Log-probabilities, under the unmodified logits, of M prompt tokens, and of the K likeliest tokens at each place.

    cells [2, M]: see `ChunkScoring.cells`. Returns [M, 1 + 2K] int32: the bits of the float32 numbers, then the ids.
    """
    assert chunk.needed is StatesNeeded.EVERY, f"a chunk is scored from every state: {chunk.needed}"
    chunk_index, column = cells
    pack = chunk.pack
    following = state.tokens.tensor[pack.rows[chunk_index], pack.start[chunk_index] + column + 1]  # [M]
    hidden = chunk.hidden[pack.cu_len[chunk_index] + column]  # [M, H]
    tile = max(1, MAX_LOGITS // state.target.vocab_size)
    parts = []
    for first in range(0, len(following), tile):
        some = slice(first, first + tile)
        logits = state.target.logits(hidden[None, some])  # [1, tile, V]
        found = LogProbs.from_logits(logits, following[None, some], alternatives)
        floats = torch.cat([found.chosen[0, :, None], found.values[0]], dim=1)
        parts.append(torch.cat([floats.contiguous().view(torch.int32), found.ids[0].int()], dim=1))
    return torch.cat(parts)
