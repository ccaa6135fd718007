"""Files that a user named: checked before the work, and written whole or not at all.

A file is written next to its place and then renamed, so a fault leaves the old file unchanged. `-` is standard output.
Anything but a regular file (a pipe, /dev/null) is written to directly, never replaced.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from specdec.errors import ConfigError, naming_file

STDOUT = Path("-")


def require_writable(path: Path) -> None:
    """Raises ConfigError if `write_file(path, ...)` could not write."""
    if path == STDOUT:
        return
    if str(path).startswith("-"):
        raise ConfigError(f"{str(path)!r}: a file name or '-' is expected here; ./{path} is a file of that name")
    try:
        with suppress(FileNotFoundError):
            path.lstat()  # raises for a name that no file can have
        if path.is_dir():
            raise ConfigError(f"{str(path)!r} is a folder; a file name is expected")
        if path.exists() and not os.access(path, os.W_OK):
            raise ConfigError(f"{str(path)!r} may not be written; choose another file")
        if not _is_device(path):
            with NamedTemporaryFile(dir=_place(path).parent, prefix=f".{path.name[:50]}."):
                pass
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error.strerror or error}") from error


def require_distinct(paths: Sequence[Path | None]) -> None:
    """Raises ConfigError if two outputs have the same destination."""
    named = [path for path in paths if path is not None]
    places = [path if path == STDOUT else _place(path) for path in named]
    for path, place in zip(named, places, strict=True):
        if places.count(place) > 1:
            raise ConfigError(f"{str(path)!r} is named for two outputs; give each a file of its own")


def write_report(
    report: Any,
    table: str | None,
    json_file: Path | None,
    *others: tuple[Path | None, Callable[[], str | bytes]],
    indent: int | None = 2,
) -> None:
    """Write the plain values of a report as JSON, and each other form, to the named files. Print the table if standard
    output is none of these."""
    if json_file is not None:
        write_file(json_file, json.dumps(report, indent=indent))
    for path, content in others:
        if path is not None:
            write_file(path, content())
    if table is not None and STDOUT not in (json_file, *(path for path, _ in others)):
        print(table)


def write_file(path: Path, content: str | bytes) -> None:
    """The whole content of a file; text is written in UTF-8, with a line feed at its end."""
    data = f"{content}\n".encode() if isinstance(content, str) else content
    if path == STDOUT:
        sys.stdout.buffer.write(data)
    else:
        with naming_file(path):
            write = Path.write_bytes if _is_device(path) else _replace
            write(path, data)


def _replace(path: Path, data: bytes) -> None:
    place = _place(path)
    temporary = place.with_name(f".{place.name[:50]}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if place.exists():
            shutil.copymode(place, temporary)
        os.replace(temporary, place)
    finally:
        temporary.unlink(missing_ok=True)


def _is_device(path: Path) -> bool:
    """Is it a pipe, a terminal, /dev/null or /dev/stdout? Such paths must not be replaced by a rename."""
    return path.exists() and (not path.is_file() or path.is_relative_to("/dev") or path.is_relative_to("/proc"))


def _place(path: Path) -> Path:
    """Path of the actual file: links are followed, so writing keeps them."""
    return Path(os.path.realpath(path))
