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

from transformers import (
    Gemma4AssistantConfig,
    Gemma4TextConfig,
    Gemma4UnifiedAssistantConfig,
    Gemma4UnifiedTextConfig,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

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
    """`layers`: of the target, None: all. `divisor`: widths (hidden, heads, vocabulary, window) are divided by it, and
    rounded up to multiples of `multiple`: grouped products need 8, packed weights 32."""

    layers: int | None = None
    divisor: int = 1
    multiple: int = 8

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
        """Fields with widths divided and rounded up. Published ones are multiples of 32, so undivided they stay."""
        step = self.multiple
        rounded = {name: -(-published[name] // (step * self.divisor)) * step for name in WIDTHS & published.keys()}
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


def _gemma4(
    layers: int,
    published: Fields,
    shrink: Shrink,
    *,
    kind: MakeConfig = Gemma4TextConfig,
    shared: int = 0,
    period: int = 6,
) -> PreTrainedConfig:
    """The last layer of each `period` is a full one, the others slide. The last `shared` of the published layers read
    K/V of earlier ones."""
    depth = shrink.depth(layers)
    kinds = [FULL_ATTENTION if (i + 1) % period == 0 else SLIDING_ATTENTION for i in range(depth)]
    return kind(
        **shrink.fields(vocab_size=262_144, head_dim=256, global_head_dim=512, **published),
        num_hidden_layers=depth,
        layer_types=[*kinds[:-1], FULL_ATTENTION],
        # an owner of each kind must be left before those that share
        num_kv_shared_layers=max(0, min(round(depth * shared / layers), depth - period)),
        final_logit_softcapping=30.0,
        bos_token_id=None,
        eos_token_id=None,
    )


def _gemma4_assistant(target: Any, shrink: Shrink, *, ordered: bool = False, **published: int) -> PreTrainedConfig:
    """Four layers without K/V of their own; heads of K/V, head sizes and window are the target's."""
    kinds = [SLIDING_ATTENTION] * 3 + [FULL_ATTENTION]
    sliding, full = (target.per_layer_config[target.layer_types.index(kind)] for kind in kinds[2:])
    unified = isinstance(target, Gemma4UnifiedTextConfig)
    make: MakeConfig = Gemma4UnifiedAssistantConfig if unified else Gemma4AssistantConfig
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
        **({} if unified else NO_PLE),
        "bos_token_id": None,
        "eos_token_id": None,
    }
    with constructible_assistants():
        return make(
            text_config=type(target)(**text),
            backbone_hidden_size=target.hidden_size,
            use_ordered_embeddings=ordered,
            num_centroids=2048 // shrink.divisor,
            centroid_intermediate_top_k=32 // shrink.divisor,
        )


def _eagle3(
    target: Any, shrink: Shrink, *, intermediate_size: int, hidden_size: int | None = None, num_heads: int | None = None
) -> Eagle3Spec:
    """One layer with the target's widths and heads, unless others are given, over the 32,000 most frequent tokens. A
    head of another width than the target's has an embedding table of its own."""
    depth = target.num_hidden_layers
    sizes = {"intermediate_size": intermediate_size, "draft_vocab_size": 32_000}
    fields = shrink.fields(**sizes, **({} if hidden_size is None else {"hidden_size": hidden_size}))
    width = fields.pop("hidden_size", target.hidden_size)
    heads = gcd(num_heads or target.num_attention_heads, width)  # fewer only where a width was shrunk
    return Eagle3Spec(
        hidden_size=width,
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_heads=heads,
        num_kv_heads=gcd(target.num_key_value_heads, heads),
        head_dim=target.head_dim,
        aux_layers=(min(2, depth), depth // 2, max(depth - 3, 0)),
        max_position_embeddings=target.max_position_embeddings,
        owns_embed=hidden_size is not None,
        **fields,
    )


MTP_DRAFTS = {"chain": SpecConfig(4), "tree": SpecConfig(4, 4, 16)}
EAGLE3_DRAFTS = {"chain": SpecConfig(4), "tree": SpecConfig(6, 4, 32)}
ON_REQUEST = {"chain7": SpecConfig(7), "tree60": SpecConfig(6, 10, 60)}
"""Drafts of any drafter, measured only when they are named: a chain that verifies 8 nodes, a tree of EAGLE's width."""

_PLE = {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144}
NO_PLE = dict.fromkeys(_PLE, 0)
"""Fields of a Gemma 4 without per-layer embeddings."""
_E2B = {"hidden_size": 1536, "intermediate_size": 6144, "use_double_wide_mlp": True, "num_attention_heads": 8}
_E2B |= {"num_key_value_heads": 1, "sliding_window": 512, **_PLE}
_E4B = {"hidden_size": 2560, "intermediate_size": 10_240, "sliding_window": 512, "num_attention_heads": 8}
_E4B |= {"num_key_value_heads": 2, **_PLE}
_LARGE: dict[str, Any] = {"sliding_window": 1024, "max_position_embeddings": 262_144, "attention_k_eq_v": True}
_12B = {"hidden_size": 3840, "intermediate_size": 15_360}
_12B_HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2}
_26B = {"hidden_size": 2816, "intermediate_size": 2112, "moe_intermediate_size": 704, "hidden_size_per_layer_input": 0}
_26B_HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2}
_26B_EXPERTS = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8}
_31B = {"hidden_size": 5376, "intermediate_size": 21_504, "hidden_size_per_layer_input": 0}
_31B_HEADS = {"num_attention_heads": 32, "num_key_value_heads": 16, "num_global_key_value_heads": 4}
_GPT_OSS = {"vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880, "sliding_window": 128}
_GPT_OSS |= {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_experts_per_tok": 4}
_LLAMA: dict[str, Any] = {"vocab_size": 128_256, "num_key_value_heads": 8, "head_dim": 128}
_LLAMA_ROPE: dict[str, Any] = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0}
_LLAMA_ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_LLAMA |= {"max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_parameters": _LLAMA_ROPE}
_LLAMA |= {"bos_token_id": None, "eos_token_id": None}
_8B = {"hidden_size": 4096, "intermediate_size": 14_336, "num_attention_heads": 32}
_70B = {"hidden_size": 8192, "intermediate_size": 28_672, "num_attention_heads": 64}
_QWEN3: dict[str, Any] = {"vocab_size": 151_936, "max_position_embeddings": 40_960, "num_attention_heads": 32}
_QWEN3 |= {"head_dim": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}}
_QWEN3_8B = {"hidden_size": 4096, "intermediate_size": 12_288, "num_key_value_heads": 8}
_QWEN3_30B = {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_key_value_heads": 4}
_QWEN3_30B_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
_SMALL_MTP = partial(_gemma4_assistant, ordered=True, num_attention_heads=4, hidden_size=256, intermediate_size=2048)
_MTP = partial(_gemma4_assistant, hidden_size=1024, intermediate_size=8192)

SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            "gemma4-e2b",
            "google/gemma-4-E2B-it with its MTP assistant",
            partial(_gemma4, 35, _E2B, shared=20, period=5),
            _SMALL_MTP,
            MTP_DRAFTS,
        ),
        Shape(
            "gemma4-e4b",
            "google/gemma-4-E4B-it with its MTP assistant",
            partial(_gemma4, 42, _E4B, shared=18),
            _SMALL_MTP,
            MTP_DRAFTS,
        ),
        Shape(
            "gemma4-12b",
            "google/gemma-4-12B-it with its MTP assistant",
            partial(_gemma4, 48, _LARGE | _12B | _12B_HEADS, kind=Gemma4UnifiedTextConfig),
            partial(_MTP, num_attention_heads=16),
            MTP_DRAFTS,
        ),
        Shape(
            "gemma4-26b-a4b",
            "google/gemma-4-26B-A4B-it with its MTP assistant",
            partial(_gemma4, 30, _LARGE | _26B | _26B_HEADS | _26B_EXPERTS),
            partial(_MTP, num_attention_heads=16),
            MTP_DRAFTS,
        ),
        Shape(
            "gemma4-31b",
            "google/gemma-4-31B-it with its MTP assistant",
            partial(_gemma4, 60, _LARGE | _31B | _31B_HEADS),
            partial(_MTP, num_attention_heads=32),
            MTP_DRAFTS,
        ),
        Shape(
            "gpt-oss-20b",
            "openai/gpt-oss-20b with the EAGLE-3 head published for gpt-oss-120b (same widths)",
            partial(_config, GptOssConfig, 24, _GPT_OSS | {"num_local_experts": 32}),
            partial(_eagle3, intermediate_size=17_280),
            EAGLE3_DRAFTS,
        ),
        Shape(
            "gpt-oss-120b",
            "openai/gpt-oss-120b with lmsys's EAGLE-3 head",
            partial(_config, GptOssConfig, 36, _GPT_OSS | {"num_local_experts": 128}),
            partial(_eagle3, intermediate_size=17_280),
            EAGLE3_DRAFTS,
        ),
        Shape(
            "llama-8b",
            "meta-llama/Llama-3.1-8B-Instruct with yuhuili's EAGLE-3 head",
            partial(_config, LlamaConfig, 32, _LLAMA | _8B),
            partial(_eagle3, intermediate_size=14_336),
            EAGLE3_DRAFTS,
        ),
        Shape(
            "llama-70b",
            "meta-llama/Llama-3.3-70B-Instruct with yuhuili's EAGLE-3 head",
            partial(_config, LlamaConfig, 80, _LLAMA | _70B),
            partial(_eagle3, intermediate_size=16_384, hidden_size=6144, num_heads=48),
            EAGLE3_DRAFTS,
        ),
        Shape(
            "qwen3-8b",
            "Qwen/Qwen3-8B with AngelSlim's or RedHat's EAGLE-3 head",
            partial(_config, Qwen3Config, 36, _QWEN3 | _QWEN3_8B),
            partial(_eagle3, intermediate_size=12_288),
            EAGLE3_DRAFTS,
        ),
        Shape(
            "qwen3-30b-a3b",
            "Qwen/Qwen3-30B-A3B with AngelSlim's or RedHat's EAGLE-3 head",
            partial(_config, Qwen3MoeConfig, 48, _QWEN3 | _QWEN3_30B | _QWEN3_30B_EXPERTS),
            partial(_eagle3, intermediate_size=6144),
            EAGLE3_DRAFTS,
        ),
    )
}
