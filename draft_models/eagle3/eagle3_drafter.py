"""The EAGLE-3 drafter: a small transformer over the target's hidden states, with its own K/V.

Its K/V use the slots of the target's tokens, each layer in the group of its window, so the request table pages, evicts
and commits them too. `observe` writes K/V of committed positions [0, S) from true target features, and a draft begins
with the state of position S - 1. K/V of a draft go to a scratch block that lives for one `propose`
(`feedback_drafts.py`).
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from specdec.draft_models.base import Binding, TargetInfo
from specdec.draft_models.eagle3.checkpoint import read_head
from specdec.draft_models.eagle3.head import Eagle3Head, FusedHead, PlainHead
from specdec.draft_models.heads.draft_context import HeadDrafter
from specdec.draft_models.heads.feedback_drafts import FeedbackWorker, ModuleRows


class Eagle3Drafter(HeadDrafter[Eagle3Head, PlainHead]):
    """A head fitted to a target; `eagle3_drafter` makes one. source: the folder that it was read from, or None."""

    name = "eagle3"
    source: str | None = None

    def __init__(self, head: Eagle3Head, target: TargetInfo) -> None:
        super().__init__(head, target, PlainHead, FusedHead)
        self.spec = head.spec
        self.reads_every_state = not self.aux_layers

    def bind(self, binding: Binding) -> FeedbackWorker:
        return FeedbackWorker(self, self.form, binding)

    def logits(self, k: int, out: ModuleRows) -> torch.Tensor:
        """Logits [B, N, V] of the tokens after rows."""
        return self.over_vocabulary(self.form.logits(out.z))


def eagle3_drafter(folder: str | Path, target: TargetInfo, aux_layers: Sequence[int] | None = None) -> Eagle3Drafter:
    """Read the head in `folder` and fit it to `target`. `aux_layers`: see `Eagle3Spec`; None: those of the files."""
    head = read_head(folder, target, aux_layers)
    drafter = Eagle3Drafter(head.place(target.device, target.dtype).eval(), target)
    drafter.source = str(folder)
    return drafter
