"""docs/api.md is what tools/api_reference.py makes of the code as it is."""

from pathlib import Path
from types import ModuleType

import pytest
from script_module import module_of

import specdec

TOOL = Path(__file__).resolve().parent.parent / "tools" / "api_reference.py"

pytestmark = pytest.mark.skipif(not TOOL.exists(), reason="needs the checkout")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return module_of(TOOL)


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


def test_a_changed_docstring_makes_the_page_stale(tool, monkeypatch, tmp_path):
    """The check can fail."""
    stale = tmp_path / "api.md"
    stale.write_text(tool.page().replace("max_batch_size: int = 8", "max_batch_size: int = 9"), "utf-8")
    monkeypatch.setattr(tool, "PAGE", stale)
    with pytest.raises(pytest.fail.Exception, match="make api"):
        test_the_api_reference_matches_the_code(tool)
