"""Lines of product code per file and in all; exits with 1 for a file above 400 lines that has no reason here.

Every line counts, blank ones and comments too: it is about what a reader must scroll through. The total has no limit.
"""

import sys
from pathlib import Path

FOLDERS = ("kvcache", "attention", "draft_models", "specdec")
MAX_FILE_LINES = 400
REASONS: dict[str, str] = {
    "specdec/engine.py": "the public class; what it does lies elsewhere already",
    "specdec/runtime/request.py": "a request, and the output and figures that are made of it",
}
"""Longer files, each with the reason why it is one concept all the same."""


def count_lines(root: Path) -> dict[str, int]:
    paths = (path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py")))
    return {path.relative_to(root).as_posix(): len(path.read_text("utf-8").splitlines()) for path in paths}


def too_long(lines: dict[str, int]) -> list[str]:
    """One message per file above the limit without a reason."""
    return [
        f"{name}: {n} lines, at most {MAX_FILE_LINES} without a reason in tools/size.py"
        for name, n in lines.items()
        if n > MAX_FILE_LINES and name not in REASONS
    ]


def main() -> int:
    lines = count_lines(Path(__file__).resolve().parent.parent)
    for name, n in lines.items():
        print(f"{n:6}  {name}" + (f"  ({REASONS[name]})" if name in REASONS else ""))
    for folder in FOLDERS:
        print(f"{sum(n for name, n in lines.items() if name.startswith(f'{folder}/')):6}  {folder}/")
    print(f"{sum(lines.values()):6}  in {len(lines)} files")
    messages = too_long(lines)
    for message in messages:
        print(message, file=sys.stderr)
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
