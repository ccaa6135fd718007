"""Rows of a run: printed as Markdown as soon as they are known, and kept as JSON with the conditions of the run."""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

USUAL = ("found", "time")


@dataclass(frozen=True, slots=True)
class Row:
    """One check or figure. figures: columns of its own, in place of `found` and `time`."""

    name: str
    found: str = ""
    time: str = ""
    ok: bool = True
    figures: Mapping[str, object] = field(default_factory=dict)

    @property
    def cells(self) -> dict[str, object]:
        return dict(self.figures) or dict(zip(USUAL, (self.found, self.time), strict=True))


def table_row(cells: Iterable[object]) -> str:
    """One row of a Markdown table."""
    return f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"


def table_head(heads: Sequence[str]) -> str:
    """The first two rows of a table."""
    return f"{table_row(heads)}\n|{'|'.join('---' for _ in heads)}|"


class Report:
    """Rows of one run; a table begins again where the columns change. failed: names of the rows that failed."""

    def __init__(self, title: str, seconds: float | None = None) -> None:
        self.rows: list[tuple[str, Row]] = []
        self.failed: list[str] = []
        self._lines: list[str] = []
        self._heads: tuple[str, ...] | None = None
        self._began = time.perf_counter()
        self._seconds = seconds
        self._write(title)

    def add(self, case: str, rows: Iterable[Row]) -> None:
        """Take rows of a case until they or the seconds of the run end."""
        for row in rows:
            if self._heads != (heads := (case, *row.cells, "")):
                self._heads = heads
                self._write(f"\n{table_head(heads)}")
            self.rows.append((case, row))
            self.failed += [] if row.ok else [row.name]
            self._write(table_row([row.name, *row.cells.values(), "ok" if row.ok else "**FAILED**"]))
            if self.is_over:
                self._write(table_row([f"{case}: the rest left out", f"{self._seconds:.0f} s are over"]))
                break

    @property
    def is_over(self) -> bool:
        return self._seconds is not None and time.perf_counter() - self._began > self._seconds

    def finish(self, out: Path | None, record: Path | None, conditions: Mapping[str, Any]) -> int:
        """Print the counts, write the lines to `out` and the rows to `record` -> exit status."""
        seconds = time.perf_counter() - self._began
        self._write(f"\n{len(self.rows)} rows, {len(self.failed)} failed, {seconds:.0f} s")
        if out is not None:
            out.write_text("\n".join(self._lines) + "\n", "utf-8")
        if record is not None:
            rows = [{"case": case, "name": row.name, "ok": row.ok, **row.cells} for case, row in self.rows]
            text = json.dumps({"conditions": conditions, "rows": rows}, indent=1, default=str)
            record.write_text(text, "utf-8")
        return 1 if self.failed else 0

    def _write(self, line: str) -> None:
        print(line, flush=True)
        self._lines.append(line)
