"""The tools that a chat may or must call: template arguments, the answer's grammar, and its parser.

tool_choice    "none"           "auto"                     "required", or a tool by name
template       nothing          the tools                  the tools
grammar        none             none                       one call, as a JSON object
parsed as      content          the model's own format     that object
"""

from typing import Any

from specdec.serving.openai.protocol import ChatRequest, refused
from specdec.serving.tools.answer_parser import AnswerParser
from specdec.serving.tools.call_grammar import call_schema
from specdec.serving.tools.tool_parsers import PARSERS
from specdec.text.prompts import template_text

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
        choice = body.tool_choice or "auto"
        if body.tool_choice is not None and not self.tools:
            raise refused("tool_choice", "tool_choice goes with tools, and there are none; give some")
        if choice == "none":
            self.tools = []
        elif choice == "auto" and self.tools:
            if "tools" not in template_text(template):
                raise refused("tools", "this model's chat template knows no tools; leave them out")
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

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Arguments of the chat template."""
        return {"tools": [tool.model_dump(exclude_none=True) for tool in self.tools]} if self.tools else {}

    @property
    def grammar(self) -> dict[str, Any] | None:
        """The grammar, if the answer must be a call."""
        if not self._forced:
            return None
        return {"json_schema": call_schema(self._forced)}

    @property
    def parameters(self) -> dict[str, dict[str, Any]]:
        """The schema of each tool's arguments, by name."""
        return {tool.function.name: tool.function.parameters or {} for tool in self.tools}
