"""Builds a chat's message, streamed or whole, from the events of an answer.

A message has one text, one thought and a list of calls, so only the deltas show the order of several texts. Separate
texts of the answer are joined by a line end in the message; around a call they are kept as written.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from specdec.serving.tools.answer_events import CallArguments, CallBegin, CallEnd, Event, EventTokens, Text

FIELDS = {"thought": "reasoning_content", "content": "content"}
Delta = dict[str, Any]


class MessageBuilder:
    """Builds one message from events. thoughts: include thoughts?"""

    def __init__(self, *, thoughts: bool = True) -> None:
        self._thoughts = thoughts
        self._ends: dict[str, str] = {}  # the last character of each field
        self._after_call = False

    def deltas(self, events: Iterable[EventTokens]) -> list[Delta]:
        """Deltas in OpenAI's form, with one field each; adjacent ones with the same field are joined."""
        deltas: list[Delta] = []
        for event, _ in events:
            delta = self._delta(event)
            if delta is None:
                continue
            if deltas and deltas[-1].keys() == delta.keys():
                _extend(deltas[-1], delta)
            else:
                deltas.append(delta)
        return deltas

    def _delta(self, event: Event) -> Delta | None:
        after_call, self._after_call = self._after_call, isinstance(event, CallEnd)
        match event:
            case Text():
                if not event.text or (event.kind == "thought" and not self._thoughts):
                    return None
                field, before = FIELDS[event.kind], self._ends.get(event.kind, "")
                apart = event.begins and before and not (after_call and event.kind == "content")
                self._ends[event.kind] = event.text[-1]
                return {field: "\n" * bool(apart and not (before + event.text[0]).isspace()) + event.text}
            case CallBegin():
                function = {"name": event.name, "arguments": ""}
                call = {"index": event.index, "id": event.id, "type": "function", "function": function}
                return {"tool_calls": [call]}
            case CallArguments():
                return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
        return None


def whole_message(deltas: Sequence[Delta]) -> Delta:
    """Join all deltas to one message, with complete calls."""
    whole: Delta = {}
    for delta in deltas:
        _extend(whole, delta)
    for call in whole.get("tool_calls", ()):
        del call["index"]
    return whole


def _extend(delta: Delta, more: Delta) -> None:
    """Merge `more` into `delta`: parts of each call together, texts joined."""
    for field, value in more.items():
        if isinstance(value, str):
            delta[field] = delta.get(field, "") + value
            continue
        calls = delta.setdefault(field, [])
        for part in value:
            if calls and calls[-1]["index"] == part["index"]:
                calls[-1]["function"]["arguments"] += part["function"]["arguments"]
            else:
                calls.append(part)
