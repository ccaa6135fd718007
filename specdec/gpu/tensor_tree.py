"""All tensors of a nested value: frozen dataclasses, named tuples, tuples, lists and dicts of them."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch


def map_tensors(value: Any, change: Callable[..., Any], *kinds: type) -> Any:
    """Returns the value with `change` of each of its tensors, and of parts of these `kinds`; a value that holds none is
    returned itself."""
    if isinstance(value, (torch.Tensor, *kinds)):
        return change(value)
    if is_dataclass(value) and not isinstance(value, type):
        old = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        new = {name: map_tensors(part, change, *kinds) for name, part in old.items()}
        return value if all(new[name] is old[name] for name in old) else replace(value, **new)
    if isinstance(value, dict):
        return {name: map_tensors(part, change, *kinds) for name, part in value.items()}
    if isinstance(value, tuple | list):
        parts = [map_tensors(part, change, *kinds) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
