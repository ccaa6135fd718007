"""The EAGLE-3 head: what it computes (`Eagle3Spec`), its modules, and how a drafter runs them (`PlainHead`).

    g_i = fc( cat(states_i) )            states: what enters the target layers `aux_layers`, at position i
                                         norm_before_fc: cat is normed first, fc_norm: each state is; never the feedback
    e_i = input_layernorm(embed(x_{i+1}))
    u_i = hidden_norm(h_i)               h_i = g_i after a target forward, the feedback of row i - 1 while drafting
    r_i = h_i                            norm_before_residual: u_i
    y_i = r_i + attention(cat[e_i, u_i]) RoPE at i, causal, own K/V; Qwen3-type heads norm q and k of each head
    a_i = y_i + mlp(post_attention_layernorm(y_i))                      layers after the first are ordinary, H wide
    logits of x_{i+2} = lm_head(norm(a_i));   feedback_i = a_i          norm_output: norm(a_i)

Row i holds the feature of position i and the token after it, so K/V of position i exist once token i + 1 is known.
A head holds no K/V and knows no requests: the caller says where K/V live (`Attend`, `HeadContext`).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from specdec.draft_models.head_spec import Attend, HeadContext, HeadModule, HeadSpec, Rotary, attend_in


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Spec(HeadSpec):
    """What a head computes.

    aux_layers: empty: the final state, after the norm. draft_vocab_size None: the target's head and vocabulary.
    has_fc False: features pass unchanged. biases: names of the linear layers that have one. owns_embed: it has an
    embedding table of its own.
    """

    target_hidden_size: int
    draft_vocab_size: int | None = None
    biases: frozenset[str] = frozenset()
    has_fc: bool = True
    owns_embed: bool = False
    final_norm: bool = True
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @property
    def feature_size(self) -> int:
        """Width of the target states that it reads, side by side."""
        return max(1, len(self.aux_layers)) * self.target_hidden_size


class Eagle3Attention(nn.Module):
    """Projections of one layer; the first takes 2H."""

    def __init__(self, spec: Eagle3Spec, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, spec.head_dim
        width = spec.hidden_size * (2 if layer == 0 else 1)
        name = f"layers.{layer}.self_attn"
        kv_size = spec.num_kv_heads * spec.head_dim
        self.q_proj = nn.Linear(width, spec.num_heads * spec.head_dim, bias=f"{name}.q_proj" in spec.biases)
        self.k_proj = nn.Linear(width, kv_size, bias=f"{name}.k_proj" in spec.biases)
        self.v_proj = nn.Linear(width, kv_size, bias=f"{name}.v_proj" in spec.biases)
        self.o_proj = nn.Linear(spec.num_heads * spec.head_dim, spec.hidden_size, bias=f"{name}.o_proj" in spec.biases)
        self.q_norm: nn.Module = LlamaRMSNorm(spec.head_dim, spec.rms_norm_eps) if spec.qk_norm else nn.Identity()
        self.k_norm: nn.Module = LlamaRMSNorm(spec.head_dim, spec.rms_norm_eps) if spec.qk_norm else nn.Identity()

    def forward(self, x: torch.Tensor, rotary: Rotary, attend: Attend) -> torch.Tensor:
        shape = (*x.shape[:2], -1, self.head_dim)  # [B, N, heads, D]
        q = self.q_norm(self.q_proj(x).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, *rotary)
        out: torch.Tensor = self.o_proj(attend(self.layer, q, k, v).flatten(2))
        return out


class Eagle3Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, spec: Eagle3Spec, layer: int, config: LlamaConfig) -> None:
        super().__init__()
        self.norm_before_residual = spec.norm_before_residual
        self.self_attn = Eagle3Attention(spec, layer)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(spec.hidden_size, spec.rms_norm_eps) if layer == 0 else None

    def forward(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        rotary: Rotary,
        attend: Attend,
    ) -> torch.Tensor:
        if self.hidden_norm is None:
            residual, x = hidden, self.input_layernorm(hidden)
        else:
            normed = self.hidden_norm(hidden)
            residual = normed if self.norm_before_residual else hidden
            x = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        y = residual + self.self_attn(x, rotary, attend)
        out: torch.Tensor = y + self.mlp(self.post_attention_layernorm(y))
        return out


class Eagle3Head(HeadModule):
    """The head of a spec, randomly initialised; `checkpoint.read_head` fills one from a checkpoint.

    embed_tokens and lm_head are None when the head shares the target's.
    """

    def __init__(self, spec: Eagle3Spec) -> None:
        super().__init__()
        self.spec = spec
        config = LlamaConfig(
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            num_attention_heads=1,  # read by no module here, and refused where it does not divide hidden_size
            head_dim=spec.head_dim,
            hidden_act=spec.hidden_act,
            mlp_bias="layers.0.mlp.gate_proj" in spec.biases,
            max_position_embeddings=spec.max_position_embeddings,
            rope_parameters=dict(spec.rope),
        )
        hidden, eps, states = spec.hidden_size, spec.rms_norm_eps, max(1, len(spec.aux_layers))
        self.embed_tokens = nn.Embedding(spec.vocab_size, hidden) if spec.owns_embed else None
        self.input_norm = LlamaRMSNorm(spec.feature_size, eps) if spec.norm_before_fc else None
        norms = [LlamaRMSNorm(spec.target_hidden_size, eps) for _ in range(states)]
        self.fc_norm = nn.ModuleList(norms) if spec.fc_norm else None
        self.fc = nn.Linear(spec.feature_size, hidden, bias="fc" in spec.biases) if spec.has_fc else None
        self.layers = nn.ModuleList([Eagle3Layer(spec, i, config) for i in range(spec.num_layers)])
        self.norm: nn.Module = LlamaRMSNorm(hidden, eps) if spec.final_norm else nn.Identity()
        size = spec.draft_vocab_size
        self.lm_head = None if size is None else nn.Linear(hidden, size, bias="lm_head" in spec.biases)
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def features(self, states: torch.Tensor) -> torch.Tensor:
        """Target states side by side [..., T * Ht] -> g [..., H]."""
        if self.fc_norm is not None:
            chunks = states.chunk(len(self.fc_norm), dim=-1)
            states = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        if self.input_norm is not None:
            states = self.input_norm(states)
        return states if self.fc is None else self.fc(states)

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """embeds and hidden [B, N, H], positions [B, N] -> a [B, N, H]."""
        rotary = self.rotary_emb(hidden, positions)
        for layer in self.layers:
            hidden = layer(embeds, hidden, rotary, attend)
        return hidden

    def logits(self, a: torch.Tensor, target_head: nn.Module | None = None) -> torch.Tensor:
        """a [..., H] -> logits [..., draft V], by the target's head if the head has none of its own."""
        head = self.lm_head if self.lm_head is not None else target_head
        assert head is not None, "a head without lm_head needs the target's"
        logits: torch.Tensor = head(self.norm(a))
        return logits

    def feedback(self, a: torch.Tensor) -> torch.Tensor:
        """a -> hidden state of the next draft step."""
        return self.norm(a) if self.spec.norm_output else a


