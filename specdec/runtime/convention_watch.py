"""Watches whether MTP modules run under the conventions that they were trained under, on the first tokens of real work.

What no tensor says comes from a table of families or a file beside the modules, and a wrong entry shows in nothing but
a low acceptance. Once WATCHED tokens are committed, the target reads them once more, densely, and the modules draft
after each of them under all conventions; another one that is clearly better is a warning. It never touches a request.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Unpack

import torch

from specdec.draft_models.base import Drafter
from specdec.draft_models.model_and_lookup import model_of
from specdec.draft_models.native_mtp.conventions import (
    all_conventions,
    difference,
    expected_length,
    is_clearly_better,
    is_worth_more,
    likelihoods,
)
from specdec.draft_models.native_mtp.mtp_checkpoint import CONVENTIONS
from specdec.draft_models.native_mtp.mtp_drafter import NativeMtpDrafter
from specdec.kvcache.layer_context import ScoreOptions
from specdec.models.probe import ProbeContext
from specdec.models.target import TargetModel
from specdec.runtime.request import Request, RequestState

logger = logging.getLogger("specdec")

WATCHED = 512
"""Committed tokens, of all requests together."""


class ConventionWatch:
    """The committed tokens of an engine until there are WATCHED; nothing after that, and for other drafters."""

    def __init__(self, target: TargetModel, drafter: Drafter | None) -> None:
        model = None if drafter is None else model_of(drafter)
        self.target = target
        # a dense read has no states of recurrent layers
        self.drafter = model if isinstance(model, NativeMtpDrafter) and not target.recurrent else None
        self.ended: list[list[int]] = []

    def after_step(self, ended: Sequence[Request], running: Sequence[Request]) -> None:
        """Count what is committed after a step; judge it once it is enough."""
        if self.drafter is None:
            return
        self.ended += [request.tokens for request in ended]
        decoding = [request for request in running if request.state is RequestState.DECODE]
        lengths = [len(tokens) for tokens in self.ended] + [request.settled.num_tokens for request in decoding]
        if sum(lengths) >= WATCHED:
            texts = cut_to(WATCHED, self.ended + [request.tokens for request in decoding])
            drafter, self.drafter, self.ended = self.drafter, None, []
            try:
                judge(self.target, drafter, texts)
            except Exception as error:  # such as no memory beside the pools: a warning less
                logger.info("the conventions of the MTP modules were not measured: %s", error)


def cut_to(most: int, texts: Sequence[list[int]]) -> list[list[int]]:
    """The first `most` tokens of texts."""
    kept = []
    for text in texts:
        kept.append(text[:most])
        most -= len(kept[-1])
    return [text for text in kept if text]


@torch.inference_mode()
def judge(target: TargetModel, drafter: NativeMtpDrafter, texts: Sequence[list[int]]) -> None:
    """Warn if the drafts of other conventions agree clearly better with what the target says in these texts."""
    device = target.device
    tokens = torch.tensor([token for text in texts for token in text], device=device)[None]
    pos = torch.tensor([place for text in texts for place in range(len(text))], device=device)
    number = torch.tensor([i for i, text in enumerate(texts) for _ in text], device=device)
    context = StateContext(target.layout, number, pos)
    context.states = {len(target.layout.layers): None}
    normed = target.run(tokens, pos[None], context)
    [raw] = context.states.values()
    assert raw is not None, "the last layer leaves a state"
    states = {True: normed, False: raw.view_as(normed)}
    chosen = torch.cat([target.logits(part).argmax(-1) for part in normed[0].split(64)])
    found = [
        (each, likelihoods(each, tokens, pos[None], states[each.family.normed_state], chosen))
        for each in all_conventions(drafter)
    ]
    own = found[0][1]
    best, log_p = found[0]
    for other, theirs in found[1:]:
        if is_worth_more(theirs, log_p):
            best, log_p = other, theirs
    if best is not drafter and is_clearly_better(log_p, own):
        logger.warning(
            "the MTP modules agree better with the target under other conventions (%s): %.2f tokens a round are "
            "expected in place of %.2f, over the first %d tokens of this engine; `specdec doctor --write-conventions` "
            "measures it on prompts of yours, and writes %s beside the modules, here %s",
            difference(drafter, best),
            expected_length(log_p),
            expected_length(own),
            tokens.shape[1],
            CONVENTIONS,
            json.dumps(asdict(best.family)),
        )


class StateContext(ProbeContext):
    """A dense forward that collects the states entering the layers in `states`, and keeps K/V only for layers that
    share them."""

    states: dict[int, torch.Tensor | None]

    def attend_rows(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        **options: Unpack[ScoreOptions],
    ) -> torch.Tensor:
        out = super().attend_rows(layer, q, k, v, **options)
        if not any(spec.owner == layer for spec in self.layout.layers[layer + 1 :]):
            del self.rows[layer]
        return out
