"""Converts the input of a response to a chat request: the engine serves both in the same way."""

from typing import Any

from pydantic import ValidationError

from specdec.serving.http.faults import invalid_body, refused
from specdec.serving.openai.chat_template import arguments_of
from specdec.serving.openai.protocol import ChatRequest, NamedFunction, ResponsesRequest, TextFormat

RESPONSES_ONLY = {"tools", "tool_choice", "stream_options", "store"}
"""Fields that chats have under the same name, but that have another form here, or that do not concern the chat."""
TEXT_FIELDS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Fields with the text of a part, by its type."""
SAME_AS_CHAT = ResponsesRequest.model_fields.keys() & ChatRequest.model_fields.keys() - RESPONSES_ONLY


def chat_request(body: ResponsesRequest, messages: list[dict[str, Any]]) -> ChatRequest:
    """The chat request for a response. messages: all messages but the instructions, earlier responses' included."""
    asked = {name: getattr(body, name) for name in SAME_AS_CHAT}
    instructions = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    asked |= {"messages": instructions + messages, "max_tokens": body.max_output_tokens}
    if not asked["messages"]:
        raise refused("input", "input holds no message and no text of a thought; there is nothing to answer")
    scored = body.top_logprobs or "message.output_text.logprobs" in (body.include or ())
    asked |= {"logprobs": bool(scored) or None, "top_logprobs": body.top_logprobs or None}
    if body.tools:
        functions = [tool.model_dump(exclude={"type"}, exclude_none=True) for tool in body.tools]
        asked["tools"] = [{"type": "function", "function": function} for function in functions]
    if isinstance(body.tool_choice, NamedFunction):
        asked["tool_choice"] = {"type": "function", "function": {"name": body.tool_choice.name}}
    elif body.tools or body.tool_choice == "required":
        asked["tool_choice"] = body.tool_choice
    if body.text is not None:
        asked["verbosity"] = body.text.verbosity
        asked["response_format"] = _response_format(body.text.format)
    if body.reasoning is not None:
        asked["reasoning_effort"] = body.reasoning.effort
    try:
        return ChatRequest.model_validate({name: value for name, value in asked.items() if value is not None})
    except ValidationError as error:  # such as too many messages
        raise invalid_body(error.errors()) from None


def _response_format(form: TextFormat | None) -> dict[str, Any] | None:
    if form is None:
        return None
    if form.type == "json_schema" and form.json_schema is None:
        raise refused("text.format.schema", "text.format.schema is missing; it is required")
    if form.type != "json_schema" and form.json_schema is not None:
        raise refused("text.format.schema", f"text.format.schema is not for type={form.type!r}; leave it out")
    schema = {"name": form.name or "", "schema": form.json_schema, "strict": form.strict}
    return {"type": form.type} | ({"json_schema": schema} if form.json_schema is not None else {})


def messages_of(items: list[dict[str, Any]], *, is_answer: bool = False) -> list[dict[str, Any]]:
    """The chat's messages for these items. Thoughts, text and calls of an answer are separate items, but one message; a
    second text begins another message.

    is_answer: the items are one answer, which is one message even with several texts: templates expect turns to
    alternate.
    """
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        _add_item(messages, item, f"input[{index}]", after_text=is_answer)
    for message in messages:
        if message["content"] is None and not message.get("tool_calls"):
            message["content"] = ""  # a message with only a thought
    return messages


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any], place: str, *, after_text: bool) -> None:
    """Append a message for this item, or extend the last message by it. place: the item's place for errors.
    after_text: may a text or thought be added to an answer that already has its text?"""
    match item.get("type", "message" if "role" in item else None):
        case "message":
            role = item.get("role")
            if role not in ("user", "assistant", "system", "developer"):
                expected = "user, assistant, system or developer is expected"
                raise refused(f"{place}.role", f"{place}.role={role!r:.80}: {expected}")
            content = _content_text(item.get("content"), f"{place}.content")
            if role != "assistant":
                messages.append({"role": role, "content": content})
                return
            message = _assistant_message(messages, after_text=after_text)
            message["content"] = content if message["content"] is None else f"{message['content']}\n{content}"
        case "function_call":
            call_id, name, arguments = (_require_string(item, name, place) for name in ("call_id", "name", "arguments"))
            answer = _assistant_message(messages)
            if item.get("status") == "incomplete":  # it broke off within its arguments, so it was not made
                return
            if not after_text:  # an answer's own calls were read as JSON
                arguments_of(arguments, f"{place}.arguments")
            function = {"name": name, "arguments": arguments}
            calls = answer.setdefault("tool_calls", [])
            calls.append({"id": call_id, "type": "function", "function": function})
        case "function_call_output":
            output = _content_text(item.get("output"), f"{place}.output")
            messages.append(
                {"role": "tool", "tool_call_id": _require_string(item, "call_id", place), "content": output}
            )
        case "reasoning":
            given = item.get("content")
            parts = [part for part in given if isinstance(part, dict)] if isinstance(given, list) else []
            if thought := "".join(str(part.get("text", "")) for part in parts):
                message = _assistant_message(messages, after_text=after_text)
                before = message.get("reasoning_content")
                message["reasoning_content"] = thought if before is None else f"{before}\n{thought}"
        case kind:
            read = "message, function_call, function_call_output, reasoning and item_reference are read"
            raise refused(place, f"{place} is of type {kind!r:.80}; {read}")


def _assistant_message(messages: list[dict[str, Any]], *, after_text: bool = True) -> dict[str, Any]:
    """The assistant message to extend: the last one, or a new one."""
    last = messages[-1] if messages else {"role": None}
    is_over = not after_text and last.get("content") is not None and not last.get("tool_calls")
    if last["role"] != "assistant" or is_over:
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _content_text(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refused(place, f"{place} is {content!r:.80}; a string or text parts are expected")
    texts = list[str]()
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(TEXT_FIELDS[kind]) if isinstance(kind, str) and kind in TEXT_FIELDS else None
        if not isinstance(text, str):
            what = f"a part of type {kind!r:.80}" if kind else "no text part"
            raise refused(place, f"{place} holds {what}; only text is read")
        texts.append(text)
    return "\n".join(texts)


def _require_string(item: dict[str, Any], name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise refused(f"{place}.{name}", f"{place}.{name} is {value!r:.80}; a string is expected")
    return value
