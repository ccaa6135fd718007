"""Marks of single cases."""

from typing import Any

import pytest


def slow(*values: Any, **options: Any) -> Any:
    """A case that `make test-fast` leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow, **options)
