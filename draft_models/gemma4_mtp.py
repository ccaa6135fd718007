"""The Gemma 4 multi-token-prediction assistant, which reads the target's frozen KV cache.

The assistant computes queries only. Its layer i reads the K/V of the last target layer of the same type (sliding or
full) that stores K/V, over exactly the committed prefix [0, S), at every draft step:

    x_j = pre_projection(cat[ embed(t_j), h_j ])      t_0 = bonus token at position S, h_0 = target state at S - 1
    y_j = layers(x_j)                                 query position S at every step
    t_{j+1} ~ head(y_j),   h_{j+1} = post_projection(y_j)

If the target has several windows, the assistant's window must equal that of the layer it reads; otherwise the pair is
refused. The head is dense, or scores only the tokens of the best centroids (`use_ordered_embeddings`).
"""

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import Gemma4TextConfig, Gemma4UnifiedTextConfig

from specdec.attention.bridge import ForwardContext
from specdec.attention.plan import plan_frozen
from specdec.attention.trees.tree import DraftTree
from specdec.draft_models.base import Binding, DraftBatch, Drafter, Fit, Observation, PromptObservation, TargetInfo
from specdec.draft_models.centroid_head import CentroidHead, centroid_best, centroid_sample, reference_centroid_logits
from specdec.draft_models.heads.draft_context import DraftTreeBuilder, continued
from specdec.draft_models.heads.fused_layers import EchoContext, Parts, fuse_in_place
from specdec.errors import UnsupportedModelError
from specdec.gpu.operations import REFERENCE, Operations
from specdec.kvcache.frozen import KVView, frozen_kv
from specdec.kvcache.layout import SLIDING_ATTENTION
from specdec.layers.accepted_path import keep_last
from specdec.layers.fuse import FusedEmbedding, fuse, fuse_embedding, fuse_linear
from specdec.modules.private_copy import private_copy
from specdec.modules.weight_watch import Weights
from specdec.sampling.kernel_sampler import MAX_BEST

QUERY_POSITION_OFFSET = 0
"""Position of the drafter's queries relative to S, at every step. transformers (code of the model's owner) uses S, the
position of the bonus token; SGLang and vLLM use S - 1."""

WINDOW_SHIFT = 2
"""Added to the drafter's sliding window, so that its query at S sees the `sliding_window + 1` newest committed keys.
transformers masks with |distance| <= window, and the newest key is at S - 1.
"""

ASSISTANT_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
"""Values of `model_type` of assistants."""


