"""The EAGLE-3 drafter: a small transformer over the target's own hidden states, with K/V of its own.

Its K/V are indexed by the target's full slots (shared slots, private storage), so paging, eviction and commit of the
request table are the whole bookkeeping. Who writes what:

    positions      [0, S)  committed                             S, S+1, ...  the draft in progress
    K/V in         private storage, slot table.slots[row, p]     a scratch block that lives for one `propose`
    written by     `observe`, from true target features          `propose`, from the head's own feedback
    visible to     every row behind it, within the draft window  descendants in the draft tree

A verify's accepted rows go through `observe` as a prefill chunk does, so a draft leaves nothing behind: no page is
copied, nothing is rolled back. Invariant: after `observe`, K/V of [0, S) are those of a fresh prefill of the tokens.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from specdec.attention.backend import MAX_HEAD_DIM, Attend
from specdec.attention.paged_attention import paged_attention
from specdec.attention.plan import runs_kernels
from specdec.attention.reference import VisibleKeys
from specdec.attention.tree import DraftTree
from specdec.attention.tree_build import Growth
from specdec.draft_models.base import DraftBatch, Observation, TargetInfo
from specdec.draft_models.eagle3_config import TargetShape
from specdec.draft_models.eagle3_format import Eagle3Checkpoint, read_head
from specdec.draft_models.eagle3_model import Eagle3Head, draft_kv_bytes, embed_raw, load_head
from specdec.errors import UnsupportedModelError
from specdec.kvcache.frozen import KVView
from specdec.kvcache.spaces import NULL_SLOT, FullLoc
from specdec.kvcache.store_kv import reference_store_kv, store_kv
from specdec.kvcache.table import RequestTable


class Storage(NamedTuple):
    """K and V rows of each draft layer, [slots, Hkv, D], by full slot of one request table."""

    table: RequestTable
    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]


class Eagle3Drafter:
    """A head bound to a target. Make one with `eagle3_drafter`."""

    name = "eagle3"
    extra_keys = 0

    def __init__(self, head: Eagle3Head, target_ids: torch.Tensor | None, target: TargetInfo) -> None:
        self.view: KVView | None = None
        self.head = head
        self.spec = head.spec
        self.taps: tuple[int, ...] = self.spec.aux_layers
        table = target.embed if head.embed_tokens is None else head.embed_tokens
        self.embedding: torch.Tensor = table.weight  # type: ignore[assignment]
        self.target_head = target.head
        self.vocab_size = target.vocab_size
        self.dtype = target.dtype
        self.target_ids = None if target_ids is None else target_ids.to(target.device)
        self.bytes_per_slot = draft_kv_bytes(self.spec, target.dtype)
        self._scaling = self.spec.head_dim**-0.5
        self._storage: Storage | None = None
        self._hidden = torch.empty(0)  # [rows + 1, H]: a of the last committed position

    def start(self, max_requests: int) -> None:
        self._hidden = self.embedding.new_zeros((max_requests + 1, self.spec.hidden_size))
        self._storage = None

    @torch.inference_mode()
    def observe(self, seen: Observation) -> None:
        table, path, width = seen.table, seen.path, seen.path.shape[1]
        steps = torch.arange(width, device=path.device)
        positions = seen.start[:, None] + steps  # [B, D]
        tokens = seen.tokens.gather(1, path)
        behind = torch.cat([tokens[:, 1:], tokens[:, :1]], dim=1)  # the token behind each
        behind = behind.scatter(1, (seen.length - 1)[:, None], seen.next_token[:, None])
        source = seen.hidden if seen.taps is None else seen.taps
        states = source.gather(1, path[:, :, None].expand(-1, -1, source.shape[-1]))  # [B, D, T * Ht]

        k_rows, v_rows = self._rows(table)
        max_pos = table.slots.tensor.shape[1] - 1
        write = table.slots.tensor[seen.row_index[:, None], positions.clamp(max=max_pos)]
        write = FullLoc(write.masked_fill(steps >= seen.length[:, None], NULL_SLOT).reshape(-1))
        kernels = runs_kernels(table) and self.spec.head_dim <= MAX_HEAD_DIM
        by_window = extend_attention(self, seen, positions, kernels=kernels)
        store = store_kv if kernels else reference_store_kv

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            new_k, new_v = (x.transpose(1, 2).flatten(0, 1) for x in (k, v))  # [B*D, Hkv, head_dim]
            store(new_k, new_v, write, k_rows[layer], v_rows[layer])
            return by_window[self.spec.windows[layer]](q, k, v, k_rows[layer], v_rows[layer], scaling=self._scaling)

        embeds = embed_raw(self.embedding, behind)
        a = self.head(embeds, self.head.features(states), positions, attend)  # [B, D, H]
        last = (seen.length - 1)[:, None, None].expand(-1, 1, a.shape[-1])
        self._hidden[seen.row_index] = a.gather(1, last)[:, 0]

    @torch.inference_mode()
    def propose(self, batch: DraftBatch) -> DraftTree:
        """Level l needs the states of level l - 1, so there are num_steps - 1 forwards, of topk rows a request."""
        root_pos = batch.history_len[:, None] - 1  # [B, 1]
        a = self._hidden[batch.row_index][:, None]  # [B, 1, H], of position S - 1
        topk, levels = batch.topk, batch.num_steps
        growth = Growth(batch.root)
        chain = [batch.root[:, None]]
        scratch = ScratchBlock(self, batch, topk * (levels - 1)) if levels > 1 else None
        for level in range(levels):
            positions = root_pos + level  # of the rows that come next; their children are drawn two further on
            logits = self._logits(a)
            if topk == 1:
                beam = batch.sample(logits, positions + 1)  # [B, 1]
                origin = torch.zeros_like(beam)
                chain.append(beam)
            else:
                drawn_pos = (positions + 1).expand(-1, a.shape[1])
                best = batch.log_scores(logits, drawn_pos).topk(topk, dim=-1)  # [B, M, K]
                beam, origin = growth.add_level(best.indices, best.values)  # [B, K]
            if scratch is not None and level + 1 < levels:
                hidden = self.head.feedback(a).gather(1, origin[:, :, None].expand(-1, -1, a.shape[-1]))
                scratch.enter_level(positions, origin)
                embeds = embed_raw(self.embedding, beam)
                a = self.head(embeds, hidden, positions.expand(-1, topk), scratch.attend)  # [B, K, H]
        if topk == 1:
            return DraftTree.chain(torch.cat(chain, dim=1))
        return growth.select(batch.num_nodes, kernels=runs_kernels(batch.table)).tree

    def storage(self, table: RequestTable) -> Storage:
        """K/V of all slots of `table`, made when first asked for."""
        if self._storage is None or self._storage.table is not table:
            shape = (len(table.allocator.full_to_swa.host), self.spec.num_kv_heads, self.spec.head_dim)
            with torch.inference_mode(False):  # ordinary tensors, whoever asks first
                k, v = (tuple(self._hidden.new_zeros(shape) for _ in range(self.spec.num_layers)) for _ in "kv")
            self._storage = Storage(table, k, v)
        return self._storage

    def _rows(self, table: RequestTable) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        storage = self.storage(table)
        return storage.k, storage.v

    def _logits(self, a: torch.Tensor) -> torch.Tensor:
        """a [B, M, H] -> [B, M, V] over the target's vocabulary, -inf for tokens outside the draft's."""
        logits = self.head.logits(a, self.target_head)
        if self.target_ids is None:
            return logits
        full = logits.new_full((*logits.shape[:2], self.vocab_size), -torch.inf)
        return full.index_copy_(2, self.target_ids, logits)


class ScratchBlock:
    """K/V of one draft in progress: for each layer, a copy of the committed keys in sight and the rows drafted so far.

    Attention here is plain torch, always: the kernel wants as many queries as block keys, and the few rows of a level
    see those of all levels before.
    `ancestors` [B, K, M]: which scratch rows each node of the present level sees, itself included.
    """

    def __init__(self, drafter: Eagle3Drafter, batch: DraftBatch, num_rows: int) -> None:
        spec, table = drafter.spec, batch.table
        storage = drafter.storage(table)
        self.windows = spec.windows
        self.scaling = spec.head_dim**-0.5
        self.num_rows, self.filled = num_rows, 0
        length = batch.history_len - 1  # [B]
        self.key_pos = length.new_zeros((len(length), num_rows))
        self.ancestors = length.new_zeros((len(length), 1, num_rows), dtype=torch.bool)
        max_len = int(table.committed_len[batch.rows].max())
        self.dtype = drafter.dtype
        self._positions = length[:, None]
        self._bias: dict[int | None, torch.Tensor] = {}
        self._committed: dict[int | None, tuple[torch.Tensor, torch.Tensor]] = {}  # position, is it committed: [B, L]
        self._k: list[torch.Tensor] = []
        self._v: list[torch.Tensor] = []
        for layer, window in enumerate(spec.windows):
            slots, key_pos = key_columns(table, batch.row_index, length, max_len, 1, window)
            committed = key_pos < length[:, None]
            slots = torch.where(committed, slots, table.slots.tensor[batch.row_index, 0][:, None])
            self._committed[window] = (key_pos, committed)
            for rows, copies in ((storage.k[layer], self._k), (storage.v[layer], self._v)):
                part = rows.index_select(0, slots.reshape(-1)).view(*slots.shape, *rows.shape[1:]).transpose(1, 2)
                copies.append(torch.cat([part, part.new_zeros((*part.shape[:2], num_rows, part.shape[3]))], dim=2))

    def enter_level(self, positions: torch.Tensor, origin: torch.Tensor) -> None:
        """The next K rows: all at `positions` [B, 1], children of the rows `origin` [B, K] of the level above."""
        topk = origin.shape[1]
        rows = torch.arange(self.filled, self.filled + topk, device=origin.device)
        index = origin[:, :, None].expand(-1, -1, self.num_rows)
        columns = torch.arange(self.num_rows, device=origin.device)
        self.ancestors = self.ancestors.gather(1, index) | (rows[:, None] == columns)
        self.key_pos[:, self.filled : self.filled + topk] = positions
        self._positions = positions
        self.filled += topk
        self._bias.clear()

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Of the present level's rows: q [B, Hq, K, D], k and v [B, Hkv, K, D] -> [B, K, Hq, D]."""
        window, topk = self.windows[layer], q.shape[2]
        prefix = self._k[layer].shape[2] - self.num_rows
        end = prefix + self.filled
        self._k[layer][:, :, end - topk : end] = k
        self._v[layer][:, :, end - topk : end] = v
        keys, values = self._k[layer][:, :, :end], self._v[layer][:, :, :end]
        bias = self._bias_of(window)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=bias, scale=self.scaling, enable_gqa=True)
        return out.transpose(1, 2)

    def _bias_of(self, window: int | None) -> torch.Tensor:
        if window not in self._bias:
            key_pos, committed = self._committed[window]
            topk = self.ancestors.shape[1]
            visible = torch.cat(
                [committed[:, None].expand(-1, topk, -1), self.ancestors[:, :, : self.filled]], dim=2
            )  # [B, K, L + M]
            if window is not None:
                all_pos = torch.cat([key_pos, self.key_pos[:, : self.filled]], dim=1)
                visible = visible & (self._positions - all_pos < window)[:, None]
            bias = torch.zeros(visible.shape, dtype=self.dtype, device=visible.device)
            self._bias[window] = bias.masked_fill_(~visible, -torch.inf)[:, None]
        return self._bias[window]


