"""What tests run on: one CPU thread, memory poisoned on request, kernels in a quicker interpreter, or a GPU.

A plugin of conftest.py.
"""

import gc
import inspect
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    # the modules and the tests, millions of objects, live to the end: the garbage collector need not visit them again
    gc.collect()
    gc.freeze()


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


class ReplacedOnce:
    """Triton's interpreter replaces the builtins of `triton.language` before a kernel runs and restores them behind it.

    It replaces them again at every call of a function inside the kernel, where nothing is left to replace: up to a
    third of a kernel's time. Here it does so once a kernel for each module that holds builtins.
    """

    def __init__(self, replace: Callable[[FunctionType], Any]) -> None:
        self.replace = replace
        self.done: list[ModuleType] = []  # empty outside of a kernel
        self.outermost: Any = None

    def __call__(self, fn: FunctionType) -> Any:
        seen = [value for value in fn.__globals__.values() if inspect.ismodule(value)]
        modules = [module for module in (tl, tl.core) if module in seen]
        if self.done and all(module in self.done for module in modules):
            return self
        scope = self.replace(fn)
        if self.done:
            self.done += modules
            return scope
        self.done, self.outermost = modules, scope
        return self

    def restore(self) -> None:
        """Behind a kernel; the interpreter restores nothing behind a function inside it."""
        self.done = []
        self.outermost.restore()


if hasattr(interpreter, "_patch_lang"):  # not public: without it the tests are slower, no more
    interpreter._patch_lang = ReplacedOnce(interpreter._patch_lang)
