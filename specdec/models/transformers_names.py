"""What transformers calls things: the auto class of a config, its type where transformers knows none, and the argument
of a forward for the K/V of earlier tokens (`cache` from 5.24 on, `past_key_values` before)."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

READ_AS = {"mimo": "qwen2"}
"""Model types that transformers does not know, and the types whose layers they have: no code of their own is run."""


def auto_class(config: Any) -> Any:
    """transformers' auto class for a config: that of causal models, or of a model that reads images and is not among
    them, such as Step 3.7 and EXAONE 4.5."""
    images = AutoModelForImageTextToText
    named = type(config) in images._model_mapping and type(config) not in AutoModelForCausalLM._model_mapping
    return images if named else AutoModelForCausalLM


def config_read_as(stored: Mapping[str, Any], path: str) -> Any:
    """The config of a checkpoint at `path` whose config.json holds `stored`, in the class of another type.

    None: it is read in its own.
    """
    if stored.get("model_type") not in READ_AS:
        return None
    own = {name: value for name, value in stored.items() if name not in ("model_type", "auto_map")}
    config = AutoConfig.for_model(READ_AS[stored["model_type"]], **own)
    config.name_or_path = path
    return config


def cache_argument(module: nn.Module, cache: Any) -> dict[str, Any]:
    """Keyword arguments by which `module` is given a cache of transformers."""
    return {cache_name(module): cache}


def cache_name(module: nn.Module) -> str:
    """Name of that argument in the forward of its class."""
    return _cache_name(type(module).forward)


@functools.cache
def _cache_name(forward: Callable[..., Any]) -> str:
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"
