"""Lists in the pages of what a table in the code holds: `python tools/code_lists.py` writes them, as `make api` does.

A page says where, with the name of the list:

    <!-- list: fused families -->...<!-- end of list -->

tests/test_generated_pages.py fails while one is stale.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import recipe_figures

from specdec.layers.description.families import FAMILIES
from specdec.measurement.model_shapes import SHAPES
from specdec.measurement.recipes import HEADS, recipes, row
from specdec.models.published import BUNDLED_NAMES
from specdec.serving.tools.reasoning_formats import REASONING
from specdec.serving.tools.tool_parsers import PARSERS

ROOT = Path(__file__).resolve().parent.parent
LIST = re.compile(r"(<!-- list: ([^<>]+) -->)(.*?)(<!-- end of list -->)", re.DOTALL)


def code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def recipe_table() -> str:
    """The rows of `specdec recipe` as Markdown."""
    rows = [HEADS, ["---"] * len(HEADS), *map(row, recipes().values())]
    return "\n" + "\n".join(f"|{'|'.join(cells)}|" for cells in rows) + "\n"


LISTS: dict[str, Callable[[], str]] = {
    "recipes": recipe_table,
    "fused families": lambda: ", ".join(sorted(name.partition(".")[0] for name in FAMILIES)),
    "tool parsers": lambda: code(PARSERS),
    "reasoning parsers": lambda: code(REASONING),
    "shapes": lambda: code(SHAPES),
    "bundled models": lambda: code(BUNDLED_NAMES),
}


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def with_lists(text: str, left_out: str = "") -> str:
    """The page with its lists as the code has them, but for one that is left as it is. Raises KeyError for a list that
    no table makes."""
    return LIST.sub(
        lambda found: found[0] if found[2] == left_out else f"{found[1]}{LISTS[found[2]]()}{found[4]}", text
    )


def main() -> None:
    recipe_figures.write()
    for page in pages():
        text = page.read_text("utf-8")
        if (new := with_lists(text)) != text:
            page.write_text(new, "utf-8")


if __name__ == "__main__":
    main()
