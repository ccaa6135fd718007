"""Training of block drafters: blocks at sampled places of packed rows, all at once.

A block at place i has the token there and MASK after it. Its rows see K/V of the true states of positions before i in
the same document, and their own block (--causal: up to themselves). Row t + 1 learns the target's distribution of token
i + 1 + t. Invariant: the states equal those of the head run as the drafter runs it (tests/test_parallel_drafts.py).
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from specdec.draft_models.block.block_checkpoint import write_block
from specdec.draft_models.block.block_head import BlockHead, block_states
from specdec.draft_models.checkpoints.checkpoint_files import TargetShape
from specdec.training.draft_loss import TargetStates, TrainableDrafter
from specdec.training.packed_rows import PackedRows, predicted_rows

BLOCKS = 64
"""Blocks per packed row; the next epoch samples others."""


class TrainableBlock(TrainableDrafter):
    """A head and its target. A packed row stands for the block at its place: it reads the token there, and the block
    drafts from the next token on."""

    module: BlockHead
    ahead = 1
    places: torch.Tensor  # [B, A] of the batch under way

    def learnt_rows(self, batch: PackedRows) -> torch.Tensor:
        begins = predicted_rows(batch, 1, self.ahead)[0]  # blocks begin before a token of an answer
        order = torch.rand(begins.shape, device=begins.device).masked_fill(~begins, -1.0)
        self.places = order.topk(min(BLOCKS, begins.shape[1]), dim=1).indices.sort(dim=1).values  # [B, A]
        chosen = torch.zeros_like(begins).scatter_(1, self.places, True)
        return chosen & begins

    def drafts(self, batch: PackedRows, known: TargetStates, steps: int) -> Iterator[torch.Tensor]:
        """States of each draft step at the places chosen by `learnt_rows`; zeros elsewhere."""
        head, places = self.module, self.places
        assert steps == head.spec.num_drafts, f"{steps=} of a head that drafts {head.spec.num_drafts}"
        states = block_states(head, self.target.embed, *batch[:2], known["states"], places)  # [B, A, K, H]
        into = places[:, :, None].expand(-1, -1, states.shape[-1])
        for step in range(steps):
            empty = states.new_zeros((*batch.ids.shape, states.shape[-1]))
            yield empty.scatter(1, into, states[:, :, head.spec.first_row + step])

    def score(self, states: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.target.head(states.to(self.target.dtype))
        return scores

    def save(self, folder: Path) -> None:
        write_block(folder, self.module, TargetShape.of_target(self.target))
