"""A drafter that is a smaller causal language model with the target's vocabulary: it continues the text.

It keeps its K/V like an EAGLE-3 head (`eagle3_drafter.py`), and reads no state of the target. Invariant: after
`observe`, its K/V of [0, S) equal those of a fresh prefill, as far as windows reach.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from specdec.attention.draft_block import DraftPlan
from specdec.attention.plan import KVPlan
from specdec.attention.trees.tree import DraftTree
from specdec.draft_models.base import Binding, DraftBatch, Drafter, Fit, Observation, PromptObservation, TargetInfo
from specdec.draft_models.heads.draft_context import DraftContext, DraftTreeBuilder, StoreWorker
from specdec.errors import UnsupportedModelError
from specdec.kvcache.frozen import KVView
from specdec.kvcache.layout import KVLayout
from specdec.modules.weight_watch import Weights


class LanguageModel(TargetInfo, Protocol):
    """A model that was probed like a target: it runs packed rows under any context."""

    windows: Sequence[int | None]
    unfused: str | None
    weights: Weights

    @property
    def max_positions(self) -> int | None:
        """The model can compute positions below this; None: all positions."""

    def forward(self, tokens: torch.Tensor, plan: KVPlan, view: KVView) -> tuple[torch.Tensor, Any]:
        """Run tokens [B, N] -> states after the final norm [B, N, H]; other results are ignored."""

    def run(self, tokens: torch.Tensor, positions: torch.Tensor, context: object) -> torch.Tensor:
        """States after the final norm [B, N, H] of tokens at positions [B, N]. The context decides where K/V are
        kept."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """States [B, N, H] -> [B, N, V]."""


def require_stateless(name: str, layout: KVLayout) -> None:
    """Raise UnsupportedModelError for a drafter with recurrent layers."""
    if layout.recurrent:
        raise UnsupportedModelError(
            f"drafter {name} has recurrent layers, and a drafter's states are not kept yet; take another model, or "
            "'suffix'"
        )


class LanguageModelDrafter(Drafter):
    """A language model fitted to a target. Only the size of the vocabulary depends on the target."""

    name = "language_model"
    may_lag = True
    reads_every_state = False

    def __init__(self, model: LanguageModel, target: TargetInfo) -> None:
        require_stateless(model.name, model.layout)
        self.model, self.dtype = model, model.dtype
        self.kv_layout: KVLayout | None = model.layout
        self.owners = [spec.owner for spec in model.layout.layers]
        self.vocab_size = target.vocab_size
        self.fit = Fit.of(target)
        self.max_positions = model.max_positions
        self.unfused = model.unfused
        self.weights: Weights | None = model.weights

    def bind(self, binding: Binding) -> "LanguageModelWorker":
        return LanguageModelWorker(self, binding)

    def known_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """Replace token ids that the model lacks: they are padding of the target's vocabulary and mean nothing."""
        return tokens.clamp(max=self.model.vocab_size - 1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of states [B, M, H] -> [B, M, V] with the target's V: checkpoints pad one vocabulary to different
        sizes."""
        logits = self.model.logits(hidden)[..., : self.vocab_size]
        return F.pad(logits, (0, self.vocab_size - logits.shape[-1]), value=-torch.inf)


class LanguageModelWorker(StoreWorker):
    """A language model in one engine. Its only state is its K/V."""

    drafter: LanguageModelDrafter

    @torch.inference_mode()
    def observe(self, seen: Observation | PromptObservation) -> None:
        tokens = seen.tokens[None] if isinstance(seen, PromptObservation) else seen.tokens.gather(1, seen.path)
        self.drafter.model.forward(self.drafter.known_tokens(tokens), self.plan_of(seen), self.own_view)

    observe_prompts = observe

    @torch.inference_mode()
    def propose(self, batch: DraftBatch) -> DraftTree:
        """Run one forward per level with topk nodes per request; on the first level all nodes are the root."""
        drafter, topk, levels = self.drafter, batch.topk, batch.num_steps
        pos = batch.positions()  # [levels + 1, B], S first
        draft = DraftPlan(self.binding.cache.table, batch.rows, pos[:levels], topk, drafter.model.windows)
        context = DraftContext(self, draft, drafter.owners)
        builder = DraftTreeBuilder(batch, self.binding.backend)
        tokens, origin = batch.root[:, None].expand(-1, topk), None
        for level in range(levels):
            context.block.enter_level(origin)
            node_pos = pos[level][:, None].expand(-1, topk)
            hidden = drafter.model.run(drafter.known_tokens(tokens), node_pos, context)
            logits = drafter.logits(hidden if level else hidden[:, :1])
            tokens, origin = builder.add_level(logits, pos[level + 1][:, None].expand(-1, logits.shape[1]))  # [B, K]
        return builder.select()
