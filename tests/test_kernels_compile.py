"""Every Triton kernel compiles for a GPU, without one: what the interpreter lets pass fails here.

Everything is compiled once, in one process (`compile_launches.py`), in a minute: asked for by SPECDEC_KERNELS=usual.
"""

import ast
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("SPECDEC_KERNELS" not in os.environ, reason="a minute; SPECDEC_KERNELS=usual runs it"),
]
TESTS = Path(__file__).parent
ROOT = TESTS.parent
FOLDERS = {"attention": "specdec.attention", "kvcache": "specdec.kvcache", "draft_models": "specdec.draft_models"}
NOT_ON_NVIDIA = {  # where there is no library of CUDA, or no PTX
    "specdec.layers.packed.packed_tile._rounded_product": "b_out = b_x * b_scale",
    "specdec.sampling.softcap._tanh": None,
    "specdec.sampling.softcap.capped": "b_tanh = _tanh(b_y)",
}
SEEDED = {"__main__.defective_kernel", "__main__.greedy_kernel"}

Report = dict[str, Any]


def called(decorator: ast.expr) -> str:
    return ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)


@cache
def jitted() -> dict[str, dict[int, str]]:
    """Jitted function -> statements of its body: the line within the function, and its text."""
    functions: dict[str, dict[int, str]] = {}
    for folder in (*FOLDERS, "specdec"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text("utf-8")
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef) and "triton.jit" in map(called, node.decorator_list):
                    name = ".".join((FOLDERS.get(folder, folder), *parts, node.name))
                    functions[name] = {
                        part.lineno - node.lineno + 1: ast.unparse(part).partition("\n")[0]
                        for statement in node.body
                        for part in ast.walk(statement)
                        if isinstance(part, ast.stmt)
                    }
    return functions


@pytest.fixture(scope="module")
def report() -> Report:
    command = [sys.executable, str(TESTS / "compile_launches.py")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    result: Report = json.loads(run.stdout.splitlines()[-1])
    return result


def test_every_kernel_compiles_and_fits(report: Report):
    assert report["not_launched"] == {}
    failures = {name: messages for name, messages in report["failures"].items() if name not in SEEDED}
    assert not failures, "\n".join(f"{name}: {message}" for name, said in failures.items() for message in said)


def test_every_jitted_function_is_compiled(report: Report):
    assert len(jitted()) > 60
    assert sorted(set(jitted()) - set(report["statements"])) == ["specdec.sampling.softcap._tanh"]


def test_every_statement_of_a_kernel_is_compiled(report: Report):
    """So every new branch that constants decide must be added to `launches.usual`."""
    left = {
        f"{name}, line {line}: {text}"
        for name, statements in jitted().items()
        for line, text in statements.items()
        if line not in report["statements"].get(name, ()) and NOT_ON_NVIDIA.get(name, "") not in (None, text)
    }
    assert sorted(left) == []


def test_a_kernel_that_does_not_compile_is_reported(report: Report):
    """A local with the name of a parameter that is a constant: the interpreter runs it, no GPU did from 94e42c7 on."""
    [message] = report["failures"]["__main__.defective_kernel"]
    assert "scale" in message
    assert "__main__.defective_kernel" not in report["compiled"]


def test_a_kernel_that_does_not_fit_is_reported(report: Report):
    [message] = report["failures"]["__main__.greedy_kernel"]
    assert "bytes of shared memory" in message
