"""Layout of a model's KV cache, read from its Hugging Face text config.

`KVLayout` answers, per decoder layer: which space its keys live in, which layer owns them (kv-shared layers read the
last non-shared layer of their type), how many kv heads of which size, and the sliding window. It allocates nothing.
One invariant: an owner owns itself, and a layer has its owner's space, heads and window.
"""

from dataclasses import dataclass, replace
from typing import Any

from specdec.errors import UnsupportedModelError
from specdec.kvcache.index_spaces import Space

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer: `owner` is the layer whose K/V it reads; `window` is None on full layers."""

    layer: int
    owner: int
    layer_type: str
    num_kv_heads: int
    head_dim: int
    window: int | None

    @property
    def space(self) -> Space:
        return Space.FULL if self.window is None else Space.SWA


@dataclass(frozen=True, slots=True)
class KVLayout:
    """All layers of a target. `window` is the widest sliding window, None for a model without sliding layers."""

    layers: tuple[LayerSpec, ...]

    @property
    def window(self) -> int | None:
        return max((spec.window for spec in self.layers if spec.window is not None), default=None)

    def owners(self, space: Space) -> tuple[LayerSpec, ...]:
        """The layers that store K/V in `space`."""
        return tuple(spec for spec in self.layers if spec.owner == spec.layer and spec.space is space)

    def last_owner(self, layer_type: str) -> LayerSpec | None:
        """The owner that the last layer of this type reads, as a frozen-KV drafter layer of that type does."""
        of_type = [spec for spec in self.layers if spec.layer_type == layer_type]
        return self.layers[of_type[-1].owner] if of_type else None

    def share(self, count: int) -> "KVLayout":
        """The layout of one rank, where the heads of every layer are divided among `count` ranks."""
        return KVLayout(tuple(replace(spec, num_kv_heads=spec.num_kv_heads // count) for spec in self.layers))

    @classmethod
    def uniform(cls, num_layers: int, num_kv_heads: int, head_dim: int) -> "KVLayout":
        """Layers that all keep K/V of one shape in full space, whatever window they attend through."""
        shape = FULL_ATTENTION, num_kv_heads, head_dim, None
        return cls(tuple(LayerSpec(layer, layer, *shape) for layer in range(num_layers)))

    def numbers_per_slot(self, space: Space) -> int:
        """Stored scalars (K and V, all owner layers) for one slot of `space`."""
        return sum(2 * spec.num_kv_heads * spec.head_dim for spec in self.owners(space))


def layout_from_config(config: Any) -> KVLayout:
    """Read the layout from a HF text config (`config.get_text_config()` of a multimodal one).

    Honours `layer_types`, `sliding_window` (a model without `layer_types` but with a window slides on every layer, as
    Mistral does), per-layer head sizes (`per_layer_config`), and `num_kv_shared_layers`.
    Raises UnsupportedModelError for layer types other than full and sliding attention, and for models whose text
    attention is not causal.
    """
    num_layers, name = int(config.num_hidden_layers), config.model_type
    bidirectional = getattr(config, "use_bidirectional_attention", None)
    if bidirectional in ("all", True):
        raise UnsupportedModelError(
            f"{name}: use_bidirectional_attention={bidirectional!r} makes text attention non-causal; "
            "specdec decodes causal language models only"
        )
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        layer_types = [SLIDING_ATTENTION if window else FULL_ATTENTION] * num_layers
    layer_types = list(layer_types)[:num_layers]
    supported = (FULL_ATTENTION, SLIDING_ATTENTION)
    unknown = sorted(set(layer_types).difference(supported))
    if unknown:
        raise UnsupportedModelError(
            f"{name}: layer types {unknown} have no paged KV cache here; supported: {', '.join(supported)}"
        )
    if SLIDING_ATTENTION in layer_types and (not isinstance(window, int) or window < 1):
        raise UnsupportedModelError(f"{name}: sliding layers need a positive sliding_window, got {window!r}")

    first_shared = num_layers - int(getattr(config, "num_kv_shared_layers", 0) or 0)
    specs: list[LayerSpec] = []
    for layer, layer_type in enumerate(layer_types):
        owner, slides = layer, layer_type == SLIDING_ATTENTION
        if layer >= first_shared:
            same_type = [i for i in range(first_shared) if layer_types[i] == layer_type]
            if not same_type:
                raise UnsupportedModelError(
                    f"{name}: kv-shared layer {layer} ({layer_type}) has no earlier layer of its type to read from; "
                    f"the {first_shared} layers before the shared ones are {sorted(set(layer_types[:first_shared]))}"
                )
            owner = same_type[-1]
        heads, head_dim = _kv_geometry(config, owner)
        specs.append(LayerSpec(layer, owner, layer_type, heads, head_dim, window if slides else None))
    return KVLayout(tuple(specs))


def _kv_geometry(config: Any, layer: int) -> tuple[int, int]:
    """(kv heads, head size) of one layer; hetero configs forbid reading the global attributes."""
    per_layer = getattr(config, "per_layer_config", None)
    layer_config = per_layer[layer] if per_layer else config
    heads = getattr(layer_config, "num_key_value_heads", None) or layer_config.num_attention_heads
    head_dim = getattr(layer_config, "head_dim", None)
    return int(heads), int(config.hidden_size // config.num_attention_heads if head_dim is None else head_dim)
