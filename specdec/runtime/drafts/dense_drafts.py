"""Drafts after every place of a text, computed in a few dense forwards, and their accepted lengths.

The target reads the text once (`record`). The record has everything that drafters read, so each drafter, changed or
not, is tried without the target. It uses no pages, plans or kernels: it is the reference for the proposals of an
engine's worker.

    root r      the bonus token at position r; the drafter knows [0, r], and of the target's states [0, r - 1]
    depth d     predicts token r + 1 + d, given the true tokens up to r + d, by its own feedback after depth 0

A greedy draft is accepted up to its first prediction that differs from the text. All roots run at once, as rows. A
block at root r holds the token at r and MASK tokens; it sees its own rows, and K/V of [0, r) made from the target's
states. The doctor compares an engine's worker with these drafts, and tries changes of a drafter. An engine checks the
conventions of MTP modules with them (`convention_watch.py`).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Unpack

import torch

from specdec.attention.dense import bias_of
from specdec.draft_models.base import Drafter
from specdec.draft_models.block.block_drafter import BlockDrafter
from specdec.draft_models.block.block_head import block_states
from specdec.draft_models.eagle3.eagle3_drafter import Eagle3Drafter
from specdec.draft_models.gemma4_mtp import Gemma4MTPDrafter, parallel_states
from specdec.draft_models.heads.feedback_drafts import chained_rows
from specdec.draft_models.native_mtp.mtp_drafter import NativeMtpDrafter
from specdec.kvcache.layer_context import OwnRows, Recurrence, ScoreOptions
from specdec.models.paused_forward import collected
from specdec.models.probe_context import ProbeContext, convolved_text, recurred_text
from specdec.models.target import TargetModel

SCORED_AT_ONCE = 64
"""Number of roots whose logits are float32 at one time."""


class RecordingContext(ProbeContext):
    """The context of one whole text."""

    keeps_kv = True  # False: only until the last layer that shares them has run

    def attend_tokens(
        self, layer: int, q: torch.Tensor, k: OwnRows, v: OwnRows, **options: Unpack[ScoreOptions]
    ) -> torch.Tensor:
        out = super().attend_tokens(layer, q, k, v, **options)
        if not self.keeps_kv and not any(spec.owner == layer for spec in self.layout.layers[layer + 1 :]):
            del self.rows[layer]
        return out

    def convolve(
        self, layer: int, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return convolved_text(inputs, weight, bias)

    def recur(self, layer: int, rows: Recurrence) -> torch.Tensor:
        return recurred_text(rows)


@dataclass(frozen=True, slots=True)
class RecordedText:
    """A text that the target has read: tokens [T], of which the first prompt_len are the prompt; hidden [T, H] after
    the final norm; `context` has K and V of each layer [T, heads, D] after RoPE, and the states."""

    tokens: torch.Tensor
    prompt_len: int
    hidden: torch.Tensor
    context: RecordingContext

    @property
    def positions(self) -> torch.Tensor:
        """Position of each token, [T]."""
        return torch.arange(len(self.tokens), device=self.tokens.device)

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V that a target layer attends to, its own or a shared layer's: [T, heads, D]."""
        _, k, v = self.context.rows[self.context.layout.layers[layer].owner]
        return k, v

    def aux_states(self, layers: tuple[int, ...]) -> torch.Tensor:
        """States of A layers side by side, [T, A * H]; no layers: the final states."""
        states = collected(self.context, layers, self.tokens.shape)
        return self.hidden if states is None else states


@torch.inference_mode()
def record(
    target: TargetModel, prompt: list[int], answer: list[int], layers: Iterable[int] | None = None
) -> RecordedText:
    """Run prompt and answer through the target once. layers: keep only the states that enter these, and no K/V."""
    tokens = torch.tensor([*prompt, *answer], device=target.device)
    steps = torch.arange(len(tokens), device=target.device)
    states: dict[int, torch.Tensor | None] = dict.fromkeys(layers or range(len(target.layout.layers) + 1))
    context = RecordingContext(target.layout, torch.zeros_like(steps), steps, states=states)
    context.keeps_kv = layers is None
    hidden = target.run(tokens[None], steps[None], context)[0]
    return RecordedText(tokens, len(prompt), hidden, context)


class Drafts(NamedTuple):
    """Drafts from R roots, K deep. roots [R]: positions; first_logits [V]: at depth 0 of the first root, the end of the
    prompt; right [R, K] bool: the prediction is the text's token; log_p [R, K] float32: log-probability of the text's
    token."""

    roots: torch.Tensor
    first_logits: torch.Tensor
    right: torch.Tensor
    log_p: torch.Tensor

    @property
    def accepted(self) -> torch.Tensor:
        """Numbers of drafts that greedy verification accepts, [R]."""
        return self.right.long().cumprod(1).sum(1)

    @property
    def expected(self) -> torch.Tensor:
        """Expected number of accepted drafts if they were drawn, [R] float32: p_1 + p_1 p_2 + ..., p_i the probability
        of the text's i-th token. It shows smaller changes than the number of right tokens."""
        return self.log_p.cumsum(1).exp().sum(1)


