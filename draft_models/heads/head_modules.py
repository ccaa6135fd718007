"""Parts of the heads of EAGLE-3 and of block drafters: the spec, and decoder layers of Llama and of Qwen3.

    layer      y = h + attention(norm(h))          y + mlp(norm(y))        Qwen3 norms q and k per head

A head holds no K/V: its forms (plain or fused) run in a `LayerContext`, which stores K/V and computes attention.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.gemma4.modeling_gemma4 import apply_rotary_pos_emb
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from specdec.draft_models.checkpoints.config_reader import LAYER_TYPES
from specdec.draft_models.checkpoints.drafter_formats import LAYER_KEYS
from specdec.errors import UnsupportedModelError
from specdec.kvcache.layer_context import AttentionCall, LayerContext
from specdec.kvcache.layout import KVLayout

CosSin = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """A head of any kind as data: every choice in its computation.

    aux_layers: target states that it reads, each named by the layer that it enters.
    windows: window of each draft layer; None: full attention.
    biases: names of the linear layers with a bias.
    owns_embed: it has its own embedding table.
    draft_vocab_size: rows of its own lm_head; None: it uses the target's.
    softcap: of logits.
    keys_are_values: V is K before its norm and RoPE.
    """

    hidden_size: int
    vocab_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    aux_layers: tuple[int, ...]
    windows: tuple[int | None, ...] = (None,)
    rope: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    qk_norm: bool = False
    biases: frozenset[str] = frozenset()
    owns_embed: bool = False
    draft_vocab_size: int | None = None
    softcap: float | None = None
    keys_are_values: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def kv_layout(self) -> KVLayout:
        return KVLayout.from_windows(self.windows, self.num_kv_heads, self.head_dim)

    def stored_fields(self) -> dict[str, Any]:
        """These fields as a head's config.json stores them, under the names of both published formats."""
        return {
            **{name: getattr(self, key.field) for name, key in LAYER_KEYS.items() if key.field},
            "vocab_size": self.vocab_size,
            "num_hidden_layers": self.num_layers,
            "rope_theta": self.rope["rope_theta"],
            "rope_scaling": None if self.rope["rope_type"] == "default" else dict(self.rope),
            "tie_word_embeddings": False,
        }

    def stored_windows(self) -> dict[str, Any]:
        """Fields of config.json for the layers' windows. Raises UnsupportedModelError for windows of several sizes."""
        sizes = {window for window in self.windows if window is not None}
        if len(sizes) > 1:
            raise UnsupportedModelError(f"a head with sliding windows {sorted(sizes)}; the format has room for one")
        kinds = [LAYER_TYPES[window is not None] for window in self.windows]
        return {"layer_types": kinds, "sliding_window": max(sizes, default=None), "use_sliding_window": bool(sizes)}


class HeadModule(nn.Module):
    """The modules of a head. target_ids [draft V]: target token of each token that it drafts; None: full vocabulary.
    embed_tokens, lm_head: None if the head shares the target's."""

    target_ids: torch.Tensor | None

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__()
        self.spec, rows = spec, spec.draft_vocab_size
        self.register_buffer("target_ids", None, persistent=False)
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size) if spec.owns_embed else None
        self.lm_head = None if rows is None else nn.Linear(spec.hidden_size, rows, bias="lm_head" in spec.biases)

    def place(self, device: torch.device, dtype: torch.dtype) -> Self:
        """Move the head. RoPE frequencies stay float32: `.to(dtype)` would round them."""
        for parameter in self.parameters():
            parameter.data = parameter.data.to(device, dtype)
        return self.to(device)


