"""Bounds on a grammar, checked before the grammar library reads it. No function recurses deeper than PLAIN_DEPTH: a
hostile schema may be nested deeper than any stack. This file knows JSON schemas and regular expressions, but not the
library.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urldefrag, urljoin, urlsplit

import numpy as np

from specdec.errors import ConfigError, require_text, shown

MAX_SCHEMA_CHARS = 1 << 20
MAX_REGEX_CHARS = 1 << 16
MAX_CHOICE_CHARS = 1 << 18
"""Most characters of all choices together."""
MAX_CHOICES = 1 << 14
MAX_DEPTH = 100
"""Most levels of objects and arrays in a schema, and of groups in a regular expression. The library's JSON reader
accepts 127."""
MAX_REFERENCES = 2000
"""Most references in a schema. The library recurses for each, on a stack of `grammar_trial.STACK_BYTES`."""

REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Value of "x-guidance" in a schema for JSON on one line."""

PLAIN_CHARS = 8192
PLAIN_DEPTH = 16
PLAIN_KEYS = frozenset(
    {
        *("type", "properties", "required", "items", "additionalProperties", "enum", "const", "minLength", "maxLength"),
        *("minItems", "maxItems", "minimum", "maximum", "title", "description", "default", "examples", "$schema"),
    }
)
"""Keys of schemas that the library compiles in linear time: without searches and without products of states."""

_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_ESCAPED_OR_CLASS = re.compile(r"\\.|\[\^?\]?[^\]\\]*+(?:\\.[^\]\\]*+)*+\]", re.DOTALL)


def require_bounded(name: str, value: Any) -> None:
    """Raise ConfigError for a grammar that is too large or too deep for the library.

    name: one of `specdec.config.GRAMMARS`. value: JSON text of a schema, a regular expression, or a tuple of choices.
    """
    if name == "json_schema":
        _require_length(name, len(value), MAX_SCHEMA_CHARS)
        _require_depth(name, _depth(_STRING.sub("", value), "{[", "}]"))
        _require_references(json.loads(value))
    elif name == "regex":
        _require_length(name, len(value), MAX_REGEX_CHARS)
        _require_depth(name, _depth(_ESCAPED_OR_CLASS.sub("", value), "(", ")"))
        require_text(name, value)
    elif name == "choice":
        if len(value) > MAX_CHOICES:
            raise ConfigError(f"choice has {len(value)} strings; at most {MAX_CHOICES} are allowed, so give fewer")
        _require_length(name, sum(map(len, value)), MAX_CHOICE_CHARS)
        for one in value:
            require_text(name, one)


def compiles_in_linear_time(name: str, value: Any) -> bool:
    """Do time and memory for compiling this grammar certainly grow in proportion to its length? Arguments are those of
    `require_bounded`."""
    if name == "json_object":
        return True
    if name == "choice":
        return sum(map(len, value)) <= PLAIN_CHARS
    if name == "regex" or len(value) > PLAIN_CHARS:
        return False
    whole = json.loads(value)
    if isinstance(whole, dict) and whole.get("x-guidance") == ONE_LINE:
        del whole["x-guidance"]
    return _is_plain(whole)


def cannot_follow(name: str, reason: str, remedy: str = "change it, or leave it out") -> ConfigError:
    """The error for a grammar that is refused. name: one of `specdec.config.GRAMMARS`."""
    return ConfigError(f"{name} cannot be followed ({reason}); {remedy}")


def _require_length(name: str, length: int, limit: int) -> None:
    if length > limit:
        raise cannot_follow(name, f"it has {length} characters, and {limit} are allowed", "shorten it")


def _require_depth(name: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise cannot_follow(name, f"it is nested {depth} deep, and {MAX_DEPTH} is allowed", "flatten it")


def _require_references(schema: Any) -> None:
    base = schema.get("$id", "") if isinstance(schema, Mapping) else ""
    texts = [(key, value) for key, value in members(schema) if isinstance(value, str)]
    bundled = {_document(value, base) for key, value in texts if key == "$id"}
    found = ((key, value) for key, value in texts if key in REFERENCES)
    for count, (key, value) in enumerate(found, start=1):
        if count > MAX_REFERENCES:
            raise cannot_follow("json_schema", f"it has more than {MAX_REFERENCES} references", "inline some of them")
        if _is_elsewhere(value) and _document(value, base) not in bundled:
            reason = f"{key}={shown(value)} is elsewhere, and nothing is fetched"
            raise cannot_follow("json_schema", reason, "put the definition into $defs")


def _is_elsewhere(reference: str) -> bool:
    """Does this reference lead to another document, other than the meta-schemas, which the library has?"""
    try:
        parts = urlsplit(reference)
    except ValueError:
        return True
    return bool(parts.scheme or parts.netloc) and parts.netloc != "json-schema.org"


def _document(reference: str, base: Any) -> str:
    """The address of the document that a reference or `$id` names."""
    try:
        return str(urldefrag(urljoin(base, reference)).url)
    except (TypeError, ValueError):
        return reference


def _depth(text: str, opening: str, closing: str) -> int:
    chars = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    steps = np.zeros(len(chars), dtype=np.int64)
    for brackets, step in ((opening, 1), (closing, -1)):
        steps[np.isin(chars, [ord(bracket) for bracket in brackets])] = step
    depths = np.cumsum(steps)
    # a bracket that closes nothing does not count: depths are relative to the lowest so far
    return int((depths - np.minimum.accumulate(np.minimum(depths, 0))).max(initial=0))


def members(value: Any) -> Iterator[tuple[str, Any]]:
    """The members of all objects in a JSON value."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, Mapping):
            yield from one.items()
            left.extend(one.values())
        elif isinstance(one, list):
            left.extend(one)


def _is_plain(schema: Any, depth: int = 0) -> bool:
    """Has a schema only plain keys, and all schemas in it, down to PLAIN_DEPTH?"""
    if not isinstance(schema, Mapping):
        return True
    if depth > PLAIN_DEPTH or not schema.keys() <= PLAIN_KEYS:
        return False
    properties = schema.get("properties")
    named = properties.values() if isinstance(properties, Mapping) else ()
    return all(_is_plain(each, depth + 1) for each in (*named, schema.get("items"), schema.get("additionalProperties")))
