"""API keys: a request's key, and the keys of a file, one per line, optionally after a name for the log.

    research      sk-4f1c...
    sk-7d20...                    a key without a name is named after its line, such as line-2

Blank lines are ignored, and text after a # at the beginning or after white space. Messages never contain keys.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path

from specdec.errors import ConfigError
from specdec.text.text_files import read_text_file


def bearer_token(headers: Mapping[str, str]) -> str:
    """The key in these headers (with lower-case names); empty if there is none."""
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


def by_name(keys: Sequence[str], named: Mapping[str, str]) -> dict[str, str]:
    """All keys by unique names: the named keys, then the others as key-1, key-2, ..., skipping taken names."""
    free = (name for number in count(1) if (name := f"key-{number}") not in named)
    return {**named, **dict(zip(free, [key for key in keys if key not in named.values()], strict=False))}


def read_key_file(path: Path) -> dict[str, str]:
    """Read a file: name -> key. Raises ConfigError, with the line's number, for an invalid or repeated key, or if there
    is no file."""
    keys: dict[str, str] = {}
    for number, line in enumerate(read_text_file(path, "the file of API keys").splitlines(), 1):
        place = f"line {number} of {str(path)!r}"
        words = re.sub(r"(^|\s)#.*", "", line).split()
        if not words:
            continue
        if len(words) > 2:
            raise ConfigError(f"{place} has {len(words)} words; a name and a key, or a key alone, are expected")
        name, key = words if len(words) == 2 else (f"line-{number}", words[0])
        if not (key.isascii() and key.isprintable()):
            raise ConfigError(f"{place}: the key holds characters that no HTTP header does; give printable ASCII")
        if name in keys:
            raise ConfigError(f"{place}: the name {name!r} is there already; give each key its own")
        if key in keys.values():
            raise ConfigError(f"{place}: this key is there already, under another name; take one out")
        keys[name] = key
    if not keys:
        raise ConfigError(f"the file of API keys {str(path)!r} holds none; a server without keys lets everybody in")
    return keys
