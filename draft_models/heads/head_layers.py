"""Decoder layers of EAGLE-3 and block-drafter heads: those of Llama, and of Qwen3, which norms q and k per head.

y = h + attention(norm(h))          y + mlp(norm(y))
"""

from collections.abc import Callable

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.gemma4.modeling_gemma4 import apply_rotary_pos_emb
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from specdec.attention.draft_attention import DraftAttend
from specdec.draft_models.heads.head_spec import CosSin, HeadSpec


def llama_config(spec: HeadSpec) -> LlamaConfig:
    """The config that Llama's modules need, from a head's spec."""
    return LlamaConfig(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_attention_heads=1,  # unused here, but it must divide hidden_size
        head_dim=spec.head_dim,
        hidden_act=spec.hidden_act,
        mlp_bias=spec.has_bias("layers.0.mlp.gate_proj"),
        max_position_embeddings=spec.max_position_embeddings,
        rope_parameters=dict(spec.rope),
    )


class HeadAttention(nn.Module):
    """Attention of one layer over inputs of size `width`. norm: makes the norms of q and k; None: no such norms."""

    def __init__(
        self,
        spec: HeadSpec,
        layer: int,
        width: int,
        norm: Callable[[int, float], nn.Module] | None,
        *,
        keys_are_values: bool = False,
    ) -> None:
        super().__init__()
        self.layer, self.head_dim, self.scaling = layer, spec.head_dim, spec.scaling
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim

        def linear(name: str, inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=spec.has_bias(f"layers.{layer}.self_attn.{name}"))

        self.q_proj = linear("q_proj", width, q_size)
        self.k_proj = linear("k_proj", width, kv_size)
        self.v_proj = None if keys_are_values else linear("v_proj", width, kv_size)
        self.o_proj = linear("o_proj", q_size, spec.hidden_size)
        self.q_norm, self.k_norm = (None if norm is None else norm(spec.head_dim, spec.rms_norm_eps) for _ in range(2))
        self.v_norm: nn.Module | None = None

    def keys_values(self, x: torch.Tensor, rotary: CosSin) -> tuple[torch.Tensor, torch.Tensor]:
        """x [B, N, width] -> K after RoPE and V, [B, Hkv, N, D]."""
        k = self.k_proj(x)
        v = k if self.v_proj is None else self.v_proj(x)
        return apply_rotary_pos_emb(self._by_head(k, self.k_norm), *rotary), self._by_head(v, self.v_norm)

    def forward(self, x: torch.Tensor, rotary: CosSin, attend: DraftAttend) -> torch.Tensor:
        q = apply_rotary_pos_emb(self._by_head(self.q_proj(x), self.q_norm), *rotary)
        out: torch.Tensor = self.o_proj(attend(self.layer, q, *self.keys_values(x, rotary)).flatten(2))
        return out

    def _by_head(self, x: torch.Tensor, norm: nn.Module | None) -> torch.Tensor:
        """[B, N, heads * D] -> [B, heads, N, D], normed."""
        x = x.unflatten(-1, (-1, self.head_dim))
        return (x if norm is None else norm(x)).transpose(1, 2)


class HeadLayer(nn.Module):
    """One decoder layer. Its attention reads inputs of size `width`."""

    def __init__(self, spec: HeadSpec, layer: int, config: LlamaConfig, width: int | None = None) -> None:
        super().__init__()
        hidden, eps = spec.hidden_size, spec.rms_norm_eps
        self.self_attn = HeadAttention(spec, layer, width or hidden, LlamaRMSNorm if spec.qk_norm else None)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(hidden, eps)
        self.post_attention_layernorm = LlamaRMSNorm(hidden, eps)

    def forward(self, hidden: torch.Tensor, rotary: CosSin, attend: DraftAttend) -> torch.Tensor:
        return self.add_layer_output(hidden, self.input_layernorm(hidden), rotary, attend)

    def add_layer_output(
        self, residual: torch.Tensor, x: torch.Tensor, rotary: CosSin, attend: DraftAttend
    ) -> torch.Tensor:
        """Residual + attention(x), then + MLP of the sum."""
        y = residual + self.self_attn(x, rotary, attend)
        out: torch.Tensor = y + self.mlp(self.post_attention_layernorm(y))
        return out
