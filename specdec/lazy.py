"""The one place that imports by name, so that what is not used is not loaded: torch alone takes a second or more.

`specdec/__init__.py` looks up its public names through it, `specdec/cli/app.py` its commands, and these their bodies;
no other module may use it (tests/test_layout.py).
"""

from importlib import import_module
from typing import Any


def load(module: str, name: str) -> Any:
    """The object that `from module import name` would give."""
    return getattr(import_module(module), name)
