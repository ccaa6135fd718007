"""Training of block drafters: blocks at sampled places of packed rows, all at once.

A block at place i has the token there and MASK after it. Its rows see K/V of the true states of positions before i in
the same document, and their own block (--causal: up to themselves). Row t + 1 learns the target's distribution of token
i + 1 + t. Invariant: the states equal those of the head run as the drafter runs it (tests/test_train_block.py).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from specdec.draft_models.block.block_checkpoint import write_block
from specdec.draft_models.block.block_head import BlockHead, BlockSpec
from specdec.draft_models.checkpoint_files import TargetShape
from specdec.training.draft_loss import TargetStates, TrainableDrafter, run_target
from specdec.training.packed_rows import PackedRows, predicted_rows, same_document

BLOCKS = 64
"""Blocks a packed row; others are sampled the next time that the row is learnt from."""


class TrainableBlock(TrainableDrafter):
    """A head and its target. A row reads the token of its block's place, and the first drafts the next one."""

    module: BlockHead
    ahead = 1
    places: torch.Tensor  # [B, A] of the batch under way

    @classmethod
    def new(cls, target: Any, spec: BlockSpec) -> "TrainableBlock":
        """A fresh head of `spec` in bfloat16."""
        return cls(BlockHead(spec).place(target.device, torch.bfloat16), target)

    def target_states(self, batch: PackedRows) -> TargetStates:
        hidden, states, _ = run_target(self.target, batch, aux_layers=self.module.spec.aux_layers)
        return {"hidden": hidden, "states": torch.cat(states, dim=-1)}

    def learnt_rows(self, batch: PackedRows) -> torch.Tensor:
        begins = predicted_rows(batch, 1, self.ahead)[0]  # a block before an answer's token
        order = torch.rand(begins.shape, device=begins.device).masked_fill(~begins, -1.0)
        self.places = order.topk(min(BLOCKS, begins.shape[1]), dim=1).indices.sort(dim=1).values  # [B, A]
        chosen = torch.zeros_like(begins).scatter_(1, self.places, True)
        return chosen & begins

    def drafts(self, batch: PackedRows, known: TargetStates, steps: int) -> Iterator[torch.Tensor]:
        """Of the places that `learnt_rows` has chosen; zeros elsewhere."""
        head, places = self.module, self.places
        assert steps == head.spec.num_drafts, f"{steps=} of a head that drafts {head.spec.num_drafts}"
        states = self.block_states(batch, known["states"], places)  # [B, A, K, H]
        into = places[:, :, None].expand(-1, -1, states.shape[-1])
        for step in range(steps):
            empty = states.new_zeros((*batch.ids.shape, states.shape[-1]))
            yield empty.scatter(1, into, states[:, :, head.spec.first_row + step])

    def block_states(self, batch: PackedRows, states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """A block at each of `places` [B, A], from states [B, T, A * H] of the target -> [B, A, K, H]."""
        head, spec = self.module, self.module.spec
        rows = spec.block_size
        steps = torch.arange(rows, device=places.device)
        first = batch.ids.gather(1, places)[:, :, None]  # [B, A, 1]
        tokens = torch.where(steps == 0, first, spec.mask_token)  # [B, A, K]
        pos = batch.pos.gather(1, places)[:, :, None] + steps
        embeds = self.target.embed(tokens.flatten(1)).to(head.fc.weight.dtype)
        attention = BlocksAttention(head, batch, head.taps(states), places)
        out: torch.Tensor = head(embeds, pos.flatten(1), attention).unflatten(1, (-1, rows))
        return out

    def score(self, states: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.target.head(states.to(self.target.dtype))
        return scores

    def save(self, folder: Path) -> None:
        write_block(folder, self.module.spec, self.module.state_dict(), TargetShape.of(self.target))


class BlocksAttention:
    """`Attend` for one batch of blocks at places [B, A], over K/V of taps [B, T, H]."""

    def __init__(self, head: BlockHead, batch: PackedRows, taps: torch.Tensor, places: torch.Tensor) -> None:
        self.head, self.taps, self.spec = head, taps, head.spec
        self.rotary = head.rotary_emb(taps, batch.pos)
        same, distance = same_document(batch.pos)  # [B, T, T], [T, T]
        length = batch.ids.shape[1]
        self.distance = distance[places]  # [B, A, T]: of a block's first row to each key
        self.before = same.gather(1, places[:, :, None].expand(-1, -1, length)) & (self.distance > 0)
        steps = torch.arange(self.spec.block_size, device=places.device)
        self.apart = steps[:, None] - steps  # [K, K]

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [B, Hq, A * K, D], k and v [B, Hkv, A * K, D] -> [B, A * K, Hq, D]."""
        rows, group = self.spec.block_size, q.shape[1] // k.shape[1]
        attention: Any = self.head.layers[layer].self_attn
        old_k, old_v, k, v = (
            x.repeat_interleave(group, 1) for x in (*attention.keys_values(self.taps, self.rotary), k, v)
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
