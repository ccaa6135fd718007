"""A chat as the model's template takes it: its messages, and what fields of the request tell the template."""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from specdec.serving.openai.protocol import ChatRequest, Message, refused
from specdec.serving.state import ServeState
from specdec.text.prompts import asks_for_none, template_text

ROLES = {"developer": "system"}
"""Roles that OpenAI renamed; templates know the old name."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Names by which templates know the thoughts of an answer that is sent back."""
NOT_OPTIONS = {
    "chat_template": "a template is a program, and this server runs its own",
    "tools": "tools say it",
    "special_tokens_in_content": "the server's own setting says it",
}
"""Keys that `chat_template_kwargs` may not have, and why."""


async def chat_prompt(body: ChatRequest, state: ServeState, tools: dict[str, Any]) -> list[int]:
    """The token ids of a chat. tools: what its template is told of them."""
    options = body.chat_template_kwargs or {}
    for name, said in NOT_OPTIONS.items():
        if name in options:
            raise refused("chat_template_kwargs", f"chat_template_kwargs holds {name}: {said}; leave it out")
    template = template_text(getattr(state.tokenizer, "chat_template", None))
    shape = MessageShape.of(template)
    plain = (_plain(f"messages[{index}]", message, shape) for index, message in enumerate(body.messages))
    messages = await state.engine.off_loop(lambda: list(plain))
    return await state.engine.chat_prompt(
        messages,
        special_tokens_in_content=state.settings.special_tokens_in_content,
        **_options(body, template) | options | tools,
    )


class MessageShape(NamedTuple):
    """What a chat template expects of messages. thoughts: the field that it reads thoughts from. asks_none: does it
    ask whether a content is none? Others add it to text."""

    thoughts: str
    asks_none: bool

    @classmethod
    def of(cls, template: str) -> "MessageShape":
        fields = (name for name in THOUGHTS if re.search(rf"""\.{name}\b|["']{name}["']""", template))
        return cls(next(fields, THOUGHTS[0]), asks_for_none(template))


def _options(body: ChatRequest, text: str) -> dict[str, Any]:
    """What fields of a chat tell its template, whose text this is: efforts and verbosity to one that reads them, a
    hint elsewhere."""
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
    for name in ("reasoning_effort", "verbosity"):
        if (value := getattr(body, name)) is not None and name in text:
            options[name] = value
    if body.reasoning_effort == "none" and "enable_thinking" in text:
        options["enable_thinking"] = False
    return options


def _plain(place: str, message: Message, shape: MessageShape) -> dict[str, Any]:
    """A message as its template expects it: parts of text are joined by line ends, arguments of calls are objects, what
    is not said is left out. Raises ApiError for parts that are no text, with their place."""
    plain = message.model_dump(exclude_none=True, exclude={"annotations", "type"})
    plain["role"] = ROLES.get(message.role, message.role)
    if isinstance(message.content, list):
        plain["content"] = "\n".join(_part_text(f"{place}.content", part) for part in message.content)
    elif message.content is None:
        if not message.tool_calls:
            raise refused(f"{place}.content", f"{place}.content is missing; text is expected")
        plain["content"] = None if shape.asks_none else ""
    for number, call in enumerate(plain.get("tool_calls", ())):
        call.pop("index", None)
        try:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
        except (ValueError, RecursionError):
            param = f"{place}.tool_calls[{number}].function.arguments"
            raise refused(param, f"{param} is not JSON; an object is expected") from None
    if thought := plain.pop("reasoning_content", None):
        plain[shape.thoughts] = thought
        if shape.thoughts == "thinking" and plain.get("tool_calls") and plain["content"]:
            # GPT-OSS writes either before a call, as the same kind of message, and refuses both
            plain |= {"thinking": f"{thought}\n{plain['content']}", "content": ""}
    return plain


def _part_text(place: str, part: Mapping[str, Any]) -> str:
    """The text of one part of a message."""
    if part.get("type") != "text":
        what = f"a part of type {part.get('type')!r:.80}"
    elif part.keys() != {"type", "text"}:
        what = "a text part with other fields"
    elif not isinstance(part["text"], str):
        what = "a part whose text is no string"
    else:
        return part["text"]
    raise refused(place, f'{place} holds {what}; only {{"type": "text", "text": ...}} is read')
