"""Counts the product, tests, tools and pages; exits with 1 for a long product file that has no reason here.

    make size                        product files one by one, then a line for each part of the project
    make size ARGS="--against v1.2"  and how much each part has grown since that tag or commit

Code is counted in lines, blank ones and comments included, since a reader scrolls through all of them; pages are
counted in words. A total has no limit.
"""

import argparse
import io
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MAX_FILE_LINES = 400
REASONS: dict[str, str] = {
    "specdec/engine.py": "the public class; what it does lies elsewhere already",
}
"""Longer product files, each with the reason why it is one concept all the same."""


class Part(NamedTuple):
    """Files of one purpose: those under `folders` whose names end with `suffix`, counted in `unit`."""

    name: str
    folders: tuple[str, ...]
    suffix: str = ".py"
    unit: str = "lines"


PARTS = (
    Part("product", ("kvcache", "attention", "draft_models", "specdec")),
    Part("tests", ("tests",)),
    Part("tools", ("tools",)),
    Part("bench", ("bench",)),
    Part("examples", ("examples",)),
    Part("decisions", ("docs/decisions",), ".md", "words"),
    Part("results", ("docs/results",), ".md", "words"),
    Part("docs", ("docs",), ".md", "words"),
)
"""A file belongs to the first part that it fits."""


def part_of(name: str) -> Part | None:
    fitting = (part for part in PARTS if name.endswith(part.suffix))
    return next((part for part in fitting if name.startswith(tuple(f"{folder}/" for folder in part.folders))), None)


def count_files(texts: Mapping[str, str]) -> dict[str, int]:
    """Lines or words of each file that belongs to a part, by name, sorted."""
    parts = {name: part_of(name) for name in sorted(texts)}
    return {
        name: len(texts[name].split() if part.unit == "words" else texts[name].splitlines())
        for name, part in parts.items()
        if part is not None
    }


def read_checkout() -> dict[str, str]:
    paths = (path for part in PARTS for folder in part.folders for path in (ROOT / folder).rglob(f"*{part.suffix}"))
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in paths}


def read_commit(commit: str) -> dict[str, str]:
    """Files of a tag or commit. Raises CalledProcessError, with what git says, for one that is unknown."""
    command = ["git", "-C", str(ROOT), "archive", "--format=tar", commit]
    archive = subprocess.run(command, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        members = [member for member in files if member.isfile() and part_of(member.name) is not None]
        contents = {member.name: files.extractfile(member) for member in members}
        return {name: content.read().decode("utf-8") for name, content in contents.items() if content is not None}


def sums_by_part(counts: Mapping[str, int]) -> Counter[str]:
    sums: Counter[str] = Counter()
    for name, count in counts.items():
        part = part_of(name)
        assert part is not None
        sums[part.name] += count
    return sums


def too_long(counts: Mapping[str, int]) -> list[str]:
    """One message per product file above the limit without a reason."""
    return [
        f"{name}: {count} lines, at most {MAX_FILE_LINES} without a reason in tools/size.py"
        for name, count in counts.items()
        if part_of(name) == PARTS[0] and count > MAX_FILE_LINES and name not in REASONS
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT", help="a tag or commit: says how much each part has grown since")
    given = parser.parse_args()
    counts = count_files(read_checkout())
    before = None
    if given.against is not None:
        try:
            before = sums_by_part(count_files(read_commit(given.against)))
        except subprocess.CalledProcessError as error:
            said = error.stderr.decode().strip()
            parser.error(f"--against {given.against}: {said}; give a tag or commit of this checkout")
    for name, count in counts.items():
        if part_of(name) == PARTS[0]:
            print(f"{count:6}  {name}" + (f"  ({REASONS[name]})" if name in REASONS else ""))
    sums = sums_by_part(counts)
    for part in PARTS:
        files = sum(part_of(name) == part for name in counts)
        since = "" if before is None else f", {sums[part.name] - before[part.name]:+d} since {given.against}"
        print(f"{sums[part.name]:6}  {part.unit} of {part.name} in {files} files{since}")
    messages = too_long(counts)
    for message in messages:
        print(message, file=sys.stderr)
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
