"""Files of JSON records, one per line, that a later process continues after a kill.

A last line without line feed was cut short by the kill: it does not count, and is removed before the next record.
"""

import json
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from specdec.errors import naming_file


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a file that count; none if there is no file."""
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def open_records(path: Path) -> FileIO:
    """Open a new or a killed process's file, without a buffer, for `append_record`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = FileIO(path, "ab")
    file.truncate(path.read_bytes().rfind(b"\n") + 1)
    return file


def append_record(file: FileIO, record: Mapping[str, Any]) -> None:
    """Write one line at the end of a file."""
    with naming_file(str(file.name)):
        left = f"{json.dumps(record)}\n".encode()
        while left:
            left = left[file.write(left) :]
