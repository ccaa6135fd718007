"""Names in transformers: a module's family, a decoder's layers, the auto class of a config, a substitute for unknown
model types, and a forward's cache argument (`cache` from 5.24 on, `past_key_values` before)."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from specdec.errors import UnsupportedModelError, shown

READ_AS = {"mimo": "qwen2", "kimi_k2": "deepseek_v3"}
"""Model types that transformers does not know, with the types that have the same layers. Their own code is not run."""

LAYER_LISTS = ("layers", "h", "blocks")
"""Attributes under which text models have their layers: "h" in GPT-2 and GPT-BigCode, "blocks" in DBRX."""


def layers_of(decoder: nn.Module) -> nn.ModuleList | None:
    """The list of a text model's layers; None: it has none by a known name."""
    found = (getattr(decoder, name, None) for name in LAYER_LISTS)
    return next((layers for layers in found if isinstance(layers, nn.ModuleList)), None)


def family_name(module: nn.Module) -> str:
    """The class of a transformers module as "folder.Class"; "" for any other class."""
    kind = type(module)
    folder = kind.__module__.removeprefix("transformers.models.").partition(".")[0]
    known = kind.__module__ == f"transformers.models.{folder}.modeling_{folder}"
    return f"{folder}.{kind.__qualname__}" if known else ""


def auto_class(config: Any) -> Any:
    """transformers' auto class for a config: for causal models or, for image models that are not among these (Step 3.7,
    EXAONE 4.5), for image-text models."""
    images = AutoModelForImageTextToText
    named = type(config) in images._model_mapping and type(config) not in AutoModelForCausalLM._model_mapping
    return images if named else AutoModelForCausalLM


def config_read_as(stored: Mapping[str, Any], path: str) -> Any:
    """The config of a checkpoint at `path` with the config.json `stored`, if its own class does not read it right: in
    the class of another type, or with the keys that 5.17 passes over of MiniMax-M2 (the share of a head's channels that
    rotate) and MiMo-V2-Flash.

    None: its own class reads it.
    """
    kind = str(stored.get("model_type"))
    own = {name: value for name, value in stored.items() if name not in ("model_type", "auto_map")}
    if kind == "minimax_m2" and own.get("rotary_dim"):
        head_dim = own.get("head_dim") or AutoConfig.for_model(kind).head_dim
        own.setdefault("partial_rotary_factor", own["rotary_dim"] / head_dim)
    elif kind == "mimo_v2_flash":
        own = _as_transformers_names(own)
    elif kind not in READ_AS:
        return None
    config = AutoConfig.for_model(READ_AS.get(kind, kind), **own)
    config.name_or_path = path
    return config


def _as_transformers_names(own: dict[str, Any]) -> dict[str, Any]:
    """The config of a MiMo-V2-Flash with the keys of its publisher under the names of transformers, which has one form
    of the others. Keys that transformers wrote count first."""
    for name, value in (("add_full_attention_sink_bias", False), ("scoring_func", "sigmoid")):
        if own.get(name, value) != value:
            raise UnsupportedModelError(f"{name}={shown(own[name])}: only {value} is read of mimo_v2_flash")
    scaling = own.get("rope_scaling") or {}
    if scaling.get("rope_type", scaling.get("type", "default")) != "default":
        raise UnsupportedModelError(f"rope_scaling={shown(scaling)}: only RoPE without scaling is read")
    read: dict[str, Any] = {}
    for name, key, kinds in (
        ("layer_types", "hybrid_layer_pattern", ("full_attention", "sliding_attention")),
        ("mlp_layer_types", "moe_layer_freq", ("dense", "sparse")),
    ):
        if own.get(key) is not None:
            read[name] = [kinds[bool(each)] for each in own[key]]
    for name, key in (("sliding_window", "sliding_window_size"), ("rms_norm_eps", "layernorm_epsilon")):
        if own.get(key) is not None:
            read[name] = own[key]
    if own.get("rope_theta") is not None:
        share = {"rope_type": "default", "partial_rotary_factor": own.get("partial_rotary_factor", 1.0)}
        sliding = own.get("swa_rope_theta", own["rope_theta"])
        read["rope_parameters"] = {
            "full_attention": {**share, "rope_theta": own["rope_theta"]},
            "sliding_attention": {**share, "rope_theta": sliding},
        }
    return own | {name: value for name, value in read.items() if own.get(name) is None}


def cache_argument(module: nn.Module, cache: Any) -> dict[str, Any]:
    """Keyword arguments that pass a transformers cache to `module`."""
    return {cache_name(type(module).forward): cache}


@functools.cache
def cache_name(forward: Callable[..., Any]) -> str:
    """Name of the cache argument in the forward of a class of modules."""
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"
