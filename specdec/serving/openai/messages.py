"""Messages of OpenAI's API as chat templates read them."""

import json
from collections.abc import Sequence
from typing import Any

from specdec.serving.http.faults import ApiError
from specdec.serving.openai.protocol import Message

ROLES = {"developer": "system"}
"""Roles that OpenAI renamed; templates know the old name."""


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Plain messages: parts of text are joined by line ends, arguments of calls are objects, what is not said is left
    out. Parts that are no text go on as they are, to be refused with their place."""
    return [_plain(index, message) for index, message in enumerate(messages)]


def _plain(index: int, message: Message) -> dict[str, Any]:
    plain = message.model_dump(exclude_none=True, exclude={"annotations", "type"})
    plain["role"] = ROLES.get(message.role, message.role)
    parts = message.content
    if isinstance(parts, list):
        if all(part.keys() == {"type", "text"} and part["type"] == "text" for part in parts):
            if not all(isinstance(part["text"], str) for part in parts):
                raise _refused(index, "a part whose text is no string")
            plain["content"] = "\n".join(part["text"] for part in parts)
        else:
            kinds = [part.get("type") for part in parts if part.get("type") != "text"]
            raise _refused(index, f"a part of type {kinds[0]!r:.80}" if kinds else "a text part with other fields")
    if message.content is None and not message.tool_calls:
        raise ApiError(
            400, f"messages[{index}].content is missing; text is expected", param=f"messages[{index}].content"
        )
    if message.content is None:
        plain["content"] = ""  # templates add it to other text
    for number, call in enumerate(plain.get("tool_calls", ())):
        call.pop("index", None)
        try:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
        except (ValueError, RecursionError):
            place = f"messages[{index}].tool_calls[{number}].function.arguments"
            raise ApiError(400, f"{place} is not JSON; an object is expected", param=place) from None
    return plain


def _refused(index: int, what: str) -> ApiError:
    place = f"messages[{index}].content"
    return ApiError(400, f'{place} holds {what}; only {{"type": "text", "text": ...}} is read', param=place)
