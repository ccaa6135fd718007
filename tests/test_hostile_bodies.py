"""Hostile bodies are refused before they are parsed into objects, off the event loop, with errors in OpenAI's shape."""

import asyncio
import codecs
import json
import logging
import random
import threading
import tracemalloc
import weakref

import httpx
import pytest

from specdec.errors import ConfigError
from specdec.serving.http import bodies, events
from specdec.serving.http.bodies import MAX_CONTAINERS, json_counts, parse, require_few_values
from specdec.serving.http.faults import ApiError
from specdec.serving.openai import chat_completions as chat
from specdec.serving.openai.protocol import ChatRequest, CompletionRequest
from specdec.serving.server_settings import ServeSettings
from specdec.text.detokenize import token_bytes

from served_engine import bundled_engine, served_url, until

pytestmark = pytest.mark.usefixtures("shallow_pair", "bundled_once")
LIMIT = 4 << 20
VALUES = LIMIT // bodies.BYTES_PER_VALUE
MESSAGES = '"messages": [{"role": "user", "content": "hi"}]'
FILLED = {
    "zeros as messages": lambda: '{"messages": [' + "0," * 2_000_000 + "0]}",
    "zeros as ids": lambda: '{"prompt": [' + "0," * 2_000_000 + "0]}",
    "half a million zeros as stops": lambda: "{" + MESSAGES + ', "stop": [' + "0," * 500_000 + "0]}",
    "empty messages": lambda: '{"messages": [' + "{}," * 1_300_000 + "{}]}",
    "unknown fields": lambda: "{" + MESSAGES + "".join(f', "x{i}": 0' for i in range(300_000)) + "}",
    "biases": lambda: (
        "{" + MESSAGES + ', "logit_bias": {"0": 0' + "".join(f',"{i}":"a"' for i in range(300_000)) + "}}"
    ),
    "tools": lambda: "{" + MESSAGES + ', "tools": [' + "{}," * 30_000 + "{}]}",
    "depth": lambda: '{"messages": ' + "[" * 2_000_000 + "]" * 2_000_000 + "}",
    "numbers": lambda: "{" + MESSAGES + ', "seed": ' + "9" * 4_000_000 + "}",
    "a key": lambda: "{" + MESSAGES + ', "' + "k" * 4_000_000 + '": 0}',
    "half": lambda: '{"messages": [{"role": "user", "content": "' + "a" * 4_000_000,
}


def refused(raw, model=ChatRequest, values=VALUES):
    with pytest.raises(ApiError) as error:
        parse(raw if isinstance(raw, bytes) else raw.encode(), model, values)
    message = error.value.body["error"]["message"]
    assert error.value.status == 400 and len(message) < 500 and "\n" not in message
    return message


@pytest.mark.parametrize("name", FILLED)
def test_a_large_body_is_refused_at_its_first_mistake_within_ten_times_its_size(name):
    """Two million zeros made an error object each: minutes on the event loop, and 2.5 GB."""
    raw = FILLED[name]().encode()
    tracemalloc.start()
    try:
        refused(raw, CompletionRequest if name == "zeros as ids" else ChatRequest)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10 * len(raw) + (4 << 20), f"{peak / len(raw):.1f} times the body"


@pytest.mark.parametrize("raw", [b'{"messages": [%s]}' % b",".join([b"0"] * 9), b'{"messages": [0], "n"', b"\xff"])
def test_a_refusal_that_waits_holds_no_values_of_the_body(raw, monkeypatch):
    """Refusals wait up to two seconds, and each held 35 MB: a server that got 465,000 stop strings grew by 220 MB."""
    held = []
    read = bodies.from_json
    monkeypatch.setattr(bodies, "from_json", lambda raw: held.append(Value(read(raw))) or held[-1])
    with pytest.raises(ApiError) as raised:
        parse(raw, ChatRequest, VALUES)
    there = [weakref.ref(value) for value in held]
    held.clear()
    assert raised.value.__context__ is None and raised.value.status == 400
    assert [ref() for ref in there] == [None] * len(there)


class Value(dict):
    """One that can be referred to weakly."""


def test_large_valid_bodies_are_read():
    text = "x" * 1_000_000 + '"\\[{,' * 20_000
    body = parse(json.dumps({"messages": [{"role": "user", "content": text}]}).encode(), ChatRequest, VALUES)
    assert body.messages[0].content == text
    ids = list(range(1000, 1000 + 200_000))
    assert parse(json.dumps({"prompt": ids}).encode(), CompletionRequest, VALUES).prompt == [ids]
    many = [{"role": "user", "content": [{"type": "text", "text": "a"}]}] * 3_000
    assert len(parse(json.dumps({"messages": many}).encode(), ChatRequest, VALUES).messages) == 3_000


