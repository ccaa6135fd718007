"""Checks, on the first answers that an engine completes, that MTP modules run under the conventions of their training.

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

import torch

from specdec.draft_models.base import Drafter
from specdec.draft_models.lookup import model_of
from specdec.draft_models.native_mtp.conventions import (
    MEASURED_STEPS,
    all_conventions,
    by_token,
    clear_winner,
    difference,
)
from specdec.draft_models.native_mtp.mtp_checkpoint import CONVENTIONS
from specdec.draft_models.native_mtp.mtp_drafter import NativeMtpDrafter
from specdec.models.target import TargetModel
from specdec.runtime.drafts.dense_drafts import dense_drafts, record
from specdec.runtime.request import Request

logger = logging.getLogger("specdec")

WATCHED = 512
"""Committed tokens of answers, over all requests. Prompts do not count: modules were trained on answers."""
PAUSE = 8
"""Steps between two of these forwards, since a forward can double the time of its step."""
MIN_WATCHED_ANSWER = 8
"""Minimum length of an answer: shorter ones are not worth reading their prompt."""
MAX_CONTEXT = 256
"""How many of a prompt's last tokens are read."""


class ConventionWatch:
    """Collects answers that have ended until they have WATCHED tokens, then judges them. is_done: there is nothing to
    judge, or it has judged."""

    def __init__(self, target: TargetModel, drafter: Drafter | None) -> None:
        self._target, self._model = target, None if drafter is None else model_of(drafter)
        # a dense forward runs on one device, and recurrent layers block by block, too slowly for a step of an engine
        is_watched = isinstance(self._model, NativeMtpDrafter) and not target.recurrent and target.ranks is None
        self.is_done = not is_watched
        self._texts: list[tuple[list[int], int]] = []  # see `answered_text`
        self._parts: Iterator[None] | None = None  # the judgement, once there are enough tokens
        self._waited = 0  # steps since the last forward of the judgement

    def after_step(self, ended: Sequence[Request], *, running: bool) -> None:
        """Watch a step and the requests that ended in it. Once there are WATCHED tokens, it runs one forward of the
        judgement every PAUSE steps, or all that are left if no request is `running`."""
        if self._parts is None:
            self._texts += [answered_text(each) for each in ended if each.num_output >= MIN_WATCHED_ANSWER]
            if sum(len(tokens) - first for tokens, first in self._texts) < WATCHED:
                return
            assert isinstance(self._model, NativeMtpDrafter)
            self._parts = judge(self._target, self._model, self._texts)
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


def answered_text(request: Request) -> tuple[list[int], int]:
    """Tokens of its prompt's end and its answer, and the index at which the answer begins."""
    first = len(request.prompt)
    cut = max(0, first - MAX_CONTEXT)
    return request.tokens[cut:], first - cut


@torch.inference_mode()
def judge(target: TargetModel, drafter: NativeMtpDrafter, texts: Sequence[tuple[list[int], int]]) -> Iterator[None]:
    """Warn if other conventions agree clearly better with these texts (`answered_text`). Yields after each forward."""
    tried, steps = all_conventions(drafter), min(MEASURED_STEPS, drafter.max_steps or MEASURED_STEPS)
    found: list[list[torch.Tensor]] = [[] for _ in tried]
    for tokens, first in texts:
        # drafts begin in the prompt, so that the first tokens count too; padding receives drafts past the end
        root, padded = max(1, first - steps), tokens + tokens[-1:] * (steps - 1)
        text = record(target, padded[:root], padded[root:], layers=[len(target.layout.layers)])
        yield
        for each, observed in zip(tried, found, strict=True):
            observed.append(by_token(dense_drafts(each, text, steps).log_p.exp()))
            yield
    own, *others = (torch.cat(observed) for observed in found)
    if (number := clear_winner(own, others)) is not None:
        best, most = tried[1 + number], others[number]
        logger.warning(
            "the MTP modules agree better with the target under other conventions (%s): a draft is accepted with a "
            "probability of %.2f in place of %.2f, over %d tokens that this engine committed; `specdec doctor "
            "--write-conventions` measures it on prompts of yours, and writes %s next to the modules, here %s",
            difference(drafter, best),
            float(most.mean()),
            float(own.mean()),
            len(own),
            CONVENTIONS,
            json.dumps(asdict(best.family)),
        )
