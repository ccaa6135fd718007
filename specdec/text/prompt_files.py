"""Reads problems from JSON Lines files. It knows fields and lines, but no task and no model.

A faulty line is reported in one sentence with its number.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from specdec.errors import ConfigError, clipped, require_text

QUESTION_KEYS = ("question", "prompt", "turns")
KEYS_IN_WORDS = "'question', 'prompt' or 'turns'"
FORMATS = {b"\x1f\x8b": "compressed by gzip", b"\x28\xb5\x2f\xfd": "compressed by zstd", b"PAR1": "a Parquet file"}
"""First bytes of the other forms in which data sets are published."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A user's turns, and a reference answer and a category if the data has them."""

    turns: tuple[str, ...]
    answer: str | None = None
    category: str | None = None

    @property
    def text(self) -> str:
        """The first turn."""
        return self.turns[0]


def read_prompts(path: str | Path, limit: int = 0) -> list[Problem]:
    """Problems of a JSONL file: 'question' (GSM8K), 'prompt' (HumanEval) or 'turns' (MT-bench); limit 0: all."""
    if limit < 0:
        raise ConfigError(f"limit={limit}: a number of prompts, or 0 for all, is expected")
    problems = [parse_problem(record, f"{path}:{line}") for line, record in islice(json_lines(path), limit or None)]
    if not problems:
        raise ConfigError(f"data={str(path)!r} holds no prompt; a line of JSON with {KEYS_IN_WORDS} is expected")
    return problems


def json_lines(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of a JSONL file, without blank lines. Raises ConfigError at a line that is not an object.

    Only line feeds end lines: JSON strings may hold U+2028 and similar characters.
    """
    path = Path(path)
    if not path.exists() or path.is_dir():
        what = "is a folder" if path.is_dir() else "no such file"
        raise ConfigError(f"data={str(path)!r}: {what}; a JSONL file with {KEYS_IN_WORDS} is expected")
    with path.open("rb") as file:
        start = file.peek(4)
        for mark, form in FORMATS.items():
            if start.startswith(mark):
                raise ConfigError(f"data={str(path)!r} is {form}; convert it to a JSONL file, which is plain text")
        for number, line in enumerate(file, start=1):
            if line := line.strip():
                yield number, _parse_object(line, f"{path}:{number}")


def _parse_object(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8-sig"))  # without the mark that may begin a file
    except UnicodeDecodeError as error:
        byte = f"byte {error.start + 1} is 0x{line[error.start]:02x}"
        raise ConfigError(f"{where}: not UTF-8 ({byte}); convert the file") from error
    except RecursionError as error:
        raise ConfigError(f"{where}: brackets are nested too deep") from error
    except ValueError as error:  # no JSON, or a number of more digits than Python converts
        raise ConfigError(f"{where}: not a line of JSON ({error})") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: an object is expected, not {_shown(record)}")
    return record


def parse_problem(record: dict[str, Any], where: str) -> Problem:
    """The problem in one object of a file. Raises ConfigError, whose text begins with `where`."""
    key = next((key for key in QUESTION_KEYS if record.get(key) is not None), None)
    if key is None:
        keys = [*map(_shown, sorted(record)[:8]), *(["..."] if len(record) > 8 else [])]
        raise ConfigError(f"{where}: no {KEYS_IN_WORDS}; keys are {', '.join(keys)}")
    turns = record[key] if key == "turns" else [record[key]]
    if not isinstance(turns, list) or not turns:
        raise ConfigError(f"{where}: 'turns' is {_shown(turns)}; a list of texts, one for each turn, is expected")
    texts = tuple(_text(turn, key if key != "turns" else f"turns[{i}]", where) for i, turn in enumerate(turns))
    return Problem(texts, _optional_text(record, "answer", where), _optional_text(record, "category", where))


def _optional_text(record: dict[str, Any], key: str, where: str) -> str | None:
    return None if record.get(key) is None else _text(record[key], key, where)


def _text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{where}: '{name}' is {_shown(value)}; text is expected")
    return require_text(f"{where}: '{name}'", value)


def _shown(value: Any) -> str:
    return clipped(json.dumps(value), 40)
