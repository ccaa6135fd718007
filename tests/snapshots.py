"""Turns the contents of objects into comparable values, for tests that nothing was changed."""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch

from specdec.kvcache.cache import KVCache


def contents(*roots: object) -> dict[str, Any]:
    """Map the path of everything that the roots hold to its value: `1.primary.capacity` -> 4.

    Two such maps are equal if nothing was written, added or replaced.
    """
    found: dict[str, Any] = {}
    seen: dict[int, str] = {}

    def visit(path: str, value: object) -> None:
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu().contiguous().view(torch.uint8).numpy() if value.dim() else value.item()
        if isinstance(value, np.ndarray):
            found[path] = (value.shape, value.tobytes())
        elif isinstance(value, type | Enum) or callable(value) or type(value).__module__ in ("builtins", "torch"):
            visit_plain(path, value)
        elif id(value) in seen:
            found[path] = f"is {seen[id(value)]}"
        else:
            seen[id(value)] = path
            slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
            names = sorted({*slots, *getattr(value, "__dict__", ())} - {"__weakref__", "__dict__"})
            for name in names:
                if hasattr(value, name):
                    visit(f"{path}.{name}", getattr(value, name))

    def visit_plain(path: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, item in value.items():
                visit(f"{path}[{key}]", item)
            found[f"{path}.keys"] = list(map(str, value))
        elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
            for i, item in enumerate(value):
                visit(f"{path}[{i}]", item)
            found[f"{path}.len"] = len(value)
        else:
            found[path] = value

    for i, root in enumerate(roots):
        visit(str(i), root)
    return found


def kv_contents(cache: KVCache) -> dict[str, Any]:
    """Return the contents of a cache's request table, of its allocator, and of all K/V in the slots."""
    for mirrored in (cache.table.slots, cache.table.committed_len, cache.allocator.maps):
        assert mirrored.tensor is not None  # uploads pending writes: when they are uploaded is no difference
    return contents(cache.table, cache.allocator, *cache.stores)
