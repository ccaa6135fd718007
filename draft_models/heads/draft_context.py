"""Code shared by drafters that keep K/V or draw level by level: a fitted head, its K/V in one engine, the forward of
one draft level, and the growing chain or tree."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, Unpack

import torch

from specdec.attention.backend import Backend
from specdec.attention.draft_block import DraftPlan
from specdec.attention.plan import KVPlan, plan_chunk, plan_packed
from specdec.attention.trees.tree import DraftTree
from specdec.attention.trees.tree_builder import TreeBuilder, num_candidates
from specdec.draft_models.base import Binding, DraftBatch, Drafter, Fit, Observation, PromptObservation, TargetInfo
from specdec.draft_models.heads.fused_layers import fuse_in_place
from specdec.draft_models.heads.head_modules import HeadForm, HeadModule
from specdec.gpu.operations import REFERENCE, Operations
from specdec.kvcache.frozen import KVView, own_view
from specdec.kvcache.layer_context import Destination, LayerContext, OwnRows, ScoreOptions
from specdec.kvcache.layout import KVLayout
from specdec.layers.accepted_path import path_rows
from specdec.modules.weight_watch import Weights

Head = TypeVar("Head", bound=HeadModule)
Form = TypeVar("Form", bound=HeadForm)


class HeadDrafter(Drafter, Generic[Head, Form]):
    """A head fitted to a target. Its layers are fused if the target's are.

    plain, fused: classes of its two forms; the fused one is made from the plain one.
    """

    may_lag = True
    weights: Weights

    def __init__(self, head: Head, target: TargetInfo, plain: type[Form], fused: Callable[..., Form]) -> None:
        self.head = head
        self.vocab_size = target.vocab_size
        self.target_ids = None if head.target_ids is None else head.target_ids.to(target.device)
        self.aux_layers: tuple[int, ...] = head.spec.aux_layers
        self.kv_layout: KVLayout | None = head.spec.kv_layout
        self.fit = Fit.of(target)
        self.dtype = target.dtype
        self.form = self.plain = plain(head, target.embed, target.head)
        self.ops = target.ops or REFERENCE
        if target.ops is not None:
            self.unfused = fuse_in_place(
                *(self.name, head, head.spec.num_layers, lambda: self.form.probed()),
                fused=lambda: [(self, "form", fused(self.plain, self.ops))],
            )
        self.weights = Weights(self.name, getattr(self.form, "layers", head))  # fused layers are over the head

    def over_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """Spread logits [B, M, draft V] to [B, M, V]; -inf for tokens outside the draft vocabulary."""
        if self.target_ids is None:
            return logits
        full = logits.new_full((*logits.shape[:2], self.vocab_size), -torch.inf)
        return full.index_copy_(2, self.target_ids, logits)


class StoreWorker:
    """A drafter with K/V in one engine: a store at the slots of the target's tokens."""

    def __init__(self, drafter: Any, binding: Binding) -> None:
        self.view: KVView | None = None
        self.drafter, self.binding = drafter, binding
        self.store = binding.cache.add_store(drafter.kv_layout, drafter.dtype)
        self.own_view = own_view(binding.cache.allocator, self.store)

    def plan_of(self, seen: Observation | PromptObservation) -> KVPlan:
        """Plan the K/V of the observed tokens, even if more tokens have been committed since."""
        backend, table = self.binding.backend, self.binding.cache.table
        if isinstance(seen, PromptObservation):
            return plan_packed(backend, table, seen.pack)
        return plan_chunk(backend, table, seen.rows, seen.start, seen.length, seen.path.shape[1])

    def rows_of(self, seen: Observation | PromptObservation) -> tuple[torch.Tensor, torch.Tensor]:
        """States [B, N, ..] of the target at the observed tokens, and the token after each, [B, N]."""
        source = seen.hidden if seen.aux_states is None else seen.aux_states
        assert source is not None, "a drafter without taps reads every final state"
        if isinstance(seen, PromptObservation):
            return source[None], seen.following[None]
        ops: Operations = self.drafter.ops
        return ops(path_rows)(source, seen.tokens, seen.path, seen.length, seen.next_token)


class DraftContext(LayerContext):
    """The forwards of a draft, one per level, with K nodes per request. Their K/V go to a scratch block.

    owners: for each layer, the layer whose K/V it reads; None: its own.
    """

    def __init__(self, worker: StoreWorker, draft: DraftPlan, owners: Sequence[int] | None = None) -> None:
        self.backend, self.topk = worker.binding.backend, draft.topk
        self.block = self.backend.draft_block(worker.store, draft)
        self.owners = range(len(draft.windows)) if owners is None else owners

    def destination(self, layer: int) -> Destination | None:
        return self.block.destination(layer) if self.owners[layer] == layer else None

    def store(self, destination: Destination, k: torch.Tensor, v: torch.Tensor) -> None:
        self.backend.store(destination, k, v)

    def attend_tokens(
        self, layer: int, q: torch.Tensor, k: OwnRows, v: OwnRows, **options: Unpack[ScoreOptions]
    ) -> torch.Tensor:
        """Attend: q [B * K, Hq, D] -> [B * K, Hq, DV]; k and v are already in the block."""
        query = q.unflatten(0, (-1, self.topk)).transpose(1, 2)  # [B, Hq, K, D]
        return self.block.attend(self.owners[layer], query, **options).flatten(0, 1)


class DraftTreeBuilder:
    """The chain or tree of a batch, drawn level by level with K = `batch.topk` nodes each."""

    def __init__(self, batch: DraftBatch, backend: Backend) -> None:
        self.batch = batch
        self.tree = TreeBuilder(batch.root, backend, batch.num_steps)
        self.chain = [batch.root[:, None]]

    def add_level(self, logits: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draw the next level from logits [B, M, V] of the M current nodes. positions [B, M]: of the drawn tokens.
        Returns the level's tokens [B, K], and the parent of each among the M nodes (None: a chain has one)."""
        if self.batch.topk == 1:
            self.chain.append(self.batch.sample(logits, positions))
            return self.chain[-1], None
        beam = self.tree.add_level(*self.batch.best(logits, positions, self.batch.topk))
        return beam.tokens, beam.origin

    def select(self) -> DraftTree:
        """The chain, or the best tree of the requested size."""
        if self.batch.topk == 1:
            return DraftTree.chain(torch.cat(self.chain, dim=1))
        most = 1 + num_candidates(self.batch.topk, self.tree.num_levels)
        return self.tree.select(min(self.batch.num_nodes, most))


def continued(states: torch.Tensor, origin: torch.Tensor | None) -> torch.Tensor:
    """Pick from states [B, M, H] those of the parents of a level's nodes: [B, K, H]."""
    return states if origin is None else states.gather(1, origin[:, :, None].expand(-1, -1, states.shape[-1]))
