"""The schema of an answer that is a call of one of some tools: {"name": ..., "arguments": {...}}.

The parameters of a tool are a schema document of their own: "#" in them means the arguments, and two tools may both
define "#/$defs/Place". So within the schema of a call each document has an address (`$id`, as JSON Schema bundles
documents), and references stay as they are written, wherever they stand and whatever they point to.
"""

from collections.abc import Sequence
from typing import Any
from urllib.parse import urljoin

from specdec.errors import shown
from specdec.sampling.grammars.grammar_bounds import ONE_LINE, members
from specdec.serving.openai.protocol import Function, refused
from specdec.serving.tools.schema_types import accepted_types

ADDRESS = "https://tools.invalid/{}/"
"""Address of the parameters of a tool, by its number; nothing is fetched from there."""
OPEN_ENDED = {
    *("additionalProperties", "patternProperties", "unevaluatedProperties"),
    *("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef"),
}
"""Members of a schema that say themselves which further properties there may be."""


def call_schema(tools: Sequence[Function]) -> dict[str, Any]:
    """The schema of a call of one of these tools, in one line, since a small model would fill more with spaces.

    Raises ApiError for parameters that accept no object, and for tools whose schemas have one address.
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
    """The schema of a tool's arguments: an object, without further properties unless its parameters say otherwise. A
    tool has no use for what it does not name, and a small model would write more and more of it."""
    if not tool.parameters:
        return {"type": "object"}
    types = accepted_types(tool.parameters, tool.parameters)
    if "object" not in types:
        said = " or ".join(sorted(types)) or "nothing"
        message = f'the parameters of tool {tool.name} accept {said}; the arguments of a call are of "type": "object"'
        raise refused("tools", message, "invalid_value")
    # of a document that is part of another one; the grammar library reads all versions alike
    schema = {key: value for key, value in tool.parameters.items() if key != "$schema"}
    if "properties" in schema and not OPEN_ENDED & schema.keys():
        schema["additionalProperties"] = False
    if types != {"object"}:
        schema["type"] = "object"
    if any(key.startswith("$") for key, _ in members(schema)):
        schema["$id"] = _address(schema.get("$id", ""), number)
    return schema


def _address(own: Any, number: int) -> Any:
    """A document's own `$id` where that is a whole address, else one within the address of the tool."""
    try:
        return urljoin(ADDRESS.format(number), own)
    except (TypeError, ValueError):
        return own  # the grammar library says what is wrong with it


def _require_own_addresses(tools: Sequence[Function], schemas: Sequence[dict[str, Any]]) -> None:
    """Two documents with one address would leave it open which of them a reference means."""
    owners: dict[str, str] = {}
    for number, (tool, schema) in enumerate(zip(tools, schemas, strict=True)):
        found = {_address(value, number) for key, value in members(schema) if key == "$id" and isinstance(value, str)}
        for address in found:
            if address in owners:
                message = f"tools {owners[address]} and {tool.name} both have a schema with $id={shown(address)}"
                raise refused("tools", f"{message}; give each its own, or leave them out", "invalid_value")
            owners[address] = tool.name