class Gemma4MTPDrafter(Drafter):
    """A loaded assistant fitted to a target; `model` is a private copy over its weights.

    Raises UnsupportedModelError, with both values, if widths, vocabulary, layer types or head sizes do not match the
    target.
    """

    name = "gemma4_mtp"
    weights: Weights
    reads_every_state = False

    def __init__(
        self,
        assistant: nn.Module,
        target: TargetInfo,
        *,
        query_offset: int = QUERY_POSITION_OFFSET,
        window_shift: int = WINDOW_SHIFT,
    ) -> None:
        """query_offset, window_shift: needed if an assistant was trained with other conventions than the defaults."""
        self.query_offset, self.window_shift = query_offset, window_shift
        self.extra_keys = max(self.window_shift - self.query_offset, 0)
        self.assistant: Any = assistant
        self.model: Any = private_copy(assistant)
        self.embed = target.embed
        self.fit = Fit.of(target)
        config = assistant.config.get_text_config()  # type: ignore[operator, union-attr]
        self.ops = target.ops
        self.layer_map, self.windows = fit_layers(assistant, target)
        self._masks: dict[str, None] = dict.fromkeys(config.layer_types)
        # every layer is kv-shared and passes these on; our attention function ignores them
        unused = torch.zeros((1, 1, 1, 1), dtype=target.dtype, device=target.device)
        self._unused_kv = dict.fromkeys(config.layer_types, (unused, unused))

        if target.ops is not None:
            fused = partial(self._fused, target.ops)
            self.unfused = fuse_in_place(self.name, self.model, len(self.windows), self._probed, fused)
        self.weights = Weights(self.name, self.model)

    def bind(self, binding: Binding) -> "Gemma4MTPWorker":
        return Gemma4MTPWorker(self, binding)

    def step(
        self, tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, context: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One draft step of tokens and positions [B, M] and hidden [B, M, Ht] -> the head's states [B, M, H] and the
        next hidden [B, M, Ht]."""
        if isinstance(self.embed, FusedEmbedding):
            inputs = self.embed(tokens, right=hidden)
        else:
            inputs = torch.cat([self.embed(tokens), hidden], dim=-1)
        inputs = self.model.pre_projection(inputs)  # [B, M, H]
        out = self.model.model(
            inputs_embeds=inputs.flatten(0, 1)[:, None],  # a batch of single rows: [B * M, 1, H]
            position_ids=positions.reshape(-1, 1),
            attention_mask=self._masks,
            shared_kv_states=self._unused_kv,
            use_cache=False,
            specdec_ctx=context,
        ).last_hidden_state.view(*tokens.shape, -1)  # [B, M, H]
        return out, self.model.post_projection(out)

    def draw(self, batch: DraftBatch, out: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Draw the next token [B, M] from each state [B, M, H]. positions [B, M]: those of the drawn tokens."""
        head, ops = self._centroids, None if self.unfused else self.ops
        if head is None or ops is None or batch.params is None:
            return batch.sample(self.logits(out), positions)
        return ops(centroid_sample)(out, positions, batch.params, head)

    def best(
        self, batch: DraftBatch, out: torch.Tensor, positions: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The `count` best next tokens given the noise, and their log-probabilities: [B, M, K]."""
        head, ops = self._centroids, None if self.unfused else self.ops
        if head is None or ops is None or batch.params is None or count > min(MAX_BEST, head.num_listed):
            return batch.best(self.logits(out), positions, count)
        return ops(centroid_best)(out, positions, batch.params, head, count)

    @property
    def _centroids(self) -> CentroidHead | None:
        ordered = self.model.masked_embedding
        if ordered is None:
            return None
        ordering = ordered.token_ordering.view(ordered.num_centroids, -1)  # [C, V / C]
        top_k = ordered.centroid_intermediate_top_k
        return CentroidHead(ordered.centroids.weight, ordering, self.model.lm_head.weight, top_k)

    def _fused(self, ops: Operations) -> Parts:
        model, linears = self.model, ("pre_projection", "post_projection", "lm_head")
        return [
            (self, "embed", fuse_embedding(self.embed, ops)),
            (model, "model", fuse(model.model, ops)),
            *((model, name, fuse_linear(getattr(model, name), ops)) for name in linears),
        ]

    def _probed(self) -> torch.Tensor:
        """Logits and next states of six tokens under `EchoContext`: [6, V + Ht] float32."""
        tokens = torch.arange(6, device=self.model.device).view(2, 3)
        hidden = self.embed(tokens + 6)
        out, following = self.step(tokens, hidden, tokens * 100, EchoContext())
        return torch.cat([self.model.lm_head(out), following], dim=-1).flatten(0, 1).float()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of states [B, M, H] -> [B, M, V]; -inf outside the best centroids if the head has centroids."""
        head = self._centroids
        return self.model.lm_head(hidden) if head is None else reference_centroid_logits(hidden, head)


class Gemma4MTPWorker:
    """An assistant in one engine. It keeps, for each row, the target state from which the next draft starts."""

    def __init__(self, drafter: Gemma4MTPDrafter, binding: Binding) -> None:
        self.view: KVView | None = None
        self.drafter = drafter
        self.binding = binding
        weight: torch.Tensor = drafter.model.pre_projection.weight
        rows = binding.cache.table.max_requests + 1
        self._seed_hidden = weight.new_zeros((rows, weight.shape[1] // 2))  # [rows, Ht]: at the last committed token

    @torch.inference_mode()
    def observe(self, seen: Observation) -> None:
        keep = (self.drafter.ops or REFERENCE)(keep_last)
        keep(self._seed_hidden, seen.rows.index, seen.hidden, seen.length, seen.path)

    @torch.inference_mode()
    def observe_prompts(self, seen: PromptObservation) -> None:
        self._seed_hidden[seen.pack.rows] = seen.last_hidden

    @torch.inference_mode()
    def propose(self, batch: DraftBatch) -> DraftTree:
        """Draft the tree. All nodes attend to the same frozen prefix [0, S): only tokens, states and scores branch."""
        hidden = self._seed_hidden[batch.rows.index][:, None]  # [B, M, Ht], M = 1, then topk
        drafter, backend, cache = self.drafter, self.binding.backend, self.binding.cache
        from_states = replace(batch, sample=partial(drafter.draw, batch), best=partial(drafter.best, batch))
        builder = DraftTreeBuilder(from_states, backend)
        tokens = batch.root[:, None]
        with frozen_kv(cache.allocator, self.binding.target_store, self, drafter.layer_map) as view:
            for level, drawn_pos in enumerate(batch.positions()[1:]):  # [B]
                if level == 0 or (level == 1 and batch.topk > 1):  # one query for the root, then topk queries
                    plan = plan_frozen(
                        *(backend, cache.table, batch.rows),
                        num_queries=tokens.shape[1],
                        position_offset=drafter.query_offset,
                        window_shift=drafter.window_shift,
                        prefix=batch.prefix,
                    )
                    context = ForwardContext.from_plan(plan, view, drafter.windows)
                out, hidden = drafter.step(tokens, hidden, plan.positions, context)
                tokens, origin = builder.add_level(out, drawn_pos[:, None].expand_as(tokens))
                hidden = continued(hidden, origin)
            return builder.select()


def fit_layers(assistant: Any, target: TargetInfo) -> tuple[tuple[int, ...], tuple[int | None, ...]]:
    """Check that the models fit. Returns (target layer that each assistant layer reads, its sliding window or None)."""

    def require(fits: bool, but: str) -> None:
        if not fits:
            raise UnsupportedModelError(f"this assistant does not fit the target {target.name}: {but}")

    config, weight = assistant.config.get_text_config(), assistant.pre_projection.weight
    require(
        (weight.device, weight.dtype) == (target.device, target.dtype),
        f"it is {weight.dtype} on {weight.device}, the target {target.dtype} on {target.device}; "
        "convert one of them with .to(...)",
    )
    backbone, vocab_size = int(assistant.config.backbone_hidden_size), config.vocab_size
    hidden = f"it was made for hidden size {backbone}, the target has {target.hidden_size}"
    require(backbone == target.hidden_size, hidden)
    tokens = f"its vocabulary has {vocab_size} tokens, the target's {target.vocab_size}"
    require(vocab_size == target.vocab_size, tokens)
    if (ordered := assistant.masked_embedding) is not None:
        count, best = ordered.num_centroids, ordered.centroid_intermediate_top_k
        shares = f"it divides {vocab_size} tokens among {count} centroids, of which it takes {best}"
        require(vocab_size % count == 0 and 0 < best <= count, shares)
    layer_map: list[int] = []
    windows: list[int | None] = []
    for layer, layer_type in enumerate(config.layer_types):
        has = sorted({spec.layer_type for spec in target.layout.layers})
        owner = target.layout.last_owner(layer_type)
        require(owner is not None, f"its layer {layer} is {layer_type}, the target has only {has}")
        assert owner is not None
        attention = assistant.model.layers[layer].self_attn
        num_heads = attention.q_proj.out_features // attention.head_dim
        require(
            attention.head_dim == owner.k.dim and num_heads % owner.k.heads == 0,
            f"its layer {layer} has {num_heads} query heads of size {attention.head_dim}, target layer "
            f"{owner.layer} ({layer_type}) has {owner.k.heads} kv heads of size {owner.k.dim}",
        )
        window = int(config.sliding_window) if layer_type == SLIDING_ATTENTION else None
        kept = sorted({spec.window for spec in target.layout.layers if spec.window is not None})
        narrower = len(kept) == 1 and window is not None and window < kept[0]  # `load_check` warns
        require(
            window == owner.window or narrower,
            f"its sliding window is {window}, but target layer {owner.layer}, whose K/V it reads, keeps "
            f"{owner.window} keys (windows of the target: {kept}); use an assistant of that window",
        )
        layer_map.append(owner.layer)
        windows.append(window)
    return tuple(layer_map), tuple(windows)


def parallel_states(
    assistant: Any,
    embedded: Iterable[torch.Tensor],
    hidden: torch.Tensor,
    positions: torch.Tensor,
    masks: Mapping[str, torch.Tensor],
    kv: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
) -> Iterator[torch.Tensor]:
    """The head's states [B, N, H] of many drafts, step by step, by the assistant's own modules without pages.

    embedded: embeddings [B, N, Ht] of each step's tokens. hidden: target states of step 0. masks (additive, [B, 1, N,
    T]) and kv [B, Hkv, T, D]: by layer type.
    """
    config = assistant.config.get_text_config()
    # an assistant has none, but some releases of transformers (such as 5.23) index them anyway
    no_inputs = hidden.new_empty((*positions.shape, config.num_hidden_layers, config.hidden_size_per_layer_input))
    for step_inputs in embedded:
        out = assistant.model(
            inputs_embeds=assistant.pre_projection(torch.cat([step_inputs.to(hidden.dtype), hidden], -1)),
            position_ids=positions,
            attention_mask=masks,
            shared_kv_states=kv,
            per_layer_inputs=no_inputs,
            use_cache=False,
        ).last_hidden_state
        yield out
        hidden = assistant.post_projection(out)


def is_assistant_config(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") in ASSISTANT_TYPES


_LOADING = threading.RLock()


@contextmanager
def constructible_assistants() -> Iterator[None]:
    """Let transformers build an assistant, all of whose layers are kv-shared.

    Some releases (5.23 among them) compute `kv_sharing_modes` from the unshared layers and raise if a model has none,
    as an assistant. The right answer is that every layer reuses K/V. Within the block, in this thread only, the class's
    property is replaced by one with that answer; one block runs at a time.
    """
    loader = threading.get_ident()
    config_classes: tuple[Any, ...] = (Gemma4TextConfig, Gemma4UnifiedTextConfig)
    with _LOADING, ExitStack() as stack:
        for config_class in config_classes:
            if (stock := vars(config_class).get("kv_sharing_modes")) is not None:

                def kv_sharing_modes(config: Any, stock: property = stock) -> list[str | None]:
                    if threading.get_ident() == loader and config.num_kv_shared_layers >= config.num_hidden_layers:
                        return ["reuse"] * config.num_hidden_layers
                    modes: list[str | None] = stock.__get__(config)
                    return modes

                stack.callback(setattr, config_class, "kv_sharing_modes", stock)
                config_class.kv_sharing_modes = property(kv_sharing_modes)
        yield
