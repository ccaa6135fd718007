"""A response as it grows: items of output, and the events that tell of them, in OpenAI's order.

    response.created, response.in_progress
        output_item.added
            content_part.added, output_text.delta ..., output_text.done, content_part.done      of a message
            content_part.added, reasoning_text.delta ..., reasoning_text.done, content_part.done  of a thought
            function_call_arguments.delta ..., function_call_arguments.done                     of a call
        output_item.done
    response.completed, response.incomplete or response.failed

One item is open at a time. A response that is not streamed is built alike, and its events are not sent.
"""

import uuid
from typing import Any

from specdec.serving.openai.reply import ReplyDelta

Event = dict[str, Any]
PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
"""Of what type the part is that an item of this type has."""


class ResponseBuilder:
    """response: as it is so far, with its `output`."""

    def __init__(self, response: dict[str, Any]) -> None:
        self.response = response
        self.output: list[dict[str, Any]] = response["output"]
        self._open: dict[str, Any] | None = None
        self._sequence = 0

    def begin(self) -> list[Event]:
        return [
            self._event("response.created", response=self._copy()),
            self._event("response.in_progress", response=self._copy()),
        ]

    def add(self, said: ReplyDelta, logprobs: list[dict[str, Any]] | None = None) -> list[Event]:
        """What a delta of the answer adds."""
        events: list[Event] = []
        if said.reasoning:
            events += self._text("reasoning", said.reasoning, [])
        if said.content:
            events += self._text("message", said.content, logprobs or [])
        for call in said.tool_calls:
            function = call["function"]
            if "id" in call:
                item = {"type": "function_call", "id": _new_id("fc"), "call_id": call["id"], "name": function["name"]}
                events += self._begin_item(item | {"arguments": "", "status": "in_progress"})
            assert self._open is not None
            if function["arguments"]:
                self._open["arguments"] += function["arguments"]
                events.append(self._of_item("response.function_call_arguments.delta", delta=function["arguments"]))
        return events

    def end(self, status: str, usage: dict[str, Any] | None, **details: Any) -> list[Event]:
        """status: completed, incomplete or failed."""
        if not self.output and status != "failed":  # an answer without a word is an empty message
            events = self._begin_item(_message(), [self._part("message")])
        else:
            events = []
        events += self._close("completed" if status == "completed" else "incomplete")
        self.response |= {"status": status, "usage": usage, **details}
        return [*events, self._event(f"response.{status}", response=self._copy())]

    def _text(self, kind: str, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        events: list[Event] = []
        if self._open is None or self._open["type"] != kind:
            item = _message() if kind == "message" else {"type": "reasoning", "id": _new_id("rs"), "summary": []}
            events += self._begin_item(item | {"status": "in_progress"}, [self._part(kind)])
        assert self._open is not None
        part = self._open["content"][0]
        part["text"] += text
        more = {}
        if kind == "message":
            part["logprobs"] += logprobs
            more = {"logprobs": logprobs}
        events.append(self._of_item(f"response.{PARTS[kind]}.delta", content_index=0, delta=text, **more))
        return events

    def _part(self, kind: str) -> dict[str, Any]:
        if kind == "reasoning":
            return {"type": "reasoning_text", "text": ""}
        return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}

    def _begin_item(self, item: dict[str, Any], parts: list[dict[str, Any]] | None = None) -> list[Event]:
        events = self._close("completed")
        self._open = item if parts is None else item | {"content": []}
        self.output.append(self._open)
        events.append(
            self._event("response.output_item.added", output_index=len(self.output) - 1, item=_copied(self._open))
        )
        for part in parts or ():
            self._open["content"].append(part)
            events.append(self._of_item("response.content_part.added", content_index=0, part=_copied(part)))
        return events

    def _close(self, status: str) -> list[Event]:
        item, events = self._open, []
        if item is None:
            return []
        if item["type"] == "function_call":
            whole = {"arguments": item["arguments"], "name": item["name"]}
            events.append(self._of_item("response.function_call_arguments.done", **whole))
        else:
            part = item["content"][0]
            more = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            kind = f"response.{PARTS[item['type']]}.done"
            events.append(self._of_item(kind, content_index=0, text=part["text"], **more))
            events.append(self._of_item("response.content_part.done", content_index=0, part=_copied(part)))
        item["status"] = status
        events.append(self._event("response.output_item.done", output_index=len(self.output) - 1, item=_copied(item)))
        self._open = None
        return events

    def _of_item(self, kind: str, **fields: Any) -> Event:
        assert self._open is not None
        return self._event(kind, item_id=self._open["id"], output_index=len(self.output) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event

    def _copy(self) -> dict[str, Any]:
        return self.response | {"output": [_copied(item) for item in self.output]}


def _message() -> dict[str, Any]:
    return {"type": "message", "id": _new_id("msg"), "role": "assistant", "status": "in_progress"}


def _copied(item: dict[str, Any]) -> dict[str, Any]:
    """As it is now: events are sent later than they are made."""
    return {name: [dict(part) for part in value] if name == "content" else value for name, value in item.items()}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
