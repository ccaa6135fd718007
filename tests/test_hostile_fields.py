"""Hostile single fields of a request: texts beyond the context, stop strings, lists, and grammars with a dead end."""

import asyncio
import time

import httpx
import pytest
from pydantic import ValidationError

from specdec import SamplingParams
from specdec.config import MAX_STOP_CHARS, MAX_STOP_TOKENS, MAX_STOPS
from specdec.errors import CapacityError, ConfigError, QueueFullError
from specdec.sampling.grammars.grammar import GrammarState
from specdec.serving.admission import TextBound, characters
from specdec.serving.async_engine import AsyncEngine
from specdec.serving.engine_thread import EngineThread
from specdec.serving.fair_pool import CLIENT
from specdec.serving.http.faults import as_api_error
from specdec.serving.openai.protocol import Body

from served_engine import bundled_engine, served

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


engine = bundled_engine(None, max_batch_size=2, max_model_len=512)


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


@pytest.fixture(scope="module")
def byte_engine(make_target, make_engine, byte_tokenizer):
    return make_engine(make_target("gemma4-e2b", vocab_size=300), tokenizer=byte_tokenizer)


def test_stop_strings_are_bounded_in_number_and_length(byte_engine):
    """465,000 of them in one request slowed all requests: each is looked for after every token."""
    for stop in ([f"s{i}" for i in range(465_000)], ["x" * (MAX_STOP_CHARS + 1)], ["a"] * (MAX_STOPS + 1)):
        with pytest.raises(ConfigError, match=f"at most {MAX_STOPS} of {MAX_STOP_CHARS} characters"):
            byte_engine.generate([1, 2], SamplingParams(max_new_tokens=2, stop=stop))
    with pytest.raises(ConfigError, match=f"at most {MAX_STOP_TOKENS}"):
        byte_engine.submit([1, 2], SamplingParams(max_new_tokens=2, stop_token_ids=[3] * (MAX_STOP_TOKENS + 1)))
    most = SamplingParams(max_new_tokens=2, stop=["x" * MAX_STOP_CHARS] * MAX_STOPS, stop_token_ids=[3])
    assert len(byte_engine.generate([1, 2], most)) == 1


def bodies(kind: type[Body] = Body) -> list[type[Body]]:
    return [kind, *(below for each in kind.__subclasses__() for below in bodies(each))]


@pytest.mark.parametrize("kind", bodies(), ids=lambda kind: kind.__name__)
def test_a_long_list_of_mistakes_makes_few_errors(kind):
    """`allowed_token_ids` and `prediction.content` made half a million error objects of half a million mistakes."""
    for name, field in kind.model_fields.items():
        with pytest.raises(ValidationError) as error:
            kind.model_validate({field.alias or name: [None] * 3000})
        assert error.value.error_count() < 20, name


@pytest.mark.parametrize("is_early", [False, True])
def test_a_grammar_with_no_way_on_is_a_mistake_of_the_request_and_no_503(is_early, byte_engine, monkeypatch):
    """Early readers look between the step that ended it and the report of that step: they got a whole answer."""
    after, report = GrammarState.after, EngineThread._report_news

    def report_late(thread):
        thread._wake_readers({sample.owner: True for sample in thread.open})
        time.sleep(0.03)
        report(thread)

    if is_early:
        monkeypatch.setattr(EngineThread, "_report_news", report_late)
    monkeypatch.setattr(
        GrammarState, "after", lambda place, token: None if token == ord("c") - 33 else after(place, token)
    )

    async def run():
        async with AsyncEngine(byte_engine) as served:
            with pytest.raises(ConfigError, match="regex cannot be followed any further: after 2 tokens") as error:
                await served.generate([1, 2, 3], SamplingParams(regex="abc", max_new_tokens=9))
            with pytest.raises(ConfigError, match="regex cannot be followed any further"):
                async for _ in served.stream([1, 2, 3], SamplingParams(regex="abc", max_new_tokens=9)):
                    pass
            [fine] = await served.generate([1, 2, 3], SamplingParams(regex="abd", max_new_tokens=9))
        return as_api_error(error.value), fine

    refusal, fine = asyncio.run(run())
    assert refusal.status == 400 and refusal.body["error"]["param"] is None and fine.text == "abd"


def test_samples_of_one_client_count_each_so_none_takes_every_row_with_one_request(byte_engine):
    """`n` and a list of prompts counted as one request: one key with --client-concurrency 8 held 64 places."""

    async def run():
        async with AsyncEngine(byte_engine, max_waiting=20, per_client=3) as served:
            many = SamplingParams(n=2, max_new_tokens=40, temperature=1.0, ignore_eos=True)
            with pytest.raises(ConfigError, match="4 samples at once are more than the 3 that one client may have"):
                await served.generate([[1, 2], [3, 4]], many)
            CLIENT.set("a")
            async with await served.submit([[1, 2]], many):
                with pytest.raises(QueueFullError, match="2 of your samples are open, and 2 more") as error:
                    await served.submit([[1, 2]], many)
                with pytest.raises(QueueFullError, match="2 of your samples are open"):
                    served.require_places(2)
                CLIENT.set("b")
                assert len(await served.generate([[1, 2]], many)) == 2
            CLIENT.set("a")
            await served.close(None)
            assert not served._admission._places_of
        return as_api_error(error.value).status

    assert asyncio.run(run()) == 429
