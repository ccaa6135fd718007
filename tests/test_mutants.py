"""The list of seeded defects is whole and fits the code, and the tool that applies it does what it says.

Whether the tests catch them is shown by `python tools/mutants.py`, which takes half an hour.
"""

import ast
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))  # its scripts import each other
import mutants
from mutant_list import KINDS, Applied, DoesNotApplyError, Edit, Mutant, apply, product_sources, read_mutants

ROOT = Path(__file__).resolve().parent.parent
JITTED = re.compile(r"@triton\.jit[^\n]*\n(?:[^\n]*\n)*?def (\w+)\(")


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return product_sources(ROOT)


@pytest.fixture(scope="module")
def applied_or_not(sources) -> tuple[list[Applied], list[str]]:
    """What every mutant of this tree makes, and what is wrong with those that do not apply."""
    made, faults = [], []
    for each in read_mutants():
        try:
            if not mutants.why_left_out(each, None, sources):
                made.append(apply(each, sources))
        except DoesNotApplyError as error:
            faults.append(f"{each.name}: {error}")
    return made, faults


def mutant(*edits: Edit, tests: tuple[str, ...] = (), gone: str = "") -> Mutant:
    return Mutant("n", "Something.", "kernel", edits, tests, gone=gone)


# the list


def test_every_mutant_applies_exactly_once_and_what_it_makes_is_python(applied_or_not) -> None:
    made, faults = applied_or_not
    assert not faults
    for applied in made:
        assert applied.after != applied.before
        ast.parse(applied.after, applied.path)


def test_the_list_has_some_of_every_kind_and_at_least_sixty() -> None:
    counts = Counter(each.kind for each in read_mutants())
    assert counts.keys() == KINDS.keys() and counts.total() >= 60 and counts["field"] >= 5


def test_every_mutant_says_what_it_breaks_in_a_sentence_and_names_tests_that_exist() -> None:
    suite = mutants.Suite.of(ROOT)
    for each in read_mutants():
        assert re.fullmatch(r"[a-z0-9-]+", each.name) and re.fullmatch(r"[A-Z].*[.)]", each.breaks), each.name
        assert any(suite.resolve(test) for test in each.tests), each.name


def test_the_default_run_has_a_test_of_every_mutant(request) -> None:
    """A case that becomes deep, or has another name, takes a mutant's only catch with it. Of the files that are run."""
    config = request.config
    if config.option.keyword or config.option.markexpr or any("::" in argument for argument in config.args):
        pytest.skip("some cases of a file are left out")
    suite, run = mutants.Suite.of(ROOT), {item.nodeid for item in request.session.items}
    run |= {name.partition("[")[0] for name in run}
    files = {name.partition("::")[0] for name in run}
    missed = {}
    for each in read_mutants():
        named = [arguments[0] for test in each.tests if (arguments := suite.resolve(test)) and len(arguments) == 1]
        if not each.gone and {name.partition("::")[0] for name in named} <= files and run.isdisjoint(named):
            missed[each.name] = named
    assert not missed


def test_every_kernel_file_is_changed_by_a_mutant(sources, applied_or_not) -> None:
    changed = {applied.path for applied in applied_or_not[0]}
    # the clock's kernel reads a counter of the device, which the interpreter has not
    kernels = {path for path, text in sources.items() if JITTED.search(text) and "globaltimer" not in text}
    without_arithmetic = {path for path in kernels if path.endswith("triton_shim.py")}
    assert kernels and kernels - without_arithmetic <= changed


# applying one


CODE = """\
def f(a):
    if a:
        b = a + 1

        return b
    return a + 1
"""


def applied(*edits: Edit) -> str:
    return apply(mutant(*edits), {"f.py": CODE, "g.py": "# another\n"}).after


@pytest.mark.parametrize(
    ("edits", "said"),
    [
        ([Edit("a + 3", "a")], "edit 1 is found 0 times"),
        ([Edit("a + 1", "a")], r"edit 1 is found 2 times \(f.py\)"),
        ([Edit("b = a + 1", "b = a", within="another")], "edit 1 is found 0 times"),
        ([Edit("a + 3", "a"), Edit("a + 1", "a")], "edit 1 is found 0 times; edit 2 is found 2 times"),
    ],
)
def test_a_fragment_that_is_not_found_once_is_a_failure(edits, said) -> None:
    with pytest.raises(DoesNotApplyError, match=said):
        applied(*edits)


# the whole of it


@pytest.mark.slow
def test_a_tree_of_its_own_is_run_with_each_defect(tmp_path, monkeypatch) -> None:
    """One is caught by the test that it names, one by another of the suite; one survives, one cannot be imported. The
    copy lies below a folder with a space in its name."""
    (tmp_path / "two words").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "two words"))
    files = {
        "specdec/__init__.py": "",
        "specdec/attention/__init__.py": "",
        "specdec/sums.py": "def add(a, b):\n    return a + b\n\n\ndef twice(a):\n    return 2 * a\n\n\nUNUSED = 1\n",
        "tests/conftest.py": "",
        "tests/test_add.py": "from specdec.sums import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n",
        "tests/test_twice.py": "from specdec.sums import twice\n\n\ndef test_twice():\n    assert twice(3) == 6\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    defects = {"add": ("a + b", "a - b"), "twice": ("2 * a", "3 * a"), "unused": ("UNUSED = 1", "UNUSED = 2")}
    defects |= {"broken": ("UNUSED = 1", "UNUSED = ")}
    listed = [
        Mutant(name, "Something.", "kernel", (Edit(*edit),), ("test_add.py::test_add", "test_old.py::test_gone"))
        for name, edit in defects.items()
    ]
    runner = mutants.Runner(tmp_path, list(files), 1, 60, 60)
    try:
        results = list(runner.run(listed, fall_back=True))
        runner.confirm(results)
    finally:
        runner.close()
    assert [(result.verdict, result.by, result.named) for result in results] == [
        (mutants.CAUGHT, "tests/test_add.py::test_add", True),
        (mutants.CAUGHT, "tests/test_twice.py::test_twice", False),
        (mutants.SURVIVED, "", False),
        (mutants.UNIMPORTABLE, "", False),
    ]
    assert results[1].note.endswith("no longer there: test_old.py::test_gone")
    assert {name: (tmp_path / name).read_text("utf-8") for name in files} == files
