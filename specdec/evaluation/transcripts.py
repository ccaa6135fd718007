"""Finished turns on disk, a line of JSON each, so that a killed evaluation goes on and a larger one takes them over.

A folder holds one file for each process; the first line of a file is the settings it was made with. Invariant: what is
taken over is what the present settings would give again; settings that would not are refused by name.
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
"""Settings that change no answer and no acceptance: where the problems lay (their sum is compared), room, and speed."""

Earlier = Callable[[int], tuple[str, set[int]]]
"""(problems of a smaller evaluation) -> the sum of their text, and those whose batch would still be the same."""


class TranscriptFile(FileIO):
    """Lines go to the system as they are written, without a buffer: closing has nothing left to write."""

    def append(self, text: str) -> None:
        with naming_file(str(self.name)):
            left = text.encode()
            while left:
                left = left[self.write(left) :]


def read_transcripts(folder: Path, settings: Record, earlier: Earlier | None = None) -> list[Record]:
    """Finished turns in `folder`, of all processes. Raises ConfigError where it was made with other settings."""
    files = sorted(folder.glob("transcripts-*.jsonl"))
    return [record for path in files for record in _usable(path, settings, earlier)]


def open_transcripts(folder: Path, settings: Record, rank: int, earlier: Earlier | None = None) -> TranscriptFile:
    """This process's file, to go on after its last whole line; its first line holds the settings."""
    if folder.is_file():
        raise ConfigError(f"transcripts={str(folder)!r} is a file; a folder is expected")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"transcripts-{rank}.jsonl"
    whole = _whole_lines(path)
    if whole and whole[0].get("problems") != settings.get("problems"):  # extended: what counts no longer goes
        write_file(path, "\n".join(map(json.dumps, [settings, *_usable(path, settings, earlier)])))
    file = TranscriptFile(path, "ab")
    if not file.truncate(path.read_bytes().rfind(b"\n") + 1):  # the beginning of a line that a kill cut short goes
        file.append(json.dumps(settings) + "\n")
    return file


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
    """Records of a file; a last line that a kill cut short has no line feed and does not count."""
    whole = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    lines: list[Record] = []
    for number, line in enumerate(whole, start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}:{number} is no transcript ({error}); use another folder") from error
        if not isinstance(record, dict) or (lines and "index" not in record):
            raise ConfigError(f"{path}:{number} is no transcript of this version; use another folder")
        lines.append(record)
    return lines
