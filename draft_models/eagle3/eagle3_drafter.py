"""The EAGLE-3 drafter: a small transformer over the target's hidden states, with its own K/V.

Its K/V use the slots of the target's tokens, each layer in the group of its window, so the request table pages, evicts
and commits them too. `observe` writes K/V of committed positions [0, S) from true target features. K/V of a draft go to
a scratch block that lives for one `propose`. Invariant: after `observe`, K/V of [0, S) equal those of a fresh prefill,
as far as windows reach.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from specdec.attention.bridge import ForwardContext
from specdec.attention.kernels.draft_block import DraftPlan
from specdec.attention.trees.tree import DraftTree
from specdec.draft_models.base import Binding, DraftBatch, Observation, PromptObservation, TargetInfo
from specdec.draft_models.eagle3.checkpoint import read_head
from specdec.draft_models.eagle3.head import Eagle3Head, FusedHead, HeadOutput, PlainHead
from specdec.draft_models.heads.draft_context import DraftContext, DraftTreeBuilder, HeadDrafter, StoreWorker, continued
from specdec.layers.accepted_path import keep_last


class Eagle3Drafter(HeadDrafter[Eagle3Head, PlainHead]):
    """A head fitted to a target; `eagle3_drafter` makes one. source: the folder that it was read from, or None."""

    name = "eagle3"
    source: str | None = None

    def __init__(self, head: Eagle3Head, target: TargetInfo) -> None:
        super().__init__(head, target, PlainHead, FusedHead)
        self.spec = head.spec
        self.reads_every_state = not self.aux_layers

    def bind(self, binding: Binding) -> "Eagle3Worker":
        return Eagle3Worker(self, binding)


class Eagle3Worker(StoreWorker):
    """A head in one engine. It keeps its K/V and, for each row, the state of the last committed position, from which a
    draft starts."""

    drafter: Eagle3Drafter

    def __init__(self, drafter: Eagle3Drafter, binding: Binding) -> None:
        super().__init__(drafter, binding)
        cache = binding.cache
        shape = (cache.table.max_requests + 1, drafter.spec.hidden_size)
        self._hidden = torch.zeros(shape, dtype=drafter.dtype, device=cache.allocator.device)  # [rows, H]

    @torch.inference_mode()
    def observe(self, seen: Observation) -> None:
        self.drafter.ops(keep_last)(self._hidden, seen.rows.index, self._extend(seen), seen.length)

    @torch.inference_mode()
    def observe_prompts(self, seen: PromptObservation) -> None:
        self._hidden[seen.pack.rows] = self._extend(seen)[0, seen.pack.last]

    def _extend(self, seen: Observation | PromptObservation) -> torch.Tensor:
        """Store K/V of the observed positions. Returns their states, [B, N, H]."""
        drafter, plan = self.drafter, self.plan_of(seen)
        states, next_tokens = self.rows_of(seen)
        context = ForwardContext.from_plan(plan, self.own_view, drafter.spec.windows)
        return drafter.form.run(next_tokens, drafter.form.features(states), plan.positions, context).state

    @torch.inference_mode()
    def propose(self, batch: DraftBatch) -> DraftTree:
        """Draft level by level. Level l needs the states of level l - 1, so num_steps - 1 forwards of topk nodes
        run."""
        drafter, backend, topk, levels = self.drafter, self.binding.backend, batch.topk, batch.num_steps
        pos = batch.positions()  # [levels + 1, B], S first
        node_pos = pos[:, :, None].expand(-1, -1, topk).contiguous()  # [levels + 1, B, K]
        draft = DraftPlan(self.binding.cache.table, batch.rows, pos[: levels - 1], topk, drafter.spec.windows)
        block = backend.draft_block(self.store, draft) if levels > 1 else None
        state = self._hidden[batch.rows.index][:, None]  # [B, 1, H], of position S - 1
        out = HeadOutput(state, drafter.form.norm(state))
        builder = DraftTreeBuilder(batch, backend)
        for level in range(levels):
            logits = drafter.over_vocabulary(drafter.form.logits(out.normed))  # [B, M, V]
            beam, origin = builder.add_level(logits, node_pos[level + 1, :, : logits.shape[1]])  # [B, K]
            if block is None or level + 1 == levels:
                break
            hidden = continued(drafter.form.feedback(out), origin)
            block.enter_level(origin if level else None)
            context = DraftContext(block, backend, topk, range(drafter.spec.num_layers))
            out = drafter.form.run(beam, hidden, node_pos[level], context)
        return builder.select()


def eagle3_drafter(folder: str | Path, target: TargetInfo, aux_layers: Sequence[int] | None = None) -> Eagle3Drafter:
    """Read the head in `folder` and fit it to `target`. `aux_layers`: see `Eagle3Spec`; None: those of the files."""
    head = read_head(folder, target, aux_layers)
    drafter = Eagle3Drafter(head.place(target.device, target.dtype).eval(), target)
    drafter.source = str(folder)
    return drafter
