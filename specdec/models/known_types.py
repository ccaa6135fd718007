"""Model types that transformers does not know, read as the types whose layers they have, without code of their own."""

from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig

READ_AS = {"mimo": "qwen2"}


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
