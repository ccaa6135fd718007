"""Training-time test for EAGLE-3 heads: all drafts from all positions of packed rows at once.

Row i of step t stands for a draft in progress behind position i: its token is x_{i+1+t}, its hidden state the feedback
of step t - 1 (the target's feature at t = 0), its RoPE position i + t. It attends, in one softmax, to the step-0 keys
of positions up to i and to its own row's keys of steps 1..t: all that a chain drafted from position i would see.

    step of row i    0             1                    2
    token            x_{i+1}       x_{i+2}              x_{i+3}          true in training, the head's own in `simulate`
    sees             K_0[<= i]     K_0[<= i], K_1[i]    K_0[<= i], K_1[i], K_2[i]
    predicts         x_{i+2}       x_{i+3}              x_{i+4}

Invariant: the logits are those of the head run one row at a time, as the drafter does (tests/test_train_eagle3.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from tiny_gemma4_data import ANSWER, QUESTION, Document, masks, pack, to_arrays

from specdec.draft_models.eagle3_model import Eagle3Head, embed_raw
from specdec.target import TargetModel


class Batch(NamedTuple):
    """Packed rows, [B, T] each: token ids, position in the document, kind (0 padding, QUESTION or ANSWER)."""

    ids: torch.Tensor
    pos: torch.Tensor
    kind: torch.Tensor


class Lesson(NamedTuple):
    """What the frozen target says about a batch: the tapped states [B, T, F] and the last one, normed, [B, T, H]."""

    states: torch.Tensor
    hidden: torch.Tensor


def pack_rows(documents: list[Document], length: int) -> Batch:
    """Whole documents packed into rows, on the host; the padding behind the last is one more document."""
    arrays = to_arrays(pack(documents, length), length, np.int32)
    return Batch(*(torch.from_numpy(arrays[name]) for name in Batch._fields))


@torch.no_grad()
def teach(target: TargetModel, aux_layers: tuple[int, ...], batch: Batch) -> Lesson:
    """One target forward over packed rows, with the states that enter `aux_layers`."""
    seen: dict[int, torch.Tensor] = {}

    def keep(layer: int) -> Callable[..., None]:
        return lambda module, args, kwargs: seen.__setitem__(layer, args[0] if args else kwargs["hidden_states"])

    entered = [*target.decoder.layers, target.decoder.norm]
    hooks = [entered[i].register_forward_pre_hook(keep(i), with_kwargs=True) for i in set(aux_layers)]
    window = target.layout.window
    mask = masks(batch.pos, window or batch.pos.shape[1], target.dtype)
    if getattr(target.config, "layer_types", None) is None:
        mask = mask["full_attention" if window is None else "sliding_attention"]
    try:
        hidden = target.decoder(
            input_ids=batch.ids, position_ids=batch.pos, attention_mask=mask, use_cache=False
        ).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    return Lesson(torch.cat([seen[i] for i in aux_layers], dim=-1) if aux_layers else hidden, hidden)


class ChainAttention:
    """`Attend` for one batch: remembers the keys of every step, per draft layer."""

    def __init__(self, head: Eagle3Head, pos: torch.Tensor) -> None:
        self.windows, self.scaling, self.step = head.spec.windows, head.spec.head_dim**-0.5, 0
        self.k: list[list[torch.Tensor]] = [[] for _ in self.windows]
        self.v: list[list[torch.Tensor]] = [[] for _ in self.windows]
        doc = (pos == 0).cumsum(1)
        place = torch.arange(pos.shape[1], device=pos.device)
        self.behind = place[:, None] - place[None, :]  # [T, T]
        self.same = (doc[:, :, None] == doc[:, None, :]) & (self.behind >= 0)  # [B, T, T]

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = q.shape[1] // k.shape[1]
        ks, vs = self.k[layer], self.v[layer]
        ks.append(k.repeat_interleave(group, 1))  # [B, Hq, T, D]
        vs.append(v.repeat_interleave(group, 1))
        window = self.windows[layer]
        first = 1  # the oldest later step in the window
        seen = self.same
        if window is not None:
            seen = seen & (self.behind + self.step < window)
            first = max(1, self.step - window + 1)
        scores = (q @ ks[0].mT) * self.scaling
        scores = scores.float().masked_fill(~seen[:, None], -torch.inf)
        own = [(q * ks[s]).sum(-1, keepdim=True).float() * self.scaling for s in range(first, self.step + 1)]
        weights = torch.cat([scores, *own], dim=-1).softmax(-1).to(v.dtype)
        length = scores.shape[-1]
        out = weights[..., :length] @ vs[0]
        for i, s in enumerate(range(first, self.step + 1)):
            out = out + weights[..., length + i, None] * vs[s]
        return out.transpose(1, 2)


def draft_logits(
    head: Eagle3Head,
    table: torch.Tensor,
    target_head: torch.nn.Module,
    target_ids: torch.Tensor | None,
    batch: Batch,
    lesson: Lesson,
    steps: int,
    forced: bool = True,
) -> Iterator[torch.Tensor]:
    """Logits [B, T, draft V] of each step; forced feeds the true tokens, otherwise the head's own argmax."""
    attention = ChainAttention(head, batch.pos)
    hidden, token = head.features(lesson.states), batch.ids.roll(-1, 1)
    for step in range(steps):
        attention.step = step
        a = head(embed_raw(table, token), hidden, batch.pos + step, attention)
        logits = head.logits(a, target_head)
        yield logits
        if forced:
            token = batch.ids.roll(-2 - step, 1)
        else:
            token = logits.argmax(-1) if target_ids is None else target_ids[logits.argmax(-1)]
        hidden = head.feedback(a)


