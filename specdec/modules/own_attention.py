"""Puts our attention in the place of what GPT-J, CodeGen, GPT-Neo and Falcon compute themselves, in a private copy.

Their decoders pass no keywords to layers. So the context of a forward takes the way of the cache, which has no other
use here:

    decoder(specdec_ctx)  ->  past_key_values  ->  layer(layer_past)  ->  attention_mask of the attention
"""

from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

ATTENTION_NAME = "specdec"


class ContextAsCache(NamedTuple):
    """A context in the place of a cache that holds no tokens."""

    context: Any

    def get_seq_length(self) -> int:
        return 0


def attend_scaled(
    self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any = None
) -> tuple[torch.Tensor, None]:
    """`_attn` of GPT-J, CodeGen and GPT-Neo: queries [1, H, T, D] -> [1, H, T, D].

    GPT-Neo does not scale, and its local layers have a window. CodeGen's queries and keys are float32.
    """
    scaling = 1 / float(getattr(self, "scale_attn", 1.0))
    window = self.config.window_size if getattr(self, "attention_type", "global") == "local" else None
    attend = ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME]
    rows = query.to(value.dtype), key.to(value.dtype), value
    return attend(self, *rows, attention_mask, scaling=scaling, sliding_window=window)[0].transpose(1, 2), None


def falcon_forward(
    self: Any, hidden_states: torch.Tensor, *, attention_mask: Any, position_embeddings: Any, **_: Any
) -> tuple[torch.Tensor, None]:
    """`forward` of Falcon's attention without ALiBi: [1, T, H] -> [1, T, H]."""
    query, key, value = self._split_heads(self.query_key_value(hidden_states))
    if self.new_decoder_architecture:  # each K/V head is repeated for its query heads
        key, value = (x[:, :, :: self.num_heads // self.num_kv_heads] for x in (key, value))
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    rotated = apply_rotary_pos_emb(query, key, *position_embeddings)
    out, _ = ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME](self, *rotated, value, attention_mask)
    return self.dense(out.flatten(2)), None


METHODS: dict[str, tuple[str, Callable[..., Any]]] = {
    **dict.fromkeys(("GPTJAttention", "CodeGenAttention", "GPTNeoSelfAttention"), ("_attn", attend_scaled)),
    "FalconAttention": ("forward", falcon_forward),
}
"""Classes of attention, with the method that is replaced."""
DECODERS = frozenset({"GPTJModel", "CodeGenModel", "GPTNeoModel", "FalconModel"})
LAYERS = frozenset({"GPTJBlock", "CodeGenBlock", "GPTNeoBlock", "FalconDecoderLayer"})


def use_own_attention(module: Any) -> None:
    """Prepare a module of a private copy for our attention, if it is one of these families."""
    kind = type(module).__name__
    if kind in METHODS:
        name, method = METHODS[kind]
        setattr(module, name, MethodType(method, module))
        module.layer_idx = getattr(module, "layer_id", getattr(module, "layer_idx", None))  # layer_id in GPT-Neo
    elif kind in DECODERS:
        module.register_forward_pre_hook(_context_as_cache, with_kwargs=True)
    elif kind in LAYERS:
        module.register_forward_pre_hook(_cache_as_context, with_kwargs=True)


def _context_as_cache(decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {**kwargs, "past_key_values": ContextAsCache(kwargs.get("specdec_ctx"))}


def _cache_as_context(layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    cache = kwargs["layer_past"]
    if cache is None:  # a copy of a copy has the hook twice
        return args, kwargs
    return args, {**kwargs, "specdec_ctx": cache.context, "attention_mask": cache.context, "layer_past": None}
