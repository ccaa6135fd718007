"""The environment of all tests: no network, one CPU thread, plugins, and settings that make results repeatable."""

import functools
import inspect
import os
import sys

# read at import by the libraries below
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# kernels run in the interpreter where there is no GPU: triton reads this when it is imported, and the launchers at each
# call, so only the tests of kernels set it again (see `interpreted` there)
os.environ["TRITON_INTERPRET"] = "0" if os.path.exists("/dev/nvidiactl") else "1"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

# tests/ is on the path: see pyproject.toml
PLUGINS = ["shallow_pair", "devices", "tiny_models", "tiny_tokenizers", "scripted_drafter", "split_engines"]
if os.environ["TRITON_INTERPRET"] == "1":
    PLUGINS[:0] = ["quick_interpreter", "strict_interpreter"]
ROOT = Path(__file__).resolve().parent.parent

# How many examples a property without a number of its own has; `examples` of marks.py goes by the profile, too. The
# default ones are the same each time, those in depth are not.
settings.register_profile("default", max_examples=25, deadline=None, derandomize=True, database=None)
settings.register_profile("deep", max_examples=100, deadline=None, print_blob=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--deep", action="store_true", help="also the cases marked `deep`, and more examples of each property"
    )


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("deep" if config.getoption("--deep") else "default")
    # the process that only hands tests to others (pytest -n) needs no torch: they start seconds sooner
    if config.getoption("dist", "no") == "no" or hasattr(config, "workerinput"):
        for plugin in PLUGINS:
            config.pluginmanager.import_plugin(plugin)
        drafts_of_one_shape()
        prompts_of_one_cost()
        clients_of_one_context()


def drafts_of_one_shape() -> None:
    """Make drafts adaptive only if a test says so: results must not depend on how long rounds take."""
    from specdec import SpecConfig

    init = inspect.unwrap(SpecConfig.__init__)
    init.__defaults__ = (*init.__defaults__[:-1], False)


MEASURED: dict[str, Any] = {}
"""The measuring functions of `warm_up`. Tests replace them, unless they use the fixture `measured`."""


@pytest.fixture
def measured() -> dict[str, Any]:
    return MEASURED


def prompts_of_one_cost() -> None:
    """Replace the timing of prompts and rounds at start: on a tape its twelve long forwards take longer than a test.
    test_adaptive.py has an engine with the real timing."""
    from specdec.runtime import warm_up
    from specdec.runtime.prompts.prompt_budget import PromptLoad

    MEASURED.update((name, getattr(warm_up, name)) for name in ("time_prompts", "time_rounds"))
    warm_up.time_prompts = lambda round, gap, read, most: gap.cost.time(PromptLoad(1, 0.5), 1e-6)
    warm_up.time_rounds = lambda captured_rounds, shapes, done: [1e-6] * len(shapes)


def clients_of_one_context() -> None:
    """Share one SSL context: a new client of httpx reads all certificates, which takes as long as many requests."""
    from httpx._transports import default

    default.create_ssl_context = functools.cache(default.create_ssl_context)


def pytest_unconfigure() -> None:
    if "processes" in sys.modules:
        sys.modules["processes"].stop_fork_server()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    from marks import (  # tools/pytest_forks.py runs this file where tests/ is not on the path
        leave_out_deep,
        mark_deep_cases,
    )

    os.environ.pop("TRITON_INTERPRET", None)
    mark_deep_cases(config, items)
    leave_out_deep(config, items)
    if addresses := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"{addresses[0]}: an address makes another name in every process; give ids")


@pytest.fixture(autouse=True)
def environment_of_its_own() -> Iterator[None]:
    """Restore the variables of the environment after each test, since scripts run in this process may set some.

    numpy's error state is restored too: after an interrupt in `np.linalg.solve` any NaN in an array raised.
    """
    before = dict(os.environ)
    with np.errstate():
        yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of evaluation data next to the checkout; tests that need it are skipped without it."""
    path = ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip("no ../shared/data next to the checkout")
    return path
