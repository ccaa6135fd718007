"""Pages that programs in tools/ make of the code are as it is; the other programs there run, tiny, since pages rest on
what they print. A new tool without an entry in RUNS or ELSEWHERE fails."""

import re
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

import specdec
from specdec.serving.http_options import HttpOptions
from specdec.serving.tools.reasoning_formats import REASONING

from marks import deep
from package_files import module_of
from processes import run

TESTS = Path(__file__).resolve().parent
TOOLS = TESTS.parent / "tools"
sys.path.insert(0, str(TOOLS))  # its scripts import each other

pytestmark = pytest.mark.skipif(not TOOLS.exists(), reason="needs the checkout")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return module_of(TOOLS / "api_reference.py")


@pytest.fixture(scope="module")
def lists() -> ModuleType:
    return module_of(TOOLS / "code_lists.py")


def test_the_api_reference_matches_the_code(tool):
    if tool.page() != tool.PAGE.read_text("utf-8"):
        pytest.fail("docs/api.md is stale: a signature, a docstring or an option has changed; run `make api`")


def test_every_public_name_and_every_option_is_on_the_page(tool):
    page = tool.page()
    missing = [name for name in specdec.__all__ if f"### {name}\n" not in page and f"* `{name}` (" not in page]
    assert missing == ["__version__"]
    for said in (
        "max_batch_size: int = 8",
        "Engine.abort(id: int) -> None",
        "Engine.from_pretrained(\n    target: str | PathLike[str]",
        "    progress: bool | None = None,\n) -> list[GenerationOutput]",
        "EngineStats(RequestStats)\n    finished: int\n",
        "* ``--prefix-cache/--no-prefix-cache`` (``True``): ",
        "* ``--max-waiting`` (``256``): ",
        "* ``--min-p`` (``0.0``): ",
        "* ``--json``: ",
        "* ``PROMPT``: ",
        "One of debug, info, warning, error.",
    ):
        assert said in page, said
    assert page.count("``--target``") == 2  # `train` has its own
    assert [page.count(f"* ``{name}``") for name in ("--drafter-revision", "--top-k", "--json")] == [1, 1, 1]
    assert str(Path(specdec.__file__).parent) not in page


def test_every_list_in_a_page_is_what_the_code_has(lists):
    """docs/limits.md named 8 fused families of 19. Rows of recipes are test_recipes.py's."""
    texts = {page.relative_to(lists.ROOT).as_posix(): page.read_text("utf-8") for page in lists.pages()}
    stale = [name for name, text in texts.items() if lists.with_lists(text, left_out="recipes") != text]
    assert not stale, f"{', '.join(stale)}: a list is stale; run `make api`"
    where = {found[2]: name for name, text in texts.items() for found in lists.LIST.finditer(text)}
    assert where.keys() == lists.LISTS.keys(), "a list that no page has is not needed"
    assert where["fused families"] == "docs/limits.md"


PROGRAMS = sorted(path.name for path in TOOLS.glob("*.py") if "__main__" in path.read_text("utf-8"))

NARROW_V = ["axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k25", "minicpm3", "mimo_v2_flash", "youtu"]
# program -> (arguments, a pattern that its output must have)
RUNS: dict[str, tuple[list[str], str]] = {
    "family_survey.py": (
        ["llama", "bloom", *NARROW_V],
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


def test_the_help_of_the_reasoning_parser_names_every_format() -> None:
    """It lacked mistral."""
    [parser] = [each for each in fields(HttpOptions) if each.name == "reasoning_parser"]
    _, settings = parser.metadata["option"]
    assert all(name in settings["help"] for name in ("none", *REASONING))


@pytest.mark.parametrize("name", [deep(name) for name in RUNS])
def test_a_tool_runs(name, tmp_path) -> None:
    arguments, pattern = RUNS[name]
    done = run([str(TOOLS / name), *arguments], cwd=tmp_path, real=True)  # as a user starts it
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(pattern, done.stdout), done.stdout
