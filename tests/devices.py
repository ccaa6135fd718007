"""The device of the tests (a GPU, or one CPU thread with Triton's interpreter), and the tolerances of kernels on it.

A plugin of conftest.py. Fixtures run kernels, poison uninitialised memory, seed random numbers and watch calls.
"""

import atexit
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]
"""Dtypes to test kernels with products in; the interpreter has no products of bfloat16."""
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}

torch.set_num_threads(1)
gc.disable()  # until all modules and tests are loaded


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    other, reason = ("cpu", "is about a CPU") if torch.cuda.is_available() else ("gpu", "needs a CUDA device")
    for item in items:
        if item.get_closest_marker(other):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Exclude torch, transformers and all tests, a million objects that stay, from the garbage collector."""
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000)
    atexit.register(gc.unfreeze)  # pytest collects twice when it ends, for what tests have leaked


class PoisonEmpty(TorchFunctionMode):
    """Fills the results of `torch.empty` and similar functions with NaN, or with the largest integer.

    A mode, and not other functions in their place: torch remembers its device constructors when they are first needed,
    and if it remembered ours, a later `with torch.device("meta")` would no longer reach `torch.empty` and would really
    allocate whatever model is made in it.
    """

    MAKERS = frozenset(
        (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty, torch.Tensor.new_empty_strided)
    )

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in self.MAKERS:
            return out
        if out.is_floating_point() or out.is_complex():
            return out.fill_(float("nan"))
        return out.fill_(True if out.dtype == torch.bool else torch.iinfo(out.dtype).max)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Assert equality up to the rounding of sums in another order."""
    tolerance = TOLERANCES[got.dtype]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def kernels_run() -> Iterator[None]:
    """Launch kernels: compiled on a GPU, in Triton's interpreter without one."""
    from specdec.gpu.triton_shim import INTERPRETED

    with pytest.MonkeyPatch.context() as monkeypatch:
        if not torch.cuda.is_available():
            monkeypatch.setenv("TRITON_INTERPRET", "1")
            assert INTERPRETED, "TRITON_INTERPRET=1 came too late"
        yield


@pytest.fixture
def poison_empty() -> Iterator[None]:
    """Poison uninitialised memory, so that an unwritten element shows."""
    with PoisonEmpty():
        yield


@pytest.fixture(scope="module")
def quick_collections() -> None:
    """Exclude all that other tests of the process hold from the garbage collector, for tests that collect often."""
    gc.freeze()


@pytest.fixture
def seeded() -> None:
    """Seed the random numbers of a test."""
    torch.manual_seed(0)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """watched(module, name, what): a list of `what(arguments)` for each later call of the function `module.name`."""

    def watch(module: Any, name: str, what: Callable[[tuple[Any, ...]], Any]) -> list[Any]:
        own, seen = getattr(module, name), list[Any]()

        def noting(*given: Any, **options: Any) -> Any:
            seen.append(what(given))
            return own(*given, **options)

        monkeypatch.setattr(module, name, noting)
        return seen

    return watch
