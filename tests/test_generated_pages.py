"""Pages that are made of the code are as it is: docs/api.md by tools/api_reference.py, lists by tools/code_lists.py."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
from script_module import module_of

import specdec

TOOLS = Path(__file__).resolve().parent.parent / "tools"
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
        "    progress: bool = None,\n) -> list[GenerationOutput]",
        "EngineStats(RequestStats)",
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
