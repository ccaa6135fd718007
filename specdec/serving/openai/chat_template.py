"""Converts a chat for the model's template: its messages, and request fields that are template options."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from pydantic_core import from_json

from specdec.errors import shown
from specdec.serving.http.faults import refused
from specdec.serving.openai.protocol import TEXT_PART, ChatRequest, Message, Tool
from specdec.serving.state import ServeState
from specdec.text.prompts import asks_for_none, template_text

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Fields for the thoughts of an earlier answer, in the order of preference."""
ROLES = {"developer": "system", "tool_responses": "tool"}
"""What templates call a role that OpenAI renamed, and the one in which google-adk sends tool results to a Gemma 4."""
JOINED_DESCRIPTION = re.compile(r"""\+ *tool(\.function)?\.description\b""")
"""GPT-OSS's template fails for a tool without a description."""
NOT_OPTIONS = {
    "chat_template": "a template is a program, and this server runs its own",
    "tools": "tools say it",
    "special_tokens_in_content": "the server's own setting says it",
}
"""Keys that `chat_template_kwargs` may not have, with the reason."""


def chat_prompt(body: ChatRequest, state: ServeState, tools: Sequence[Tool]) -> list[int]:
    """The token ids of a chat; a long one takes time. tools: those that the template is told."""
    options = body.chat_template_kwargs or {}
    for name, reason in NOT_OPTIONS.items():
        if name in options:
            raise refused("chat_template_kwargs", f"chat_template_kwargs holds {name}: {reason}; leave it out")
    template = template_text(getattr(state.tokenizer, "chat_template", None))
    told = {"tools": [_plain_tool(tool, template) for tool in tools]} if tools else {}
    return state.engine.read_chat(
        [_plain_message(f"messages[{index}]", message, template) for index, message in enumerate(body.messages)],
        special_tokens_in_content=state.settings.special_tokens_in_content,
        **_template_options(body, template) | options | told,
    )


@lru_cache(maxsize=16)
def thought_field(template: str) -> str:
    """The field from which a chat template reads the thoughts of an earlier answer."""
    fields = (name for name in THOUGHTS if re.search(rf"""\.{name}\b|["']{name}["']""", template))
    return next(fields, THOUGHTS[0])


def _template_options(body: ChatRequest, text: str) -> dict[str, Any]:
    """Template options from a chat's fields. text: the template. It gets efforts and verbosity only if it reads
    them."""
    options: dict[str, Any] = {}
    if body.continue_final_message:
        goes_on = "continue_final_message=true continues the last message"
        if body.add_generation_prompt:
            message = f"{goes_on}, add_generation_prompt=true begins another; leave one out"
            raise refused("continue_final_message", message)
        if not body.messages[-1].content:
            raise refused("continue_final_message", f"{goes_on}, and that has no text; give it some")
        options["continue_final_message"] = True
    elif body.add_generation_prompt is False:
        options["add_generation_prompt"] = False
    for name in ("reasoning_effort", "verbosity"):
        if (value := getattr(body, name)) is not None and name in text:
            options[name] = value
    if body.reasoning_effort == "none" and "enable_thinking" in text:
        options["enable_thinking"] = False
    return options


def _plain_message(place: str, message: Message, template: str) -> dict[str, Any]:
    """Convert a message for the template: text parts are joined by line ends, call arguments become objects, absent
    fields are left out. Raises ApiError for parts that are no text, with their place."""
    plain = message.model_dump(exclude_none=True)
    plain["role"] = ROLES.get(message.role, message.role)
    if isinstance(message.content, list):
        plain["content"] = "\n".join(_part_text(f"{place}.content", part) for part in message.content)
    elif message.content is None:
        if not (message.tool_calls or message.reasoning_content or message.reasoning):
            raise refused(f"{place}.content", f"{place}.content is missing; text is expected")
        plain["content"] = None if asks_for_none(template) else ""  # other templates join it with text
    for number, call in enumerate(plain.get("tool_calls", ())):
        param = f"{place}.tool_calls[{number}].function.arguments"
        call["function"]["arguments"] = arguments_of(call["function"]["arguments"], param)
    newer = plain.pop("reasoning", None)
    if thought := plain.pop("reasoning_content", None) or newer:
        plain[field := thought_field(template)] = thought
        if field == "thinking" and plain.get("tool_calls") and plain["content"]:
            # before a call GPT-OSS writes either as the same kind of message, and refuses both
            plain |= {"thinking": f"{thought}\n{plain['content']}", "content": ""}
    return plain


def _plain_tool(tool: Tool, template: str) -> dict[str, Any]:
    """Convert a tool for the template: absent fields are left out, but for a description that it joins with text."""
    plain = tool.model_dump(exclude_none=True)
    if JOINED_DESCRIPTION.search(template):
        plain["function"].setdefault("description", "")
    return plain


def arguments_of(text: str, param: str) -> dict[str, Any]:
    """A call's arguments; none may be blank or null. Of a call that broke off, or went wrong, those before that: its
    client sends back what it was given. Raises ApiError, with the field's name, if they are no JSON object."""
    try:
        arguments = json.loads(text.strip() or "{}")
    except (ValueError, RecursionError):
        try:
            arguments = from_json(text.encode(errors="replace"), allow_partial="trailing-strings")
        except ValueError:
            raise refused(param, f"{param} is not JSON; an object is expected") from None
    if not isinstance(arguments, dict | None):
        raise refused(param, f"{param} is {shown(arguments)}; an object is expected")
    return arguments or {}


def _part_text(place: str, part: Mapping[str, Any]) -> str:
    """The text of one part of a message; an assistant may have refused in a part of its own type."""
    if part.get("type") == "refusal" and isinstance(refusal := part.get("refusal"), str):
        return refusal
    if part.get("type") != "text":
        what = f"a part of type {part.get('type')!r:.80}"
    elif unknown := part.keys() - TEXT_PART:
        what = f"a text part with the unknown field {shown(min(unknown))}"
    elif not isinstance(text := part.get("text"), str):
        what = "a part whose text is no string"
    else:
        return text
    raise refused(place, f'{place} holds {what}; only {{"type": "text", "text": ...}} is read')
