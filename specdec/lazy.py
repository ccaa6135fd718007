"""Imports by name, so that unused modules are not loaded: torch alone takes a second or more.

`specdec/__init__.py` loads public names through it, and commands their actions. No other module may use it
(tests/test_layout.py).
"""

from importlib import import_module
from typing import Any


def load(module: str, name: str) -> Any:
    """Load what `from module import name` would import."""
    return getattr(import_module(module), name)
