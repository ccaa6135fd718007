"""Finished turns on disk, one JSON line each. A killed evaluation resumes from them, and a larger one reuses them.

A folder holds one file per process; the first line of a file holds its settings, and each further line names the batch
it was made in. Invariant: reused turns are those that the present settings would give again; a file with other settings
is refused, and the error names them.
"""

import json
from io import FileIO
from pathlib import Path
from typing import Any

from specdec.errors import ConfigError, naming_file

Record = dict[str, Any]
"""One turn of one problem: index, turn, batch (hash of its problems), parting (position and logit_margin, or None), and
its runs (`timed_comparison.Runs`)."""

NEUTRAL = {"data", "problems", "sha256", "max_model_len", "full_slots", "swa_slots", "cuda_graphs"}
"""Settings that change neither answers nor acceptance: which problems there are (records name their batch), room, and
speed."""


def read_transcripts(folder: Path, settings: Record) -> list[Record]:
    """Finished turns in `folder`, of all processes. Raises ConfigError if the folder was made with other settings."""
    records: list[Record] = []
    for path in sorted(folder.glob("transcripts-*.jsonl")):
        head, *others = _whole_lines(path) or [settings]
        compared = {key: value for key, value in settings.items() if key not in NEUTRAL}
        other = [f"{key} {head.get(key)!r}, now {value!r}" for key, value in compared.items() if head.get(key) != value]
        if other:
            raise ConfigError(
                f"{path} was made with {'; '.join(other)}; use the same settings (another limit may be given) or "
                "another folder"
            )
        records += others
    return records


def open_transcripts(folder: Path, settings: Record, rank: int) -> FileIO:
    """Open this process's file, without a buffer, for `append_record`; its first line holds the settings."""
    if folder.is_file():
        raise ConfigError(f"transcripts={str(folder)!r} is a file; a folder is expected")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"transcripts-{rank}.jsonl"
    file = FileIO(path, "ab")
    if not file.truncate(path.read_bytes().rfind(b"\n") + 1):  # drop a line that a kill cut short
        append_record(file, settings)
    return file


def append_record(file: FileIO, record: Record) -> None:
    """Write one line at the end of a file of transcripts."""
    with naming_file(str(file.name)):
        left = f"{json.dumps(record)}\n".encode()
        while left:
            left = left[file.write(left) :]


def _whole_lines(path: Path) -> list[Record]:
    """Records of a file; a last line without line feed was cut short by a kill and does not count."""
    lines: list[Record] = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or (lines and "batch" not in record):
            raise ConfigError(f"{path}:{number} is no transcript of this version; use another folder")
        lines.append(record)
    return lines