Dense = Callable[[Any, RecordedText, torch.Tensor, int], Iterable[torch.Tensor]]
"""(drafter, text, roots [R], K) -> logits [R, V] of each depth; fewer than K depths if the drafter drafts no more."""


@torch.inference_mode()
def dense_drafts(drafter: Drafter, text: RecordedText, num_steps: int) -> Drafts:
    """Drafts of `num_steps` depths after every place of the answer that is followed by as many tokens."""
    last = len(text.tokens) - num_steps - 1
    roots = torch.arange(text.prompt_len, last + 1, device=text.tokens.device)
    first, right, log_p = list[torch.Tensor](), [], []
    for depth, logits in enumerate(DENSE_FORMS[type(drafter)](drafter, text, roots, num_steps)):
        true = text.tokens[roots + 1 + depth]
        first = first or [logits[0].float()]
        right.append(logits.argmax(-1) == true)
        parts = zip(logits.split(SCORED_AT_ONCE), true[:, None].split(SCORED_AT_ONCE), strict=True)
        log_p.append(torch.cat([part.float().log_softmax(-1).gather(1, tokens)[:, 0] for part, tokens in parts]))
    return Drafts(roots, first[0], torch.stack(right, 1), torch.stack(log_p, 1))


def frozen_drafts(
    drafter: Gemma4MTPDrafter, text: RecordedText, roots: torch.Tensor, num_steps: int
) -> list[torch.Tensor]:
    """`Dense` of Gemma 4 assistants: root r sees the target's K/V of [0, r), on sliding layers through its window."""
    positions, keys = roots + drafter.query_offset, text.positions
    kv, masks = {}, {}
    kinds = drafter.assistant.config.get_text_config().layer_types
    for kind, layer, window in zip(kinds, drafter.layer_map, drafter.windows, strict=True):
        seen = keys < roots[:, None]
        if window is not None:
            seen = seen & (positions[:, None] - keys < window + drafter.window_shift)
        k, v = (x.transpose(0, 1)[None] for x in text.kv(layer))
        kv[kind], masks[kind] = (k, v), bias_of(seen[None]).to(k.dtype)
    embedded = (drafter.embed(text.tokens[roots + depth][None]) for depth in range(num_steps))
    hidden = text.hidden[roots - 1][None]
    states = parallel_states(drafter.assistant, embedded, hidden, positions[None], masks, kv)
    return [drafter.logits(out)[0] for out in states]


def head_drafts(
    drafter: Eagle3Drafter, text: RecordedText, roots: torch.Tensor, num_steps: int
) -> Iterator[torch.Tensor]:
    """`Dense` of EAGLE-3 heads, by the head's own modules. Row r - 1 holds the token r."""
    form, states = drafter.plain, text.aux_states(drafter.aux_layers)[None]
    batch = (text.tokens[None], states, text.positions[None])
    rows = chained_rows(form, *batch, num_steps, roots - 1, in_float32=True)
    return (drafter.over_vocabulary(form.logits(out.z))[0] for out in rows)


def block_drafts(drafter: BlockDrafter, text: RecordedText, roots: torch.Tensor, num_steps: int) -> list[torch.Tensor]:
    """`Dense` of block drafters, by the head's own modules."""
    head, spec, form = drafter.head, drafter.spec, drafter.plain
    levels = min(num_steps, spec.num_drafts)
    aux = text.aux_states(spec.aux_layers)[None]
    batch = (text.tokens[None], text.positions[None], aux, roots[None])
    [states] = block_states(head, form.table, *batch, in_float32=True)
    states = states[:, spec.first_row : spec.first_row + levels]
    logits = form.logits(states)  # [R, levels, V]
    if head.markov_head is None:
        return list(drafter.over_vocabulary(logits).unbind(1))
    scores, carried = [], None
    for level in range(levels):
        bias, carried = head.markov_head(text.tokens[roots + level][:, None], states[:, level], carried)
        scores.append(drafter.over_vocabulary(logits[:, level, None] + bias)[:, 0])
    return scores


def module_drafts(
    drafter: NativeMtpDrafter, text: RecordedText, roots: torch.Tensor, num_steps: int
) -> Iterator[torch.Tensor]:
    """`Dense` of MTP modules."""
    states, levels = text.aux_states(drafter.aux_layers)[None], min(num_steps, drafter.max_steps or num_steps)
    rows = chained_rows(drafter, text.tokens[None], states, text.positions[None], levels, roots - 1)
    last = len(drafter.modules) - 1
    return (drafter.logits(min(level, last), out)[0] for level, out in enumerate(rows))


DENSE_FORMS: dict[type, Dense] = {
    NativeMtpDrafter: module_drafts,
    Gemma4MTPDrafter: frozen_drafts,
    Eagle3Drafter: head_drafts,
    BlockDrafter: block_drafts,
}
"""The dense form of each kind of drafter. Other kinds have none and are measured in engines only."""
