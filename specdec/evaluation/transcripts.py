"""Finished turns on disk, one JSON line each. A killed evaluation resumes from them, and a larger one reuses them.

A folder holds one file per process; the first line of a file holds its settings. Invariant: reused turns are those that
the present settings would give again; a file with other settings is refused, and the error names them.
"""

import json
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

from specdec.errors import ConfigError, naming_file
from specdec.evaluation.output_files import write_file

Record = dict[str, Any]
"""One turn of one problem: index, turn, parting (position and logit_margin, or None), and by run its text, token_ids,
finish_reason, stats, seconds."""

NEUTRAL = {"data", "max_model_len", "full_slots", "swa_slots", "cuda_graphs"}
"""Settings that change neither answers nor acceptance: the problems' location (their hash is compared), room, and
speed."""

Earlier = Callable[[int], tuple[str, set[int]]]
"""(problems of a smaller evaluation) -> the hash of their text, and the problems whose batch would be the same."""


def read_transcripts(folder: Path, settings: Record, earlier: Earlier | None = None) -> list[Record]:
    """Finished turns in `folder`, of all processes. Raises ConfigError if the folder was made with other settings."""
    files = sorted(folder.glob("transcripts-*.jsonl"))
    return [record for path in files for record in _usable(path, settings, earlier)]


def open_transcripts(folder: Path, settings: Record, rank: int, earlier: Earlier | None = None) -> FileIO:
    """Open this process's file, without a buffer, for `append_record`; its first line holds the settings."""
    if folder.is_file():
        raise ConfigError(f"transcripts={str(folder)!r} is a file; a folder is expected")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"transcripts-{rank}.jsonl"
    whole = _whole_lines(path)
    if whole and whole[0].get("problems") != settings.get("problems"):  # extended: outdated records are dropped
        write_file(path, "\n".join(map(json.dumps, [settings, *_usable(path, settings, earlier)])))
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


def _usable(path: Path, settings: Record, earlier: Earlier | None) -> list[Record]:
    """The records of a file that the present settings would give again."""
    lines = _whole_lines(path)
    if not lines:
        return []
    head, *records = lines
    wanted, count = settings, head.get("problems")
    if earlier is not None and isinstance(count, int) and 0 < count < settings["problems"]:
        sha256, kept = earlier(count)
        wanted = settings | {"problems": count, "sha256": sha256}
        records = [record for record in records if record["index"] in kept]
    compared = {key: value for key, value in wanted.items() if key not in NEUTRAL}
    other = [f"{key} {head.get(key)!r}, now {value!r}" for key, value in compared.items() if head.get(key) != value]
    if other:
        raise ConfigError(
            f"{path} was made with {'; '.join(other)}; use the same settings (a larger limit may be given) or another "
            "folder"
        )
    return records


def _whole_lines(path: Path) -> list[Record]:
    """Records of a file; a last line without line feed was cut short by a kill and does not count."""
    whole = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    lines: list[Record] = []
    for number, line in enumerate(whole, start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or (lines and "index" not in record):
            raise ConfigError(f"{path}:{number} is no transcript of this version; use another folder")
        lines.append(record)
    return lines
