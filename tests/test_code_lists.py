"""Lists in the pages are what tools/code_lists.py makes of the tables in the code."""

from pathlib import Path
from types import ModuleType

import pytest
from script_module import module_of

TOOL = Path(__file__).resolve().parent.parent / "tools" / "code_lists.py"

pytestmark = pytest.mark.skipif(not TOOL.exists(), reason="needs the checkout")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return module_of(TOOL)


def test_every_list_in_a_page_is_what_the_code_has(tool):
    """docs/limits.md named 8 fused families of 19. Rows of recipes are test_recipes.py's."""
    texts = {page.relative_to(tool.ROOT).as_posix(): page.read_text("utf-8") for page in tool.pages()}
    stale = [name for name, text in texts.items() if tool.with_lists(text, left_out="recipes") != text]
    assert not stale, f"{', '.join(stale)}: a list is stale; run `make api`"
    where = {found[2]: name for name, text in texts.items() for found in tool.LIST.finditer(text)}
    assert where.keys() == tool.LISTS.keys(), "a list that no page has is not needed"
    assert where["fused families"] == "docs/limits.md"


def test_a_list_is_rewritten_between_its_marks_alone(tool, monkeypatch):
    monkeypatch.setattr(tool, "LISTS", {"letters": lambda: "a, b"})
    page = "<!-- list: letters -->a<!-- end of list --> and <!-- list: letters --><!-- end of list -->, no more.\n"
    assert tool.with_lists(page).count("<!-- list: letters -->a, b<!-- end of list -->") == 2
    assert tool.with_lists(tool.with_lists(page)) == tool.with_lists(page)
    assert tool.with_lists("a, c") == "a, c"
    with pytest.raises(KeyError, match="digits"):
        tool.with_lists("<!-- list: digits -->1<!-- end of list -->")
