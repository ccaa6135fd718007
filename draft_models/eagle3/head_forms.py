"""How a head runs: its own modules, or fused layers over the same weights. Both answer to `HeadForm`.

    extend    rows of the target's states: what the target has just processed
    step      rows of the head's own states: a level of a draft
    context   the forward that they are part of: where its K/V go, and attention over what it may see

A form holds no K/V and knows no requests.
"""

from typing import NamedTuple, Protocol, Unpack

import torch
from torch import nn

from specdec.attention.backend import Backend
from specdec.attention.bridge import AttentionCall, AttentionContext
from specdec.attention.kernels.draft_block import DraftBlock
from specdec.draft_models.eagle3.head import Eagle3Head, embed_raw
from specdec.kvcache.layer_context import Destination, LayerContext, ScoreOptions


class HeadContext(AttentionContext, LayerContext, Protocol):
    """What a head of either form asks of the forward that it runs in."""


class HeadOutput(NamedTuple):
    """a [B, N, H] and norm(a), which is what lm_head reads."""

    state: torch.Tensor
    normed: torch.Tensor


class HeadForm(Protocol):
    """tokens, positions: [B, N]; row i holds the token behind position i."""

    def extend(
        self, tokens: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, context: HeadContext
    ) -> HeadOutput:
        """states [B, N, A * Ht] of the target."""

    def step(
        self, tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, context: HeadContext
    ) -> HeadOutput:
        """hidden [B, N, H]: the head's feedback."""

    def norm(self, state: torch.Tensor) -> torch.Tensor:
        """a -> norm(a)."""

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """norm(a) [B, N, H] -> [B, N, draft V]."""


class PlainHead:
    """The modules as they are."""

    def __init__(self, head: Eagle3Head, table: nn.Module, target_head: nn.Module) -> None:
        self.head, self.table = head, table
        self.lm_head = target_head if head.lm_head is None else head.lm_head
        self.scaling = head.spec.head_dim**-0.5

    def extend(
        self, tokens: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, context: HeadContext
    ) -> HeadOutput:
        return self.step(tokens, self.head.features(states), positions, context)

    def step(
        self, tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, context: HeadContext
    ) -> HeadOutput:
        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return context.attend(AttentionCall(layer, q, k, v, self.scaling, None, None, None, {}))

        weight: torch.Tensor = self.table.weight  # type: ignore[assignment]
        state = self.head(embed_raw(weight, tokens), hidden, positions, attend)
        return HeadOutput(state, self.norm(state))

    def norm(self, state: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.head.norm(state)
        return normed

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(normed)
        return logits


class DraftContext:
    """The newest level of a draft in progress, K nodes a request."""

    def __init__(self, block: DraftBlock, backend: Backend, topk: int) -> None:
        self.block, self.backend, self.topk = block, backend, topk

    def attend(self, call: AttentionCall) -> torch.Tensor:
        k, v = (x.transpose(1, 2).flatten(0, 1) for x in (call.key, call.value))  # [B * K, Hkv, D]
        self.backend.store(*self.block.destination(call.layer), k, v)
        return self.block.attend(call.layer, call.query, scaling=call.scaling)

    def destination(self, layer: int) -> Destination:
        kept, slots = self.block.destination(layer)
        return Destination(kept.k, kept.v, slots)

    def attend_rows(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        **options: Unpack[ScoreOptions],
    ) -> torch.Tensor:
        assert options.get("softcap") is None and options.get("sinks") is None, "no head has them"
        query = q.unflatten(0, (-1, self.topk)).transpose(1, 2)  # [B, Hq, K, D]
        return self.block.attend(layer, query, scaling=options["scaling"]).reshape(q.shape)


class Echo:
    """A forward whose attention answers with the queries, and stores nothing: to compare forms by."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        return call.query.transpose(1, 2)

    def destination(self, layer: int) -> None:
        return None

    def attend_rows(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        **options: Unpack[ScoreOptions],
    ) -> torch.Tensor:
        return q
