"""The block drafter: one forward of a small transformer drafts a whole block from the target's hidden states.

It keeps K/V like an EAGLE-3 head (`eagle3_drafter.py`): `observe` writes those of committed positions to its own store,
and those of the block (the last token, then MASKs) live in a scratch block during one `propose`. Row d of a block gives
the distribution of draft d, given the text but no other draft. So in a tree every node of depth d has the candidates of
row d. With a successor head (DSpark), candidates also depend on the previous token.
"""

from pathlib import Path

import torch

from specdec.attention.bridge import ForwardContext
from specdec.attention.draft_block import DraftPlan, NodeOrder
from specdec.attention.trees.tree import DraftTree
from specdec.draft_models.base import Binding, DraftBatch, Observation, PromptObservation, TargetInfo
from specdec.draft_models.block.block_checkpoint import read_block
from specdec.draft_models.block.block_head import BlockHead, FusedBlock, PlainBlock
from specdec.draft_models.checkpoints.checkpoint_files import equals_weight
from specdec.draft_models.heads.draft_context import DraftContext, DraftTreeBuilder, HeadDrafter, StoreWorker, continued


class BlockDrafter(HeadDrafter[BlockHead, PlainBlock]):
    """A head fitted to a target; `block_drafter` makes one."""

    name = "block"
    reads_every_state = False

    def __init__(self, head: BlockHead, target: TargetInfo) -> None:
        super().__init__(head, target, PlainBlock, FusedBlock)
        self.spec = head.spec
        self.max_steps: int | None = self.spec.num_drafts

    def bind(self, binding: Binding) -> "BlockWorker":
        return BlockWorker(self, binding)


class BlockWorker(StoreWorker):
    """A head in one engine. Its only state is its K/V."""

    drafter: BlockDrafter

    @torch.inference_mode()
    def observe(self, seen: Observation | PromptObservation) -> None:
        (states, _), plan = self.rows_of(seen), self.plan_of(seen)
        self.drafter.form.observe(states, plan.positions, ForwardContext.from_plan(plan, self.own_view, ()))

    observe_prompts = observe

    @torch.inference_mode()
    def propose(self, batch: DraftBatch) -> DraftTree:
        drafter, levels = self.drafter, batch.num_steps
        assert levels <= drafter.spec.num_drafts, f"{levels=} of a block that drafts {drafter.spec.num_drafts}"
        pos = batch.positions()  # [num_steps + 1, B], S first
        states = self._run_block(batch, pos[:1], levels)
        logits = drafter.form.logits(states)  # [B, levels, V]
        drawn_pos = pos[1 : levels + 1].t().contiguous()  # [B, levels]
        if drafter.head.markov_head is not None:
            return self._by_successors(batch, states, logits, drawn_pos)
        logits = drafter.over_vocabulary(logits)
        if batch.topk == 1:
            return DraftTree.chain(torch.cat([batch.root[:, None], batch.sample(logits, drawn_pos)], dim=1))
        tokens, log_probs = batch.best(logits, drawn_pos, batch.topk)  # [B, levels, K]
        builder = DraftTreeBuilder(batch, self.binding.backend)
        builder.tree.add_levels(tokens[:, :, None], log_probs[:, :, None])
        return builder.select()

    def _run_block(self, batch: DraftBatch, start: torch.Tensor, levels: int) -> torch.Tensor:
        """Run a block that starts at positions start [1, B] (S) -> states [B, levels, H] of the rows that draft."""
        drafter, spec = self.drafter, self.drafter.spec
        rows = spec.first_row + levels if spec.causal else spec.block_size  # a causal block can do without later rows
        order = NodeOrder.CAUSAL if spec.causal else NodeOrder.MUTUAL
        draft = DraftPlan(self.binding.cache.table, batch.rows, start, rows, spec.windows, order, spec.anchored)
        context = DraftContext(self, draft)
        context.block.enter_level(None)
        masks = batch.root.new_full((len(batch.root), rows - 1), spec.mask_token)
        tokens = torch.cat([batch.root[:, None], masks], dim=1)
        states = drafter.form.run(tokens, draft.key_positions(), context)
        return states[:, spec.first_row : spec.first_row + levels]

    def _by_successors(
        self, batch: DraftBatch, states: torch.Tensor, logits: torch.Tensor, drawn_pos: torch.Tensor
    ) -> DraftTree:
        """Draw the rows of a block one after another; a node's scores depend on its parent's token."""
        successors = self.drafter.head.markov_head
        assert successors is not None
        builder = DraftTreeBuilder(batch, self.binding.backend)
        before, carried = batch.root[:, None], None  # [B, M], [B, M, r]
        for level in range(logits.shape[1]):
            bias, carried = successors(before, states[:, level], carried)
            scores = self.drafter.over_vocabulary(logits[:, level, None] + bias)  # [B, M, V]
            node_pos = drawn_pos[:, level, None].expand(-1, scores.shape[1]).contiguous()
            before, origin = builder.add_level(scores, node_pos)  # [B, K]
            carried = None if carried is None else continued(carried, origin)
        return builder.select()


def block_drafter(folder: str | Path, target: TargetInfo) -> BlockDrafter:
    """Read the head in `folder` and fit it to `target`."""
    head = read_block(folder, target).place(target.device, target.dtype).eval()
    for name, theirs in (("embed_tokens", target.embed), ("lm_head", target.head)):
        own = getattr(head, name)  # DSpark's files hold copies of the target's, but never of scaled or packed ones
        has_biases = any(getattr(each, "bias", None) is not None for each in (own, theirs))
        if type(own) is type(theirs) and not has_biases and equals_weight(own.weight, theirs):
            setattr(head, name, None)
    return BlockDrafter(head, target)
