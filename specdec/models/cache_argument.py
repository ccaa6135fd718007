"""The name that a forward of transformers has for the K/V of earlier tokens: `cache` from 5.24 on, `past_key_values`
before. The old name still works there, with a FutureWarning."""

import inspect
from typing import Any

from torch import nn


def cache_argument(module: nn.Module, cache: Any) -> dict[str, Any]:
    """Keyword arguments by which `module` is given a cache of transformers."""
    known = inspect.signature(module.forward).parameters
    return {"cache" if "cache" in known else "past_key_values": cache}
