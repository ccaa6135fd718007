"""Checks that a user's mistake is refused in one sentence, with the value."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from specdec import SpecDecError


@contextmanager
def one_sentence(kind: type[SpecDecError], *parts: str) -> Iterator[pytest.ExceptionInfo[SpecDecError]]:
    """Check that the block raises this error: one line that has all the parts, and prints no tensor or module."""
    with pytest.raises(kind) as error:
        yield error
    text = str(error.value)
    assert isinstance(error.value, SpecDecError)
    assert "\n" not in text and 15 < len(text) < 400 and "tensor(" not in text and "in_features" not in text, text
    for part in parts:
        assert part in text, f"{part!r} is not in {text!r}"
