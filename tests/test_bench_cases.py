"""`python -m bench`: every case that has a CPU form runs tiny, pages name cases that exist, and HumanEval's grade."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from specdec.models.published import HELD_OUT_PROBLEMS

from marks import deep
from processes import run

ROOT = Path(__file__).resolve().parent.parent
if not (ROOT / "bench").exists():
    pytest.skip("needs the checkout", allow_module_level=True)
sys.path.append(str(ROOT))
from bench import humaneval  # noqa: E402
from bench.figures import PICTURE, decode_speed_svg, readme_rows  # noqa: E402
from bench.humaneval import Programming, grade, passes, program_of  # noqa: E402
from bench.registry import CASES  # noqa: E402
from bench.report import Report, Row  # noqa: E402

QUICK = ("readme", "host")
"""Cases of `make test`; the others take longer, most of them in Triton's interpreter."""
PAGES = sorted(path for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")) if "results" not in path.parts)
GPU = re.compile(r"\b[HA][12]00\b")
COMMAND = re.compile(r"python -m bench ((?:[a-z][a-z-]*(?: |(?=[`\n.,)])))+)")


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def bench(*words: str, interpreted: bool = False):
    """In a real process where kernels are interpreted: a fork has imported triton."""
    return run(["-m", "bench", *words], cwd=ROOT, env=ENVIRONMENT, real=interpreted)


ON_A_CPU = [name for name, case in CASES.items() if case.cpu is not None]


@pytest.mark.parametrize("names", [QUICK, *(deep((name,)) for name in ON_A_CPU if name not in QUICK)], ids=" ".join)
def test_a_case_runs_on_a_cpu(names, tmp_path):
    data = ["--data", str(HELD_OUT_PROBLEMS)] if "pair" in names else []
    given = ["--device", "cpu", "--json", str(tmp_path / "rows.json"), *data]
    done = bench(*names, *given, interpreted=names != QUICK)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    record = json.loads((tmp_path / "rows.json").read_text("utf-8"))
    assert {row["case"] for row in record["rows"]} == set(names) and all(row["ok"] for row in record["rows"])
    assert {"command", "date", "torch", "device", "commit"} <= record["conditions"].keys()


def test_options_reach_the_case_and_unknown_ones_are_refused(tmp_path):
    done = bench("host", "--requests", "2", "--steps", "1", "--out", str(tmp_path / "table.md"))
    assert "| 2 requests |" in done.stdout and "| 1 requests |" not in done.stdout
    assert (tmp_path / "table.md").read_text("utf-8").strip() == done.stdout.strip()
    assert "unrecognized arguments: --rquests" in bench("host", "--rquests", "2").stderr
    assert "'hosts' is no case; choose of paged-attention," in bench("hosts").stderr


def test_impossible_runs_and_unwritable_files_are_refused_at_the_start(tmp_path):
    assert "'part' is no part of host; choose of functions" in bench("host", "--parts", "part").stderr
    nowhere = str(tmp_path / "nowhere" / "rows")
    for option in ("--out", "--json"):
        done = bench("host", option, nowhere)
        assert (done.returncode, done.stdout) == (2, "") and f"{nowhere!r} cannot be written: No such" in done.stderr


INTERRUPTED = """
import sys
from bench.__main__ import main
from bench.cases import host
from bench.report import Row

def rows():
    yield Row("first")
    raise KeyboardInterrupt

host.functions_rows = rows
sys.exit(main(sys.argv[1:]))
"""


def test_rows_before_ctrl_c_are_kept(tmp_path):
    file = tmp_path / "rows.json"
    done = run(["-c", INTERRUPTED, "host", "--json", str(file)], cwd=ROOT, env=ENVIRONMENT)
    assert done.returncode == 130, done.stderr
    assert [row["name"] for row in json.loads(file.read_text("utf-8"))["rows"]] == ["first"]


def test_the_list_has_every_case():
    rows = bench("--list").stdout.splitlines()[2:]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == list(CASES)


def test_every_part_is_a_function_with_these_options():
    """Without an import: the functions of a GPU's cases need one."""
    for case in CASES.values():
        path = ROOT / (case.path.replace(".", "/") + ".py")
        text = path.read_text("utf-8")
        functions = dict(re.findall(r"^def (\w+)_rows\(([^)]*)\)", text, re.MULTILINE))
        small = [*(case.cpu or {}), *case.quick]
        assert {*case.parts, *(case.cpu or {}).get("parts", []), *case.quick.get("parts", [])} <= functions.keys(), (
            case.name
        )
        arguments = {name for part in functions.values() for name in re.findall(r"(\w+):", part)}
        assert {*case.options, *small} - {"parts"} <= arguments | set(re.findall(r"(\w+): ", text)), case.name
        assert {*small} - {"parts"} <= case.options.keys() and {*case.timed} <= {*case.parts}, case.name


def test_gpu_test_installs_what_its_cases_import():
    """In a fresh clone the case `crowd` found no pytest, which a helper of the tests imports."""
    assert "gpu-test: $(VENV)/.test " in (ROOT / "Makefile").read_text("utf-8")


def test_a_failed_row_is_the_exit_status_and_time_ends_a_run(capsys, tmp_path):
    report = Report("title")
    report.add("case", [Row("a", "1"), Row("b", ok=False), Row("c", figures={"x": 2})])
    assert report.finish(None, tmp_path / "rows.json", {}) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "| b |  |  | **FAILED** |" in lines and "| case | x |  |" in lines and "| c | 2 | ok |" in lines
    written = json.loads((tmp_path / "rows.json").read_text("utf-8"))["rows"]
    assert written[2] == {"case": "case", "name": "c", "ok": True, "x": 2}
    report = Report("title", seconds=0)
    report.add("case", [Row("a"), Row("b")])
    assert [row.name for _, row in report.rows] == ["a"]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pages_name_cases_that_exist(path):
    text = path.read_text("utf-8")
    named = [word for words in COMMAND.findall(text) for word in words.split()]
    assert set(named) - {"plot"} <= CASES.keys(), path


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks.md", "docs/quantised.md", "docs/exactness.md"])
def test_pages_with_figures_of_a_gpu_name_a_case(page):
    text = (ROOT / page).read_text("utf-8")
    assert not GPU.search(text) or COMMAND.search(text)


def test_the_readme_has_the_recorded_figures():
    text = (ROOT / "README.md").read_text("utf-8")
    assert all(row in text for row in readme_rows())


def test_the_picture_is_what_the_command_prints():
    assert PICTURE.read_text("utf-8") == decode_speed_svg() == bench("plot").stdout


# HumanEval's grade

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


def test_programs_are_stopped_and_see_nothing_of_the_caller(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("A_SECRET", "1")
    assert not passes("while True: pass", seconds=0.2)
    assert not passes("import time; time.sleep(60)", seconds=0.2)
    assert passes("import os; assert 'A_SECRET' not in os.environ and not os.listdir('.')")
    monkeypatch.setattr(humaneval, "MAX_MEMORY", 256 << 20)
    assert not passes("x = bytearray(1 << 30)")
    assert passes("import sys; assert sys.stdin.read() == ''")


def test_the_test_of_a_problem_is_what_decides():
    program = program_of(TWICE, "    return 2 * x\n")
    assert passes(program) and program.rstrip().endswith("check(twice)")
    assert not passes(program.replace("== 6", "== 7"))
