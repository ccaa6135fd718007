"""What a user's mistake raises: one sentence with the value and what is allowed, and no whole tensor or module."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from specdec import SpecDecError


@contextmanager
def one_sentence(kind: type[BaseException], *parts: str) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Within the block this error is raised: a single line that holds all the parts."""
    with pytest.raises(kind) as error:
        yield error
    text = str(error.value)
    assert isinstance(error.value, SpecDecError)
    assert "\n" not in text and 15 < len(text) < 400 and "tensor(" not in text and "in_features" not in text, text
    for part in parts:
        assert part in text, f"{part!r} is not in {text!r}"
