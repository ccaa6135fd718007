"""Published models as configs without weights: what `specdec bench --shape` makes at random on the device.

A shape is the text part of a target and the drafter that is published for it. Nothing is read and nothing is made here:
phases/random_weights.py builds targets and drafters, on a device or on `meta`. `Shrink` makes a shape smaller in depth
and width for machines that it does not fit; what is measured on such a one is no figure of the model.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any

from transformers import Gemma4AssistantConfig, Gemma4TextConfig, GptOssConfig, LlamaConfig, PreTrainedConfig

from specdec.config import SpecConfig
from specdec.draft_models.eagle3.head import Eagle3Spec
from specdec.draft_models.gemma4_mtp import constructible_assistants
from specdec.errors import ConfigError
from specdec.kvcache.layout import FULL_ATTENTION, SLIDING_ATTENTION

WIDTHS = frozenset(
    f"{name}_size" for name in ("vocab", "draft_vocab", "hidden", "intermediate", "moe_intermediate")
) | {"head_dim", "global_head_dim", "sliding_window", "hidden_size_per_layer_input", "vocab_size_per_layer_input"}
"""Fields of a config that `Shrink` divides."""
MAX_SHRINK = 16
"""Narrower heads and windows are no attention."""
MIN_LAYERS = 2


Fields = Mapping[str, Any]
MakeConfig = Callable[..., PreTrainedConfig]


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
        return ", ".join(parts if self.divisor == 1 else [*parts, f"widths / {self.divisor}"])

    def depth(self, published: int) -> int:
        if self.layers is not None and self.layers > published:
            raise ConfigError(f"layers={self.layers}: this shape has {published}")
        return self.layers or published

    def fields(self, **published: Any) -> dict[str, Any]:
        """With widths in multiples of 8, as all published ones are and grouped products want them."""
        rounded = {name: -(-published[name] // (8 * self.divisor)) * 8 for name in WIDTHS & published.keys()}
        return published | rounded


@dataclass(frozen=True, slots=True)
class Shape:
    """A target and its drafter, as configs. drafts: shapes of the draft that are measured, by name."""

    name: str
    published: str
    target: Callable[[Shrink], PreTrainedConfig]
    drafter: Callable[[Any, Shrink], PreTrainedConfig | Eagle3Spec]
    drafts: Mapping[str, SpecConfig]


def find_shape(name: str) -> Shape:
    """Raises ConfigError with the list where there is none of that name."""
    if name not in SHAPES:
        raise ConfigError(f"shape={name!r} is unknown; choose one of {', '.join(SHAPES)}")
    return SHAPES[name]


def _config(kind: MakeConfig, layers: int, published: Fields, shrink: Shrink) -> PreTrainedConfig:
    return kind(num_hidden_layers=shrink.depth(layers), **shrink.fields(**published))


def _gemma4(layers: int, published: Fields, shrink: Shrink, shared: int = 0) -> PreTrainedConfig:
    """Five sliding layers, then a full one. The last `shared` of the published layers read K/V of earlier ones."""
    depth = shrink.depth(layers)
    kinds = [FULL_ATTENTION if (i + 1) % 6 == 0 else SLIDING_ATTENTION for i in range(depth)]
    return Gemma4TextConfig(
        **shrink.fields(vocab_size=262_144, head_dim=256, global_head_dim=512, **published),
        num_hidden_layers=depth,
        layer_types=[*kinds[:-1], FULL_ATTENTION],
        # an owner of each kind must be left before those that share
        num_kv_shared_layers=max(0, min(round(depth * shared / layers), depth - 6)),
        final_logit_softcapping=30.0,
        bos_token_id=None,
        eos_token_id=None,
    )


def _gemma4_assistant(target: Any, shrink: Shrink, *, ordered: bool = False, **published: int) -> PreTrainedConfig:
    """Four layers without K/V of their own; heads of K/V, head sizes and window are the target's."""
    kinds = [SLIDING_ATTENTION] * 3 + [FULL_ATTENTION]
    sliding, full = (target.per_layer_config[target.layer_types.index(kind)] for kind in kinds[2:])
    text: dict[str, Any] = {
        **shrink.fields(vocab_size=262_144, **published),
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
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


def _eagle3(target: Any, shrink: Shrink, *, intermediate_size: int) -> Eagle3Spec:
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
        **shrink.fields(intermediate_size=intermediate_size, draft_vocab_size=32_000),
    )


