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
from pathlib import Path

import torch
import torch.nn.functional as F

from specdec.attention.plan import plan_chunk
from specdec.attention.reference import newest
from specdec.attention.tree import DraftTree
from specdec.attention.tree_build import Growth
from specdec.attention.visibility import bias_of, visible
from specdec.draft_models.base import Binding, DraftBatch, Drafter, Fit, Observation, TargetInfo
from specdec.draft_models.eagle3_config import TargetShape
from specdec.draft_models.eagle3_format import Eagle3Checkpoint, read_head
from specdec.draft_models.eagle3_model import Eagle3Head, embed_raw, load_head
from specdec.errors import UnsupportedModelError
from specdec.kvcache.frozen import KVView
from specdec.kvcache.layout import KVLayout
from specdec.kvcache.spaces import Space
from specdec.kvcache.stores import KVStore


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
            new_k, new_v = (x.transpose(1, 2).flatten(0, 1) for x in (k, v))  # [B*D, Hkv, head_dim]
            backend.store(kept, slots, new_k, new_v)
            return attention[windows[layer]](q, k, v, kept.k, kept.v, scaling=drafter.scaling)

        embeds = embed_raw(drafter.embedding, behind)
        a = drafter.head(embeds, drafter.head.features(states), plan.positions, attend)  # [B, D, H]
        self._hidden[seen.rows.index] = a.gather(1, last[:, :, None].expand(-1, -1, a.shape[-1]))[:, 0]

    @torch.inference_mode()
    def propose(self, batch: DraftBatch) -> DraftTree:
        """Level l needs the states of level l - 1, so there are num_steps - 1 forwards, of topk nodes a request."""
        drafter, head = self.drafter, self.drafter.head
        root_pos = batch.history_len[:, None] - 1  # [B, 1]
        a = self._hidden[batch.rows.index][:, None]  # [B, 1, H], of position S - 1
        topk, levels = batch.topk, batch.num_steps
        growth = Growth(batch.root)
        chain = [batch.root[:, None]]
        scratch = ScratchBlock(self, batch, topk * (levels - 1)) if levels > 1 else None
        for level in range(levels):
            positions = root_pos + level  # of the nodes that come next; their children are drawn two further on
            logits = drafter.logits(a)
            if topk == 1:
                beam = batch.sample(logits, positions + 1)  # [B, 1]
                origin = torch.zeros_like(beam)
                chain.append(beam)
            else:
                drawn_pos = (positions + 1).expand(-1, a.shape[1])
                best = batch.log_scores(logits, drawn_pos).topk(topk, dim=-1)  # [B, M, K]
                beam, origin = growth.add_level(best.indices, best.values)  # [B, K]
            if scratch is not None and level + 1 < levels:
                hidden = head.feedback(a).gather(1, origin[:, :, None].expand(-1, -1, a.shape[-1]))
                scratch.enter_level(positions, origin)
                embeds = embed_raw(drafter.embedding, beam)
                a = head(embeds, hidden, positions.expand(-1, topk), scratch.attend)  # [B, K, H]
        if topk == 1:
            return DraftTree.chain(torch.cat(chain, dim=1))
        return growth.select(self.binding.backend, batch.num_nodes)


class ScratchBlock:
    """K/V of one draft in progress: for each layer, a copy of the committed keys in sight and the nodes drafted so far.

    Attention here is plain torch, always: the kernel wants as many queries as block keys, and the few nodes of a level
    see those of all levels before.
    `ancestors` [B, K, M]: which scratch nodes each node of the present level sees, itself included.
    """

    def __init__(self, worker: Eagle3Worker, batch: DraftBatch, num_nodes: int) -> None:
        self.windows = worker.drafter.spec.windows
        self.scaling = worker.drafter.scaling
        self.num_nodes, self.filled = num_nodes, 0
        length = batch.history_len - 1  # [B]
        self.key_pos = length.new_zeros((len(length), num_nodes))
        self.ancestors = length.new_zeros((len(length), 1, num_nodes), dtype=torch.bool)
        self.positions = length[:, None]
        all_slots = worker.binding.cache.table.slots.tensor[batch.rows.index, : batch.rows.longest]
        self.prefix: dict[int | None, tuple[torch.Tensor, torch.Tensor]] = {}  # position, is it committed: [B, L]
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []  # K and V [B, Hkv, L + M, D] of each layer
        for layer, window in enumerate(self.windows):
            slots, start = all_slots, torch.zeros_like(length)
            if window is not None:
                slots, start = newest(all_slots, length, window)
            key_pos = start[:, None] + torch.arange(slots.shape[1], device=slots.device)
            committed = key_pos < length[:, None]
            self.prefix[window] = (key_pos, committed)
            own = torch.where(committed, slots, slots[:, :1])
            self.kept.append(copy_with_room(worker.store, layer, own, num_nodes))
        self._bias: dict[int | None, torch.Tensor] = {}

    def enter_level(self, positions: torch.Tensor, origin: torch.Tensor) -> None:
        """The next K nodes: all at `positions` [B, 1], children of the nodes `origin` [B, K] of the level above."""
        topk = origin.shape[1]
        nodes = torch.arange(self.filled, self.filled + topk, device=origin.device)
        index = origin[:, :, None].expand(-1, -1, self.num_nodes)
        columns = torch.arange(self.num_nodes, device=origin.device)
        self.ancestors = self.ancestors.gather(1, index) | (nodes[:, None] == columns)
        self.key_pos[:, self.filled : self.filled + topk] = positions
        self.positions = positions.expand(-1, topk)
        self.filled += topk
        self._bias = {window: bias_of(self._seen(window)) for window in self.prefix}

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Of the present level's nodes: q [B, Hq, K, D], k and v [B, Hkv, K, D] -> [B, K, Hq, D]."""
        kept_k, kept_v = self.kept[layer]
        end = kept_k.shape[2] - self.num_nodes + self.filled
        kept_k[:, :, end - q.shape[2] : end] = k
        kept_v[:, :, end - q.shape[2] : end] = v
        bias = self._bias[self.windows[layer]].to(q.dtype)
        out = F.scaled_dot_product_attention(
            q, kept_k[:, :, :end], kept_v[:, :, :end], attn_mask=bias, scale=self.scaling, enable_gqa=True
        )
        return out.transpose(1, 2)

    def _seen(self, window: int | None) -> torch.Tensor:
        """[B, K, L + M]: what the present level sees of the prefix and of the nodes drafted so far."""
        key_pos, committed = self.prefix[window]
        known = torch.cat(
            [committed[:, None].expand(-1, self.ancestors.shape[1], -1), self.ancestors[:, :, : self.filled]], dim=2
        )
        return visible(self.positions, torch.cat([key_pos, self.key_pos[:, : self.filled]], dim=1), known, window)


def copy_with_room(
    store: KVStore, layer: int, slots: torch.Tensor, num_nodes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of slots [B, L], and zeros for `num_nodes` more: [B, Hkv, L + M, D] each."""
    kept = store.layers[layer]
    copies = []
    for tensor in (kept.k, kept.v):
        part = tensor.index_select(0, slots.reshape(-1)).view(*slots.shape, *tensor.shape[1:]).transpose(1, 2)
        copies.append(torch.cat([part, part.new_zeros((*part.shape[:2], num_nodes, part.shape[3]))], dim=2))
    return copies[0], copies[1]


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
