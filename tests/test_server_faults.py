"""Over HTTP, a fault in one request affects that request only."""

import json
from contextlib import ExitStack

import httpx
import pytest

from specdec import Engine, EngineConfig, SamplingParams
from specdec.sampling.grammars import grammar

from served_engine import served

ORIGIN = "https://a.example"
HEADERS = {"Authorization": "Bearer one", "Origin": ORIGIN}
LONG = {"prompt": "Tom has 3 apples and buys 5 more. How many", "temperature": 0, "max_tokens": 60, "ignore_eos": True}
GUIDED = {"prompt": "Ann has", "temperature": 0, "max_tokens": 60, "guided_regex": "[a-z]{60}"}


def texts(lines):
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


@pytest.mark.usefixtures("shallow_pair", "bundled_once")
def test_what_raises_in_the_engine_is_a_500_of_that_request_alone(monkeypatch):
    """Everybody's answer ended, or the server stopped."""
    whole, calls = grammar.GrammarState.after, [0]

    def broken(place, token):
        calls[0] += 1
        if calls[0] > 4:
            raise RuntimeError("the library broke")
        return whole(place, token)

    config = EngineConfig(max_batch_size=8, max_model_len=512)
    with (
        Engine.from_pretrained("tiny-gemma4", "tiny-gemma4-mtp", config=config) as engine,
        served(engine, cors_origins=[ORIGIN], api_keys={"a": "one"}) as (url, *_),
        ExitStack() as open_streams,
        httpx.Client(headers=HEADERS, timeout=300) as client,
    ):
        address = f"{url}/v1/completions"
        [truth] = engine.generate(LONG["prompt"], SamplingParams(60, temperature=0, ignore_eos=True))
        monkeypatch.setattr(grammar.GrammarState, "after", broken)
        others = []
        for _ in range(4):  # all have begun when the other fails
            stream = open_streams.enter_context(client.stream("POST", address, json=LONG | {"stream": True}))
            lines = stream.iter_lines()
            others.append(([next(lines)], lines))
        answer = client.post(address, json=GUIDED, headers={"X-Request-Id": "mine"})
        streamed = client.post(address, json=GUIDED | {"stream": True})
        for begun, lines in others:
            begun.extend(lines)
            assert texts(begun) == truth.text and begun[-2] == "data: [DONE]"
        monkeypatch.undo()
        assert client.get(url + "/health").status_code == 200
        assert client.post(address, json=LONG).json()["choices"][0]["text"] == truth.text
    assert answer.status_code == 500 and answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"] == "mine"
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    error = answer.json()["error"]
    assert error["type"] == "server_error" and "the grammar raised" in error["message"]
    last = [line for line in streamed.text.splitlines() if line][-1]  # its status was sent before
    assert streamed.status_code == 200 and json.loads(last.removeprefix("data: "))["error"] == error