def key_columns(
    table: RequestTable, row_index: torch.Tensor, start: torch.Tensor, max_len: int, num_rows: int, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots and positions [B, L] that queries at start, ..., start + num_rows - 1 may see among the first `max_len`.

    O(window) wide on a sliding layer: the oldest key in sight of `start` comes first.
    """
    first, width = torch.zeros_like(start), max_len
    if window is not None:
        first = (start - (window - 1)).clamp(min=0)
        width = min(max_len, window - 2 + num_rows)
    positions = first[:, None] + torch.arange(width, device=start.device)
    columns = positions.clamp(max=table.slots.tensor.shape[1] - 1)
    return table.slots.tensor[row_index[:, None], columns], positions


def extend_attention(
    drafter: Eagle3Drafter, seen: Observation, positions: torch.Tensor, *, kernels: bool
) -> dict[int | None, Attend]:
    """By window, the attention of rows at `positions` [B, D], stored just before: to themselves and what is before."""
    table, windows = seen.table, set(drafter.spec.windows)
    max_len = int(table.committed_len[seen.rows].max())
    if kernels:  # pages of full space, whatever the window, and the new rows as a block
        page_size = table.allocator.page_size
        width = -(-max_len // page_size)
        pages = table.slots.tensor[seen.row_index, : width * page_size : page_size] // page_size  # [B, P]
        paged: Attend = partial(paged_attention, pages=pages, start=torch.zeros_like(seen.start))
        paged = partial(paged, committed_len=seen.start, positions=positions, page_size=page_size)
        return {window: partial(paged, block_len=seen.length, window=window) for window in windows}
    attention: dict[int | None, Attend] = {}
    for window in windows:
        slots, key_pos = key_columns(table, seen.row_index, positions[:, 0], max_len, positions.shape[1] + 1, window)
        committed = key_pos < (seen.start + seen.length)[:, None]
        visible = committed[:, None] & (key_pos[:, None] <= positions[:, :, None])  # [B, D, L]
        if window is not None:
            visible = visible & (positions[:, :, None] - key_pos[:, None] < window)
        bias = torch.zeros(visible.shape, dtype=drafter.dtype, device=visible.device).masked_fill_(~visible, -torch.inf)
        attention[window] = VisibleKeys(torch.where(committed, slots, slots[:, :1]), bias[:, None]).attend
    return attention


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
