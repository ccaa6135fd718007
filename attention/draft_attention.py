"""Attention for many drafts at once, which begin at many places of texts: chains of single tokens, and blocks.

Each class is the `LayerContext` of a draft head's modules: one softmax over the visible text and the draft's own
rows. Several texts may be packed into a row; position 0 begins a text. Training uses it, and so does the doctor, to
draft at every place of an answer.
"""

from collections.abc import Callable, Sequence
from typing import Unpack

import torch

from specdec.kvcache.layer_context import LayerContext, OwnRows, ScoreOptions


def same_document(pos: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(mask [B, T, T] of queries and keys of one text, query position minus key position [T, T])."""
    doc = (pos == 0).cumsum(1)
    place = torch.arange(pos.shape[1], device=pos.device)
    return doc[:, :, None] == doc[:, None, :], place[:, None] - place[None, :]


class ChainAttention(LayerContext):
    """Attention of chains over positions [B, T]. It keeps the keys and values of every step for each draft layer.

    windows: one per draft layer, None: full. in_float32: 16-bit inputs are widened first, so scores are not rounded;
    kernels do not round them either. rows: places whose drafts continue after step 0; None: all places.
    """

    def __init__(self, windows: Sequence[int | None], pos: torch.Tensor, *, in_float32: bool = False) -> None:
        self.rows: torch.Tensor | None = None
        self.windows, self.in_float32, self.step, self.batch = windows, in_float32, 0, len(pos)
        self.k: list[list[torch.Tensor]] = [[] for _ in self.windows]
        self.v: list[list[torch.Tensor]] = [[] for _ in self.windows]
        same, self.distance = same_document(pos)
        self.seen = same & (self.distance >= 0)  # [B, T, T]

    def attend_tokens(
        self, layer: int, q: torch.Tensor, k: OwnRows, v: OwnRows, **options: Unpack[ScoreOptions]
    ) -> torch.Tensor:
        """Attend: q [B * N, Hq, D], k and v [B * N, Hkv, D] -> [B * N, Hq, D]."""
        assert k is not None and v is not None, "a draft has K/V of its own"
        dtype, softcap, sinks = q.dtype, options.get("softcap"), options.get("sinks")
        q, k, v = (x.unflatten(0, (self.batch, -1)).transpose(1, 2) for x in (q, k, v))
        if self.in_float32:
            q, k, v = q.float(), k.float(), v.float()
        group = q.shape[1] // k.shape[1]
        ks, vs = self.k[layer], self.v[layer]
        ks.append(k.repeat_interleave(group, 1))  # [B, Hq, T, D]
        vs.append(v.repeat_interleave(group, 1))
        window, seen, distance, length = self.windows[layer], self.seen, self.distance, ks[0].shape[2]
        if self.step and self.rows is not None:
            seen, distance = seen[:, self.rows], distance[self.rows]
        own = range(1, self.step + 1)  # later steps within the window
        if window is not None:
            seen = seen & (distance + self.step < window)
            own = range(max(1, self.step - window + 1), self.step + 1)
        q = q * options["scaling"]
        scores = [q @ ks[0].mT, *((q * ks[s]).sum(-1, keepdim=True) for s in own)]
        if softcap is not None:
            scores = [softcap * torch.tanh(score / softcap) for score in scores]
        scores[0] = scores[0].masked_fill(~seen[:, None], -torch.inf)
        if sinks is not None:
            scores.append(sinks[:, None, None].to(q.dtype).expand(*q.shape[:3], 1))
        weights = torch.cat(scores, dim=-1).softmax(-1, dtype=torch.float32).to(v.dtype)
        out = weights[..., :length] @ vs[0]
        for column, s in enumerate(own, start=length):
            out = out + weights[..., column, None] * vs[s]
        return out.to(dtype).transpose(1, 2).flatten(0, 1).contiguous()


class BlocksAttention(LayerContext):
    """Attention of blocks of `size` tokens at places [B, A] of texts at positions [B, T].

    keys_values: k and v [B, Hkv, T, D] of the text after RoPE, for each draft layer. causal: a row of a block sees the
    rows up to itself; otherwise all rows. anchored: windows count from the first row of the block. in_float32: see
    `ChainAttention`.
    """

    def __init__(
        self,
        windows: Sequence[int | None],
        pos: torch.Tensor,
        places: torch.Tensor,
        *,
        size: int,
        causal: bool,
        anchored: bool,
        in_float32: bool,
        keys_values: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        self.windows, self.in_float32, self.keys_values = windows, in_float32, keys_values
        same, distance = same_document(pos)  # [B, T, T], [T, T]
        length = pos.shape[1]
        self.distance = distance[places]  # [B, A, T]: of a block's first row to each key
        self.before = same.gather(1, places[:, :, None].expand(-1, -1, length)) & (self.distance > 0)
        self.steps = torch.arange(size, device=places.device)
        apart = self.steps[:, None] - self.steps  # [K, K]
        self.own = apart >= 0 if causal else torch.ones_like(apart, dtype=torch.bool)
        self.ahead = torch.zeros_like(self.steps) if anchored else self.steps

    def attend_tokens(
        self, layer: int, q: torch.Tensor, k: OwnRows, v: OwnRows, **options: Unpack[ScoreOptions]
    ) -> torch.Tensor:
        """Attend: q [B * A * K, Hq, D], k and v [B * A * K, Hkv, D] -> [B * A * K, Hq, D]."""
        assert k is not None and v is not None, "a draft has K/V of its own"
        dtype, rows, group = q.dtype, len(self.steps), q.shape[1] // k.shape[1]
        q, k, v = (x.unflatten(0, (len(self.before), -1)).transpose(1, 2) for x in (q, k, v))  # [B, heads, A * K, D]
        q = q.float() if self.in_float32 else q
        given = (*self.keys_values(layer), k, v)
        old_k, old_v, k, v = (x.to(q.dtype).repeat_interleave(group, 1) for x in given)
        q, k, v = (x.unflatten(2, (-1, rows)) for x in (q * options["scaling"], k, v))  # [B, Hq, A, K, D]
        seen = self.before[:, :, None].expand(-1, -1, rows, -1)  # [B, A, K, T]
        own = self.own
        if (window := self.windows[layer]) is not None:
            seen = seen & (self.distance[:, :, None] + self.ahead[:, None] < window)
            own = own & (self.ahead[:, None] - self.steps < window)
        length = old_k.shape[2]
        scores = [
            (q.flatten(2, 3) @ old_k.mT).unflatten(2, (-1, rows)).masked_fill(~seen[:, None], -torch.inf),
            (q @ k.mT).masked_fill(~own, -torch.inf),
        ]
        weights = torch.cat(scores, dim=-1).softmax(-1, dtype=torch.float32).to(v.dtype)  # [B, Hq, A, K, T + K]
        out: torch.Tensor = weights[..., :length].flatten(2, 3) @ old_v  # [B, Hq, A * K, D]
        out = out + (weights[..., length:] @ v).flatten(2, 3)
        return out.to(dtype).transpose(1, 2).flatten(0, 1).contiguous()
