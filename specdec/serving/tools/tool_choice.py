"""Which tools a chat may or must call: what the template is told, what grammar the answer follows, who reads it.

tool_choice    "none"           "auto"                     "required", or a tool by name
template       nothing          the tools                  the tools
grammar        none             none                       one call, as a JSON object
read as        content          the model's own format     that object
"""

from typing import Any

from specdec.sampling.grammars.grammar_bounds import ONE_LINE
from specdec.serving.http.faults import ApiError
from specdec.serving.openai.protocol import ChatRequest, Function, NamedTool
from specdec.serving.tools.tool_parsers import PARSERS, ToolParser
from specdec.text.prompts import template_text

BARE_JSON = PARSERS["llama"]
"""Reads {"name": ..., "arguments": {...}} where an answer begins."""


class ToolChoice:
    """Of one request. Raises ApiError where it cannot be served. parser: of the model's own format, None: unknown."""

    def __init__(self, body: ChatRequest, template: Any, parser: type[ToolParser] | None) -> None:
        self.tools = [tool.function for tool in body.tools or ()]
        choice = body.tool_choice or ("auto" if self.tools else "none")
        self._forced: list[Function] = []
        self.parser: type[ToolParser] | None = None
        self.max_calls = 1 if body.parallel_tool_calls is False else None
        if not self.tools:
            if body.tool_choice is not None:
                raise ApiError(400, "tool_choice goes with tools, and there are none; give some", param="tool_choice")
            return
        if choice == "none":
            self.tools = []
            return
        if choice == "auto":
            if "tools" not in template_text(template):
                raise ApiError(400, "this model's chat template knows no tools; leave them out", param="tools")
            if parser is None:
                raise ApiError(
                    400,
                    "how this model writes tool calls is not known; name it with --tool-parser, or use tool_choice "
                    "'required', a tool's name or 'none'",
                    param="tools",
                )
            self.parser = parser
            return
        self._forced = [tool for tool in self.tools if not isinstance(choice, NamedTool) or _is(tool, choice)]
        if not self._forced:
            known = ", ".join(tool.name for tool in self.tools)
            raise ApiError(400, f"tool_choice names no tool of this request; it has {known}", param="tool_choice")
        self.parser = BARE_JSON

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """What the chat template is told."""
        described = [{"type": "function", "function": tool.model_dump(exclude_none=True)} for tool in self.tools]
        return {"tools": described} if described else {}

    @property
    def grammar(self) -> dict[str, Any] | None:
        """Settings of the Python API for an answer that must be a call, in one line: a small model would fill it with
        spaces."""
        if not self._forced:
            return None
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": tool.name}, "arguments": _closed(tool.parameters)},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for tool in self._forced
        ]
        return {"json_schema": (calls[0] if len(calls) == 1 else {"anyOf": calls}) | {"x-guidance": ONE_LINE}}

    @property
    def parameter_types(self) -> dict[str, dict[str, Any]]:
        """Of each tool, the schemas of its parameters by name."""
        return {tool.name: (tool.parameters or {}).get("properties", {}) for tool in self.tools}


def _is(tool: Function, choice: NamedTool) -> bool:
    return tool.name == choice.function.name


def _closed(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """A schema of arguments without further ones, unless it says otherwise: a tool has no use for what it does not
    name, and a small model would write more and more of it."""
    if not parameters:
        return {"type": "object"}
    open_ended = (
        "additionalProperties",
        "patternProperties",
        "unevaluatedProperties",
        "allOf",
        "anyOf",
        "oneOf",
        "$ref",
    )
    if "properties" not in parameters or any(name in parameters for name in open_ended):
        return parameters
    return parameters | {"additionalProperties": False}
