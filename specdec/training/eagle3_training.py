"""Training-time test for EAGLE-3 heads: all drafts from all positions of packed rows at once.

Row i of step t is step t of a draft that begins after position i: its token is x_{i+1+t}, its hidden state the feedback
of step t - 1 (the target's feature at t = 0), its RoPE position i + t. It attends, in one softmax, to the step-0 keys
of positions up to i and to its own row's keys of steps 1..t, and predicts x_{i+2+t}. Invariant: the states equal those
of the head run one row at a time, as the drafter runs it (tests/test_parallel_drafts.py).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from specdec.attention.draft_attention import ChainAttention
from specdec.draft_models.checkpoints.checkpoint_files import TargetShape
from specdec.draft_models.eagle3.checkpoint import write_head
from specdec.draft_models.eagle3.head import Eagle3Head, embed_raw
from specdec.training.draft_loss import TargetStates, TrainableDrafter
from specdec.training.packed_rows import Document, PackedRows


def draft_vocabulary(documents: list[Document], size: int, vocab_size: int) -> tuple[torch.Tensor | None, float]:
    """The `size` most frequent tokens of the answers, ascending, and the share of answer tokens they cover."""
    counts = np.bincount(np.concatenate([tokens[cut:] for tokens, cut in documents]), minlength=vocab_size)
    if size >= vocab_size:
        return None, 1.0
    ids = np.sort(np.argsort(-counts, kind="stable")[:size])
    return torch.from_numpy(ids), float(counts[ids].sum() / counts.sum())


class TrainableEagle3(TrainableDrafter):
    """A head and its target. Row i reads token i + 1 and predicts token i + 2, so `ahead` is 2."""

    module: Eagle3Head
    ahead = 2

    def choose_vocabulary(self, documents: list[Document], size: int) -> None:
        """Draft the `size` most frequent tokens of the answers. If the widths agree, the lm_head starts as the
        target's rows of these tokens."""
        head, weight = self.module, cast(torch.Tensor, self.target.head.weight)
        ids, covered = draft_vocabulary(documents, size, self.target.vocab_size)
        if ids is not None:
            print(f"draft vocabulary of {len(ids)} tokens covers {covered:.3%} of the answers", flush=True)
            head.target_ids = ids.to(self.target.device)
        if head.lm_head is not None and weight.shape[1] == head.spec.hidden_size:
            head.lm_head.weight.data.copy_(weight if ids is None else weight[head.target_ids])

    def drafts(self, batch: PackedRows, known: TargetStates, steps: int) -> Iterator[torch.Tensor]:
        head = self.module
        table: Any = self.target.embed.weight if head.embed_tokens is None else head.embed_tokens.weight
        attention = ChainAttention(head.spec.windows, head.spec.scaling, batch.pos)
        hidden = head.features(known["states"])
        for step in range(steps):
            attention.step = step
            token = batch.ids.roll(-1 - step, 1)
            a = head(embed_raw(table, token).to(hidden.dtype), hidden, batch.pos + step, attention)
            yield a
            hidden = head.feedback(a)

    def score(self, states: torch.Tensor) -> torch.Tensor:
        return self.module.logits(states, self.target.head)

    def save(self, folder: Path) -> None:
        write_head(folder, self.module, TargetShape.of_target(self.target))
