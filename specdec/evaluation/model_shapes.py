"""Published models as configs without weights: what `specdec bench --shape` makes at random on the device.

A shape is the text part of a target and the drafter that is published for it. Nothing is read and nothing is made here:
`targets` and `drafters` are built by phases/weights.py, on a device or on `meta`. `Shrink` makes a shape smaller in
depth and width for machines that it does not fit; what is measured on such a one is no figure of the model.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import gcd
from typing import Any

from transformers import (
    Gemma4AssistantConfig,
    Gemma4TextConfig,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
)

from specdec.config import SpecConfig
from specdec.draft_models.eagle3.head import Eagle3Spec
from specdec.draft_models.gemma4_mtp import constructible_assistants
from specdec.errors import ConfigError

SLIDING, FULL = "sliding_attention", "full_attention"
MAX_SHRINK = 16
"""Narrower heads and windows are no attention."""
MIN_LAYERS = 2


@dataclass(frozen=True, slots=True)
class Shrink:
    """`layers`: of the target, None: all. `divisor`: widths (hidden, heads, vocabulary, window) are divided by it."""

    layers: int | None = None
    divisor: int = 1

    def __post_init__(self) -> None:
        if self.layers is not None and self.layers < MIN_LAYERS:
            raise ConfigError(f"layers={self.layers}: a target has at least {MIN_LAYERS}")
        if not 1 <= self.divisor <= MAX_SHRINK or MAX_SHRINK % self.divisor:
            raise ConfigError(f"shrink={self.divisor}: widths are divided by 1, 2, 4, 8 or {MAX_SHRINK}")

    @property
    def words(self) -> str:
        """What was changed; empty for the published shape."""
        parts = [] if self.layers is None else [f"{self.layers} layers"]
        parts += [] if self.divisor == 1 else [f"widths / {self.divisor}"]
        return ", ".join(parts)

    def depth(self, published: int) -> int:
        if self.layers is not None and self.layers > published:
            raise ConfigError(f"layers={self.layers}: this shape has {published}")
        return self.layers or published

    def widths(self, **published: int) -> dict[str, Any]:
        """In multiples of 8, as all published ones are and grouped products want them."""
        return {name: -(-width // (8 * self.divisor)) * 8 for name, width in published.items()}


MakeTarget = Callable[[Shrink], PreTrainedConfig]
MakeDrafter = Callable[[Any, Shrink], PreTrainedConfig | Eagle3Spec]


@dataclass(frozen=True, slots=True)
class Shape:
    """A target and its drafter, as configs. drafts: shapes of the draft that are measured, by name."""

    name: str
    published: str
    target: MakeTarget
    drafter: MakeDrafter
    drafts: Mapping[str, SpecConfig] = field(default_factory=dict)


def find_shape(name: str) -> Shape:
    """Raises ConfigError with the list where there is none of that name."""
    if name not in SHAPES:
        raise ConfigError(f"shape={name!r} is unknown; choose one of {', '.join(SHAPES)}")
    return SHAPES[name]


def _gemma4(
    shrink: Shrink, *, layers: int, shared: int = 0, widths: Mapping[str, int], **rest: Any
) -> PreTrainedConfig:
    """Five sliding layers, then a full one. The last `shared` of the published layers read K/V of earlier ones."""
    depth = shrink.depth(layers)
    kinds = [FULL if (i + 1) % 6 == 0 else SLIDING for i in range(depth)]
    kinds[-1] = FULL
    # an owner of each kind must be left before those that share
    num_shared = max(0, min(round(depth * shared / layers), depth - 6))
    return Gemma4TextConfig(
        **shrink.widths(vocab_size=262_144, head_dim=256, global_head_dim=512, **widths),
        num_hidden_layers=depth,
        layer_types=kinds,
        num_kv_shared_layers=num_shared,
        final_logit_softcapping=30.0,
        bos_token_id=None,
        eos_token_id=None,
        **rest,
    )


def _gemma4_assistant(target: Any, shrink: Shrink, *, heads: int, ordered: bool, **published: int) -> PreTrainedConfig:
    """Four layers without K/V of their own; heads of K/V, head sizes and window are the target's."""
    kinds = [SLIDING, SLIDING, SLIDING, FULL]
    sliding, full = (target.per_layer_config[target.layer_types.index(kind)] for kind in (SLIDING, FULL))
    text: dict[str, Any] = {
        **shrink.widths(vocab_size=262_144, **published),
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "num_attention_heads": heads,
        "num_key_value_heads": sliding.num_key_value_heads,
        "num_global_key_value_heads": full.num_key_value_heads,
        "attention_k_eq_v": target.attention_k_eq_v,
        "head_dim": sliding.head_dim,
        "global_head_dim": full.head_dim,
        "sliding_window": target.sliding_window,
        "max_position_embeddings": target.max_position_embeddings,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    with constructible_assistants():
        return Gemma4AssistantConfig(
            text_config=Gemma4TextConfig(**text),
            backbone_hidden_size=target.hidden_size,
            use_ordered_embeddings=ordered,
            num_centroids=2048 // shrink.divisor,
            centroid_intermediate_top_k=32 // shrink.divisor,
        )


def _gpt_oss_20b(shrink: Shrink) -> PreTrainedConfig:
    return GptOssConfig(
        **shrink.widths(vocab_size=201_088, hidden_size=2880, intermediate_size=2880, head_dim=64, sliding_window=128),
        num_hidden_layers=shrink.depth(24),
        num_local_experts=32,
        num_experts_per_tok=4,
        num_attention_heads=64,
        num_key_value_heads=8,
    )


def _llama_8b(shrink: Shrink) -> PreTrainedConfig:
    return LlamaConfig(
        **shrink.widths(vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, head_dim=128),
        num_hidden_layers=shrink.depth(32),
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        bos_token_id=None,
        eos_token_id=None,
    )


def _eagle3(target: Any, shrink: Shrink, *, intermediate_size: int, norm_before_fc: bool = False) -> Eagle3Spec:
    """One layer with the target's widths, over the 32,000 most frequent tokens."""
    depth = target.num_hidden_layers
    heads = gcd(target.num_attention_heads, target.hidden_size)  # fewer only where a width was shrunk
    return Eagle3Spec(
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_heads=heads,
        num_kv_heads=gcd(target.num_key_value_heads, heads),
        head_dim=target.head_dim,
        aux_layers=(min(2, depth), depth // 2, max(depth - 3, 0)),
        max_position_embeddings=target.max_position_embeddings,
        norm_before_fc=norm_before_fc,
        **shrink.widths(intermediate_size=intermediate_size, draft_vocab_size=32_000),
    )


MTP_DRAFTS = {"chain": SpecConfig(4), "tree": SpecConfig(4, 4, 16)}
ON_REQUEST = {"chain7": SpecConfig(7)}
"""Drafts of any drafter that are measured when they are asked for: this one verifies 8 nodes."""
EAGLE3_DRAFTS = {"chain": SpecConfig(4), "tree": SpecConfig(6, 4, 32)}

_E4B_WIDTHS = {
    "hidden_size": 2560,
    "intermediate_size": 10_240,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
}
_26B_WIDTHS = {"hidden_size": 2816, "intermediate_size": 2112, "moe_intermediate_size": 704, "sliding_window": 1024}
_31B_WIDTHS = {"hidden_size": 5376, "intermediate_size": 21_504, "sliding_window": 1024}
_LARGE_GEMMA4: dict[str, Any] = {
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "max_position_embeddings": 262_144,
}

SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            "gemma4-e4b",
            "google/gemma-4-E4B-it with its MTP assistant",
            partial(_gemma4, layers=42, shared=18, widths=_E4B_WIDTHS, num_attention_heads=8, num_key_value_heads=2),
            partial(_gemma4_assistant, heads=4, ordered=True, hidden_size=256, intermediate_size=2048),
            MTP_DRAFTS,
        ),
        Shape(
            "gemma4-26b-a4b",
            "google/gemma-4-26B-A4B-it with its MTP assistant",
            partial(
                _gemma4,
                layers=30,
                widths=_26B_WIDTHS,
                num_attention_heads=16,
                num_key_value_heads=8,
                num_global_key_value_heads=2,
                enable_moe_block=True,
                num_experts=128,
                top_k_experts=8,
                **_LARGE_GEMMA4,
            ),
            partial(_gemma4_assistant, heads=16, ordered=False, hidden_size=1024, intermediate_size=8192),
            MTP_DRAFTS,
        ),
        Shape(
            "gemma4-31b",
            "google/gemma-4-31B-it with its MTP assistant",
            partial(
                _gemma4,
                layers=60,
                widths=_31B_WIDTHS,
                num_attention_heads=32,
                num_key_value_heads=16,
                num_global_key_value_heads=4,
                **_LARGE_GEMMA4,
            ),
            partial(_gemma4_assistant, heads=32, ordered=False, hidden_size=1024, intermediate_size=8192),
            MTP_DRAFTS,
        ),
        Shape(
            "gpt-oss-20b",
            "openai/gpt-oss-20b, experts unquantised, with the EAGLE-3 head published for gpt-oss-120b (same widths)",
            _gpt_oss_20b,
            partial(_eagle3, intermediate_size=17_280),
            EAGLE3_DRAFTS,
        ),
        Shape(
            "llama-8b",
            "meta-llama/Llama-3.1-8B-Instruct with yuhuili's EAGLE-3 head",
            _llama_8b,
            partial(_eagle3, intermediate_size=14_336),
            EAGLE3_DRAFTS,
        ),
    )
}
