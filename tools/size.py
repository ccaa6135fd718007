"""Lines of product code per file and in all; exits with 1 above the budget.

Every line counts, blank ones and comments too: the budget is about what a reader must scroll through.
"""

import sys
from pathlib import Path

FOLDERS = ("kvcache", "attention", "draft_models", "specdec")
MAX_FILE_LINES = 400
MAX_TOTAL_LINES = 7_300


def count_lines(root: Path) -> dict[str, int]:
    paths = (path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py")))
    return {path.relative_to(root).as_posix(): len(path.read_text("utf-8").splitlines()) for path in paths}


def over_budget(lines: dict[str, int]) -> list[str]:
    """One message per file above its limit, and one for the total."""
    messages = [f"{name}: {n} lines, at most {MAX_FILE_LINES}" for name, n in lines.items() if n > MAX_FILE_LINES]
    total = sum(lines.values())
    if total > MAX_TOTAL_LINES:
        messages.append(f"all files: {total} lines, at most {MAX_TOTAL_LINES}")
    return messages


def main() -> int:
    lines = count_lines(Path(__file__).resolve().parent.parent)
    for name, n in lines.items():
        print(f"{n:6}  {name}")
    for folder in FOLDERS:
        print(f"{sum(n for name, n in lines.items() if name.startswith(f'{folder}/')):6}  {folder}/")
    print(f"{sum(lines.values()):6}  in {len(lines)} files; budget {MAX_TOTAL_LINES}, {MAX_FILE_LINES} a file")
    messages = over_budget(lines)
    for message in messages:
        print(message, file=sys.stderr)
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
