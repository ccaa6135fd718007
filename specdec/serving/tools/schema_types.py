"""The JSON types that a schema accepts. They decide what "5" is if a model writes values without quotes.

    accepted_types(schema, root)          {"string", "null"} for {"anyOf": [{"type": "string"}, {"type": "null"}]}
    parameter_types(parameters, name)     the same for one parameter, wherever the tool's schema describes it

References are resolved only within their document. In doubt it returns too many types, not too few: unknown features
(references elsewhere, conditions, patterns) restrict nothing. Each schema is visited once, down to MAX_DEPTH, so that a
recursive or hostile schema costs no more than its length.
"""

import re
from collections.abc import Mapping
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
    return _types(schema, root, None, {})


def parameter_types(parameters: Any, name: str) -> Types:
    """The JSON types that a tool's parameters accept for one argument."""
    return _types(parameters, parameters, name, {})


def _types(schema: Any, root: Any, name: str | None, seen: dict[Any, Types], depth: int = 0) -> Types:
    """The types that a schema accepts together with all schemas that it combines.

    name: the types of the argument with this name are asked for; None: those of the value itself. seen: types of the
    visited schemas, by identity and name.
    """
    if schema is False:
        return NO_TYPE
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return ANY_TYPE
    if (id(schema), name) in seen:
        return seen[id(schema), name]
    seen[id(schema), name] = ANY_TYPE  # for a reference that leads back here
    if "$id" in schema:  # a separate document: "#" means it
        root = schema

    def types_of(inner: Any) -> Types:
        return _types(inner, root, name, seen, depth + 1)

    found, properties = ANY_TYPE, schema.get("properties")
    if name is None:
        found = _own_types(schema)
    elif isinstance(properties, Mapping) and name in properties:
        found = _types(properties[name], root, None, seen)
    elif "patternProperties" not in schema:
        found = _types(schema.get("additionalProperties", True), root, None, seen) or ANY_TYPE
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
    seen[id(schema), name] = found
    return found


def _own_types(schema: Mapping[str, Any]) -> Types:
    """The types that a schema's own members accept, without the schemas that it combines."""
    found = ANY_TYPE
    names = schema.get("type")
    names = names if isinstance(names, list) else [names]
    if names and all(isinstance(name, str) and name in ANY_TYPE for name in names):
        found = frozenset(names) | ({"integer"} if "number" in names else NO_TYPE)
    if isinstance(values := schema.get("enum"), list):
        found &= frozenset(map(type_of, values))
    if "const" in schema:
        found &= {type_of(schema["const"])}
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


def type_of(value: Any) -> str:
    """The JSON type of a value; JSON Schema counts 1.0 as an integer."""
    is_whole = isinstance(value, float) and value.is_integer()
    return "integer" if is_whole else TYPE_NAMES.get(type(value), "object")
