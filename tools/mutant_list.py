"""The list of mutants, in tools/mutants/*.toml, and how one is found in the code and applied. See `mutants.py`.

    [[mutant]]
    name = "window-one-key-wider"
    breaks = "A query on a sliding layer sees one key more than its window."
    kind = "invariant"                  one of KINDS
    tests = ["test_reference_attention.py::test_verify"]
    find = "..."                        a fragment that is found exactly once in all files of the product
    replace = "..."
    within = "..."                      optional: only files that contain this are searched
    since = "fd0dd28"                   optional: left out on commits before this one
    gone = "..."                        optional: why the code is no more; left out where it is not found
    [[mutant.or]]                       optional, more than once: the same defect as other generations of the code write
    find = "..."                        it, with `find`, `replace` and `within` of its own
    replace = "..."

A fragment of one line is found anywhere in a line; one of several lines as whole lines, at any indentation.
"""

import re
import subprocess
import textwrap
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LISTS = Path(__file__).resolve().parent / "mutants"
NO_PRODUCT = ("tests", "tools", "bench", "examples", "docs", "build", "dist")
"""Top-level folders whose Python is not product code."""
KINDS = {
    "field": "a defect that other engines shipped",
    "regression": "a defect that this project had, as CHANGELOG.md and docs/decisions tell",
    "invariant": "an invariant of the index spaces, the allocator, the prefix cache, the table or the scheduler",
    "round": "what a round decides, and how the host settles it",
    "kernel": "a Triton kernel",
    "sampling": "a sampler",
    "drafter": "a drafter",
    "loading": "checkpoints and their dialects",
    "serving": "what the server bounds and refuses",
}


@dataclass(frozen=True)
class Edit:
    """One fragment of code and what replaces it. within: a string that the file must contain besides."""

    find: str
    replace: str
    within: str = ""


@dataclass(frozen=True)
class Mutant:
    """One seeded defect.

    edits: the same defect in each generation of the code; the first that is found is applied. tests: names of tests
    expected to fail, `file.py::test_name`, `file.py::test_name[case]` or `file.py -k expression`. since: the commit
    that brought the code; the mutant is left out before. gone: why the code is no more; if none of the edits is found
    the mutant is left out.
    """

    name: str
    breaks: str
    kind: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]
    since: str = ""
    gone: str = ""


@dataclass(frozen=True)
class Applied:
    """The file that a mutant changes, relative to the root, and its text before and after."""

    path: str
    before: str
    after: str


class DoesNotApplyError(Exception):
    """No edit of a mutant is found exactly once."""


def read_mutants() -> list[Mutant]:
    """All mutants of the lists. Raises ValueError for one that is not whole."""
    tables = (tomllib.loads(file.read_text("utf-8")) for file in sorted(LISTS.glob("*.toml")))
    mutants = [_mutant(entry) for table in tables for entry in table["mutant"]]
    twice = [name for name, times in Counter(mutant.name for mutant in mutants).items() if times > 1]
    if twice:
        raise ValueError(f"mutants {', '.join(twice)} are in the lists twice")
    return mutants


def _mutant(entry: Mapping[str, Any]) -> Mutant:
    name = entry.get("name", "a mutant without a name")
    unknown = entry.keys() - {"name", "breaks", "kind", "tests", "since", "gone", "find", "replace", "within", "or"}
    if unknown:
        raise ValueError(f"{name}: unknown keys {', '.join(sorted(unknown))}")
    if missing := [key for key in ("name", "breaks", "kind", "tests", "find", "replace") if key not in entry]:
        raise ValueError(f"{name}: without {', '.join(missing)}")
    if entry["kind"] not in KINDS:
        raise ValueError(f"{name}: kind {entry['kind']!r} is none of {', '.join(KINDS)}")
    forms = [entry, *entry.get("or", [])]
    edits = tuple(Edit(form["find"], form["replace"], form.get("within", "")) for form in forms)
    if any(not edit.find.strip() or edit.find == edit.replace for edit in edits):
        raise ValueError(f"{name}: an edit that changes nothing")
    since, gone = entry.get("since", ""), entry.get("gone", "")
    return Mutant(name, entry["breaks"], entry["kind"], edits, tuple(entry["tests"]), since, gone)


def tracked_files(root: Path) -> list[str]:
    """Files of a checkout that git knows; of a folder without git all but hidden ones."""
    if (root / ".git").exists():
        listed = subprocess.run(["git", "-C", str(root), "ls-files", "-z"], check=True, capture_output=True).stdout
        return [name for name in listed.decode().split("\0") if name and (root / name).exists()]
    found = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
    return sorted(
        str(path) for path in found if not any(part.startswith((".git", "__pycache__")) for part in path.parts)
    )


def product_sources(root: Path) -> dict[str, str]:
    """The Python of the product, by path relative to the root."""
    names = [name for name in tracked_files(root) if name.endswith(".py") and name.split("/")[0] not in NO_PRODUCT]
    return {name: (root / name).read_text("utf-8") for name in names}


def places_of(mutant: Mutant, sources: Mapping[str, str]) -> list[tuple[Edit, list[tuple[str, re.Match[str]]]]]:
    """Finds the places of each of its edits."""
    places = []
    for edit in mutant.edits:
        pattern = _pattern(edit.find)
        parts = [edit.within, *map(str.strip, edit.find.split("\n"))]  # a search for a pattern takes far longer
        files = [(path, text) for path, text in sources.items() if all(part in text for part in parts)]
        places.append((edit, [(path, match) for path, text in files for match in pattern.finditer(text)]))
    return places


def apply(mutant: Mutant, sources: Mapping[str, str]) -> Applied:
    """Raises DoesNotApplyError unless one of the edits is found exactly once, saying where each was found."""
    said: list[str] = []
    for edit, found in places_of(mutant, sources):
        if len(found) == 1:
            [(path, match)] = found
            text = sources[path]
            return Applied(path, text, text[: match.start()] + _replacement(edit.replace, match) + text[match.end() :])
        where = f" ({', '.join(sorted({path for path, _ in found}))})" if found else ""
        said.append(f"edit {len(said) + 1} is found {len(found)} times{where}")
    raise DoesNotApplyError("; ".join(said))


def _pattern(fragment: str) -> re.Pattern[str]:
    """One line is found anywhere; of several, whole lines are, at any indentation."""
    lines = textwrap.dedent(fragment.strip("\n")).split("\n")
    if len(lines) == 1:
        return re.compile(re.escape(lines[0].strip()))
    rest = "".join(f"\n(?P=indent){re.escape(line)}" if line.strip() else "\n[ \t]*" for line in lines[1:])
    return re.compile(rf"^(?P<indent>[ \t]*){re.escape(lines[0])}{rest}$", re.MULTILINE)


def _replacement(text: str, match: re.Match[str]) -> str:
    lines = textwrap.dedent(text.strip("\n")).split("\n")
    indent = match.groupdict().get("indent")
    if indent is None:
        return "\n".join(line.strip() for line in lines) if len(lines) == 1 else _indented(lines, match)
    return "\n".join(indent + line if line.strip() else "" for line in lines)


def _indented(lines: Sequence[str], match: re.Match[str]) -> str:
    """Several lines in the place of one: as deep as the line that they replace."""
    line = match.string[match.string.rfind("\n", 0, match.start()) + 1 : match.start()]
    return f"\n{line if not line.strip() else ''}".join(lines)
