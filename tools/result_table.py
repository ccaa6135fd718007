"""The table that developer scripts print: Markdown, a line as soon as it is known, and a count of what failed."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple


class Row(NamedTuple):
    """One check or one figure."""

    check: str
    error: str
    time: str = ""
    ok: bool = True


def table_row(cells: Sequence[object]) -> str:
    """One row of a Markdown table."""
    return f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"


def table_head(*heads: str, numbers: Sequence[str] = ()) -> str:
    """The first two rows; the columns of `numbers` are aligned to the right."""
    return f"{table_row(heads)}\n|{'|'.join('---:' if head in numbers else '---' for head in heads)}|"


class ResultTable:
    """Prints rows as they are added, and keeps the lines for a file. failed: names of the checks that failed."""

    def __init__(self, title: str) -> None:
        self.failed: list[str] = []
        self._lines: list[str] = []
        self._count = 0
        self._began = time.perf_counter()
        self._title = title

    def add(self, rows: Iterable[Row]) -> None:
        for row in rows:
            if not self._lines:  # not before the arguments are read
                self._write(f"{self._title}\n\n{table_head('check', 'found', 'time', '')}")
            self._count += 1
            self.failed += [] if row.ok else [row.check]
            self._write(table_row([*row[:3], "ok" if row.ok else "**FAILED**"]))

    def finish(self, out: Path | None = None) -> int:
        """Print the counts, write all lines to `out`. -> exit status"""
        seconds = time.perf_counter() - self._began
        self._write(f"\n{self._count} rows, {len(self.failed)} failed, {seconds:.0f} s")
        if out is not None:
            out.write_text("\n".join(self._lines) + "\n", "utf-8")
        return 1 if self.failed else 0

    def _write(self, line: str) -> None:
        print(line, flush=True)
        self._lines.append(line)
