"""Fixtures shared by the tests. Nothing here reaches the network; one CPU thread per test process."""

import os

# read at import by the libraries below
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


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


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of evaluation data beside the checkout; tests that need it are skipped without it."""
    path = ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip("no ../shared/data beside the checkout")
    return path
