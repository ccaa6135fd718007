"""Describes a target from its config and modules, before weights are read. Refuses configs, placements and stacks of
layers that the runtime does not reproduce, before anything runs.

    layout           layer types and owners by the config; heads, sizes and windows by each layer's first attention call
    context length   by the config

Configs describe heads and sizes in too many ways, so the recorded calls decide. For example, multi-head latent
attention expands K to 192 and V to 128 numbers per head while `config.head_dim` is 64; and a window may or may not
count the query's own key. Whether a layer has a window is taken from the config, since some classes apply windows only
in a mask; if call and config disagree, the probe refuses the model.

Invariant of the context length: up to `max_len` tokens, the encoding of a position does not depend on the other rows of
a forward, so neither a batch nor a draft can change a request. RoPE of the types `longrope` and `dynamic` changes its
frequencies for all rows if the longest position of a forward exceeds a limit; so longer sequences are refused.

A model on the `meta` device (shapes without numbers), made from a config alone, is described too: drafters can be
fitted to it and its memory measured, but it cannot run.
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.errors import ConfigError, UnsupportedModelError, first_line
from specdec.gpu.operations import Operations
from specdec.kvcache.layer_context import AttentionCall, Recurrence
from specdec.kvcache.layout import (
    FULL_ATTENTION,
    KEEP_ALL,
    SLIDING_ATTENTION,
    CacheField,
    KVLayout,
    LayerSpec,
    Retention,
    attention_fields,
    layout_from_config,
)
from specdec.kvcache.recurrent_state import StateShape
from specdec.models.probe import TEXT_LEN, refusing
from specdec.models.recurrent_layers import replace_recurrent_modules
from specdec.modules.module_watch import ModuleWatch
from specdec.modules.private_copy import private_copy
from specdec.modules.transformers_names import auto_class, layers_of

META = torch.device("meta")

UNSUPPORTED_ATTRIBUTES = {
    "alibi": "uses ALiBi biases",
    "attention_chunk_size": "uses chunked attention",
    "index_topk": "uses sparse attention",
}
"""Config attributes that change the result in ways the runtime does not reproduce. A chunk size means nothing where
`layer_types` calls every layer full or sliding, as in MiMo-V2-Flash, whose published config has one."""

DYNAMIC_INT8 = ("torch.ao.nn.quantized", "torch.nn.quantized")
"""Packages of torch's modules that quantise activations."""


