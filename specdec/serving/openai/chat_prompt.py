"""A chat as the model's template reads it: messages of OpenAI's API, tools, and the options of a request."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from specdec.serving.http.faults import ApiError
from specdec.serving.openai.protocol import ChatRequest, Message, refused
from specdec.serving.state import ServeState
from specdec.text.prompts import template_text

ROLES = {"developer": "system"}
"""Roles that OpenAI renamed; templates know the old name."""
NOT_OPTIONS = {
    "chat_template": "a template is a program, and this server runs its own",
    "tools": "tools say it",
    "special_tokens_in_content": "the server's own setting says it",
}
"""What `chat_template_kwargs` may not hold, and why."""


async def chat_prompt(body: ChatRequest, state: ServeState, tools: dict[str, Any]) -> list[int]:
    """The token ids of a chat. tools: what its template is told of them."""
    options = body.chat_template_kwargs or {}
    for name, said in NOT_OPTIONS.items():
        if name in options:
            raise refused("chat_template_kwargs", f"chat_template_kwargs holds {name}: {said}; leave it out")
    plain = (_plain(f"messages[{index}]", message) for index, message in enumerate(body.messages))
    messages = await asyncio.to_thread(list, plain)
    return await state.engine.chat_prompt(
        messages,
        special_tokens_in_content=state.settings.special_tokens_in_content,
        **_options(body, getattr(state.tokenizer, "chat_template", None)) | options | tools,
    )


def _options(body: ChatRequest, template: Any) -> dict[str, Any]:
    """What fields of a chat tell its template: efforts and verbosity to one that reads them, a hint elsewhere."""
    options: dict[str, Any] = {}
    if body.continue_final_message:
        goes_on = "continue_final_message=true goes on with the last message"
        if body.add_generation_prompt:
            message = f"{goes_on}, add_generation_prompt=true begins another; leave one out"
            raise refused("continue_final_message", message)
        if not body.messages[-1].content:
            raise refused("continue_final_message", f"{goes_on}, and that has no text; give it some")
        options["continue_final_message"] = True
    elif body.add_generation_prompt is False:
        options["add_generation_prompt"] = False
    text = template_text(template)
    for name in ("reasoning_effort", "verbosity"):
        if (value := getattr(body, name)) is not None and name in text:
            options[name] = value
    if body.reasoning_effort == "none" and "enable_thinking" in text:
        options["enable_thinking"] = False
    return options


def _plain(place: str, message: Message) -> dict[str, Any]:
    """Parts of text are joined by line ends, arguments of calls are objects, what is not said is left out. Raises
    ApiError for parts that are no text, with their place."""
    plain = message.model_dump(exclude_none=True, exclude={"annotations", "type"})
    plain["role"] = ROLES.get(message.role, message.role)
    if isinstance(message.content, list):
        plain["content"] = "\n".join(_part_text(f"{place}.content", part) for part in message.content)
    elif message.content is None:
        if not message.tool_calls:
            raise refused(f"{place}.content", f"{place}.content is missing; text is expected")
        plain["content"] = ""  # templates add it to other text
    for number, call in enumerate(plain.get("tool_calls", ())):
        call.pop("index", None)
        try:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
        except (ValueError, RecursionError):
            param = f"{place}.tool_calls[{number}].function.arguments"
            raise refused(param, f"{param} is not JSON; an object is expected") from None
    return plain


def _part_text(place: str, part: Mapping[str, Any]) -> str:
    """The text of one part of a message."""
    if part.get("type") != "text":
        raise _no_text(place, f"a part of type {part.get('type')!r:.80}")
    if part.keys() != {"type", "text"}:
        raise _no_text(place, "a text part with other fields")
    if not isinstance(part["text"], str):
        raise _no_text(place, "a part whose text is no string")
    text: str = part["text"]
    return text


def _no_text(place: str, what: str) -> ApiError:
    return refused(place, f'{place} holds {what}; only {{"type": "text", "text": ...}} is read')