def random_json(draw, depth=0):
    kind = draw.randrange(7 if depth < 6 else 4)
    if kind < 2:
        return "".join(draw.choice('ab"\\{}[],:é\n😀') for _ in range(draw.randrange(12)))
    if kind < 4:
        return draw.choice([None, True, 1, -2.5e30, "", "\\", '"', '\\"'])
    if kind < 6:
        return [random_json(draw, depth + 1) for _ in range(draw.randrange(5))]
    return {str(i) + ':"': random_json(draw, depth + 1) for i in range(draw.randrange(5))}


def counted(value):
    """(containers, members, commas) by walking the object."""
    if not isinstance(value, (list, dict)):
        return 0, 0, 0
    inner = [counted(each) for each in (value.values() if isinstance(value, dict) else value)]
    return (
        1 + sum(each[0] for each in inner),
        len(value) * isinstance(value, dict) + sum(each[1] for each in inner),
        max(0, len(inner) - 1) + sum(each[2] for each in inner),
    )


@pytest.mark.parametrize("window", [1, 2, 3, 7, 1 << 16])
def test_json_is_counted_as_what_it_holds_wherever_it_is_cut(window, monkeypatch):
    monkeypatch.setattr(bodies, "WINDOW", window)
    draw = random.Random(7)
    for _ in range(150):
        value = random_json(draw)
        for raw in (json.dumps(value).encode(), json.dumps(value, ensure_ascii=False, indent=1).encode()):
            *_, found = json_counts(raw)
            containers, members, commas = counted(value)
            assert found == (containers, members, commas + containers), raw


def test_errors_of_bounds_name_the_limit():
    assert "recursion limit" in refused("[" * 300 + "]" * 300)
    assert f"{MAX_CONTAINERS} are allowed" in refused("[" + "[]," * MAX_CONTAINERS + "[]]")
    assert "100 are allowed" in refused("[" + "1," * 200 + "1]", values=100)
    require_few_values(b'"' + b"[" * 1000 + b'"', 10)


# a server in this process


engine, url = bundled_engine(max_batch_size=4, max_model_len=512), served_url(max_body_bytes=LIMIT)


def post(url, body, path="/v1/chat/completions", **options):
    content = body if isinstance(body, (bytes, str)) else json.dumps(body)
    headers = {"Content-Type": "application/json"} | options.pop("headers", {})
    return httpx.post(url + path, content=content, headers=headers, timeout=120, **options)


ASKED = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "temperature": 0}


def test_large_bodies_are_parsed_off_the_loop_and_the_loop_goes_on(url, monkeypatch):
    seen = []

    def noted(*arguments):
        seen.append(threading.current_thread().name)
        return parse(*arguments)

    monkeypatch.setattr(bodies, "parse", noted)
    assert post(url, ASKED | {"user": "x" * 200_000}).status_code == 200
    assert len(seen) == 1 and seen[0].startswith("specdec-bodies")
    for name in ("zeros as messages", "half a million zeros as stops", "unknown fields"):
        answer = post(url, FILLED[name]())
        assert answer.status_code == 400 and answer.json()["error"]["message"]
    assert all(name.startswith("specdec-bodies") for name in seen)


