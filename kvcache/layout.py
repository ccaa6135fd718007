"""What each layer of a model keeps, as data, and the index spaces of the cache groups that follow from it. It allocates
nothing.

    CacheField    k: 4 heads x 192; v: 4 heads x 128
    Retention     every token; or the n newest of a window; or records, until a recurrent state has folded them
    LayerSpec     one layer: its fields and retention, the layer that owns them, and the state if it is recurrent
    cache group   all layers of an engine's models with one retention: they share slots and page tables

Pools, allocator and request table know retentions, not kinds of layers: a model with other layers has another layout.
Only the states of recurrent layers, which take no slots, have code of their own in the store and the prefix cache. A
layout is read from a Hugging Face text config. Invariant: an owner owns itself, and a layer has its owner's fields and
retention.

A token owns one slot in the primary pool (`PrimaryLoc`). It owns one more in the pool of each windowed group while a
query can still see the token through that window. vLLM keeps one block table per group; here a request has one row of
primary slots, and the slots of a group are looked up from that row. The numbers of two pools are unrelated. Reading one
pool with a slot number of another is the class of bugs that these types exclude.

    PrimaryLoc   slots as the request table has them
    GroupLoc     slots of the pool of one group; for the primary group, the same numbers

Both are `NewType`s over int64 tensors, so mixing them is a type error under `mypy --strict` and costs nothing at run
time. A `PrimaryLoc` becomes a `GroupLoc` in `HybridAllocator.translate`, and where the page tables of a forward are
made (`attention/kernels/page_table.py`), from the same maps; plans and drafts only reshape the slots
that they are given. No type checks that the group is the right one. So values by group are a `ByGroup`, indexed with
the layer's own `GroupId`, and the sanitizer compares each plan with the table.

Suffixes outside kernels: `row` (row of the request table), `pos` (position in a sequence), `node` (tree node),
`page`, `slot` (= page * page_size + offset), `layer` / `draft_layer`; `x_to_y` maps x to y; lengths end in `_len`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, NewType, TypeVar

import torch

from specdec.errors import ConfigError, UnsupportedModelError
from specdec.kvcache.recurrent_state import FOLD, StateShape

PrimaryLoc = NewType("PrimaryLoc", torch.Tensor)
GroupLoc = NewType("GroupLoc", torch.Tensor)

GroupId = NewType("GroupId", int)
PRIMARY = GroupId(0)
"""The group of the layers that keep every token. It always exists, even if the model has no such layer."""

NULL_SLOT = 0
"""Slot 0 (and the rest of page 0) of each pool takes the writes of padded rows. It is never allocated."""

T = TypeVar("T", covariant=True)
S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class ByGroup(Generic[T]):
    """One value per group, the primary group first."""

    values: tuple[T, ...]

    def __getitem__(self, group: GroupId) -> T:
        return self.values[group]

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[T]:
        return iter(self.values)

    def group_of(self, value: object) -> GroupId:
        """The group that has this value."""
        assert value in self.values, f"no group has {value}; there are {self.values}"
        return GroupId(self.values.index(value))

    def items(self) -> Iterator[tuple[GroupId, T]]:
        return ((GroupId(number), value) for number, value in enumerate(self.values))

    def map(self, function: Callable[[T], S]) -> "ByGroup[S]":
        return ByGroup(tuple(map(function, self.values)))


FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"
RECURRENT_TYPES = frozenset({"linear_attention", "conv"})
"""Layer types that keep one state per request instead of K/V: see `recurrent_state.py`."""
STATELESS_TYPES = frozenset({"mlp", "moe"})
"""Layer types that keep nothing per token or request."""


class CacheField(NamedTuple):
    """What a layer stores for each token under one name: `heads` x `dim` numbers.

    fp8: stored in 8 bits, with one scale per head (`fp8_pool.py`). dtype None: the model's dtype.
    """

    name: str
    heads: int
    dim: int
    fp8: bool = False
    dtype: torch.dtype | None = None

    def bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a slot, in a model of this dtype."""
        return self.heads * (self.dim + 4 if self.fp8 else self.dim * (self.dtype or dtype).itemsize)


class Retention(NamedTuple):
    """The newest `window` tokens of a request stay readable, the query's own included; None: all of them.

    cached: cached prefixes keep these fields too. False: records of recurrent layers, which are read until the state
    has folded them.
    """

    window: int | None = None
    cached: bool = True

    @property
    def name(self) -> str:
        if not self.cached:
            return "records"
        return "full" if self.window is None else f"window {self.window}"

    def num_kept(self, lookahead: int) -> int | None:
        """How many tokens an engine keeps for requests with `lookahead` uncommitted tokens; None: all.

        A record is kept until it is folded (up to FOLD tokens) and no round in flight reads it (twice `lookahead`
        tokens). A grammar may force up to FOLD tokens in a round, root included, even if the lookahead is shorter.
        """
        return self.window if self.cached else FOLD + max(2 * lookahead, FOLD)


