"""The JSON schema of an answer that calls one of several tools: {"name": ..., "arguments": {...}}.

A tool's parameters are a separate schema document: "#" in them means the arguments, and two tools may both define
"#/$defs/Place". So within the schema of a call each document has an address (`$id`, JSON Schema's way to bundle
documents), and references need no change.
"""

from collections.abc import Sequence
from typing import Any
from urllib.parse import urljoin

from specdec.errors import shown
from specdec.sampling.grammars.grammar_bounds import ONE_LINE, members
from specdec.serving.openai.protocol import Function, refused
from specdec.serving.tools.schema_types import accepted_types

ADDRESS = "https://tools.invalid/{}/"
"""Address of a tool's parameters, by number. Nothing is fetched from it."""
OPEN_ENDED = {
    *("additionalProperties", "patternProperties", "unevaluatedProperties"),
    *("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef"),
}
"""Members of a schema that decide about additional properties."""


def call_schema(tools: Sequence[Function]) -> dict[str, Any]:
    """The schema of a call of one of these tools. Calls are one line, since a small model would fill more lines with
    spaces.

    Raises ApiError if parameters accept no object, or if two tools' schemas have the same address.
    """
    arguments = [_arguments(tool, number) for number, tool in enumerate(tools)]
    _require_own_addresses(tools, arguments)
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, "arguments": schema},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool, schema in zip(tools, arguments, strict=True)
    ]
    return (calls[0] if len(calls) == 1 else {"anyOf": calls}) | {"x-guidance": ONE_LINE}


def _arguments(tool: Function, number: int) -> dict[str, Any]:
    """The schema of a tool's arguments: an object, without additional properties unless its parameters allow them. A
    tool cannot use unnamed properties, and a small model would write more and more of them."""
    if not tool.parameters:
        return {"type": "object"}
    types = accepted_types(tool.parameters, tool.parameters)
    if "object" not in types:
        accepted = " or ".join(sorted(types)) or "nothing"
        message = (
            f'the parameters of tool {tool.name} accept {accepted}; the arguments of a call are of "type": "object"'
        )
        raise refused("tools", message, "invalid_value")
    # not allowed in a nested document; the grammar library treats all versions alike
    schema = {key: value for key, value in tool.parameters.items() if key != "$schema"}
    if "properties" in schema and not OPEN_ENDED & schema.keys():
        schema["additionalProperties"] = False
    if types != {"object"}:
        schema["type"] = "object"
    if any(key.startswith("$") for key, _ in members(schema)):
        schema["$id"] = _address(schema.get("$id", ""), number)
    return schema


def _address(own: Any, number: int) -> Any:
    """A document's own `$id` if it is an absolute address, else one relative to the tool's address."""
    try:
        return urljoin(ADDRESS.format(number), own)
    except (TypeError, ValueError):
        return own  # the grammar library reports what is wrong


def _require_own_addresses(tools: Sequence[Function], schemas: Sequence[dict[str, Any]]) -> None:
    """Raise ApiError if two documents have one address: references would be ambiguous."""
    owners: dict[str, str] = {}
    for number, (tool, schema) in enumerate(zip(tools, schemas, strict=True)):
        found = {_address(value, number) for key, value in members(schema) if key == "$id" and isinstance(value, str)}
        for address in found:
            if address in owners:
                message = f"tools {owners[address]} and {tool.name} both have a schema with $id={shown(address)}"
                raise refused("tools", f"{message}; give each its own, or leave them out", "invalid_value")
            owners[address] = tool.name