def test_whole_answers_are_built_off_the_loop(url, monkeypatch):
    names = []
    whole = chat.ChatTextAnswer._whole_answer

    def noted(*arguments):
        names.append(threading.current_thread())
        return whole(*arguments)

    monkeypatch.setattr(chat.ChatTextAnswer, "_whole_answer", noted)
    answer = post(url, ASKED | {"logprobs": True, "top_logprobs": 20, "max_tokens": 8})
    assert (
        answer.status_code == 200 and len(answer.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 20
    )
    [thread] = names
    assert "asyncio" in thread.name, "a thread of the loop's executor, not the loop's own"


def test_many_tokens_in_one_delta_are_read_off_the_loop():
    async def run(tokens):
        return await events.off_loop(tokens, threading.current_thread)

    here = threading.current_thread()
    assert asyncio.run(run(3)) is here
    assert asyncio.run(run(events.MANY_TOKENS)) is not here


def with_call(arguments, name="f"):
    """A chat in which an assistant has called a tool."""
    call = {"id": "a", "function": {"name": name, "arguments": arguments}}
    return {"messages": [*ASKED["messages"], {"role": "assistant", "tool_calls": [call]}]}


REFUSED = {
    "messages for the template": ({"chat_template_kwargs": {"messages": []}}, "chat template"),
    "self for the template": ({"chat_template_kwargs": {"self": 1}}, "chat template"),
    "tokenizer for the template": ({"chat_template_kwargs": {"tokenizer": 1}}, None),
    "chat for the template": ({"chat_template_kwargs": {"chat": 1}}, None),
    "conversation for the template": ({"chat_template_kwargs": {"conversation": 1}}, "chat template"),
    "a key of 5000 digits": ({"logit_bias": {"1" * 5000: 1}}, "its keys are token ids"),
    "half a pair as arguments": (with_call('{"a": "\\ud800"}'), None),
    "half a pair as a name": (with_call("{}", name="\ud800"), None),
    "deep arguments": (with_call("[" * 100_000 + "]" * 100_000), "is not JSON"),
    "arguments 900 deep": (with_call("[" * 900 + "]" * 900), None),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bodies_that_once_gave_a_500_are_the_clients_mistake(name, url):
    change, said = REFUSED[name]
    answer = post(url, ASKED | change)
    if said is None:
        assert answer.status_code in (200, 400), answer.text
    else:
        assert answer.status_code == 400 and said in answer.json()["error"]["message"], answer.text


def test_an_answer_with_half_a_surrogate_pair_is_sent_escaped():
    for sent in (events.json_bytes({"a": "\ud800é"}), events.event({"a": "\ud800é"}).removeprefix(b"data: ")):
        assert json.loads(sent) == {"a": "\ud800é"}
    assert "é".encode() in events.json_bytes({"a": "é"})


def lines_with(caplog, word):
    """Lines of the log, once there is one: it is written when the answer has been sent."""

    def found():
        return [message for record in list(caplog.records) if word in (message := record.getMessage())]

    until(found)
    return found()


def test_a_path_cannot_write_lines_or_escapes_into_the_log(url, caplog):
    caplog.set_level(logging.INFO, logger="specdec.serving")
    httpx.get(url + "/a%0aERROR%20forged%1b[31m%0d%e2%80%a8%c2%9b")
    [line] = lines_with(caplog, "forged")
    assert line.isprintable() and "\\n" in line and "\\x1b" in line


def test_a_fault_of_the_server_is_a_500_with_its_id_in_the_log(url, caplog, monkeypatch):
    """It was logged as 499, and had neither the id nor the headers for other origins."""
    caplog.set_level(logging.INFO, logger="specdec.serving")

    def broken(*_):
        raise RuntimeError("on purpose")

    monkeypatch.setattr(chat.ChatTextAnswer, "_make_params", broken)
    answer = post(url, ASKED, headers={"X-Request-Id": "mine-500"})
    assert answer.status_code == 500 and answer.headers["x-request-id"] == "mine-500"
    assert answer.json()["error"]["type"] == "server_error" and "on purpose" not in answer.text
    [line] = lines_with(caplog, "mine-500")
    assert " 500 in " in line


def test_a_body_of_another_type_is_refused_with_415(url):
    for kind in ("text/plain", "application/x-www-form-urlencoded", "text/x+json", ""):
        answer = post(url, ASKED, headers={"Content-Type": kind})
        assert answer.status_code == 415 and "application/json" in answer.json()["error"]["message"]
    for kind in ("Application/JSON ; charset=utf-8", "application/vnd.x+json"):
        assert post(url, ASKED, headers={"Content-Type": kind}).status_code == 200


def test_a_byte_order_mark_before_the_body_is_skipped():
    raw = b'{"prompt": "a"}'
    assert parse(codecs.BOM_UTF8 + raw, CompletionRequest, VALUES) == parse(raw, CompletionRequest, VALUES)


def test_keys_that_no_header_can_hold_are_refused():
    """`--api-key "abc "` never matched."""
    for key in ("abc ", " abc", " "):
        with pytest.raises(ConfigError, match="begins or ends with a space"):
            ServeSettings(model_names=["m"], api_keys={"a": key})


def test_bytes_of_tokens_join_to_the_text(byte_tokenizer):
    """Those of parts of a character were the bytes of U+FFFD."""
    text = "grün, 漢字 und 😀\n"
    ids = byte_tokenizer.encode(text)
    assert b"".join(token_bytes(byte_tokenizer, token) for token in ids) == text.encode()
    assert token_bytes(byte_tokenizer, 256) == b"<eos>"
