"""The JSON types that a schema accepts. They decide what "5" is if a model writes values without quotes.

    accepted_types(schema, root)          {"string", "null"} for {"anyOf": [{"type": "string"}, {"type": "null"}]}
    parameter_types(parameters, name)     the same for one parameter, wherever the tool's schema describes it

References are resolved only within their document. In doubt it returns too many types, not too few: unknown features
(references elsewhere, conditions, patterns) restrict nothing. Each schema is visited once, down to MAX_DEPTH, so that a
recursive or hostile schema costs no more than its length.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from specdec.sampling.grammars.grammar_bounds import MAX_DEPTH

ANY_TYPE = frozenset({"string", "integer", "number", "boolean", "object", "array", "null"})
"""All types. A schema that accepts "number" also accepts "integer"; {"integer"} alone excludes 1.5."""
NO_TYPE: frozenset[str] = frozenset()
Types = frozenset[str]
INDEX = re.compile("[0-9]{1,9}")
TYPE_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", type(None): "null"}


def accepted_types(schema: Any, root: Any) -> Types:
    """The JSON types that a schema accepts; empty if it contradicts itself.

    root: the schema that "#" refers to, such as a tool's `parameters`.
    """
    return _combined(schema, root, _own_types, {})


def parameter_types(parameters: Any, name: str) -> Types:
    """The JSON types that a tool's parameters accept for one argument."""
    seen: dict[int, Types] = {}

    def own(schema: Mapping[str, Any]) -> Iterable[Types]:
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            yield _combined(properties[name], parameters, _own_types, seen)
        elif "patternProperties" not in schema:
            yield _combined(schema.get("additionalProperties", True), parameters, _own_types, seen) or ANY_TYPE

    return _combined(parameters, parameters, own, {})


def _own_types(schema: Mapping[str, Any]) -> Iterable[Types]:
    if "type" in schema:
        given = schema["type"]
        yield _named(given if isinstance(given, list) else [given])
    if isinstance(values := schema.get("enum"), list):
        yield frozenset(map(type_of, values))
    if "const" in schema:
        yield frozenset({type_of(schema["const"])})


def _combined(
    schema: Any, root: Any, own: Callable[[Mapping[str, Any]], Iterable[Types]], seen: dict[int, Types], depth: int = 0
) -> Types:
    """The types that a schema accepts together with all schemas that it combines.

    own: types from one schema's own members, without combined schemas. seen: types of the visited schemas, by identity.
    """
    if schema is False:
        return NO_TYPE
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return ANY_TYPE
    if id(schema) in seen:
        return seen[id(schema)]
    seen[id(schema)] = ANY_TYPE  # for a reference that leads back here
    if "$id" in schema:  # a separate document: "#" means it
        root = schema

    def types_of(inner: Any) -> Types:
        return _combined(inner, root, own, seen, depth + 1)

    found = ANY_TYPE.intersection(*own(schema))
    for key in ("$ref", "$dynamicRef"):
        if key in schema:
            found &= types_of(resolved(schema[key], root))
    if isinstance(all_of := schema.get("allOf"), list):
        found = found.intersection(*map(types_of, all_of))
    for key in ("anyOf", "oneOf"):
        if isinstance(one_of := schema.get(key), list):
            found &= NO_TYPE.union(*map(types_of, one_of))
    if schema.get("nullable") is True:  # from OpenAPI
        found |= {"null"}
    seen[id(schema)] = found
    return found


def resolved(reference: Any, root: Any) -> Any:
    """The schema that a local reference such as "#/$defs/Place" names; True, which accepts anything, if it names
    nothing."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return True
    found = root
    for part in unquote(reference[1:]).split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        try:
            found = found[int(part) if isinstance(found, list) and INDEX.fullmatch(part) else part]
        except (LookupError, TypeError):
            return True
    return found


def _named(names: Sequence[Any]) -> Types:
    if not names or not all(isinstance(name, str) and name in ANY_TYPE for name in names):
        return ANY_TYPE
    return frozenset(names) | ({"integer"} if "number" in names else NO_TYPE)


def type_of(value: Any) -> str:
    """The JSON type of a value; JSON Schema counts 1.0 as an integer."""
    is_whole = isinstance(value, float) and value.is_integer()
    return "integer" if is_whole else TYPE_NAMES.get(type(value), "object")
