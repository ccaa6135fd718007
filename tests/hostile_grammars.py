"""Hostile schemas and regular expressions: too deep, too many, too long to compile, or with foreign references.

HOSTILE[name] = (setting of SamplingParams, value)
"""

import json
from collections.abc import Callable
from typing import Any


def nested(key: str, depth: int, wrap: Callable[[str], str] = "[{}]".format) -> str:
    """JSON text of a schema in a schema in a schema: never built as an object, which would overflow Python's stack."""
    before, after = wrap("|").split("|")
    return ('{"' + key + '": ' + before) * depth + '{"type": "string"}' + (after + "}") * depth


def chained(count: int, link: Callable[[dict[str, Any]], dict[str, Any]] = lambda ref: ref) -> str:
    """References to references."""
    definitions = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(count)}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": definitions | {f"d{count}": {"type": "string"}}})


def doubled(levels: int, key: str) -> str:
    """Two references to a schema of two references to ...: 2 ** levels, were they written out."""
    return chained(levels, lambda ref: {key: [ref, ref]})


def inside(depth: int, value: dict[str, Any]) -> dict[str, Any]:
    for _ in range(depth):
        value = {"allOf": [value]}
    return value


def far_patterns(count: int) -> str:
    return json.dumps({"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(2, count)]})


PLAIN = "{}".format
SCHEMAS = {
    "4000 chained refs": chained(4000),
    "1999 chained refs": chained(1999),
    "1999 refs in allOf 40 deep": chained(1999, lambda ref: inside(40, ref)),
    "1999 refs in anyOf": chained(1999, lambda ref: {"anyOf": [ref, {"type": "null"}]}),
    "a ref to itself": '{"$ref": "#"}',
    "refs in a circle": '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}',
    "10000 nested allOf": nested("allOf", 10000),
    "10000 nested anyOf": nested("anyOf", 10000),
    "10000 nested items": nested("items", 10000, PLAIN),
    "10000 nested not": nested("not", 10000, PLAIN),
    "10000 nested properties": nested("properties", 10000, lambda inner: '{"a": ' + inner + "}"),
    "100000 nested arrays": "[" * 100000 + "]" * 100000,
    "a const 900 deep": '{"const": ' + "[" * 900 + "]" * 900 + "}",
    "allOf of allOf of ...": doubled(26, "allOf"),
    "anyOf of anyOf of ...": doubled(26, "anyOf"),
    "products of anyOf": json.dumps({"allOf": [{"anyOf": [{"minLength": i}, {"maxLength": i}]} for i in range(40)]}),
    "200 patterns at once": far_patterns(200),
    "a pattern of 5000 groups": json.dumps({"type": "string", "pattern": "(" * 5000 + "a" + ")" * 5000}),
    "20000 properties": json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(20000)}}),
    "a long enum": json.dumps({"enum": ["v" * 900_000]}),
    "a schema of 2 MB": json.dumps({"description": "x" * 2_000_000}),
    "divisors": json.dumps({"type": "integer", "allOf": [{"multipleOf": p} for p in (99991, 99989, 99971)]}),
    "a number of 4000 digits": '{"type": "integer", "minimum": ' + "9" * 4000 + "}",
    "a file": '{"$ref": "file:///etc/passwd"}',
}
REGEXES = {
    "10000 groups": "(" * 10000 + "a" + ")" * 10000,
    "3000 stars": "(?:" * 3000 + "a" + ")*" * 3000,
    "repeats of repeats": "(a{1000}){1000}",
    "a million times": "a{1000000}",
    "3 MB": "a" * 3_000_000,
    "a literal": "a" * 60000,
    "alternatives": "|".join(f"w{i}" for i in range(9000)),
    "states": "(a|b)*a(a|b){30}",
    "brackets": "[" * 10000,
    "sets of sets": "[" * 2000 + "a" + "]" * 2000,
    "half a pair": "\ud800",
    "flags": "(?i)" * 5000 + "a",
    "nothing or nothing": "|" * 60000,
    "backslashes": "\\" * 50001,
}
HOSTILE = {name: ("json_schema", text) for name, text in SCHEMAS.items()}
HOSTILE |= {f"regex: {name}": ("regex", text) for name, text in REGEXES.items()}
