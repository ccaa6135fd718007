"""Lists in the pages of what a table in the code holds: `python tools/code_lists.py` writes them, as `make api` does.

A page says where, with the name of the list:

    <!-- list: fused families -->...<!-- end of list -->

tests/test_code_lists.py fails while one is stale.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from specdec.evaluation.model_shapes import SHAPES
from specdec.layers.families import FAMILIES
from specdec.models.bundled import BUNDLED_NAMES
from specdec.serving.tools.reasoning import REASONING
from specdec.serving.tools.tool_parsers import PARSERS

ROOT = Path(__file__).resolve().parent.parent
LIST = re.compile(r"(<!-- list: ([^<>]+) -->)(.*?)(<!-- end of list -->)", re.DOTALL)


def code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


LISTS: dict[str, Callable[[], str]] = {
    "fused families": lambda: ", ".join(sorted(name.partition(".")[0] for name in FAMILIES)),
    "tool parsers": lambda: code(PARSERS),
    "reasoning parsers": lambda: code(REASONING),
    "shapes": lambda: code(SHAPES),
    "bundled models": lambda: code(BUNDLED_NAMES),
}


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def with_lists(text: str) -> str:
    """The page with its lists as the code has them. Raises KeyError for a list that no table makes."""
    return LIST.sub(lambda found: f"{found[1]}{LISTS[found[2]]()}{found[4]}", text)


def main() -> None:
    for page in pages():
        text = page.read_text("utf-8")
        if with_lists(text) != text:
            page.write_text(with_lists(text), "utf-8")


if __name__ == "__main__":
    main()
