"""Reads the config.json of any checkpoint (target or drafter) and checks for values that no model can have.

transformers checks types when it makes a config, but not numbers, which fail later as a division by zero or a wrong
shape. The keys in `WITHIN` are checked here and refused by name. Drafter families check the rest of their keys.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from specdec.errors import CheckpointError, first_line, shown


class ValueKind(NamedTuple):
    """The kind of value that a key must have."""

    words: str
    holds: Callable[[Any], bool]


FLAG = ValueKind("true or false", lambda value: isinstance(value, bool))
COUNT = ValueKind("a whole number above 0", lambda value: type(value) is int and value > 0)
INDEX = ValueKind("a whole number of 0 or more", lambda value: type(value) is int and value >= 0)
POSITIVE = ValueKind("a number above 0", lambda value: type(value) in (int, float) and isfinite(value) and value > 0)
NUMBER = ValueKind(
    "a number of 0 or more", lambda value: type(value) in (int, float) and isfinite(value) and value >= 0
)
OBJECT = ValueKind("an object", lambda value: isinstance(value, dict))
LIST = ValueKind("a list", lambda value: isinstance(value, list))
TEXT = ValueKind("a string", lambda value: isinstance(value, str))
ANY = ValueKind("anything", lambda value: True)
NAMES = ValueKind(
    "a list of names", lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value)
)
WITHIN: dict[str, ValueKind] = {
    **dict.fromkeys(("hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"), COUNT),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), COUNT),
    **dict.fromkeys(("intermediate_size",), INDEX),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"), NUMBER),
    **dict.fromkeys(("rope_theta", "factor", "original_max_position_embeddings"), POSITIVE),
    **dict.fromkeys(("text_config", "rope_parameters", "rope_scaling", "quantization_config"), OBJECT),
    "architectures": NAMES,
}
"""The kinds of values that keys must have at the top level, in the parts that describe a text decoder, and in RoPE. The
family checks lists, such as one number per layer."""
PARTS = ("text_config", "transformer_layer_config", "rope_parameters", "rope_scaling")


def read_config_json(file: Path) -> dict[str, Any]:
    """Read the file. Raises CheckpointError if it is no JSON object, or if a value cannot belong to any model."""
    try:
        config = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"there is no config.json that can be read ({first_line(error)})") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"config.json holds {type(config).__name__}, expected an object")
    for place, part in _parts("", config):
        for key, value in part.items():
            kind = WITHIN.get(key)
            if kind is None or value is None or (isinstance(value, list) and kind is not NAMES):
                continue
            if not kind.holds(value):
                raise CheckpointError(f"{place}{key}={shown(value)}, expected {kind.words}")
        heads, groups = part.get("num_attention_heads"), part.get("num_key_value_heads")
        if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
            raise CheckpointError(f"{place}num_attention_heads={heads} do not group over num_key_value_heads={groups}")
    return config


def _parts(place: str, part: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The config and those of `PARTS` that it has; RoPE may have one part per layer type."""
    yield place, part
    for key, value in part.items():
        if isinstance(value, dict) and (key in PARTS or place.endswith(("rope_parameters.", "rope_scaling."))):
            yield from _parts(f"{place}{key}.", value)