MTP_DRAFTS = {"chain": SpecConfig(4), "tree": SpecConfig(4, 4, 16)}
EAGLE3_DRAFTS = {"chain": SpecConfig(4), "tree": SpecConfig(6, 4, 32)}
ON_REQUEST = {"chain7": SpecConfig(7)}
"""Drafts of any drafter that are measured when they are asked for: this one verifies 8 nodes."""

_E4B = {"hidden_size": 2560, "intermediate_size": 10_240, "sliding_window": 512, "num_attention_heads": 8}
_E4B |= {"num_key_value_heads": 2, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144}
_LARGE = {"sliding_window": 1024, "hidden_size_per_layer_input": 0, "max_position_embeddings": 262_144}
_LARGE["attention_k_eq_v"] = True
_26B = {"hidden_size": 2816, "intermediate_size": 2112, "moe_intermediate_size": 704}
_26B_HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2}
_26B_EXPERTS = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8}
_31B = {"hidden_size": 5376, "intermediate_size": 21_504}
_31B_HEADS = {"num_attention_heads": 32, "num_key_value_heads": 16, "num_global_key_value_heads": 4}
_GPT_OSS = {"vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880, "sliding_window": 128}
_GPT_OSS_HEADS = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64}
_GPT_OSS_EXPERTS = {"num_local_experts": 32, "num_experts_per_tok": 4}
_LLAMA: dict[str, Any] = {"vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336}
_LLAMA_HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
_LLAMA_ROPE: dict[str, Any] = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0}
_LLAMA_ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_LLAMA_REST = {"max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_parameters": _LLAMA_ROPE}
_LLAMA |= {"bos_token_id": None, "eos_token_id": None}

SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            "gemma4-e4b",
            "google/gemma-4-E4B-it with its MTP assistant",
            partial(_gemma4, 42, _E4B, shared=18),
            partial(_gemma4_assistant, ordered=True, num_attention_heads=4, hidden_size=256, intermediate_size=2048),
            MTP_DRAFTS,
        ),
        Shape(
            "gemma4-26b-a4b",
            "google/gemma-4-26B-A4B-it with its MTP assistant",
            partial(_gemma4, 30, _LARGE | _26B | _26B_HEADS | _26B_EXPERTS),
            partial(_gemma4_assistant, num_attention_heads=16, hidden_size=1024, intermediate_size=8192),
            MTP_DRAFTS,
        ),
        Shape(
            "gemma4-31b",
            "google/gemma-4-31B-it with its MTP assistant",
            partial(_gemma4, 60, _LARGE | _31B | _31B_HEADS),
            partial(_gemma4_assistant, num_attention_heads=32, hidden_size=1024, intermediate_size=8192),
            MTP_DRAFTS,
        ),
        Shape(
            "gpt-oss-20b",
            "openai/gpt-oss-20b, experts unquantised, with the EAGLE-3 head published for gpt-oss-120b (same widths)",
            partial(_config, GptOssConfig, 24, _GPT_OSS | _GPT_OSS_HEADS | _GPT_OSS_EXPERTS),
            partial(_eagle3, intermediate_size=17_280),
            EAGLE3_DRAFTS,
        ),
        Shape(
            "llama-8b",
            "meta-llama/Llama-3.1-8B-Instruct with yuhuili's EAGLE-3 head",
            partial(_config, LlamaConfig, 32, _LLAMA | _LLAMA_HEADS | _LLAMA_REST),
            partial(_eagle3, intermediate_size=14_336),
            EAGLE3_DRAFTS,
        ),
    )
}