KEEP_ALL = Retention()
RECORDS = Retention(cached=False)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The cache of one decoder layer. `owner` is the layer whose fields it reads.

    shares: number of ranks that divide its heads; `fields` describes one rank's part. 1: all heads are here. state:
    shape of a recurrent layer's state; None: the layer is not recurrent.
    """

    layer: int
    owner: int
    layer_type: str
    fields: tuple[CacheField, ...]
    retention: Retention
    shares: int = 1
    state: StateShape | None = None

    @property
    def recurrent(self) -> bool:
        return self.layer_type in RECURRENT_TYPES

    @property
    def k(self) -> CacheField:
        return self.fields[0]

    @property
    def v(self) -> CacheField:
        return self.fields[1]

    @property
    def window(self) -> int | None:
        """The window through which the layer attends; None: it sees every token."""
        return self.retention.window


def attention_fields(heads: int, k_dim: int, v_dim: int | None = None) -> tuple[CacheField, ...]:
    """Fields of an attention layer: K and V of `heads` heads. v_dim None: V has the size of K."""
    return CacheField("k", heads, k_dim), CacheField("v", heads, k_dim if v_dim is None else v_dim)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """All layers of a model."""

    layers: tuple[LayerSpec, ...]

    @property
    def owners(self) -> tuple[LayerSpec, ...]:
        """The layers that store something."""
        return tuple(spec for spec in self.layers if spec.owner == spec.layer)

    @property
    def max_window(self) -> int | None:
        return max((spec.window for spec in self.layers if spec.window is not None), default=None)

    @property
    def recurrent(self) -> bool:
        """Does some layer keep a state per request?"""
        return any(spec.recurrent for spec in self.layers)

    @property
    def max_head_dim(self) -> int:
        """The widest key or value of any attention layer."""
        return max((field.dim for spec in self.layers if not spec.recurrent for field in spec.fields), default=1)

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the states of one request, in a model of this dtype."""
        return sum(spec.state.bytes(dtype) for spec in self.owners if spec.state is not None)

    def last_owner(self, layer_type: str) -> LayerSpec | None:
        """The owner that the last layer of this type reads. A frozen-KV drafter layer of this type reads the same
        owner."""
        of_type = [spec for spec in self.layers if spec.layer_type == layer_type]
        return self.layers[of_type[-1].owner] if of_type else None

    def map(self, change: Callable[[LayerSpec], LayerSpec]) -> "KVLayout":
        """This layout with `change` applied to each layer."""
        return KVLayout(tuple(map(change, self.layers)))

    def share(self, count: int) -> "KVLayout":
        """The layout of one of `count` ranks, which divide the heads of every layer. If there are fewer heads than
        ranks, heads are repeated: rank r holds head r * heads // count. Heads of recurrent layers are not repeated."""

        def divided(spec: LayerSpec) -> LayerSpec:
            if spec.state is not None:
                inputs, *records = spec.fields
                own = (field._replace(heads=field.heads // count) for field in records)
                fields = inputs._replace(dim=inputs.dim // count), *own
                return replace(spec, fields=fields, shares=count, state=spec.state.share(count))
            fields = tuple(field._replace(heads=-(-field.heads // count)) for field in spec.fields)
            return replace(spec, fields=fields, shares=min(spec.k.heads, count))

        return self.map(divided)

    def in_fp8(self) -> "KVLayout":
        """This layout with 8-bit fields. Raises ConfigError if a head has an odd size: numbers are stored in pairs."""
        for spec in self.layers:
            for field in spec.fields:
                if field.dim % 2:
                    raise ConfigError(
                        f"kv_dtype='fp8', and {field.name} of layer {spec.layer} has {field.dim} numbers per head, "
                        "which are stored in pairs; leave kv_dtype None"
                    )
        return self.map(lambda spec: replace(spec, fields=tuple(f._replace(fp8=True) for f in spec.fields)))

    @classmethod
    def from_windows(cls, windows: Sequence[int | None], num_kv_heads: int, head_dim: int) -> "KVLayout":
        """One layer for each of these windows, all with K and V of one shape; None: a full-attention layer."""
        fields = attention_fields(num_kv_heads, head_dim)
        kept = [(FULL_ATTENTION if n is None else SLIDING_ATTENTION, Retention(n)) for n in windows]
        return cls(tuple(LayerSpec(i, i, kind, fields, retention) for i, (kind, retention) in enumerate(kept)))

    def slot_bytes(self, retention: Retention, dtype: torch.dtype) -> int:
        """Bytes of one token in the layers with this retention."""
        kept = [field for spec in self.owners if spec.retention == retention for field in spec.fields]
        return sum(field.bytes(dtype) for field in kept)


def cache_groups(layouts: Iterable[KVLayout]) -> ByGroup[Retention]:
    """Groups of these models' layers, which share slots and page tables, by what they retain: the primary group, which
    keeps every token, then a group for each window, the narrowest first, then records."""
    found = {KEEP_ALL, *(spec.retention for layout in layouts for spec in layout.layers)}
    return ByGroup(tuple(sorted(found, key=lambda kept: (not kept.cached, kept.window or 0))))


def layout_from_config(config: Any) -> KVLayout:
    """Read the layout from a HF text config (`config.get_text_config()` of a multimodal one).

    Honours `layer_types`, `sliding_window` (a model without `layer_types` but with a window slides on every layer, as
    Mistral does), per-layer head sizes and windows (`per_layer_config`), and `num_kv_shared_layers`. Raises
    UnsupportedModelError for layer types that are neither attention, full or sliding, nor recurrent, nor without
    state, and for a model whose text attention is not causal.
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
    if layer_types is None and (kinds := getattr(config, "attention_layers", None)):  # of GPT-Neo
        layer_types = [SLIDING_ATTENTION if kind == "local" else FULL_ATTENTION for kind in kinds]
    elif layer_types is None:
        layer_types = [SLIDING_ATTENTION if window else FULL_ATTENTION] * num_layers
    layer_types = list(layer_types)[:num_layers]
    supported = (FULL_ATTENTION, SLIDING_ATTENTION, *sorted(RECURRENT_TYPES))
    unknown = sorted(set(layer_types).difference(supported, STATELESS_TYPES))
    if unknown:
        raise UnsupportedModelError(
            f"{name}: layer types {unknown} have no paged KV cache here; supported: {', '.join(supported)}"
        )
    first_shared = num_layers - int(getattr(config, "num_kv_shared_layers", 0) or 0)
    specs: list[LayerSpec] = []
    for layer, layer_type in enumerate(layer_types):
        if layer_type in RECURRENT_TYPES or layer_type in STATELESS_TYPES:  # fields are measured, if there are any
            kept = RECORDS if layer_type in RECURRENT_TYPES else KEEP_ALL
            specs.append(LayerSpec(layer, layer, layer_type, (), kept))
            continue
        owner = layer if layer < first_shared else _owner_of_shared(name, layer, layer_types, first_shared)
        fields, retention = _kept_by_attention(name, config, owner, layer_type)
        specs.append(LayerSpec(layer, owner, layer_type, fields, retention))
    return KVLayout(tuple(specs))


def _owner_of_shared(name: str, layer: int, layer_types: Sequence[str], first_shared: int) -> int:
    """The last layer of its type that stores K/V."""
    layer_type = layer_types[layer]
    same_type = [i for i in range(first_shared) if layer_types[i] == layer_type]
    if not same_type:
        raise UnsupportedModelError(
            f"{name}: kv-shared layer {layer} ({layer_type}) has no earlier layer of its type to read from; "
            f"the {first_shared} layers before the shared ones are {sorted(set(layer_types[:first_shared]))}"
        )
    return same_type[-1]


def _kept_by_attention(name: str, config: Any, layer: int, layer_type: str) -> tuple[tuple[CacheField, ...], Retention]:
    """Fields and retention of an attention layer. Configs with `per_layer_config` forbid reading the global
    attributes."""
    per_layer = getattr(config, "per_layer_config", None)
    own = per_layer[layer] if per_layer else config
    heads = getattr(own, "num_key_value_heads", None) or own.num_attention_heads
    head_dim = getattr(own, "head_dim", None)
    fields = attention_fields(heads, config.hidden_size // config.num_attention_heads if head_dim is None else head_dim)
    if layer_type != SLIDING_ATTENTION:
        return fields, KEEP_ALL
    of_all = getattr(config, "sliding_window", getattr(config, "window_size", None))  # the latter in GPT-Neo
    window = getattr(own, "sliding_window", None) or of_all
    if not isinstance(window, int) or window < 1:
        raise UnsupportedModelError(f"{name}: sliding layers need a positive sliding_window, got {window!r}")
    return fields, Retention(window)