@dataclass(slots=True)
class GeometryContext:
    """A forward context that records what each layer's calls keep, and returns zeros."""

    fields: dict[int, tuple[CacheField, ...]] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)  # of attention layers
    states: dict[int, StateShape] = field(default_factory=dict)  # of recurrent layers

    def attend(self, call: AttentionCall) -> torch.Tensor:
        query, (_, heads, _, k_dim), v_dim = call.query, call.key.shape, call.value.shape[3]
        self.fields.setdefault(call.layer, attention_fields(heads, k_dim, v_dim))
        self.windows.setdefault(call.layer, call.sliding_window)
        return query.new_zeros((len(query), query.shape[2], query.shape[1], v_dim))

    def convolve(
        self, layer: int, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        channels, taps = weight.shape
        self.fields[layer] = (CacheField("inputs", 1, channels),)
        self.states[layer] = StateShape(0, 0, 0, taps - 1, channels)
        return inputs

    def recur(self, layer: int, rows: Recurrence) -> torch.Tensor:
        """Called after `convolve`. Fields are in the order of `recurrence/torch_recurrence.py`."""
        (_, key_heads, k_dim), (_, heads, v_dim) = rows.k.shape, rows.v.shape
        records = (("k", key_heads, k_dim), ("u", heads, v_dim), ("g", heads, 1))
        self.fields[layer] += tuple(CacheField(*record, dtype=torch.float32) for record in records)
        self.states[layer] = self.states[layer]._replace(heads=heads, k_dim=k_dim, v_dim=v_dim)
        return rows.v.float()

    def measured(self, layout: KVLayout, max_len: int | None) -> KVLayout:
        """`layout` with the heads, sizes, windows and states of the recorded calls. A layer gets its owner's; a layer
        without a call is unchanged. A window that the calls lack is none if no sequence (`max_len`) exceeds it."""

        def of_layer(spec: LayerSpec) -> LayerSpec:
            if spec.owner not in self.fields:
                return spec
            window, retention = self.windows.get(spec.owner), spec.retention
            if spec.window is not None and window is not None:
                retention = Retention(window)
            elif spec.window is not None and max_len is not None and spec.window >= max_len:
                retention = KEEP_ALL
            return replace(spec, fields=self.fields[spec.owner], retention=retention, state=self.states.get(spec.layer))

        return layout.map(of_layer)


class ContextLength(NamedTuple):
    """How many tokens of a sequence a model can serve.

    default: length if the user sets none.
    max_len: the largest allowed length (None: any). why: reason of that limit.
    end: the first position that cannot be computed, or not independently of other rows. None: all positions can be
        computed, even beyond the model's training; only drafters use these.
    """

    default: int | None
    max_len: int | None
    why: str
    end: int | None

    def require(self, max_model_len: int, name: str) -> None:
        """Raise ConfigError if the model called `name` must not run sequences of this length."""
        if self.max_len is not None and max_model_len > self.max_len:
            raise ConfigError(
                f"max_model_len={max_model_len}: {name} serves at most {self.max_len} tokens, {self.why}; "
                f"set max_model_len to {self.max_len} or less, or leave it None"
            )


def context_length(config: Any) -> ContextLength:
    """Read a text config: `max_position_embeddings`, extended by static RoPE scaling and limited by dynamic kinds."""
    stated = getattr(config, "max_position_embeddings", None)
    stated = int(stated) if stated else None
    limits: list[tuple[int, str]] = []
    stretched = stated
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    by_layer_type = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in by_layer_type or [parameters]:
        kind = str(rope.get("rope_type") or rope.get("type") or "default")
        original = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        if kind == "longrope" and (original or stated):
            limit = int(original or stated or 0)
            limits.append((limit, f"since its longrope frequencies change beyond {limit}, for a whole batch at once"))
        elif "dynamic" in kind and stated:
            limits.append((stated, f"since its dynamic RoPE frequencies change beyond {stated}, for a whole batch"))
        elif kind in ("yarn", "linear") and stated:
            base = original if kind == "yarn" and original else stated
            stretched = max(stretched or 0, int(base * (rope.get("factor") or 1)))
    if limits:
        most, why = min(limits)
        return ContextLength(min(most, stated or most), most, why, most)
    end = None if parameters else stated  # without RoPE, positions may be rows of a table
    return ContextLength(stated, stretched, "the positions that its config states", end)


def model_on_meta(config: Any, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    """Make a model on `meta`. options: for transformers' `from_config`. Experts run as one product, whose shapes do not
    depend on a router."""
    with META:
        model: PreTrainedModel = auto_class(config).from_config(
            config, dtype=dtype, experts_implementation="batched_mm", **options
        )
    model.eval()
    return model


class DescribedModel:
    """A causal LM before any forward. Raises UnsupportedModelError if it cannot be served.

    layout: from the config; a forward may correct it. user_decoder, user_head: the user's modules; decoder, head:
    private copies. original: notices changes of the user's modules after the copy. placed: its weights are on a device.
    """

    def __init__(self, name: str, model: PreTrainedModel, *, placed: bool) -> None:
        self.name, self.model = name, model
        with refusing(name, f"{type(model).__name__} is not built as a decoder-only causal language model"):
            self.config: Any = model.config.get_text_config()
            self.model_types: tuple[str, str] = self.config.model_type, model.config.model_type
            if getattr(model.config, "is_encoder_decoder", False) or getattr(self.config, "is_encoder_decoder", False):
                raise UnsupportedModelError(
                    f"{name} ({type(model).__name__}) is an encoder-decoder; specdec serves decoder-only models"
                )
            if placed:
                require_placed(name, model)
            self.vocab_size = int(self.config.vocab_size)  # a copy: the user's config may change later
            self.context_length: ContextLength = context_length(self.config)
            head = model.get_output_embeddings()
            if not isinstance(head, nn.Module):
                raise UnsupportedModelError(f"{name} ({type(model).__name__}) has no language-model head")
            self.layout: KVLayout = supported_layout(name, self.config)
            self.user_head: nn.Module = head
            self.user_decoder: nn.Module = find_decoder(name, model, len(self.layout.layers))
            self.original = ModuleWatch(model, self.user_decoder, head)  # made before the copy: no change is missed
            self.head: nn.Module = private_copy(head)
            self.decoder: nn.Module = private_copy(self.user_decoder)
            replace_recurrent_modules(name, self.decoder, self.layout)
            self.embed: nn.Module = self.decoder.get_input_embeddings()  # type: ignore[operator]
            self.home: torch.device = self.embed.weight.device  # device of the user's weights

    @property
    def recurrent(self) -> bool:
        """Does some layer keep a state per request?"""
        return self.layout.recurrent

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)


class ModelOnMeta(DescribedModel):
    """A target made from its config only.

    layout: measured in a forward's attention calls; from the config if the forward does not run on `meta` (`unmeasured`
    has the reason).
    """

    def __init__(self, name: str, model: PreTrainedModel) -> None:
        super().__init__(name, model, placed=False)
        self.dtype, self.device = model.dtype, self.home
        self.ops: Operations | None = None
        self.unmeasured: str | None = None
        calls = GeometryContext()
        tokens = torch.zeros((1, TEXT_LEN), dtype=torch.int64, device=META)
        places = torch.arange(TEXT_LEN, device=META)[None]
        try:
            with torch.inference_mode():
                self.decoder(input_ids=tokens, position_ids=places, use_cache=False, specdec_ctx=calls)
            self.layout = calls.measured(self.layout, self.context_length.max_len)
        except Exception as error:  # on `meta`, a forward that reads a number may raise any error
            self.unmeasured = first_line(error)


def supported_layout(name: str, config: Any) -> KVLayout:
    """The layout by a text config. Raises UnsupportedModelError for a layer or a setting that is not supported."""
    no_chunks = set(getattr(config, "layer_types", None) or [""]) <= {FULL_ATTENTION, SLIDING_ATTENTION}
    for attribute, what in UNSUPPORTED_ATTRIBUTES.items():
        value = getattr(config, attribute, None)
        if value and not (no_chunks and attribute == "attention_chunk_size"):
            raise UnsupportedModelError(f"{name} {what} ({attribute}={value}), which specdec does not support")
    return layout_from_config(config)


def require_placed(name: str, model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError for weights that torch quantises dynamically, or that are not on one device."""
    for path, module in model.named_modules():
        if type(module).__module__.startswith(DYNAMIC_INT8):
            raise UnsupportedModelError(
                f"{name} is quantised dynamically (its module {path} is a {type(module).__module__}."
                f"{type(module).__name__}), which specdec does not support: rounding of activations depends on "
                "the batch; give the model before quantisation, or quantise its weights alone"
            )
    placement = getattr(model, "hf_device_map", None) or {}
    devices = {str(device) for device in placement.values()} | {w.device.type for w in model.parameters()}
    if devices == {"meta"}:
        raise UnsupportedModelError(f"{name} is on the meta device, without weights; load it onto a real one")
    if len(devices) > 1 or "meta" in devices:
        raise UnsupportedModelError(f"{name} is spread over {sorted(devices)}; specdec runs on one device")


def find_decoder(name: str, model: PreTrainedModel, num_layers: int) -> nn.Module:
    """The text decoder of a model: `get_decoder()`, or the decoder inside it in multimodal checkpoints. Raises
    UnsupportedModelError unless it is a stack of `num_layers` layers."""
    decoder: Any = model.get_decoder()
    while layers_of(decoder) is None:
        inner = getattr(decoder, "language_model", None)
        inner = decoder.get_decoder() if inner is None and hasattr(decoder, "get_decoder") else inner
        if inner is None or inner is decoder:
            break
        decoder = inner
    if len(layers_of(decoder) or ()) != num_layers:
        given = f"the {type(decoder).__name__} that {type(model).__name__}.get_decoder() gives"
        raise UnsupportedModelError(f"{name}: {given} is not a stack of {num_layers} decoder layers, so it cannot run")
    found: nn.Module = decoder
    return found