class HeadForm(ABC):
    """A head in plain or fused form, with its embedding table and lm_head; if it lacks one, the given one is used."""

    def __init__(self, head: Any, table: nn.Module, lm_head: nn.Module) -> None:
        self.head = head
        self.table: Any = table if head.embed_tokens is None else head.embed_tokens
        self.lm_head = lm_head if head.lm_head is None else head.lm_head

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """States after the final norm [B, N, H] -> [B, N, draft V], without a successor head's bias."""
        logits: torch.Tensor = self.lm_head(states)
        cap = self.head.spec.softcap
        return logits if cap is None else (logits / cap).tanh() * cap

    def random_rows(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Six random target states [2, 3, width] and tokens [2, 3], for `probed`."""
        weight: torch.Tensor = next(self.head.parameters())
        generator = torch.Generator().manual_seed(0)
        states = torch.randn((2, 3, width), generator=generator, dtype=torch.float32, device="cpu")
        tokens = torch.arange(6, device=weight.device).view(2, 3) % self.head.spec.vocab_size
        return states.to(weight.device, weight.dtype), tokens

    @abstractmethod
    def probed(self) -> torch.Tensor:
        """Results [R, W] float32 for random rows, by which two forms are compared."""


def llama_config(spec: HeadSpec) -> LlamaConfig:
    """The config that Llama's modules need, from a head's spec."""
    return LlamaConfig(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_attention_heads=1,  # unused here, but it must divide hidden_size
        head_dim=spec.head_dim,
        hidden_act=spec.hidden_act,
        mlp_bias="layers.0.mlp.gate_proj" in spec.biases,
        max_position_embeddings=spec.max_position_embeddings,
        rope_parameters=dict(spec.rope),
    )


class HeadAttention(nn.Module):
    """Attention of one layer over inputs of size `width`. norm: makes the norms of q and k; None: no such norms."""

    def __init__(self, spec: HeadSpec, layer: int, width: int, norm: Callable[[int, float], nn.Module] | None) -> None:
        super().__init__()
        self.layer, self.head_dim, self.scaling = layer, spec.head_dim, float(spec.head_dim**-0.5)
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim

        def linear(name: str, inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=f"layers.{layer}.self_attn.{name}" in spec.biases)

        self.q_proj = linear("q_proj", width, q_size)
        self.k_proj = linear("k_proj", width, kv_size)
        self.v_proj = None if spec.keys_are_values else linear("v_proj", width, kv_size)
        self.o_proj = linear("o_proj", q_size, spec.hidden_size)
        self.q_norm, self.k_norm = (None if norm is None else norm(spec.head_dim, spec.rms_norm_eps) for _ in range(2))
        self.v_norm: nn.Module | None = None

    def keys_values(self, x: torch.Tensor, rotary: CosSin) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute K after RoPE, and V, [B, Hkv, N, D] from x [B, N, width]."""
        k = self.k_proj(x)
        v = k if self.v_proj is None else self.v_proj(x)
        return apply_rotary_pos_emb(self._by_head(k, self.k_norm), *rotary), self._by_head(v, self.v_norm)

    def forward(self, x: torch.Tensor, rotary: CosSin, context: LayerContext) -> torch.Tensor:
        q = apply_rotary_pos_emb(self._by_head(self.q_proj(x), self.q_norm), *rotary)
        call = AttentionCall(self.layer, q, *self.keys_values(x, rotary), self.scaling, None, None, None, {})
        out: torch.Tensor = self.o_proj(context.attend(call).flatten(2))
        return out

    def _by_head(self, x: torch.Tensor, norm: nn.Module | None) -> torch.Tensor:
        """Divide x by heads and norm it: [B, N, heads * D] -> [B, heads, N, D]."""
        x = x.unflatten(-1, (-1, self.head_dim))
        return (x if norm is None else norm(x)).transpose(1, 2)


class HeadLayer(nn.Module):
    """One decoder layer. Its attention reads inputs of size `width`. norm: makes its norms."""

    norm: Callable[[int, float], nn.Module] = LlamaRMSNorm

    def __init__(self, spec: HeadSpec, layer: int, config: LlamaConfig, width: int | None = None) -> None:
        super().__init__()
        norm, hidden, eps = type(self).norm, spec.hidden_size, spec.rms_norm_eps
        self.self_attn = HeadAttention(spec, layer, width or hidden, norm if spec.qk_norm else None)
        self.mlp = LlamaMLP(config)
        self.input_layernorm, self.post_attention_layernorm = norm(hidden, eps), norm(hidden, eps)

    def forward(self, hidden: torch.Tensor, rotary: CosSin, context: LayerContext) -> torch.Tensor:
        return self.add_layer_output(hidden, self.input_layernorm(hidden), rotary, context)

    def add_layer_output(
        self, residual: torch.Tensor, x: torch.Tensor, rotary: CosSin, context: LayerContext
    ) -> torch.Tensor:
        """Residual + attention(x), then + MLP of the sum."""
        y = residual + self.self_attn(x, rotary, context)
        out: torch.Tensor = y + self.mlp(self.post_attention_layernorm(y))
        return out
