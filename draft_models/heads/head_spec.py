"""Shared by EAGLE-3 heads and block drafters' heads: their spec, and how they are placed on a device and run."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import torch
from torch import nn

from specdec.attention.bridge import AttentionCall, AttentionContext
from specdec.attention.draft_attention import DraftAttend
from specdec.draft_models.checkpoints.config_reader import LAYER_TYPES
from specdec.draft_models.checkpoints.drafter_formats import LAYER_KEYS
from specdec.errors import UnsupportedModelError
from specdec.kvcache.layer_context import LayerContext
from specdec.kvcache.layout import KVLayout

CosSin = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """A head of any kind as data: every choice in its computation.

    aux_layers: target states that it reads, each named by the layer that it enters. windows: window of each draft
    layer; None: full attention.
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

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def kv_layout(self) -> KVLayout:
        return KVLayout.from_windows(self.windows, self.num_kv_heads, self.head_dim)

    @property
    def scaling(self) -> float:
        """Factor of attention scores before the softmax."""
        return float(self.head_dim**-0.5)

    def has_bias(self, name: str) -> bool:
        """Does the linear layer of this name have a bias?"""
        return False

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


class HeadContext(AttentionContext, LayerContext, Protocol):
    """The forward that a head (plain or fused) runs in: it stores K/V and computes attention."""


class HeadModule(nn.Module):
    """The modules of a head. target_ids [draft V]: target token of each token that it drafts; None: full vocabulary."""

    target_ids: torch.Tensor | None

    def __init__(self, spec: HeadSpec) -> None:
        super().__init__()
        self.spec = spec
        self.register_buffer("target_ids", None, persistent=False)

    def place(self, device: torch.device, dtype: torch.dtype) -> Self:
        """Move the head. RoPE frequencies stay float32: `.to(dtype)` would round them."""
        for parameter in self.parameters():
            parameter.data = parameter.data.to(device, dtype)
        return self.to(device)


class HeadForm(ABC):
    """A head in plain or fused form, with its embedding table and lm_head; if it lacks one, the given one is used."""

    def __init__(self, head: Any, table: nn.Module, lm_head: nn.Module) -> None:
        self.head = head
        self.table = table if head.embed_tokens is None else head.embed_tokens
        self.lm_head = lm_head if head.lm_head is None else head.lm_head

    @abstractmethod
    def probed(self) -> torch.Tensor:
        """Results [R, W] float32 for random rows, by which two forms are compared."""


def attend_in(context: HeadContext, scaling: float) -> DraftAttend:
    """The attention of a forward in the form that a head's modules call."""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return context.attend(AttentionCall(layer, q, k, v, scaling, None, None, None, {}))

    return attend