def embed_raw(table: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Rows of an embedding table as stored: Gemma's module scales them by sqrt(H), and heads are trained without."""
    return F.embedding(tokens, table)


class HeadOutput(NamedTuple):
    """a [B, N, H] and norm(a), which is what lm_head reads."""

    state: torch.Tensor
    normed: torch.Tensor


class PlainHead:
    """A head with its embedding table and lm_head, run by its own modules. `FusedHead` is the other form.

    tokens, positions: [B, N]; row i holds the token after position i.
    """

    def __init__(self, head: Eagle3Head, table: nn.Module, target_head: nn.Module) -> None:
        self.head, self.table = head, table
        self.lm_head = target_head if head.lm_head is None else head.lm_head

    def extend(
        self, tokens: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, context: HeadContext
    ) -> HeadOutput:
        """Rows that the target has processed: states [B, N, A * Ht] of the target."""
        return self.step(tokens, self.head.features(states), positions, context)

    def step(
        self, tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, context: HeadContext
    ) -> HeadOutput:
        """A level of a draft: hidden [B, N, H] is the head's own feedback."""
        weight: torch.Tensor = self.table.weight  # type: ignore[assignment]
        state = self.head(embed_raw(weight, tokens), hidden, positions, attend_in(context, self.head.spec.scaling))
        return HeadOutput(state, self.norm(state))

    def norm(self, state: torch.Tensor) -> torch.Tensor:
        """a -> norm(a)."""
        normed: torch.Tensor = self.head.norm(state)
        return normed

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """norm(a) [B, N, H] -> [B, N, draft V]."""
        logits: torch.Tensor = self.lm_head(normed)
        return logits
