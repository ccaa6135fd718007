"""Over HTTP, a fault or a delay in one request affects that request only."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest

from specdec import Engine, EngineConfig, SamplingParams
from specdec.sampling.grammars import grammar

from served_engine import served, until

pytestmark = pytest.mark.usefixtures("shallow_pair", "bundled_once")
ORIGIN = {"Origin": "https://a.example"}
GOES_ON = "Tom has 3 apples and buys 5 more. How many"
LONG = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
GUIDED = {"prompt": "Ann has", "temperature": 0, "max_tokens": 60, "guided_regex": "[a-z]{60}"}


class Tokenizer:
    """The tokenizer of an engine, that can be told to wait."""

    def __init__(self, whole):
        self.whole = whole
        self.waiting = 0  # prompts that hold "slow" and are being read
        self.go = threading.Event()

    def __getattr__(self, name):
        return getattr(self.whole, name)

    def __len__(self):
        return len(self.whole)

    def __call__(self, text, **options):
        if "slow" in text:
            self.waiting += 1
            assert self.go.wait(300)
            self.waiting -= 1
        return self.whole(text, **options)


@pytest.fixture(scope="module")
def engine():
    config = EngineConfig(max_batch_size=8, max_model_len=512)
    with Engine.from_pretrained("tiny-gemma4", "tiny-gemma4-mtp", config=config) as engine:
        engine.tokenizer = engine.request_builder._tokenizer = Tokenizer(engine.tokenizer)
        yield engine


@pytest.fixture(scope="module")
def url(engine):
    with served(engine, intake_seconds=300, cors_origins=["https://a.example"], api_keys={"a": "one", "b": "two"}) as (
        url,
        *_,
    ):
        yield url


def headers(key="one"):
    return {"Authorization": f"Bearer {key}"} | ORIGIN


def post(url, body, key="one", **more):
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers(key) | more, timeout=300)


def texts(lines):
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def test_what_raises_in_the_engine_is_a_500_of_that_request_alone(engine, url, monkeypatch):
    """Everybody's answer ended, or the server stopped."""
    [truth] = engine.generate(GOES_ON, SamplingParams(60, temperature=0, ignore_eos=True))
    whole, calls = grammar.GrammarState.after, [0]

    def broken(place, token):
        calls[0] += 1
        if calls[0] > 4:
            raise RuntimeError("the library broke")
        return whole(place, token)

    monkeypatch.setattr(grammar.GrammarState, "after", broken)
    with ExitStack() as open_streams, httpx.Client(headers=headers(), timeout=300) as client:
        others = []
        for _ in range(4):  # all have begun when the other fails
            sent = LONG | {"prompt": GOES_ON, "stream": True}
            stream = open_streams.enter_context(client.stream("POST", f"{url}/v1/completions", json=sent))
            lines = stream.iter_lines()
            others.append(([next(lines)], lines))
        answer = post(url, GUIDED, **{"X-Request-Id": "mine"})
        streamed = post(url, GUIDED | {"stream": True})
        for begun, lines in others:
            begun.extend(lines)
            assert texts(begun) == truth.text and begun[-2] == "data: [DONE]"
    assert answer.status_code == 500 and answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"] == "mine"
    assert answer.headers["access-control-allow-origin"] == "https://a.example"
    error = answer.json()["error"]
    assert error["type"] == "server_error" and "the grammar raised" in error["message"]
    last = [line for line in streamed.text.splitlines() if line][-1]  # its status was sent before
    assert streamed.status_code == 200 and json.loads(last.removeprefix("data: "))["error"] == error
    monkeypatch.undo()
    assert httpx.get(url + "/health", timeout=300).status_code == 200
    assert post(url, LONG | {"prompt": GOES_ON}).json()["choices"][0]["text"] == truth.text


def test_four_slow_prompts_of_one_key_leave_another_keys_short_prompt_its_way(engine, url):
    """They took all readers of prompts, for as long as they took, and after their clients had left."""
    tokenizer = engine.tokenizer
    tokenizer.go.clear()
    short = {"prompt": GOES_ON, "temperature": 0, "max_tokens": 2}
    with ThreadPoolExecutor(6) as pool:
        try:
            slow = [pool.submit(post, url, short | {"prompt": f"slow {i}"}) for i in range(6)]
            until(lambda: tokenizer.waiting == 3)  # of four readers, one is left for others
            for key in ("two", "two"):
                assert post(url, short, key).status_code == 200
            chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
            address = f"{url}/v1/chat/completions"
            assert httpx.post(address, json=chat, headers=headers("two"), timeout=300).status_code == 200
            assert tokenizer.waiting == 3 and not any(future.done() for future in slow)
        finally:
            tokenizer.go.set()
        assert [future.result(300).status_code for future in slow] == [200] * 6
