"""The programs in tools/ run, tiny: pages rest on what they print, and a tool that nothing runs falls behind the code.

A new tool without an entry in RUNS or ELSEWHERE fails.
"""

import re
from pathlib import Path

import pytest
from script_module import module_of

from marks import deep
from processes import run

TESTS = Path(__file__).resolve().parent
TOOLS = TESTS.parent / "tools"
PROGRAMS = sorted(path.name for path in TOOLS.glob("*.py") if "__main__" in path.read_text("utf-8"))

NARROW_V = ["axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k25", "minicpm3", "mimo_v2_flash", "youtu"]
# program -> (arguments, a pattern that its output must have)
RUNS: dict[str, tuple[list[str], str]] = {
    "family_survey.py": (
        ["llama", "falcon", *NARROW_V],
        rf"equal +llama (?s:.*)equal {1 + len(NARROW_V)}, refused 1\n",
    ),
    "round_types.py": ([], r"\d+ types"),
}
ELSEWHERE = {
    "api_reference.py": "test_generated_pages.py",
    "check_dist.py": "test_packaging.py",
    "code_lists.py": "test_generated_pages.py",
    "hostile.py": "test_serve_soak.py",
    "mutants.py": "test_mutants.py",
    "pytest_forks.py": "test_mutants.py",
    "recipe_figures.py": "test_recipes.py",
    "size.py": "test_layout.py",
}

pytestmark = [
    pytest.mark.usefixtures("bundled_once"),
    pytest.mark.skipif(not TOOLS.exists(), reason="needs the checkout"),
]


def test_every_tool_is_run_or_said_why_not() -> None:
    listed = {*RUNS, *ELSEWHERE}
    assert listed >= set(PROGRAMS), f"without an entry: {sorted(set(PROGRAMS) - listed)}"
    gone = [name for name in (*RUNS, *ELSEWHERE) if not (TOOLS / name).exists()]
    gone += [name for name in ELSEWHERE.values() if name.startswith("test_") and not (TESTS / name).exists()]
    assert not gone


def test_the_survey_of_families_serves_one(make_target) -> None:
    """It said "crashed" of each class that is served: its drafter had an older interface."""
    result = module_of(TOOLS / "family_survey.py").survey(make_target("llama", fresh=True))
    assert result.verdict == "equal", result


def test_pages_have_the_types_of_a_round_that_the_tool_counts() -> None:
    """A decision said 18 where the tool printed 31, of which a page lacked four."""
    met = {kind.__name__ for kind in module_of(TOOLS / "round_types.py").types_of_a_round()}
    docs = TOOLS.parent / "docs"
    page = (docs / "life_of_a_request.md").read_text("utf-8")
    [listed] = re.findall(r"## The types on the way\n(.*?)\n## ", page, re.DOTALL)
    assert set(re.findall(r"`([A-Z]\w+)`", listed)) == met
    [text] = [path.read_text("utf-8") for path in (docs / "decisions").glob("0047-*")]
    assert f"prints `{len(met)} types` now" in text and f"| {len(met)} |" in text


@pytest.mark.parametrize("name", [deep(name) for name in RUNS])
def test_a_tool_runs(name, tmp_path) -> None:
    arguments, pattern = RUNS[name]
    done = run([str(TOOLS / name), *arguments], cwd=tmp_path, real=True)  # as a user starts it
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(pattern, done.stdout), done.stdout
