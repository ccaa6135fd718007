"""The tools that a chat may or must call: template arguments, the answer's grammar, and its parser.

tool_choice    "none"           "auto"                     "auto", a JSON format     "required", or a tool by name
template       nothing          the tools                  the tools                 the tools
grammar        the format's     none                       that, or a call           one call, as a JSON object
parsed as      content          the model's own format     a call if it is one       that object

The grammar is the JSON schema of an answer that calls one of several tools: {"name": ..., "arguments": {...}}. A tool's
parameters are a separate schema document: "#" in them means the arguments, and two tools may both define
"#/$defs/Place". So within the schema of a call each document has an address (`$id`, JSON Schema's way to bundle
documents), and references need no change.
"""

from collections.abc import Sequence
from typing import Any
from urllib.parse import urljoin

from specdec.errors import shown
from specdec.sampling.grammars.grammar_bounds import ONE_LINE, members
from specdec.serving.http.faults import refused
from specdec.serving.openai.protocol import ChatRequest, Function
from specdec.serving.tools.answer_parser import AnswerParser
from specdec.serving.tools.schema_types import accepted_types
from specdec.serving.tools.tool_parsers import PARSERS
from specdec.text.prompts import template_text

ADDRESS = "https://tools.invalid/{}/"
"""Address of a tool's parameters, by number, and of a format. Nothing is fetched from it."""
OPEN_ENDED = {
    *("additionalProperties", "patternProperties", "unevaluatedProperties"),
    *("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef"),
}
"""Members of a schema that decide about additional properties."""
BARE_JSON = PARSERS["llama"]
"""Reads {"name": ..., "arguments": {...}} at the beginning of an answer."""


class ToolChoice:
    """The tools that one request may or must call. Raises ApiError if it cannot be served. parser: for the model's
    format; None: unknown."""

    def __init__(self, body: ChatRequest, template: Any, parser: type[AnswerParser] | None) -> None:
        self.tools = body.tools or []
        self.parser: type[AnswerParser] | None = None
        self.max_calls = 1 if body.parallel_tool_calls is False else None
        self._forced = body.forced_tools
        self._format: dict[str, Any] | None = None  # schema of an answer that calls no tool
        choice = body.tool_choice or "auto"
        if choice not in ("none", "auto") and not self.tools:
            raise refused("tool_choice", "tool_choice goes with tools, and there are none; give some")
        if choice == "none":
            self.tools = []
        elif choice == "auto" and self.tools:
            if "tools" not in template_text(template):
                raise refused("tools", "this model's chat template knows no tools; leave them out")
            if (form := body.response_format) is not None and form.type != "text":
                self._format, parser = form.schema_of_text or {"type": "object"}, BARE_JSON
            if parser is None:
                message = (
                    "how this model writes tool calls is not known; name it with --tool-parser, or use tool_choice "
                    "'required', a tool's name or 'none'"
                )
                raise refused("tools", message)
            self.parser = parser
        elif self.tools:
            if not self._forced:
                known = ", ".join(tool.function.name for tool in self.tools)
                raise refused("tool_choice", f"tool_choice names no tool of this request; it has {known}")
            self.parser = BARE_JSON
        self.parameters = {tool.function.name: tool.function.parameters or {} for tool in self.tools}
        """The schema of each tool's arguments, by name."""

    @property
    def grammar(self) -> dict[str, Any] | None:
        """The grammar, if the answer must be a call, or may be one and has a format otherwise."""
        if self._forced:
            return {"json_schema": call_schema(self._forced)}
        if self._format is None:
            return None
        return {"json_schema": call_or_format(self._format, [tool.function.name for tool in self.tools])}


def call_or_format(other: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The schema of an answer that has another schema or calls a tool. As always with "auto", arguments may be any
    object."""
    other = dict(other)
    options = {"x-guidance": other.pop("x-guidance")} if "x-guidance" in other else {}  # of the whole grammar
    return {"anyOf": [_call({"enum": list(names)}, {"type": "object"}), _as_document(other, 0)], **options}


def call_schema(tools: Sequence[Function]) -> dict[str, Any]:
    """The schema of a call of one of these tools. Calls are one line, since a small model would fill more lines with
    spaces.

    Raises ApiError if parameters accept no object, or if two tools' schemas have the same address.
    """
    calls, owners = [], dict[str, Function]()
    schemas = [_arguments_schema(tool, number) for number, tool in enumerate(tools)]
    for number, (tool, schema) in enumerate(zip(tools, schemas, strict=True)):
        calls.append(_call({"const": tool.name}, schema))
        own = (value for key, value in members(schema) if key == "$id" and isinstance(value, str))
        for address in (_address(value, number) for value in own):
            if (owner := owners.setdefault(address, tool)) is not tool:
                message = f"tools {owner.name} and {tool.name} both have a schema with $id={shown(address)}"
                raise refused("tools", f"{message}; give each its own, or leave them out", "invalid_value")
    return (calls[0] if len(calls) == 1 else {"anyOf": calls}) | {"x-guidance": ONE_LINE}


def _call(name: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """The schema of a call, from those of its two members."""
    return {
        "type": "object",
        "properties": {"name": name, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _arguments_schema(tool: Function, number: int) -> dict[str, Any]:
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
    schema = dict(tool.parameters)
    if "properties" in schema and not OPEN_ENDED & schema.keys():
        schema["additionalProperties"] = False
    if types != {"object"}:
        schema["type"] = "object"
    return _as_document(schema, number)


def _as_document(schema: dict[str, Any], number: int) -> dict[str, Any]:
    """A schema as a document within another, with an address if it has references."""
    # not allowed in a nested document; the grammar library treats all versions alike
    nested = {key: value for key, value in schema.items() if key != "$schema"}
    if any(key.startswith("$") for key, _ in members(nested)):
        nested["$id"] = _address(nested.get("$id", ""), number)
    return nested


def _address(own: Any, number: int) -> Any:
    """A document's own `$id` if it is an absolute address, else one relative to the tool's address."""
    try:
        return urljoin(ADDRESS.format(number), own)
    except (TypeError, ValueError):
        return own  # the grammar library reports what is wrong
