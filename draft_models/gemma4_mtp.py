"""The Gemma 4 multi-token-prediction assistant, run on the target's own frozen KV cache.

The assistant has queries only. Layer i attends to the K/V of the target layer that owns its layer type (the last
sliding one, the last full one, after kv-sharing), over exactly the committed prefix [0, S), at every draft step:

    x_j = pre_projection(cat[ embed(t_j), h_j ])      t_0 = bonus token at position S, h_0 = target state at S - 1
    y_j = layers(x_j)                                 query position S at every step
    t_{j+1} ~ head(y_j),   h_{j+1} = post_projection(y_j)

so one row a request and no KV of its own: nothing to roll back. The head is dense, or picks the best centroids and
scores only their tokens (`use_ordered_embeddings`). Checkpoints: transformers' Gemma4AssistantForCausalLM.
"""

from typing import Any

import torch
from torch import nn

from specdec.attention.bridge import ForwardContext, attention_installed, text_configs
from specdec.attention.plan import plan_frozen
from specdec.attention.tree import DraftTree
from specdec.draft_models.base import DraftBatch, Observation, TargetInfo
from specdec.kvcache.errors import UnsupportedModelError
from specdec.kvcache.frozen import KVView, frozen_kv
from specdec.kvcache.layout import SLIDING_ATTENTION

QUERY_POSITION_OFFSET = 0
"""The drafter queries at position S + this, at every step. transformers uses S (the bonus token's own position); SGLang
and vLLM use S - 1. The model's owner wrote the former."""

WINDOW_SHIFT = 2
"""Added to the sliding window of the drafter's query at S: it sees `sliding_window + 1` committed keys, the newest.
transformers masks with |distance| <= window over the keys it is given, whose newest lies at S - 1."""


