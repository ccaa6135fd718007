"""Checks, on the first answers of an engine, that MTP modules run under the conventions of their training.

No tensor states the conventions; they come from a table of families or a file next to the modules. A wrong entry has
one symptom: low acceptance. After WATCHED committed tokens, the target reads their texts again in dense forwards, and
the modules draft each of these tokens under every convention. If another convention is clearly better, a warning says
so. One forward runs every PAUSE steps; if the engine runs out of requests first, its last step runs the rest. It never
changes a request.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import NamedTuple, Unpack

import torch

from specdec.draft_models.base import Drafter
from specdec.draft_models.model_and_lookup import model_of
from specdec.draft_models.native_mtp.conventions import (
    accepted,
    all_conventions,
    difference,
    is_clearly_better,
    is_worth_more,
)
from specdec.draft_models.native_mtp.mtp_checkpoint import CONVENTIONS
from specdec.draft_models.native_mtp.mtp_drafter import NativeMtpDrafter
from specdec.kvcache.layer_context import OwnRows, ScoreOptions
from specdec.models.probe import ProbeContext
from specdec.models.target import TargetModel
from specdec.runtime.request import Request, RequestState

logger = logging.getLogger("specdec")

WATCHED = 512
"""Committed tokens of answers, over all requests. Prompts do not count: modules were trained on answers."""
PAUSE = 8
"""Steps between two of these forwards, since a forward can double the time of its step."""
MIN_WATCHED_ANSWER = 8
"""Minimum length of an answer: shorter ones are not worth reading their prompt."""
MAX_CONTEXT = 256
"""How many of a prompt's last tokens are read."""


class AnsweredText(NamedTuple):
    """Tokens of a prompt and its answer. The answer begins at index `first`."""

    tokens: list[int]
    first: int

    @classmethod
    def from_request(cls, request: Request) -> "AnsweredText":
        prompt = len(request.prompt)
        cut = max(0, prompt - MAX_CONTEXT)
        return cls(request.tokens[cut : request.settled.num_tokens], prompt - cut)


class ConventionWatch:
    """Collects answers until they have WATCHED tokens, then judges them. is_done: there is nothing to judge, or it has
    judged."""

    def __init__(self, target: TargetModel, drafter: Drafter | None) -> None:
        self._target, self._model = target, None if drafter is None else model_of(drafter)
        # dense forwards support neither recurrent layers nor several devices
        is_watched = isinstance(self._model, NativeMtpDrafter) and not target.recurrent and target.ranks is None
        self.is_done = not is_watched
        self._ended: list[Request] = []
        self._parts: Iterator[None] | None = None  # the judgement, once there are enough tokens
        self._waited = 0  # steps since the last forward of the judgement

    def after_step(self, ended: Sequence[Request], running: Sequence[Request]) -> None:
        """Watch a step: the requests that ended in it, and those that run. Copies nothing before there are WATCHED
        tokens; then it runs one forward of the judgement every PAUSE steps, or all that are left if no request runs."""
        if self._parts is None:
            self._ended += filter(is_long_enough, ended)
            decoding = [each for each in running if each.state is RequestState.DECODE and is_long_enough(each)]
            answered = self._ended + decoding
            if sum(request.num_output for request in answered) < WATCHED:
                return
            assert isinstance(self._model, NativeMtpDrafter)
            self._parts = judge(self._target, self._model, list(map(AnsweredText.from_request, answered)))
            self._ended = []
        self._waited += 1
        if running and self._waited < PAUSE:
            return
        self._waited = 0
        try:
            for _ in self._parts:
                if running:
                    return
        except Exception as error:  # such as out of memory: then no warning is given
            logger.info("the conventions of the MTP modules were not measured: %s", error)
        self.is_done = True


def is_long_enough(request: Request) -> bool:
    """Is the request's answer worth reading its prompt?"""
    return request.num_output >= MIN_WATCHED_ANSWER


@torch.inference_mode()
def judge(target: TargetModel, drafter: NativeMtpDrafter, texts: Sequence[AnsweredText]) -> Iterator[None]:
    """Warn if other conventions agree clearly better with these texts. Yields after each forward."""
    tried = all_conventions(drafter)
    found: list[list[torch.Tensor]] = [[] for _ in tried]
    for text in texts:
        tokens = torch.tensor(text.tokens, device=target.device)
        states = target_states(target, tokens)
        yield
        for each, observed in zip(tried, found, strict=True):
            observed.append(accepted(each, tokens, states[each.family.normed_state], text.first))
            yield
    own, *others = (torch.cat(observed) for observed in found)
    best, most = drafter, own
    for other, theirs in zip(tried[1:], others, strict=True):
        if is_worth_more(theirs, most):
            best, most = other, theirs
    if best is not drafter and is_clearly_better(most, own, len(others)):
        logger.warning(
            "the MTP modules agree better with the target under other conventions (%s): a draft is accepted with a "
            "probability of %.2f in place of %.2f, over %d tokens that this engine committed; `specdec doctor "
            "--write-conventions` measures it on prompts of yours, and writes %s beside the modules, here %s",
            difference(drafter, best),
            float(most.mean()),
            float(own.mean()),
            len(own),
            CONVENTIONS,
            json.dumps(asdict(best.family)),
        )


def target_states(target: TargetModel, tokens: torch.Tensor) -> dict[bool, torch.Tensor]:
    """States [T, H] of tokens [T] after the final norm (True) and before it (False)."""
    pos = torch.arange(len(tokens), device=tokens.device)
    states: dict[int, torch.Tensor | None] = {len(target.layout.layers): None}
    context = StateContext(target.layout, torch.zeros_like(pos), pos, states=states)
    normed = target.run(tokens[None], pos[None], context)[0]
    [raw] = states.values()
    assert raw is not None, "the last layer leaves a state"
    return {True: normed, False: raw.view_as(normed)}


class StateContext(ProbeContext):
    """A dense forward that keeps K/V only for layers that share them."""

    def attend_tokens(
        self, layer: int, q: torch.Tensor, k: OwnRows, v: OwnRows, **options: Unpack[ScoreOptions]
    ) -> torch.Tensor:
        out = super().attend_tokens(layer, q, k, v, **options)
        if not any(spec.owner == layer for spec in self.layout.layers[layer + 1 :]):
            del self.rows[layer]
        return out
