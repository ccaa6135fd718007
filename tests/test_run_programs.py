"""Programs in answers: found in the text, run in a process of their own, and graded by whether the tests pass."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
import run_programs
from run_programs import Programming, grade, passes, program_of

TWICE = Programming(
    prompt='import math\n\n\ndef helper(x):\n    return x\n\n\ndef twice(x: int) -> int:\n    """ Two of x.\n    """\n',
    entry_point="twice",
    test="\n\ndef check(candidate):\n    assert candidate(3) == 6\n",
)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("Here:\n```python\ndef twice(x: int) -> int:\n    return 2 * x\n```\nIt doubles x.", True),
        ("```python\ndef twice(x):\n    return 2 * helper(x)\n```", True),  # what the prompt defines is there
        ("```\nprint(1)\n```\nor\n```py\ndef twice(x):\n    return math.floor(2 * x)\n```", True),
        ("    return 2 * x\n", True),  # the body alone
        ("```python\ndef twice(x):\n    return 2 * x", True),  # cut off after the code
        ("```python\ndef twice(x):\n    return 3 * x\n```", False),
        ("I cannot do that.", False),
        ("", False),
    ],
)
def test_an_answer_is_graded_by_its_code(answer: str, right: bool):
    assert grade([TWICE], [answer]) == [right]


def test_programs_are_stopped_and_see_nothing_of_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("A_SECRET", "1")
    assert not passes("while True: pass", seconds=0.5)
    assert not passes("import time; time.sleep(60)", seconds=0.5)
    assert passes("import os; assert 'A_SECRET' not in os.environ and not os.listdir('.')")
    monkeypatch.setattr(run_programs, "MAX_MEMORY", 256 << 20)
    assert not passes("x = bytearray(1 << 30)")
    assert passes("import sys; assert sys.stdin.read() == ''")


def test_the_test_of_a_problem_is_what_decides():
    program = program_of(TWICE, "    return 2 * x\n")
    assert passes(program) and program.rstrip().endswith("check(twice)")
    assert not passes(program.replace("== 6", "== 7"))
