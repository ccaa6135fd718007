"""Which classes of transformers read a checkpoint: by its config, or by another type whose layers it has."""

from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

READ_AS = {"mimo": "qwen2"}
"""Model types that transformers does not know, and those that they are read as, without code of their own."""


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


def auto_class(config: Any) -> Any:
    """The auto class whose models have this config: of text, or of text and images where there is no class of text
    alone (EXAONE 4.5, Step 3.7)."""
    kind, images = type(config), AutoModelForImageTextToText
    is_text = kind in AutoModelForCausalLM._model_mapping or kind not in images._model_mapping
    return AutoModelForCausalLM if is_text else images
