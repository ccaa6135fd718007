"""The JSON types that a schema of a tool's parameter accepts."""

import pytest

from specdec.serving.tools.schema_types import ANY_TYPE, accepted_types, parameter_types

ROOT = {
    "$defs": {
        "Unit": {"enum": ["C", "F"]},
        "Size": {"type": "integer"},
        "Alias": {"$ref": "#/$defs/Unit"},
        "Loop": {"$ref": "#/$defs/Loop"},
        "Tree": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/Tree"}}, {"type": "string"}]},
        "a/b~c d": {"type": "boolean"},
    },
    "definitions": {"Old": {"type": ["string", "null"]}},
    "properties": {"first": {"type": "array", "items": {"type": "integer"}}},
    "type": "object",
}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, "string"),
        ({"type": ["string", "null"]}, "string null"),
        ({"type": "integer"}, "integer"),
        ({"type": "number"}, "number integer"),
        ({"type": "string", "nullable": True}, "string null"),
        ({"enum": ["a", "b"]}, "string"),
        ({"enum": ["a", 1, 2.5, 3.0, None, True, [], {}]}, "string integer number null boolean array object"),
        ({"type": ["string", "integer"], "enum": ["1", "2"]}, "string"),
        ({"const": "5"}, "string"),
        ({"const": None}, "null"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "string null"),
        ({"oneOf": [{"const": "a"}, {"type": "integer"}]}, "string integer"),
        ({"anyOf": [{"type": "integer"}, True]}, None),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": ["string", "null"]}]}, "string"),
        ({"allOf": [{"$ref": "#/$defs/Unit"}], "description": "as old pydantic writes it"}, "string"),
        ({"allOf": [{"type": "number"}, {"type": "integer"}]}, "integer"),
        ({"type": "string", "anyOf": [{"minLength": 2}, {"pattern": "a"}]}, "string"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, ""),
        # references
        ({"$ref": "#/$defs/Unit"}, "string"),
        ({"$ref": "#/$defs/Alias"}, "string"),
        ({"$ref": "#/$defs/Size", "default": 3}, "integer"),
        ({"$ref": "#/definitions/Old"}, "string null"),
        ({"$ref": "#/properties/first"}, "array"),
        ({"$ref": "#/properties/first/items"}, "integer"),
        ({"$ref": "#/$defs/Tree/anyOf/1"}, "string"),
        ({"$ref": "#/$defs/a~1b~0c%20d"}, "boolean"),
        ({"$ref": "#"}, "object"),
        ({"$ref": "#/$defs/Tree"}, "array string"),
        ({"anyOf": [{"$ref": "#/$defs/Unit"}, {"$ref": "#/$defs/Unit"}]}, "string"),
        ({"$id": "T", "$ref": "#/$defs/Unit", "$defs": {"Unit": {"type": "integer"}}}, "integer"),
        # nothing is known of these
        ({}, None),
        (True, None),
        (None, None),
        ("string", None),
        ({"type": "text"}, None),
        ({"type": {"a": 1}}, None),
        ({"anyOf": 5, "allOf": "x", "enum": 3}, None),
        ({"$ref": "#/$defs/Loop"}, None),
        ({"$ref": "#/$defs/None"}, None),
        ({"$ref": "#Unit"}, None),
        ({"$ref": "https://example.com/unit"}, None),
        ({"$ref": 5}, None),
        (False, ""),
    ],
    ids=lambda value: str(value)[:60],
)
def test_the_types_that_a_schema_accepts(schema, types):
    assert accepted_types(schema, ROOT) == (ANY_TYPE if types is None else frozenset(types.split()))


@pytest.mark.parametrize(
    ("parameters", "types"),
    [
        ({"properties": {"x": {"type": "string"}}}, "string"),
        ({"properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"type": "null"}}}, "null"),
        ({"$ref": "#/$defs/Call", "$defs": {"Call": {"properties": {"x": {"const": "1"}}}}}, "string"),
        ({"allOf": [{"properties": {"x": {"type": ["string", "null"]}}}, {"properties": {"x": {"type": "null"}}}]},
         "null"),
        ({"anyOf": [{"properties": {"x": {"type": "string"}}}, {"properties": {"x": {"type": "integer"}}}]},
         "string integer"),
        ({"type": "object", "additionalProperties": {"type": "string"}}, "string"),
        ({"additionalProperties": {"type": "string"}, "patternProperties": {"x": {"type": "integer"}}}, None),
        ({"properties": {"y": {"type": "string"}}}, None),
        ({"properties": {"y": {"type": "string"}}, "additionalProperties": False}, None),
        ({"properties": 5}, None),
        (None, None),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_the_types_of_a_parameter_wherever_the_tool_describes_it(parameters, types):
    assert parameter_types(parameters, "x") == (ANY_TYPE if types is None else frozenset(types.split()))


def test_a_hostile_schema_costs_no_more_than_its_length():
    """Each reference twice, 500 in a row: 2^500 paths. And deeper than Python's stack."""
    twice = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(500)}
    root = {"$defs": twice | {"d500": {"type": "string"}}}
    assert accepted_types({"$ref": "#/$defs/d470"}, root) == {"string"}
    assert accepted_types({"$ref": "#/$defs/d0"}, root) == ANY_TYPE
    deep = {"type": "string"}
    for _ in range(100_000):
        deep = {"allOf": [deep]}
    assert accepted_types(deep, deep) == ANY_TYPE
    while deep.get("allOf"):  # freed level by level
        [deep] = deep.pop("allOf")
