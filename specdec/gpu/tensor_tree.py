"""All tensors of a nested value: frozen dataclasses, named tuples, tuples, lists and dicts of them."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Returns the value with `change` applied to each of its tensors; a value without tensors is returned itself."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if is_dataclass(value) and not isinstance(value, type):
        old = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        new = {name: map_tensors(part, change) for name, part in old.items()}
        return value if all(new[name] is old[name] for name in old) else replace(value, **new)
    if isinstance(value, dict):
        return {name: map_tensors(part, change) for name, part in value.items()}
    if isinstance(value, tuple | list):
        parts = [map_tensors(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
