"""The EAGLE-3 drafter: a small transformer over the target's own hidden states, with K/V of its own.

Its K/V are indexed by the target's full slots (shared slots, private storage), so paging, eviction and commit of the
request table are the whole bookkeeping. Who writes what:

    positions      [0, S)  committed                             S, S+1, ...  the draft in progress
    K/V in         its own store, slot table.slots[row, p]       a scratch block that lives for one `propose`
    written by     `observe`, from true target features          `propose`, from the head's own feedback
    visible to     every query behind it, within the window      descendants in the draft tree

A verify's accepted nodes go through `observe` as a prefill chunk does, so a draft leaves nothing behind: no page is
copied, nothing is rolled back. Invariant: after `observe`, K/V of [0, S) are those of a fresh prefill of the tokens.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from specdec.attention.draft_block import Draft, DraftBlock
from specdec.attention.plan import plan_chunk
from specdec.attention.tree import DraftTree
from specdec.attention.tree_build import Growth
from specdec.draft_models.base import Binding, DraftBatch, Drafter, Fit, Observation, TargetInfo
from specdec.draft_models.eagle3_config import TargetShape
from specdec.draft_models.eagle3_format import Eagle3Checkpoint, read_head
from specdec.draft_models.eagle3_model import Eagle3Head, embed_raw, load_head
from specdec.errors import UnsupportedModelError
from specdec.kvcache.frozen import KVView
from specdec.kvcache.layout import KVLayout
from specdec.kvcache.spaces import Space


class Eagle3Drafter(Drafter):
    """A head fitted to a target. Make one with `eagle3_drafter`."""

    name = "eagle3"

    def __init__(self, head: Eagle3Head, target_ids: torch.Tensor | None, target: TargetInfo) -> None:
        self.head = head
        self.spec = head.spec
        self.aux_layers: tuple[int, ...] = self.spec.aux_layers
        self.kv_layout: KVLayout | None = KVLayout.uniform(
            self.spec.num_layers, self.spec.num_kv_heads, self.spec.head_dim
        )
        table = target.embed if head.embed_tokens is None else head.embed_tokens
        self.embedding: torch.Tensor = table.weight  # type: ignore[assignment]
        self.target_head = target.head
        self.fit = Fit.of(target)
        self.vocab_size = target.vocab_size
        self.dtype = target.dtype
        self.target_ids = None if target_ids is None else target_ids.to(target.device)
        self.scaling = self.spec.head_dim**-0.5

    def bind(self, binding: Binding) -> "Eagle3Worker":
        return Eagle3Worker(self, binding)

    def logits(self, a: torch.Tensor) -> torch.Tensor:
        """a [B, M, H] -> [B, M, V] over the target's vocabulary, -inf for tokens outside the draft's."""
        logits = self.head.logits(a, self.target_head)
        if self.target_ids is None:
            return logits
        full = logits.new_full((*logits.shape[:2], self.vocab_size), -torch.inf)
        return full.index_copy_(2, self.target_ids, logits)


class Eagle3Worker:
    """A head at work: its K/V, and per row the state of the last committed position, from which a draft starts."""

    def __init__(self, drafter: Eagle3Drafter, binding: Binding) -> None:
        self.view: KVView | None = None
        self.drafter = drafter
        self.binding = binding
        assert drafter.kv_layout is not None
        self.store = binding.cache.add_store(drafter.kv_layout, drafter.dtype)
        rows = binding.cache.table.max_requests + 1
        self._hidden = drafter.embedding.new_zeros((rows, drafter.spec.hidden_size))  # [rows, H]

    @torch.inference_mode()
    def observe(self, seen: Observation) -> None:
        drafter, backend, path, width = self.drafter, self.binding.backend, seen.path, seen.path.shape[1]
        last = (seen.length - 1).clamp(min=0)[:, None]  # [B, 1]
        tokens = seen.tokens.gather(1, path)
        behind = torch.cat([tokens[:, 1:], tokens[:, :1]], dim=1)  # the token behind each
        behind = behind.scatter(1, last, seen.next_token[:, None])
        source = seen.hidden if seen.aux_states is None else seen.aux_states
        states = source.gather(1, path[:, :, None].expand(-1, -1, source.shape[-1]))  # [B, D, A * Ht]

        # a run of new tokens behind [0, start), whatever has been committed since
        plan = plan_chunk(backend, self.binding.cache.table, seen.rows, seen.length, width, start=seen.start)
        windows = drafter.spec.windows
        attention = {window: backend.attention(plan, Space.FULL, window) for window in set(windows)}
        slots = plan.write_slots(Space.FULL)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            kept = self.store.layers[layer]
            backend.store(kept, slots, by_row(k), by_row(v))
            return attention[windows[layer]](q, k, v, kept.k, kept.v, scaling=drafter.scaling)

        embeds = embed_raw(drafter.embedding, behind)
        a = drafter.head(embeds, drafter.head.features(states), plan.positions, attend)  # [B, D, H]
        self._hidden[seen.rows.index] = a.gather(1, last[:, :, None].expand(-1, -1, a.shape[-1]))[:, 0]

    @torch.inference_mode()
    def propose(self, batch: DraftBatch) -> DraftTree:
        """Level l needs the states of level l - 1, so there are num_steps - 1 forwards, of topk nodes a request."""
        drafter, head, topk, levels = self.drafter, self.drafter.head, batch.topk, batch.num_steps
        steps = torch.arange(levels + 1, device=batch.root.device)
        pos = batch.history_len - 1 + steps[:, None]  # [levels + 1, B], S first
        a = self._hidden[batch.rows.index][:, None]  # [B, 1, H], of position S - 1
        growth = Growth(batch.root)
        chain = [batch.root[:, None]]
        table = self.binding.cache.table
        block = None
        if levels > 1:
            draft = Draft(table, batch.rows, pos[: levels - 1], topk, drafter.spec.windows)
            block = self.binding.backend.draft_block(self.store, draft)
        for level in range(levels):
            logits = drafter.logits(a)
            drawn_pos = pos[level + 1][:, None].expand(-1, a.shape[1])
            origin = None
            if topk == 1:
                beam = batch.sample(logits, drawn_pos)  # [B, 1]
                chain.append(beam)
            else:
                beam, origin = growth.add_level(*batch.best(logits, drawn_pos, topk))  # [B, K]
            if block is not None and level + 1 < levels:
                hidden = head.feedback(a)
                if origin is not None:
                    hidden = hidden.gather(1, origin[:, :, None].expand(-1, -1, a.shape[-1]))
                block.enter_level(origin if level else None)
                attend = partial(self._attend_draft, block)
                a = head(embed_raw(drafter.embedding, beam), hidden, pos[level][:, None].expand(-1, topk), attend)
        if topk == 1:
            return DraftTree.chain(torch.cat(chain, dim=1))
        return growth.select(self.binding.backend, batch.num_nodes)

    def _attend_draft(
        self, block: DraftBlock, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """`Attend` of a level: q [B, Hq, K, D], k and v [B, Hkv, K, D] -> [B, K, Hq, D]."""
        self.binding.backend.store(*block.destination(layer), by_row(k), by_row(v))
        return block.attend(layer, q, scaling=self.drafter.scaling)


def by_row(x: torch.Tensor) -> torch.Tensor:
    """[B, heads, N, D] -> [B * N, heads, D]."""
    return x.transpose(1, 2).flatten(0, 1)


def eagle3_drafter(folder: str | Path, target: TargetInfo, aux_layers: Sequence[int] | None = None) -> Eagle3Drafter:
    """Read the head in `folder` and bind it to `target`. `aux_layers`: see `Eagle3Spec`; None: what the files say."""
    shape = TargetShape(
        name=target.name,
        num_layers=len(target.layout.layers),
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
    )
    return bind_head(read_head(folder, shape, aux_layers), target)


def bind_head(checkpoint: Eagle3Checkpoint, target: TargetInfo) -> Eagle3Drafter:
    """A drafter from a checkpoint that was read for this target."""
    if checkpoint.spec.target_hidden_size != target.hidden_size or checkpoint.spec.vocab_size != target.vocab_size:
        raise UnsupportedModelError(
            f"this head was read for a target of hidden size {checkpoint.spec.target_hidden_size} and "
            f"{checkpoint.spec.vocab_size} tokens; {target.name} has {target.hidden_size} and {target.vocab_size}"
        )
    return Eagle3Drafter(load_head(checkpoint, target.device, target.dtype), checkpoint.target_ids, target)
