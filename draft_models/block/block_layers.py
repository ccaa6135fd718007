"""Layers of DSpark's drafters for Gemma 4, and DSpark's successor head. The layers differ from `head_modules.py`:

v          normed per head, without a gain; if keys are values, v is the k before its norm
scores     q . k, unscaled; RoPE as in the target's full-attention layers, with later frequencies 0
residual   h = h + norm(attention(norm(h))),   h = scalar (h + norm(mlp(norm(h))))
"""

from typing import Any

import torch
from torch import nn
from transformers import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm, Gemma4TextMLP

from specdec.attention.bridge import AttentionContext
from specdec.draft_models.heads.head_modules import CosSin, HeadAttention

FULL = "full_attention"


def gemma4_config(spec: Any) -> Gemma4TextConfig:
    """The config that Gemma 4's modules need, from a `BlockSpec`."""
    heads: dict[str, Any] = {"head_dim": spec.head_dim, "global_head_dim": spec.head_dim}
    return Gemma4TextConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        **heads,
        hidden_activation=spec.hidden_act,
        layer_types=[FULL] * spec.num_layers,
        max_position_embeddings=spec.max_position_embeddings,
        hidden_size_per_layer_input=0,
        rope_parameters={FULL: dict(spec.rope)},
    )


class Gemma4BlockLayer(nn.Module):
    """A decoder layer of Gemma 4."""

    layer_scalar: torch.Tensor

    def __init__(self, spec: Any, layer: int, config: Gemma4TextConfig) -> None:
        super().__init__()
        hidden, eps = spec.hidden_size, spec.rms_norm_eps
        self.self_attn = HeadAttention(spec, layer, hidden, Gemma4RMSNorm, keys_are_values=spec.keys_are_values)
        self.self_attn.v_norm = Gemma4RMSNorm(spec.head_dim, eps, with_scale=False)
        self.mlp = Gemma4TextMLP(config, layer)
        self.input_layernorm = Gemma4RMSNorm(hidden, eps)
        self.post_attention_layernorm = Gemma4RMSNorm(hidden, eps)
        self.pre_feedforward_layernorm = Gemma4RMSNorm(hidden, eps)
        self.post_feedforward_layernorm = Gemma4RMSNorm(hidden, eps)
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(self, x: torch.Tensor, rotary: CosSin, context: AttentionContext) -> torch.Tensor:
        y = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), rotary, context))
        out = y + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(y)))
        scaled: torch.Tensor = out * self.layer_scalar.to(out.dtype)
        return scaled


KINDS = ("vanilla", "gated", "rnn")


class SuccessorHead(nn.Module):
    """The successor head of a `BlockSpec`. Its modules have the names of the checkpoints."""

    def __init__(self, spec: Any) -> None:
        super().__init__()
        self.kind, rank = spec.successor, spec.successor_rank
        assert self.kind in KINDS, self.kind
        self.markov_w1 = nn.Embedding(spec.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, spec.draft_vocab_size or spec.vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(spec.hidden_size + rank, rank)
        if self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + spec.hidden_size, 3 * rank)

    def forward(
        self, before: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Previous tokens before [B, M], hidden [B, H] of the row, state [B, M, r] or None -> bias [B, M, V], next
        state."""
        token: torch.Tensor = self.markov_w1(before)  # [B, M, r]
        if self.kind == "vanilla":
            return self.markov_w2(token), None
        hidden = hidden[:, None].expand(-1, token.shape[1], -1)
        if self.kind == "gated":
            gate = self.gate_proj(torch.cat([hidden, token], dim=-1)).sigmoid()
            return self.markov_w2(gate * token), None
        state = torch.zeros_like(token) if state is None else state
        keep, candidate, out = self.joint_proj(torch.cat([state, token, hidden], dim=-1)).chunk(3, dim=-1)
        keep = keep.sigmoid()
        return self.markov_w2(out.tanh()), keep * state + (1 - keep) * candidate.tanh()
