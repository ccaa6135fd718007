"""Published models as configs without weights; `specdec bench --shape` makes random weights for them.

A shape is the text part of a target and the drafter published for it, from `bundled/model_shapes.json`. `Shrink` makes
it smaller for small machines; measurements of a shrunken shape are not figures of the model.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from specdec.config import SpecConfig
from specdec.draft_models.block.block_head import BlockSpec, spread_layers
from specdec.draft_models.eagle3.head import Eagle3Spec
from specdec.draft_models.gemma4_mtp import constructible_assistants
from specdec.draft_models.heads.head_modules import HeadSpec
from specdec.errors import ConfigError, counted, require_one_of
from specdec.kvcache.layout import FULL_ATTENTION, SLIDING_ATTENTION
from specdec.models.published import BUNDLED_DIR

SIZES = ("vocab", "draft_vocab", "hidden", "backbone_hidden", "intermediate", "moe_intermediate")
WIDTHS = frozenset(f"{name}_size" for name in SIZES) | (
    {"num_centroids", "centroid_intermediate_top_k"}
    | {"head_dim", "global_head_dim", "sliding_window", "hidden_size_per_layer_input", "vocab_size_per_layer_input"}
    | {"share_expert_dim", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"}
    | {"linear_key_head_dim", "linear_value_head_dim", "shared_expert_intermediate_size"}
)
"""Fields of a config that `Shrink` divides."""
PATTERNS = {"sliding_window_pattern": SLIDING_ATTENTION, "recurrent_pattern": "linear_attention"}
"""Layer type between full-attention layers, by the shape's field that holds their period."""
MAX_SHRINK = 16
"""Largest divisor: with a larger one heads and windows become too narrow to be of use."""
MIN_LAYERS = 2
"""Fewest layers of a shrunken target."""


