"""Keywords of a JSON schema whose value restricts nothing, such as Zod's "propertyNames": {"type": "string"} or
pydantic's "format": "path".

The library refuses each keyword and format that it does not implement, whatever its value. This file knows where a
schema has schemas, and where it has data.
"""

from typing import Any

ANYTHING: tuple[Any, ...] = (True, {})
IDLE: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": (*ANYTHING, {"type": "string"}),
    "unevaluatedItems": ANYTHING,
    "unevaluatedProperties": ANYTHING,
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "not": (False,),
}
"""Values with which a keyword restricts nothing."""
FORMATS = frozenset(
    {
        *("date-time", "time", "date", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6"),
        *("uuid", "uri", "uri-reference", "uri-template", "iri", "iri-reference", "json-pointer"),
        *("relative-json-pointer", "regex"),
    }
)
"""Formats that JSON Schema defines. The library follows most of them, and refuses the others; any other name only
describes a text."""
DATA = frozenset({"const", "enum", "default", "examples"})
SCHEMAS_BY_NAME = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)


def drop_idle_keywords(schema: Any) -> None:
    """Remove, in place, keywords that restrict nothing from a schema and all schemas in it."""
    left = [schema]
    while left:
        one = left.pop()
        if isinstance(one, list):
            left += one
        if not isinstance(one, dict):
            continue
        for key in [key for key, value in one.items() if _is_idle(key, value)]:
            del one[key]
        for key, value in one.items():
            if key in SCHEMAS_BY_NAME and isinstance(value, dict):
                left += value.values()
            elif key not in DATA:
                left.append(value)


def _is_idle(key: str, value: Any) -> bool:
    if key == "format":
        return isinstance(value, str) and value not in FORMATS
    return value in IDLE.get(key, ())
