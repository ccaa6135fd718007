"""Fields that clients send: some change nothing, vLLM's have their effect, others are refused or left out."""

import asyncio
import json
import logging

import httpx
import jsonschema
import pytest

from specdec import Engine
from specdec.serving.application import create_app
from specdec.serving.async_engine import AsyncEngine
from specdec.serving.server_settings import ServeSettings

from served_engine import served

pytestmark = pytest.mark.usefixtures("shallow_pair", "bundled_once")
QUESTION = "Tom has 3 apples and buys 5 more. How many apples does he have?"
CHAT = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 12, "temperature": 0}
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "unit": {"enum": ["eggs", "pens"]}},
    "required": ["a", "unit"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": ADD}}]


@pytest.fixture(scope="module")
def engine():
    with Engine.from_pretrained("tiny-gemma4", "tiny-gemma4-mtp") as engine:
        yield engine


@pytest.fixture(scope="module")
def url(engine):
    with served(engine) as (url, _, _):
        yield url


def chat(url, **fields):
    return httpx.post(f"{url}/v1/chat/completions", json=CHAT | fields, timeout=60)


def complete(url, **fields):
    return httpx.post(
        f"{url}/v1/completions", json={"prompt": QUESTION, "max_tokens": 8, "temperature": 0} | fields, timeout=60
    )


def events(answer):
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize(
    "fields",
    [
        {"use_beam_search": False, "length_penalty": 1.0, "early_stopping": False, "skip_special_tokens": True},
        {"add_generation_prompt": True, "continue_final_message": False, "spaces_between_special_tokens": True},
        {"store": True, "metadata": {"a": "b"}, "user": "u", "service_tier": "auto", "safety_identifier": "s"},
        {"seed": 3, "priority": 0, "prompt_cache_key": "x", "chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "low", "verbosity": "low", "prediction": {"type": "content", "content": "It is 8."}},
        {"parallel_tool_calls": False, "min_tokens": 0, "return_token_ids": False, "bad_words": [], "functions": []},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_values_that_change_nothing_are_taken(url, fields):
    answer = chat(url, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"] == chat(url).json()["choices"]


@pytest.mark.parametrize(
    "fields",
    [
        {"use_beam_search": True},
        {"length_penalty": 0.8},
        {"skip_special_tokens": False},
        {"reasoning_effort": "enormous"},
        {"verbosity": "loud"},
        {"prediction": {"type": "song", "content": "la"}},
        {"functions": [{}]},
        {"truncate_prompt_tokens": 0},
        {"min_tokens": 13},
        {"allowed_token_ids": []},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_values_that_would_change_the_answer_are_refused(url, fields):
    answer = chat(url, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].split(".")[0] == next(iter(fields))


def test_a_prompt_is_cut_to_its_last_tokens(url, engine):
    ids = engine.encode(QUESTION)
    cut = complete(url, truncate_prompt_tokens=7, return_token_ids=True, echo=True).json()["choices"][0]
    assert cut["prompt_token_ids"] == ids[-7:] and cut["text"].startswith(engine.decode(ids[-7:]))
    most = engine.max_model_len
    assert complete(url, truncate_prompt_tokens=-1).json()["usage"]["prompt_tokens"] == len(ids)  # there is room
    assert complete(url, truncate_prompt_tokens=most + 1).status_code == 400
    assert complete(url, truncate_prompt_tokens=500).json()["usage"]["prompt_tokens"] == len(ids)
    whole = chat(url, return_token_ids=True).json()["prompt_token_ids"]
    assert chat(url, truncate_prompt_tokens=9, return_token_ids=True).json()["prompt_token_ids"] == whole[-9:]


def test_the_last_message_is_continued(url, engine):
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "Tom has"}]
    answer = chat(
        url, messages=messages, continue_final_message=True, add_generation_prompt=False, return_token_ids=True
    )
    assert answer.json()["prompt_token_ids"] == engine.chat_prompt(messages, continue_final_message=True)
    both = chat(url, messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert both.status_code == 400 and both.json()["error"]["param"] == "continue_final_message"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}], ids=["any", "named"])
def test_a_tool_that_must_be_called_is_called_once_whole_and_streamed(url, choice):
    asked = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 60}
    answer = chat(url, **asked)
    assert answer.status_code == 200, answer.text
    [whole] = answer.json()["choices"]
    [call] = whole["message"]["tool_calls"]
    assert (whole["finish_reason"], whole["message"]["content"]) == ("tool_calls", None)
    assert (call["type"], call["function"]["name"]) == ("function", "f")
    jsonschema.validate(json.loads(call["function"]["arguments"]), ADD)
    choices = [each for chunk in events(chat(url, **asked, stream=True)) for each in chunk["choices"]]
    parts = [part for each in choices for part in each["delta"].get("tool_calls", ())]
    assert [part["function"]["name"] for part in parts if "id" in part] == ["f"] and len(parts) > 1
    assert "".join(part["function"].get("arguments", "") for part in parts) == call["function"]["arguments"]
    assert choices[-1]["finish_reason"] == "tool_calls"


def test_with_tool_choice_none_a_call_is_text(url):
    written = r'Well\.<tool_call>\{"name": "f", "arguments": \{\}\}</tool_call>'
    [choice] = chat(url, tools=TOOLS, tool_choice="none", guided_regex=written, max_tokens=60).json()["choices"]
    assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]
    assert choice["message"]["content"] == 'Well.<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def test_a_required_call_has_no_arguments_that_its_tool_does_not_name(url):
    """Written as clients write schemas, which do not say that there are no others."""
    parameters = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    answer = chat(url, tools=tools, tool_choice="required", max_tokens=100, temperature=1.5, n=3, seed=0).json()
    for choice in answer["choices"]:
        [call] = choice["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) in ({"a": 1}, {"a": 2})


def test_a_required_tool_needs_no_template_that_knows_tools(url, engine):
    template = engine.tokenizer.chat_template
    try:
        engine.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
        required = chat(url, tools=TOOLS, tool_choice="required", max_tokens=60)
        assert required.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f"
        refused = chat(url, tools=TOOLS)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == "this model's chat template knows no tools; leave them out"
    finally:
        engine.tokenizer.chat_template = template


@pytest.mark.parametrize("handling", ["refuse", "warn", "ignore"])
def test_unknown_fields_are_refused_or_left_out_as_the_server_is_told(handling, engine, caplog):
    settings = ServeSettings(model_names=["tiny-gemma4"], unknown_fields=handling)

    async def ask():
        async with AsyncEngine(engine) as running:
            transport = httpx.ASGITransport(create_app(running, settings))
            async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
                body = CHAT | {"num_ctx": 8, "stream_options": None}
                body["messages"] = [CHAT["messages"][0] | {"mood": "good"}]
                return await client.post("/v1/chat/completions", json=body)

    with caplog.at_level(logging.WARNING):
        answer = asyncio.run(ask())
    assert answer.status_code == (400 if handling == "refuse" else 200)
    said = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert len(said) == (2 if handling == "warn" else 0)
    assert all(name in " ".join(said) for name in (("num_ctx", "mood") if said else ()))