@dataclass(frozen=True, slots=True)
class Shrink:
    """How a shape is made smaller.

    `layers`: number of layers of the target; None: all. `divisor`: widths (hidden, heads, vocabulary, window) are
    divided by it, and rounded up to multiples of `multiple`: grouped products need 8, packed weights 32.
    """

    layers: int | None = None
    divisor: int = 1
    multiple: int = 8

    def __post_init__(self) -> None:
        if self.layers is not None and self.layers < MIN_LAYERS:
            raise ConfigError(f"layers={self.layers}: a target has at least {MIN_LAYERS}")
        if not 1 <= self.divisor <= MAX_SHRINK or MAX_SHRINK % self.divisor:
            raise ConfigError(f"shrink={self.divisor}: widths are divided by 1, 2, 4, 8 or {MAX_SHRINK}")

    @property
    def summary(self) -> str:
        """The changes in words; empty for the published shape."""
        parts = [] if self.layers is None else [counted(self.layers, "layer")]
        return ", ".join(parts if self.divisor == 1 else [*parts, f"widths / {self.divisor}"])

    def depth(self, published: int) -> int:
        if self.layers is not None and self.layers > published:
            raise ConfigError(f"layers={self.layers}: this shape has {published}")
        return self.layers or published

    def fields(self, **published: Any) -> dict[str, Any]:
        """Fields with widths divided and rounded up, in a `text_config` too. Published widths are multiples of 32, so
        divisor 1 keeps them."""
        step = self.multiple
        published |= {name: self.fields(**inner) for name, inner in published.items() if name == "text_config"}
        widths = {name: published[name] for name in WIDTHS & published.keys() if published[name] is not None}
        rounded = {name: -(-width // (step * self.divisor)) * step for name, width in widths.items()}
        return published | rounded


@dataclass(frozen=True, slots=True)
class MtpSpec:
    """MTP modules whose blocks have the attention of the target's layers. parts: which of norm, head and embed the
    modules own. dense: are their MLPs dense; None: like the target layer's."""

    modules: int
    parts: Sequence[str]
    dense: bool | None = None


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A target and its drafter, as fields of their configs.

    target_fields: may have "inside", the model_type of the multimodal config that contains the target's; the encoder of
    a shrunken shape has one layer. drafter_fields: their model_type "eagle3" makes an `Eagle3Spec`, "mtp" an `MtpSpec`,
    a name in `BLOCKS` a `BlockSpec`, and any other a config of transformers."""

    name: str
    published: str
    target_fields: Mapping[str, Any]
    drafter_fields: Mapping[str, Any]

    @property
    def drafts(self) -> dict[str, SpecConfig]:
        """Draft shapes that are measured, by name; none for drafters without random weights."""
        return DRAFTS.get(self.drafter_fields["model_type"], {})

    def target(self, shrink: Shrink) -> PreTrainedConfig:
        """Config of the target. The last layer, and the last of every `sliding_window_pattern` or `recurrent_pattern`
        layers, have full attention."""
        fields = shrink.fields(**self.target_fields)
        layers, whole = fields["num_hidden_layers"], fields.pop("inside", None)
        fields["num_hidden_layers"] = depth = shrink.depth(layers)
        for pattern, kind in PATTERNS.items():
            if (period := fields.pop(pattern, None)) is None:
                continue
            kinds = [FULL_ATTENTION if (i + 1) % period == 0 else kind for i in range(depth)]
            fields["layer_types"] = [*kinds[:-1], FULL_ATTENTION]
            if "num_kv_shared_layers" in fields:  # an owner of each kind must remain before the layers that share
                shared = min(round(depth * fields["num_kv_shared_layers"] / layers), depth - period)
                fields["num_kv_shared_layers"] = max(0, shared)
        config: PreTrainedConfig = AutoConfig.for_model(**fields)
        if whole is None:
            return config
        small: dict[str, Any] = {"vision_config": SMALL_VISION} if shrink.summary else {}
        return AutoConfig.for_model(whole, text_config=config.to_dict(), **small)

    def drafter(self, target: Any, shrink: Shrink) -> PreTrainedConfig | HeadSpec | MtpSpec:
        """target: its config, as `target` makes it or loaded."""
        fields = shrink.fields(**self.drafter_fields)
        match kind := fields.pop("model_type"):
            case "eagle3":
                return _eagle3(target, **fields)
            case "mtp":
                return MtpSpec(**fields)
            case "dflash" | "dspark":
                return block_spec_of(target, kind, **fields)
        with constructible_assistants():
            config: PreTrainedConfig = AutoConfig.for_model(kind, **fields)
        return config


def find_shape(name: str) -> ModelShape:
    """Raises ConfigError with the list of names if there is no such shape."""
    require_one_of("shape", name, SHAPES)
    return SHAPES[name]


def _eagle3(target: Any, *, hidden_size: int | None = None, num_heads: int | None = None, **fields: int) -> Eagle3Spec:
    """One layer with the target's widths and heads, unless others are given. A head whose width differs from the
    target's has its own embedding table."""
    depth, width = target.num_hidden_layers, hidden_size or target.hidden_size
    heads = gcd(num_heads or target.num_attention_heads, width)  # fewer only if a width was shrunk
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
        **fields,  # type: ignore[arg-type]
    )


def block_spec_of(target: Any, kind: str, *, layers: int, block_size: int, **fields: Any) -> BlockSpec:
    """Layers with the target's widths and heads; MASK is the target's last token. kind: of `BLOCKS`."""
    depth, table = target.num_hidden_layers, target.vocab_size
    taps = spread_layers(5, max(depth, 4))
    return BlockSpec(
        hidden_size=target.hidden_size,
        vocab_size=table,
        num_heads=target.num_attention_heads,
        num_kv_heads=target.num_key_value_heads,
        head_dim=target.head_dim,
        aux_layers=tuple(dict.fromkeys(min(entered, depth - 1) for entered in taps)),
        block_size=block_size,
        mask_token=table - 1,
        windows=(None,) * layers,
        draft_vocab_size=table if BLOCKS[kind].get("owns_embed") else None,
        **{"intermediate_size": target.intermediate_size, **BLOCKS[kind], **fields},
    )


BLOCKS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dspark": {"shifted": True, "owns_embed": True, "successor": "vanilla", "successor_rank": 256},
}
"""How block drafters differ, by kind."""
ASSISTANT_DRAFTS = {"chain": SpecConfig(4), "tree": SpecConfig(4, 4, 16)}
DRAFTS = {
    "dflash": {"block": SpecConfig(15), "tree": SpecConfig(15, 4, 32)},
    "dspark": {"block": SpecConfig(7), "tree": SpecConfig(7, 4, 32)},
    "eagle3": {"chain": SpecConfig(4), "tree": SpecConfig(6, 4, 32)},
    "gemma4_assistant": ASSISTANT_DRAFTS,
    "gemma4_unified_assistant": ASSISTANT_DRAFTS,
    "mtp": {"mtp1": SpecConfig(1), "mtp": SpecConfig(3), "tree": SpecConfig(3, 4, 16)},  # the depth of three modules
}
"""Drafts that are measured, by kind of drafter; other kinds have no random weights."""
SMALL_VISION = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
ON_REQUEST = {"chain7": SpecConfig(7), "tree60": SpecConfig(6, 10, 60)}
"""Drafts for any drafter, measured only if named: a chain that verifies 8 nodes, and a tree of EAGLE's width."""
_published = json.loads((BUNDLED_DIR / "model_shapes.json").read_text("utf-8"))
SHAPES = {
    name: ModelShape(name, shape["published"], _published[shape.get("target_of", name)]["target"], shape["drafter"])
    for name, shape in _published.items()
}
