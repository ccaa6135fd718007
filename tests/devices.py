"""What tests run on: one CPU thread, memory poisoned on request, or a GPU.

A plugin of conftest.py.
"""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

torch.set_num_threads(1)
gc.disable()  # until the modules and the tests, millions of objects that live to the end, are all there


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    # the garbage collector need not visit them ever
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture
def poison_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what `torch.empty` and its kin return, so that an unwritten element shows: NaN, or the largest integer."""

    def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
            out = make(*args, **kwargs)
            if out.is_floating_point() or out.is_complex():
                return out.fill_(float("nan"))
            return out.fill_(True if out.dtype == torch.bool else torch.iinfo(out.dtype).max)

        return wrapper

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, poisoned(getattr(torch.Tensor, name)))
