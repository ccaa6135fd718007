"""Fixtures shared by the tests. Nothing here reaches the network; one CPU thread per test process."""

import os

# read at import by the libraries below
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# kernels run in the interpreter where there is no GPU: triton reads this when it is imported, and the launchers at each
# call, so only the tests of kernels set it again (see `interpreted` there)
os.environ["TRITON_INTERPRET"] = "0" if os.path.exists("/dev/nvidiactl") else "1"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from specdec import Engine, EngineConfig, SpecConfig
from specdec.models.target import TargetModel

pytest_plugins = ("tiny_models", "stand_ins")  # tests/ is on the path: see pyproject.toml
ROOT = Path(__file__).resolve().parent.parent

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    if addresses := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"{addresses[0]}: an address makes another name in every process; give ids")
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def environment_of_its_own() -> Iterator[None]:
    """Scripts that a test runs in this process may set variables; the next test does not see them."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


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


@pytest.fixture(scope="session")
def make_engine() -> Callable[..., Engine]:
    """make_engine(model, drafter=None, *, num_steps=3, spec=None, tokenizer=None, **engine_config).

    `drafter`: a module or a name, or any drafter.
    """

    def make(
        model: PreTrainedModel,
        drafter: Any = None,
        *,
        num_steps: int = 3,
        spec: SpecConfig | None = None,
        tokenizer: Any = None,
        **config: Any,
    ) -> Engine:
        spec = spec or SpecConfig(num_steps=num_steps)
        settings = EngineConfig(**{"max_model_len": 256, "prefill_chunk": 16, **config})
        if hasattr(drafter, "bind"):
            return Engine(TargetModel(model), drafter, tokenizer=tokenizer, spec=spec, config=settings)
        return Engine.from_pretrained(model, drafter, tokenizer=tokenizer, spec=spec, config=settings)

    return make
