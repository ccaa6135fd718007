"""Names in transformers: a module's family, the auto class of a config, a substitute for unknown model types, and a
forward's cache argument (`cache` from 5.24 on, `past_key_values` before)."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

READ_AS = {"mimo": "qwen2"}
"""Model types that transformers does not know, with the types that have the same layers. Their own code is not run."""


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
    the class of another type, or with the share of a head's channels that MiniMax-M2 rotates, which 5.17 passes over.

    None: its own class reads it.
    """
    kind = str(stored.get("model_type"))
    own = {name: value for name, value in stored.items() if name not in ("model_type", "auto_map")}
    if kind == "minimax_m2" and "rotary_dim" in own:
        own.setdefault("partial_rotary_factor", own["rotary_dim"] / own["head_dim"])
    elif kind not in READ_AS:
        return None
    config = AutoConfig.for_model(READ_AS.get(kind, kind), **own)
    config.name_or_path = path
    return config


def cache_argument(module: nn.Module, cache: Any) -> dict[str, Any]:
    """Keyword arguments that pass a transformers cache to `module`."""
    return {cache_name(type(module).forward): cache}


@functools.cache
def cache_name(forward: Callable[..., Any]) -> str:
    """Name of the cache argument in the forward of a class of modules."""
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"