class Gemma4MTPDrafter:
    """A loaded assistant bound to a target.

    Raises UnsupportedModelError when the assistant was made for another target: widths, vocabulary, layer types or head
    sizes that do not match, each named with both values.
    """

    name = "gemma4_mtp"
    taps: tuple[int, ...] = ()

    def __init__(self, assistant: nn.Module, target: TargetInfo) -> None:
        self.view: KVView | None = None
        self.assistant: Any = assistant
        assistant.eval()
        self.embed = target.embed
        self.config: Any = assistant.config.get_text_config()  # type: ignore[operator, union-attr]
        self.layer_map, self.windows = bind_layers(assistant, target)
        self._configs = text_configs(self.assistant.model)
        self._masks: dict[str, None] = dict.fromkeys(self.config.layer_types)
        # every layer is kv-shared and reads these unless our attention function ignores them, as it does
        unused = torch.zeros((1, 1, 1, 1), dtype=target.dtype, device=target.device)
        self._unused_kv = dict.fromkeys(self.config.layer_types, (unused, unused))
        self._seed_hidden = torch.empty(0)

    def start(self, max_requests: int) -> None:
        weight: torch.Tensor = self.assistant.pre_projection.weight
        self._seed_hidden = weight.new_zeros((max_requests + 1, weight.shape[1] // 2))

    def observe(self, seen: Observation) -> None:
        self._seed_hidden[seen.row_index] = seen.last_hidden()

    def propose(self, batch: DraftBatch) -> DraftTree:
        plan = plan_frozen(batch.table, batch.rows, position_offset=QUERY_POSITION_OFFSET, window_shift=WINDOW_SHIFT)
        root_pos = plan.committed_len[:, None]  # [B, 1]
        token, hidden = batch.root, self._seed_hidden[batch.row_index]
        tokens = [token]
        with frozen_kv(batch.table.allocator, self, self.layer_map) as view, attention_installed(self._configs):
            context = ForwardContext.of(plan, view, self.windows, self._seed_hidden.dtype)
            for step in range(batch.num_steps):
                logits, hidden = self.step(token, hidden, plan.positions, context)
                token = batch.sample(logits[:, None], root_pos + step + 1)[:, 0]
                tokens.append(token)
        return DraftTree.chain(torch.stack(tokens, dim=1))

    def step(
        self, token: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One draft step: token [B], hidden [B, Ht], positions [B, 1] -> logits [B, V], next hidden [B, Ht]."""
        inputs = self.assistant.pre_projection(torch.cat([self.embed(token), hidden], dim=-1))  # [B, H]
        out = self.assistant.model(
            inputs_embeds=inputs[:, None],
            position_ids=positions,
            attention_mask=self._masks,
            shared_kv_states=self._unused_kv,
            use_cache=False,
            specdec_ctx=context,
        ).last_hidden_state[:, 0]  # [B, H]
        return self._head(out), self.assistant.post_projection(out)

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, H] -> [B, V]; tokens outside the chosen centroids get -inf, so that a draw cannot pick them."""
        ordered = self.assistant.masked_embedding
        if ordered is None:
            dense: torch.Tensor = self.assistant.lm_head(hidden)
            return dense
        best = ordered.centroids(hidden).topk(ordered.centroid_intermediate_top_k, dim=-1).indices  # [B, K]
        clusters = ordered.token_ordering.view(ordered.num_centroids, -1)  # [C, V / C]
        selected = clusters[best].flatten(1)  # [B, K * V / C] token ids
        weight: torch.Tensor = self.assistant.lm_head.weight
        scores = torch.einsum("bkh,bh->bk", weight[selected], hidden)
        return scores.new_full((len(scores), weight.shape[0]), -torch.inf).scatter_(1, selected, scores)


def bind_layers(assistant: Any, target: TargetInfo) -> tuple[tuple[int, ...], tuple[int | None, ...]]:
    """(target layer that each assistant layer reads, its sliding window or None), after checking that the two fit."""
    config = assistant.config.get_text_config()
    fits = f"this assistant does not fit the target {target.name}"
    weight = assistant.pre_projection.weight
    if (weight.device, weight.dtype) != (target.device, target.dtype):
        raise UnsupportedModelError(
            f"{fits}: it is {weight.dtype} on {weight.device}, the target {target.dtype} on {target.device}; "
            "convert one of them with .to(...)"
        )
    backbone = int(assistant.config.backbone_hidden_size)
    if backbone != target.hidden_size:
        raise UnsupportedModelError(
            f"{fits}: it was made for hidden size {backbone}, the target has {target.hidden_size}"
        )
    if config.vocab_size != target.vocab_size:
        raise UnsupportedModelError(
            f"{fits}: its vocabulary has {config.vocab_size} tokens, the target's {target.vocab_size}"
        )
    layer_map: list[int] = []
    windows: list[int | None] = []
    for layer, layer_type in enumerate(config.layer_types):
        owner = target.layout.last_owner(layer_type)
        if owner is None:
            has = sorted({spec.layer_type for spec in target.layout.layers})
            raise UnsupportedModelError(f"{fits}: its layer {layer} is {layer_type}, the target has only {has}")
        attention = assistant.model.layers[layer].self_attn
        num_heads = attention.q_proj.out_features // attention.head_dim
        if attention.head_dim != owner.head_dim or num_heads % owner.num_kv_heads:
            raise UnsupportedModelError(
                f"{fits}: its layer {layer} has {num_heads} query heads of size {attention.head_dim}, target layer "
                f"{owner.layer} ({layer_type}) has {owner.num_kv_heads} kv heads of size {owner.head_dim}"
            )
        window = int(config.sliding_window) if layer_type == SLIDING_ATTENTION else None
        if window is not None and owner.window is not None and window > owner.window:
            raise UnsupportedModelError(
                f"{fits}: its sliding window is {window}, but the target keeps only {owner.window} keys"
            )
        layer_map.append(owner.layer)
        windows.append(window)
    return tuple(layer_map), tuple(windows)
