"""Tools over HTTP with the official client: calls whole and as they come, forced by a grammar, and sent back.

The bundled model's template has Hermes' way of writing them; it was not trained on it, so grammars make it write calls.
"""

import json

import jsonschema
import openai
import pytest
from server_process import running_server

from specdec.serving.http.faults import ApiError
from specdec.serving.openai.protocol import ChatRequest
from specdec.serving.tools.tool_choice import ToolChoice

ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "unit": {"enum": ["eggs", "pens"]}},
    "required": ["a", "unit"],
    "additionalProperties": False,
}
NOW = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": ADD}},
    {"type": "function", "function": {"name": "now", "parameters": NOW}},
]
CHAT = [{"role": "user", "content": "Ann has 4 eggs and buys 3 more. How many?"}]
WRITTEN = (  # as the template's format has it, with text in front
    r'Well, I add\.\n<tool_call>\n\{"name": "add", "arguments": \{"a": [1-9][0-9]?, "unit": "(eggs|pens)"\}\}'
    r"\n</tool_call>"
    r'\n<tool_call>\n\{"name": "now", "arguments": \{\}\}\n</tool_call>'
)

pytestmark = pytest.mark.usefixtures("shallow_pair")


@pytest.fixture(scope="module")
def client():
    with (
        running_server() as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def ask(client, **options):
    options = {"model": "tiny-gemma4", "messages": CHAT, "tools": TOOLS, "temperature": 0, "max_tokens": 200} | options
    return client.chat.completions.create(**options)


def gathered(chunks):
    """(content, [(id, name, arguments), ...], why it ended) out of a stream."""
    content, calls, reason = "", [], None
    for chunk in chunks:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or []:
                if call.id is not None:
                    assert call.index == len(calls) and call.type == "function"
                    calls.append([call.id, call.function.name, ""])
                calls[call.index][2] += call.function.arguments or ""
    return content, [tuple(call) for call in calls], reason


@pytest.mark.parametrize(
    "choice", [{"type": "function", "function": {"name": "add"}}, "required"], ids=["named", "any"]
)
def test_a_tool_that_must_be_called_is_called_as_its_schema_says(choice, client):
    answer = ask(client, tool_choice=choice).choices[0]
    [call] = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls" and not answer.message.content
    schemas = {"add": ADD, "now": NOW} if choice == "required" else {"add": ADD}
    jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])
    streamed = gathered(ask(client, tool_choice=choice, stream=True))
    assert streamed[0] == "" and streamed[2] == "tool_calls"
    assert [each[1:] for each in streamed[1]] == [(call.function.name, call.function.arguments)]


@pytest.mark.parametrize("speculation", [None, False], ids=["drafts", "plain"])
def test_calls_in_the_models_own_format_come_out_of_its_text(speculation, client):
    body = {"structured_outputs": {"regex": WRITTEN}, "speculation": speculation}
    answer = ask(client, extra_body=body).choices[0]
    calls = [(call.function.name, call.function.arguments) for call in answer.message.tool_calls]
    assert answer.message.content == "Well, I add.\n" and answer.finish_reason == "tool_calls"
    assert [name for name, _ in calls] == ["add", "now"]
    jsonschema.validate(json.loads(calls[0][1]), ADD)
    chunks = list(ask(client, extra_body=body, stream=True))
    content, streamed, reason = gathered(chunks)
    assert (content, [each[1:] for each in streamed], reason) == ("Well, I add.\n", calls, "tool_calls")
    assert len({each[0] for each in streamed}) == 2
    assert sum(bool(c.choices and c.choices[0].delta.tool_calls) for c in chunks) > 2  # as it comes


def test_a_call_that_is_cut_off_by_length_has_the_arguments_so_far(client):
    body = {"structured_outputs": {"regex": WRITTEN}}
    whole = ask(client, extra_body=body).choices[0].message.tool_calls[0].function.arguments
    seen = set()
    for most in range(10, 60, 6):
        cut = ask(client, extra_body=body, max_tokens=most).choices[0]
        if cut.finish_reason != "length":
            break
        for call in (cut.message.tool_calls or [])[:1]:
            seen.add(call.function.arguments)
            assert whole.startswith(call.function.arguments)
    assert len(seen) > 1


def test_with_tool_choice_none_all_text_is_content(client):
    answer = ask(client, tool_choice="none", extra_body={"structured_outputs": {"regex": WRITTEN}}).choices[0]
    assert answer.message.tool_calls is None and answer.finish_reason == "stop"
    assert '<tool_call>\n{"name": "add"' in answer.message.content


def test_calls_and_their_results_are_sent_back(client):
    named = {"type": "function", "function": {"name": "add"}}
    message = ask(client, tool_choice=named).choices[0].message
    said = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "7"}
    answer = ask(client, messages=[*CHAT, message, said], max_tokens=8).choices[0]
    assert answer.finish_reason in ("stop", "length") and answer.message.tool_calls is None


def test_tools_are_refused_where_the_chat_template_knows_none():
    body = ChatRequest.model_validate({"messages": CHAT, "tools": TOOLS})
    with pytest.raises(ApiError, match=r"^this model's chat template knows no tools; leave them out$"):
        ToolChoice(body, "{{ messages }}", None)
