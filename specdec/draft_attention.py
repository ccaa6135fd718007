"""Attention of drafts that begin at many places of texts at once: the chains of an EAGLE-3 head, and blocks.

Each is the `Attend` of a head's own modules: one softmax over the text as far as a place sees it, and the draft's own
rows. Texts may be packed into rows: position 0 begins one. A drafter learns with it, and the doctor looks with it at
every place of an answer.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from specdec.draft_models.block.block_head import BlockHead
from specdec.draft_models.eagle3.head import Eagle3Head
from specdec.draft_models.heads.head_spec import Attend


def same_document(pos: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(whether query and key share a document [B, T, T], position of the query minus that of the key [T, T])."""
    doc = (pos == 0).cumsum(1)
    place = torch.arange(pos.shape[1], device=pos.device)
    return doc[:, :, None] == doc[:, None, :], place[:, None] - place[None, :]


def in_float32(attend: Attend) -> Attend:
    """Wraps `attend` so that scores are not rounded, as in kernels: for a reference in 16 bits."""
    return lambda layer, q, k, v: attend(layer, q.float(), k.float(), v.float()).to(q.dtype)


class ChainAttention:
    """Attention of an EAGLE-3 head over positions [B, T]. It keeps the keys and values of every step, by draft layer.

    rows: where drafts begin that go on after step 0; None: everywhere.
    """

    def __init__(self, head: Eagle3Head, pos: torch.Tensor) -> None:
        self.rows: torch.Tensor | None = None
        self.windows, self.scaling, self.step = head.spec.windows, head.spec.head_dim**-0.5, 0
        self.k: list[list[torch.Tensor]] = [[] for _ in self.windows]
        self.v: list[list[torch.Tensor]] = [[] for _ in self.windows]
        same, self.distance = same_document(pos)
        self.seen = same & (self.distance >= 0)  # [B, T, T]

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = q.shape[1] // k.shape[1]
        ks, vs = self.k[layer], self.v[layer]
        ks.append(k.repeat_interleave(group, 1))  # [B, Hq, T, D]
        vs.append(v.repeat_interleave(group, 1))
        window, seen, distance, length = self.windows[layer], self.seen, self.distance, ks[0].shape[2]
        if self.step and self.rows is not None:
            seen, distance = seen[:, self.rows], distance[self.rows]
        own = range(1, self.step + 1)  # steps after 0 within the window
        if window is not None:
            seen = seen & (distance + self.step < window)
            own = range(max(1, self.step - window + 1), self.step + 1)
        q = q * self.scaling
        scores = [(q @ ks[0].mT).masked_fill_(~seen[:, None], -torch.inf)]
        scores += [(q * ks[s]).sum(-1, keepdim=True) for s in own]
        weights = torch.cat(scores, dim=-1).softmax(-1, dtype=torch.float32).to(v.dtype)
        out = weights[..., :length] @ vs[0]
        for column, s in enumerate(own, start=length):
            out = out + weights[..., column, None] * vs[s]
        return out.transpose(1, 2)


def block_states(
    head: BlockHead,
    table: nn.Module,
    ids: torch.Tensor,
    pos: torch.Tensor,
    states: torch.Tensor,
    places: torch.Tensor,
    form: Callable[[Attend], Attend] = lambda attend: attend,
) -> torch.Tensor:
    """A block at each of `places` [B, A] of texts [B, T], from the target's states [B, T, L * H] -> [B, A, K, H]."""
    spec = head.spec
    steps = torch.arange(spec.block_size, device=places.device)
    tokens = torch.where(steps == 0, ids.gather(1, places)[:, :, None], spec.mask_token)  # [B, A, K]
    block_pos = pos.gather(1, places)[:, :, None] + steps
    embeds = table(tokens.flatten(1)).to(head.fc.weight.dtype)
    attention = form(BlocksAttention(head, pos, head.taps(states), places))
    out: torch.Tensor = head(embeds, block_pos.flatten(1), attention).unflatten(1, (-1, spec.block_size))
    return out


class BlocksAttention:
    """Attention of blocks at places [B, A] of texts at positions [B, T], over K/V of taps [B, T, H]."""

    def __init__(self, head: BlockHead, pos: torch.Tensor, taps: torch.Tensor, places: torch.Tensor) -> None:
        self.head, self.taps, self.spec = head, taps, head.spec
        self.rotary = head.rotary_emb(taps, pos)
        same, distance = same_document(pos)  # [B, T, T], [T, T]
        length = pos.shape[1]
        self.distance = distance[places]  # [B, A, T]: of a block's first row to each key
        self.before = same.gather(1, places[:, :, None].expand(-1, -1, length)) & (self.distance > 0)
        steps = torch.arange(self.spec.block_size, device=places.device)
        self.apart = steps[:, None] - steps  # [K, K]

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [B, Hq, A * K, D], k and v [B, Hkv, A * K, D] -> [B, A * K, Hq, D]."""
        rows, group = self.spec.block_size, q.shape[1] // k.shape[1]
        attention: Any = self.head.layers[layer].self_attn
        old_k, old_v, k, v = (
            x.to(q.dtype).repeat_interleave(group, 1) for x in (*attention.keys_values(self.taps, self.rotary), k, v)
        )
        q, k, v = (x.unflatten(2, (-1, rows)) for x in (q * self.spec.scaling, k, v))  # [B, Hq, A, K, D]
        seen = self.before[:, :, None].expand(-1, -1, rows, -1)  # [B, A, K, T]
        own = self.apart >= 0 if self.spec.causal else torch.ones_like(self.apart, dtype=torch.bool)
        if (window := self.spec.windows[layer]) is not None:
            steps = torch.arange(rows, device=q.device)
            seen = seen & (self.distance[:, :, None] + steps[:, None] < window)
            own = own & (self.apart < window)
        length = old_k.shape[2]
        scores = [
            (q.flatten(2, 3) @ old_k.mT).unflatten(2, (-1, rows)).masked_fill(~seen[:, None], -torch.inf),
            (q @ k.mT).masked_fill(~own, -torch.inf),
        ]
        weights = torch.cat(scores, dim=-1).softmax(-1, dtype=torch.float32).to(v.dtype)  # [B, Hq, A, K, T + K]
        out: torch.Tensor = weights[..., :length].flatten(2, 3) @ old_v  # [B, Hq, A * K, D]
        return (out + (weights[..., length:] @ v).flatten(2, 3)).transpose(1, 2)
