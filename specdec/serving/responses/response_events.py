"""Builds a response from an answer's events: output items in order, and OpenAI's stream events.

One item is open at a time. Its events are `output_item.added`, deltas and their `done` (inside a `content_part` for a
message or thought), then `output_item.done`. A response that is not streamed is built in the same way.
"""

from collections.abc import Mapping
from typing import Any

from specdec.serving.tools import answer_events
from specdec.serving.tools.answer_events import CallArguments, CallBegin, CallEnd, Text

ResponseEvent = dict[str, Any]
ITEMS = {"thought": "reasoning", "content": "message"}
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
"""Prefix of an item's id, by item type. It is followed by the response's own id and the item's place in its output."""


class ResponseBuilder:
    """Builds a response and its events from the parts of an answer.

    response: the response so far, with its `output`.
    """

    def __init__(self, response: dict[str, Any]) -> None:
        self.response = response
        self.output: list[dict[str, Any]] = response["output"]
        self._open: dict[str, Any] = {}  # the open item; empty: none
        self._sequence = 0

    def begin(self) -> list[ResponseEvent]:
        return [self._response_event("response.created"), self._response_event("response.in_progress")]

    def add(self, event: answer_events.Event, logprobs: list[Any]) -> list[ResponseEvent]:
        """The response events for one event of the answer. logprobs: log-probabilities of the event's tokens."""
        match event:
            case Text():
                scores = {"logprobs": logprobs} if event.kind == "content" else {}
                return self._add_text(ITEMS[event.kind], event, **scores)
            case CallBegin():
                return self._begin_item("function_call", call_id=event.id, name=event.name, arguments="")
            case CallArguments():
                self._open["arguments"] += event.text
                return [self._item_event("function_call_arguments.delta", delta=event.text)]
            case CallEnd():
                return self._close_item("completed" if event.whole else "incomplete")

    def end(self, status: str, usage: dict[str, Any] | None, **details: Any) -> list[ResponseEvent]:
        """End the response. status: completed, incomplete or failed."""
        events = []
        if not self.output and status != "failed":  # an empty answer is an empty message
            events += self._begin_item("message")
        events += self._close_item("completed" if status == "completed" else "incomplete")
        self.response |= {"status": status, "usage": usage, **details}
        return [*events, self._response_event(f"response.{status}")]

    def _add_text(self, kind: str, added: Text, **details: list[Any]) -> list[ResponseEvent]:
        events = self._begin_item(kind) if added.begins else []
        [part] = self._open["content"]
        part["text"] += added.text
        for name, more in details.items():
            part[name] += more
        if not (added.text or any(details.values())):
            return events
        return [*events, self._item_event(f"{part['type']}.delta", content_index=0, delta=added.text, **details)]

    def _begin_item(self, kind: str, **fields: Any) -> list[ResponseEvent]:
        events = self._close_item("completed")
        item_id = f"{PREFIXES[kind]}_{self.response['id'].removeprefix('resp_')}_{len(self.output)}"
        item = {"type": kind, "id": item_id, "status": "in_progress", **fields}
        parts: list[dict[str, Any]] = []
        if kind == "message":
            item |= {"role": "assistant", "content": parts}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": parts}
            part = {"type": "reasoning_text", "text": ""}
        self._open = item
        self.output.append(item)
        events.append(self._output_event("output_item.added"))
        if kind != "function_call":
            parts.append(part)
            events.append(self._item_event("content_part.added", content_index=0, part=_copy_item(part)))
        return events

    def _close_item(self, status: str) -> list[ResponseEvent]:
        item, events = self._open, []
        if not item:
            return []
        if item["type"] == "function_call":
            whole = {"arguments": item["arguments"], "name": item["name"]}
            events.append(self._item_event("function_call_arguments.done", **whole))
        else:
            part = _copy_item(item["content"][0])
            whole = {name: value for name, value in part.items() if name not in ("type", "annotations")}
            events.append(self._item_event(f"{part['type']}.done", content_index=0, **whole))
            events.append(self._item_event("content_part.done", content_index=0, part=part))
        item["status"] = status
        events.append(self._output_event("output_item.done"))
        self._open = {}
        return events

    def _response_event(self, kind: str) -> ResponseEvent:
        return self._event(kind, response=self.response | {"output": [_copy_item(item) for item in self.output]})

    def _output_event(self, kind: str) -> ResponseEvent:
        return self._event(f"response.{kind}", output_index=len(self.output) - 1, item=_copy_item(self._open))

    def _item_event(self, kind: str, **fields: Any) -> ResponseEvent:
        item_id, output_index = self._open["id"], len(self.output) - 1
        return self._event(f"response.{kind}", item_id=item_id, output_index=output_index, **fields)

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event


def _copy_item(item: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of an item or a part, since the original may grow before the event is sent."""
    copy = {name: list(value) if isinstance(value, list) else value for name, value in item.items()}
    return copy | ({"content": [_copy_item(part) for part in item["content"]]} if "content" in item else {})
