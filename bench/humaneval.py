"""HumanEval's grade: the programs in a model's answers run against the tests of their problems.

Each program is a Python process of its own (`-I`: no user packages, no paths of this checkout), in an empty folder,
with limits on time, memory and the size of files. That stops mistakes, not malice: run models that you trust, or in a
container without a network.

    program   the imports and helpers that the prompt has before the function, the answer's code, the problem's test
    code      the first fenced block that defines the function; a block or text that defines nothing is its body
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

FENCED = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
MAX_MEMORY, MAX_FILE = 2 << 30, 1 << 20  # bytes
LIMITS = """import resource as _r
for _name, _most in (("CPU", {cpu}), ("AS", {memory}), ("FSIZE", {file})):
    _r.setrlimit(getattr(_r, "RLIMIT_" + _name), (_most, _most))
del _r, _name, _most
"""


@dataclass(frozen=True, slots=True)
class Programming:
    """One problem of HumanEval."""

    prompt: str
    entry_point: str
    test: str


def read_problems(path: Path) -> list[Programming]:
    """Problems of a JSONL file with HumanEval's fields."""
    records = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
    return [Programming(each["prompt"], each["entry_point"], each["test"]) for each in records]


def program_of(problem: Programming, answer: str) -> str:
    """The whole program that grades an answer."""
    defines = re.compile(rf"^def {re.escape(problem.entry_point)}\b", re.MULTILINE)
    blocks = FENCED.findall(answer)
    code = next((block for block in blocks if defines.search(block)), blocks[0] if blocks else answer)
    found = defines.search(problem.prompt)
    before = problem.prompt[: found.start()] if found else ""
    body = f"{before}\n{code}" if defines.search(code) else problem.prompt + code
    return f"{body}\n\n{problem.test}\n\ncheck({problem.entry_point})\n"


def passes(program: str, seconds: float = 10.0) -> bool:
    """Does this program end by itself, in time and without an error?"""
    cpu = int(seconds) + 1
    limits = LIMITS.format(cpu=cpu, memory=MAX_MEMORY, file=MAX_FILE)
    with tempfile.TemporaryDirectory() as folder:
        try:
            run = subprocess.run(
                [sys.executable, "-I", "-c", limits + program],
                cwd=folder,
                env={"PATH": os.defpath, "HOME": folder},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
    return run.returncode == 0


def grade(problems: Sequence[Programming], answers: Sequence[str], seconds: float = 10.0) -> list[bool]:
    """Which answers pass the tests of their problems, as many at a time as there are processors."""
    programs = [program_of(problem, answer) for problem, answer in zip(problems, answers, strict=True)]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return list(pool.map(lambda program: passes(program, seconds), programs))
