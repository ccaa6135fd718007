"""The public names, pinned: a change here is a change of the API."""

import ast
import doctest
import pickle
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import specdec
from specdec.config import SpecConfig

EXPORTS = [
    "DraftTree",
    "Drafter",
    "Engine",
    "EngineConfig",
    "GenerationOutput",
    "Handle",
    "RequestStats",
    "SamplingParams",
    "SpecConfig",
    "SpecDecError",
    "__version__",
    "generate",
]


def test_exports_are_pinned_and_sorted():
    assert specdec.__all__ == EXPORTS == sorted(EXPORTS)


def test_version_is_that_of_the_distribution():
    assert specdec.__version__ == version("specdec-runtime")


# the names are loaded when they are used


@pytest.mark.slow
def test_import_alone_loads_nothing_heavy():
    heavy = "{'torch', 'transformers', 'numpy'}"
    code = f"import specdec, sys; print(sorted({heavy} & set(sys.modules)), specdec.__version__)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["[]", specdec.__version__]


def test_names_for_type_checkers_are_those_loaded_at_run_time():
    source = Path(specdec.__file__).read_text("utf-8")
    [guarded] = [n for n in ast.parse(source).body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    named = {alias.name: node.module for node in guarded.body for alias in node.names}
    assert named == specdec._HOMES
    assert {*named, "__version__"} == set(EXPORTS)


def test_every_way_of_importing_gives_the_same_object():
    namespace = {}
    exec("from specdec import *\nfrom specdec import SpecConfig as named", namespace)
    assert set(EXPORTS) <= set(namespace)
    assert namespace["SpecConfig"] is namespace["named"] is specdec.SpecConfig is SpecConfig
    assert set(EXPORTS) <= set(dir(specdec))
    spec = pickle.loads(pickle.dumps(specdec.SpecConfig(3, 2)))
    assert spec == SpecConfig(3, 2)
    assert pickle.loads(pickle.dumps(specdec.generate)) is specdec.generate


def test_a_name_that_is_not_there_is_an_attribute_error():
    assert not hasattr(specdec, "Engin")
    assert doctest.testmod(specdec).failed == 0