def rounds(batch: Batch, steps: int) -> list[torch.Tensor]:
    """[B, T] for each step: does row i predict a token of an answer in its own document there?"""
    found = []
    for ahead in range(2, steps + 2):
        inside = batch.pos.roll(-ahead, 1) == batch.pos + ahead
        found.append(inside & (batch.kind.roll(-ahead, 1) == ANSWER))
    return found


def chain_loss(
    logits: torch.Tensor, teacher: torch.Tensor, target_ids: torch.Tensor | None, good: torch.Tensor
) -> torch.Tensor:
    """Cross-entropy with the target's law over the draft vocabulary; rows whose best token is outside do not count."""
    if target_ids is not None:
        inside = torch.zeros(teacher.shape[-1], dtype=torch.bool, device=teacher.device).index_fill_(
            0, target_ids, True
        )
        good = good & inside[teacher.argmax(-1)]
        teacher = teacher[..., target_ids]
    losses = -(teacher.float().softmax(-1) * logits.float().log_softmax(-1)).sum(-1)
    return torch.where(good, losses, 0.0).sum() / good.sum().clamp(min=1)


@torch.no_grad()
def simulate(
    head: Eagle3Head,
    target: TargetModel,
    target_ids: torch.Tensor | None,
    documents: list[Document],
    length: int,
    *,
    drafts: int = 4,
    rows: int = 32,
) -> dict[str, object]:
    """Greedy chains of `drafts` tokens against greedy answers of the target.

    `agreement`: share of correct prefixes by step over all positions; `acceptance_length` walks each answer as decoding
    would, bonus token included.
    """
    table = target.embed.weight if head.embed_tokens is None else head.embed_tokens.weight
    reached, correct, accepted_rounds = np.zeros(drafts), np.zeros(drafts), []
    packed = pack_rows([d for d in documents if len(d[0]) <= length], length)
    for first in range(0, len(packed.ids), rows):
        batch = Batch(*(x[first : first + rows].to(target.device).long() for x in packed))
        lesson = teach(target, head.spec.aux_layers, batch)
        chains = draft_logits(head, table, target.head, target_ids, batch, lesson, drafts, forced=False)
        good = torch.stack(rounds(batch, drafts))
        hits = []
        for step, logits in enumerate(chains):
            token = logits.argmax(-1) if target_ids is None else target_ids[logits.argmax(-1)]
            hits.append(token == batch.ids.roll(-2 - step, 1))
        prefix = (torch.stack(hits) & good).long().cumprod(0)
        reached += good.sum((1, 2)).cpu().numpy()
        correct += prefix.sum((1, 2)).cpu().numpy()
        accepted, kind, pos = prefix.sum(0).cpu().numpy(), batch.kind.cpu().numpy(), batch.pos.cpu().numpy()
        for r, c in zip(*np.nonzero((kind == ANSWER) & (np.roll(kind, 1, 1) == QUESTION) & (pos > 0)), strict=True):
            # the answer's first token is the first bonus: its draft comes from the position before it
            while c < length - 1 and kind[r, c + 1] == ANSWER and pos[r, c + 1] == pos[r, c] + 1:
                accepted_rounds.append(int(accepted[r, c - 1]))
                c += accepted_rounds[-1] + 1
    rate = correct / np.maximum(reached, 1)
    return {
        "agreement": [round(float(x), 4) for x in rate],
        "acceptance_length": round(1 + sum(accepted_rounds) / max(1, len(accepted_rounds)), 3),
        "rounds": len(accepted_rounds),
        "drafts": drafts,
    }
