"""Ids of calls for Kimi's chat templates, which write the id of a call in the place of its tool's name.

An id there is functions.NAME:NUMBER, and the number counts the calls of the chat. Clients have other ids: from this
server those that never repeat, which forced calls have too, or those of another server.
"""

from collections.abc import Iterable, Mapping
from typing import Any

CALLED_BY_ID = "<|tool_call_argument_begin|>"
"""A chat template that contains this writes ids for names."""
PREFIX = "functions."


def with_naming_ids(chat: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The chat with such ids of calls and their results. An id that has the prefix stays as it is."""
    naming: dict[Any, str] = {}
    named, number = [], 0
    for message in chat:
        if isinstance(calls := message.get("tool_calls"), (list, tuple)):
            own = []
            for call in calls:
                naming |= _naming_id(call, number)
                own.append(_with_id(call, "id", naming))
                number += 1
            message = {**message, "tool_calls": own}
        elif message.get("role") == "tool":
            message = _with_id(message, "tool_call_id", naming)
        named.append(message)
    return named


def _naming_id(call: Any, number: int) -> dict[Any, str]:
    """The id of a call, and that which names its tool."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or str(call.get("id")).startswith(PREFIX):
        return {}
    return {call.get("id"): f"{PREFIX}{function.get('name')}:{number}"}


def _with_id(message: Any, field: str, naming: Mapping[Any, str]) -> Any:
    """The message or call with the naming id for its own."""
    known = isinstance(message, Mapping) and message.get(field) in naming
    return {**message, field: naming[message.get(field)]} if known else message
