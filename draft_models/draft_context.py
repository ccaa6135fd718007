"""The forward of one level of a draft in progress: what layers of a drafter with K/V of its own attend through."""

from collections.abc import Sequence
from typing import Unpack

import torch

from specdec.attention.backend import Backend
from specdec.attention.bridge import AttentionCall
from specdec.attention.kernels.draft_block import DraftBlock
from specdec.kvcache.layer_context import Destination, ScoreOptions


class DraftContext:
    """K nodes a request. New K/V go to the scratch block; owners: of each layer, the layer whose K/V it reads."""

    def __init__(self, block: DraftBlock, backend: Backend, topk: int, owners: Sequence[int]) -> None:
        self.block, self.backend, self.topk, self.owners = block, backend, topk, owners

    def attend(self, call: AttentionCall) -> torch.Tensor:
        q, k, v = call.rows()
        if self.owners[call.layer] == call.layer:
            self.backend.store(*self.block.destination(call.layer), k, v)
        return call.answer(self, q, k, v)

    def destination(self, layer: int) -> Destination | None:
        if self.owners[layer] != layer:
            return None
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
        """q [B * K, Hq, D] -> [B * K, Hq, D]: k and v are in the block."""
        query = q.unflatten(0, (-1, self.topk)).transpose(1, 2)  # [B, Hq, K, D]
        return self.block.attend(self.owners[layer], query, **options).reshape(q.shape)
