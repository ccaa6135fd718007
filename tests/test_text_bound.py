"""On every route, all text that a template or a tokenizer would read counts against the context length."""

import asyncio

import httpx
import pytest

from specdec import Engine, EngineConfig, SamplingParams
from specdec.errors import CapacityError
from specdec.serving.admission import TextBound, characters
from specdec.serving.async_engine import AsyncEngine

from served_engine import served

pytestmark = pytest.mark.usefixtures("shallow_pair", "bundled_once")
LONG = "y" * 3000
HI = {"role": "user", "content": "hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "' + LONG + '"}'}}
TOOL = {"name": "f", "description": LONG, "parameters": {"type": "object", "properties": {}}}
NAMES = {"type": "object", "properties": {f"name-{number}": {} for number in range(300)}}
NUMBERS = {"type": "object", "properties": {"a": {"enum": list(range(1500))}}}


def chat(*messages, **more):
    return {"messages": [HI, *messages], "max_tokens": 1} | more


def forced(tool):
    return chat(tools=[{"type": "function", "function": tool}], tool_choice="required")


BODIES = {
    "content": ("/v1/chat/completions", chat({"role": "user", "content": LONG})),
    "parts": ("/v1/chat/completions", chat({"role": "user", "content": [{"type": "text", "text": LONG}]})),
    "several": ("/v1/chat/completions", chat(*[{"role": "user", "content": LONG[:800]}] * 2)),
    "thought": ("/v1/chat/completions", chat({"role": "assistant", "content": "", "reasoning_content": LONG})),
    "name": ("/v1/chat/completions", chat({"role": "user", "content": "hi", "name": LONG})),
    "call": ("/v1/chat/completions", chat({"role": "assistant", "content": "", "tool_calls": [CALL]})),
    "tool": ("/v1/chat/completions", forced(TOOL)),
    "tool-names": ("/v1/chat/completions", forced({"name": "f", "parameters": NAMES})),
    "tool-numbers": ("/v1/chat/completions", forced({"name": "f", "parameters": NUMBERS})),
    "template": ("/v1/chat/completions", chat(chat_template_kwargs={"documents": [{"text": LONG}]})),
    "completion": ("/v1/completions", {"prompt": LONG, "max_tokens": 1}),
    "completions": ("/v1/completions", {"prompt": ["hi", LONG], "max_tokens": 1}),
    "input": ("/v1/responses", {"input": LONG}),
    "instructions": ("/v1/responses", {"input": "hi", "instructions": LONG}),
    "tokenize": ("/tokenize", {"prompt": LONG}),
    "tokenize-as-it-is": ("/tokenize", {"prompt": LONG, "add_special_tokens": False}),
    "tokenize-chat": ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}),
    "tokenize-tools": ("/tokenize", {"messages": [HI], "tools": [{"type": "function", "function": TOOL}]}),
    "tokenize-template": ("/tokenize", {"messages": [HI], "chat_template_kwargs": {"note": LONG}}),
}


@pytest.fixture(scope="module")
def engine():
    config = EngineConfig(max_batch_size=2, max_model_len=512)
    with Engine.from_pretrained("tiny-gemma4", None, config=config) as engine:
        yield engine


@pytest.fixture(scope="module")
def url(engine):
    with served(engine) as (url, running, _):
        running._bound.max_characters = 1000  # as if the longest token had two characters
        yield url


@pytest.mark.parametrize("name", BODIES)
def test_text_of_every_field_counts_before_a_template_or_a_tokenizer_reads_it(name, url, engine, monkeypatch):
    """Only contents of messages did: tools, arguments of templates and /tokenize held a reader for half a minute."""
    monkeypatch.setattr(engine, "chat_prompt", None)
    monkeypatch.setattr(engine, "encode", lambda text: [1])  # short ones are read
    monkeypatch.setattr("specdec.serving.async_engine.text_ids", None)
    route, body = BODIES[name]
    answer = httpx.post(url + route, json=body, timeout=120)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded"), error
    assert "characters, more than the 1000 that max_model_len=512" in error["message"]


def test_texts_that_are_submitted_as_prompts_count_too(engine):
    async def scene():
        async with AsyncEngine(engine) as served:
            served._bound.max_characters = 1000
            with pytest.raises(CapacityError, match="more than the 1000"):
                await served.generate(["hi", LONG], SamplingParams(max_new_tokens=1))
            assert served.open_requests == 0
            assert len(await served.generate("hi", SamplingParams(max_new_tokens=1))) == 1

    asyncio.run(scene())


def test_characters_are_those_of_texts_and_names_and_one_for_every_other_value():
    assert characters(["ab", {"cd": ["e", 7, None, True]}, ("f",)], 100) == 2 + 2 + 1 + 2 + 1
    assert characters(["x" * 60, "x" * 50, "x" * 7], 50) == 57  # no further than needed


def test_a_text_may_be_as_long_as_tokens_of_the_longest_text_would_be():
    """Neither roles nor what the server is told count."""

    class Tokenizer:
        def get_vocab(self):
            return {"a": 0, "abc": 1}

    def said(*lengths):
        return [{"role": "assistant", "content": "x" * length} for length in lengths]

    bound = TextBound(Tokenizer(), max_model_len=10)
    bound.require("x" * 30)
    bound.require(said(30), {"tools": None})
    for text, more in (("x" * 31, {}), (said(16, 16), {}), (said(30), {"tools": ["x"]})):
        with pytest.raises(CapacityError, match="characters, more than the 30 that max_model_len=10"):
            bound.require(text, more)
    TextBound(object(), max_model_len=10).require("x" * 1000)  # of a tokenizer whose vocabulary is not known
