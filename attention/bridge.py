"""The bridge into Hugging Face models: one attention function, and nothing else.

`transformers` calls the function registered as "specdec" from every attention layer, with post-RoPE queries and the new
tokens' keys and values, and passes our `specdec_ctx` keyword through untouched. The function hands the layer to that
context. No mask function is registered under the name, so transformers builds no masks at all. A model is switched to
the function only for the length of a forward (`attention_installed`), so a user's own model is left as it was.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from transformers import AttentionInterface

from specdec.attention.backend import Attend, attention_by_window
from specdec.attention.hf_norms import DECOMPOSED_NORMS, fused_rms_norm
from specdec.attention.plan import KVPlan
from specdec.errors import SpecDecError
from specdec.kvcache.frozen import KVView

ATTENTION_NAME = "specdec"

IGNORED_KWARGS = frozenset(
    {"position_ids", "use_cache", "output_router_logits", "output_attentions", "output_hidden_states", "is_causal"}
    | {"cache_position", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "position_embeddings"}
    | {"logits_to_keep", "num_items_in_batch", "return_shared_kv_states", "return_dict"}
)
"""Keywords of an attention call that do not change what it computes here; any other tensor is refused."""


class AttentionCall(NamedTuple):
    """What one layer asks of attention, as transformers passes it.

    query [X, Hq, T, D], key and value [X, Hkv, T, D] after RoPE, with rows packed [1, B*N] or as a batch [B*N, 1];
    sinks [Hq] or None; extra: the keywords that specdec has no name for.
    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scaling: float
    sliding_window: int | None
    sinks: torch.Tensor | None
    softcap: float | None
    extra: dict[str, Any]


class AttentionContext(Protocol):
    """What the attention function delegates to."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """-> [X, T, Hq, D]."""


def specdec_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    specdec_ctx: AttentionContext | None = None,
    **extra: Any,
) -> tuple[torch.Tensor, None]:
    """The registered attention function: queries [1, Hq, B*N, D] or [B*N, Hq, 1, D] in, heads after rows out."""
    if specdec_ctx is None:
        raise SpecDecError(
            "the attention implementation 'specdec' works inside a specdec engine only; "
            "restore the model with model.set_attn_implementation('sdpa') to call it yourself"
        )
    call = AttentionCall(
        layer=int(getattr(module, "layer_idx", -1)),
        query=query,
        key=key,
        value=value,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        sinks=s_aux,
        softcap=softcap,
        extra=extra,
    )
    return specdec_ctx.attend(call).contiguous(), None  # some models take a view of it


AttentionInterface.register(ATTENTION_NAME, specdec_attention)


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """One forward: its plan, the view it reads and writes KV through, and each layer's window.

    `by_window` maps a window (None: full attention) to the attention of layers with it; made here, for this forward.
    `lent` holds the new K/V [B, Hkv, N, D] of the layers whose K/V later layers share, once they have run.
    """

    plan: KVPlan
    view: KVView
    windows: Sequence[int | None]
    by_window: dict[int | None, Attend]
    lent: dict[int, tuple[torch.Tensor, torch.Tensor] | None]

    @classmethod
    def of(cls, plan: KVPlan, view: KVView, windows: Sequence[int | None], dtype: torch.dtype) -> "ForwardContext":
        """`windows[i]` is the sliding window of worker layer i, None on full layers; dtype: the model's."""
        lenders = {owner for layer, owner in enumerate(view.layer_map) if owner != layer}
        return cls(plan, view, windows, attention_by_window(plan, windows, dtype), dict.fromkeys(lenders))

    def attend(self, call: AttentionCall) -> torch.Tensor:
        layer = call.layer
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (call.query, call.key, call.value))  # [B*N, heads, D]
        block = None
        if self.plan.write_full is not None:
            if self.view.owns(layer):
                self.view.write(layer, self.plan.write_full, self.plan.write_swa, k, v)
                block = self._by_request(k), self._by_request(v)
                if layer in self.lent:
                    self.lent[layer] = block
            else:
                block = self.lent[self.view.layer_map[layer]]
        block_k, block_v = block or (None, None)
        pool_k, pool_v, _ = self.view.layer(layer)
        options = {"scaling": call.scaling, "softcap": call.softcap, "sinks": call.sinks}
        attend = self.by_window[self.windows[layer]]
        out = attend(self._by_request(q), block_k, block_v, pool_k, pool_v, **options)  # [B, N, Hq, D]
        return out.reshape(len(call.query), -1, *out.shape[2:])

    def _by_request(self, rows: torch.Tensor) -> torch.Tensor:
        """[B*N, H, D] -> [B, H, N, D], a view."""
        return rows.view(*self.plan.positions.shape, *rows.shape[1:]).transpose(1, 2)


@contextmanager
def attention_installed(configs: Iterable[Any]) -> Iterator[None]:
    """In the block, modules that hold these HF configs call our attention, and decomposed norms are one operator."""
    previous = [(config, config._attn_implementation_internal) for config in configs]
    forwards = [(norm, norm.forward) for norm in DECOMPOSED_NORMS]
    try:
        for config, _ in previous:
            config._attn_implementation_internal = ATTENTION_NAME
        for norm, _ in forwards:
            norm.forward = fused_rms_norm
        yield
    finally:
        for config, name in previous:
            config._attn_implementation_internal = name
        for norm, forward in forwards:
            norm.forward = forward


def text_configs(module: nn.Module) -> list[Any]:
    """The distinct config objects held inside `module`: those `attention_installed` must switch."""
    found = {id(config): config for m in module.modules() if (config := getattr(m, "config", None)) is not None}
    return [config for config in found.values() if hasattr(config, "_attn_implementation_internal")]
