"""Whatever fields a request has, its answer over HTTP, whole and streamed, is what the engine generates with the same
parameters. Requests are drawn at random; literal cases are in `test_server.py` and `test_server_scoring.py`."""

import json
import random

import httpx
import pytest

from specdec import Engine, SamplingParams

from marks import examples
from served_engine import served

pytestmark = pytest.mark.usefixtures("shallow_pair", "bundled_once")
TEXTS = ("Tom has 3 apples and", "Ann buys 12", "hi", "née 😀")
TOLERANCE = 1e-3
"""Forwards of other shapes round log-probabilities otherwise."""


@pytest.fixture(scope="module")
def engine():
    with Engine.from_pretrained("tiny-gemma4", "tiny-gemma4-mtp") as engine:
        yield engine


@pytest.fixture(scope="module")
def url(engine):
    with served(engine) as (url, _, _):
        yield f"{url}/v1"


SAMPLING = {
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.3,
    "top_n_sigma": 0.5,
    "repetition_penalty": 3.0,
    "presence_penalty": 2.0,
    "frequency_penalty": 2.0,
    "logit_bias": {18: 30.0, 303: 29.0},
    "stop": ["another text", "e"],
    "stop_token_ids": list(range(200, 500)),
    "allowed_token_ids": list(range(300, 400)),
    "min_tokens": 5,
    "ignore_eos": True,
    "n": 2,
}
"""Fields that requests and `SamplingParams` call the same, with values that change answers."""


def drawn_fields(rng, name, engine):
    """This field and some others, with so much noise that they matter."""
    others = {each: value for each, value in SAMPLING.items() if rng.random() < 0.15}
    hot = {"temperature": rng.choice([1.5, 2.0]), "seed": rng.randrange(99)}
    if name in ("min_tokens", "ignore_eos"):  # without them it would end at once
        others["logit_bias"] = dict.fromkeys(engine.end_tokens, 40.0)
    return others | {name: SAMPLING[name]} | hot


def drawn_request(rng, name, engine):
    """(path, body, prompts as token ids, echoed texts, parameters of the engine)"""
    fields, count, logprobs = drawn_fields(rng, name, engine), rng.randint(6, 9), rng.choice([None, 0, 2])
    body = fields | {"return_token_ids": True}
    if "logit_bias" in fields:
        body["logit_bias"] = {str(token): bias for token, bias in fields["logit_bias"].items()}
    show = {"show_drafts": True}
    body["speculation"] = rng.choice([True, False, show, show, show | {"num_steps": 2}])
    if rng.random() < 0.5:
        path, echoes, messages = "chat/completions", [""], [{"role": "user", "content": rng.choice(TEXTS)}]
        body |= {"messages": messages, "logprobs": logprobs is not None, "top_logprobs": logprobs}
        prompts = [engine.chat_prompt(messages)]
    else:
        path, texts = "completions", rng.sample(TEXTS, rng.randint(1, 3))
        prompts, echo = [engine.encode(text) for text in texts], rng.random() < 0.5
        body |= {"prompt": rng.choice([texts, prompts]), "logprobs": logprobs, "echo": echo}
        count = 0 if echo and rng.random() < 0.3 and "min_tokens" not in fields else count
        echoes = [engine.decode(prompt) if echo else "" for prompt in prompts]
    scored = logprobs if body.get("echo") else None
    scored = 0 if scored is None and count == 0 else scored
    params = SamplingParams(count, **fields, logprobs=logprobs, prompt_logprobs=scored)
    return path, body | {"max_tokens": count}, prompts, echoes, params


def scores_of(choice):
    """Texts of a choice's scored tokens, where each begins, and log-probabilities: of the token, and of the best one
    that is named."""
    found = choice.get("logprobs") or {"content": []}
    if "content" in found:
        best = [max((top["logprob"] for top in one["top_logprobs"]), default=None) for one in found["content"]]
        return [[one["token"] for one in found["content"]], [], [one["logprob"] for one in found["content"]], best]
    best = [top and max(top.values()) for top in found["top_logprobs"]]
    return [found["tokens"], found["text_offset"], found["token_logprobs"], best]


def read(choices):
    """(text, end, tokens and drafted text; scores) of one choice, or of its chunks in order."""
    text, reason, tokens, drafted, scores = "", None, [], "", [[], [], [], []]
    for choice in choices:
        said = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
        text += said.get("content") or ""
        reason = choice["finish_reason"] or reason
        tokens += choice.get("token_ids") or []
        drafted += "".join(piece for piece, _ in choice.get("drafted") or ())
        scores = [joined + more for joined, more in zip(scores, scores_of(choice), strict=True)]
    return (text, reason, tokens, drafted), scores


def near(values):
    return [value if value is None else pytest.approx(value, abs=TOLERANCE) for value in values]


@pytest.mark.parametrize("name", SAMPLING)
def test_an_answer_is_that_of_the_engine_whole_and_streamed(name, url, engine):
    rng = random.Random(name)
    for _ in range(examples(2, 12)):
        path, body, prompts, echoes, params = drawn_request(rng, name, engine)
        outs = engine.generate(prompts, params)
        answers = [httpx.post(f"{url}/{path}", json=body | more, timeout=60) for more in ({}, {"stream": True})]
        assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
        whole = answers[0].json()
        chunks = [json.loads(line[6:]) for line in answers[1].text.splitlines() if line.startswith("data: {")]
        streamed = [each for chunk in chunks for each in chunk["choices"]]
        assert whole["usage"]["prompt_tokens"] == sum(map(len, prompts))
        assert whole["usage"]["completion_tokens"] == sum(len(out.token_ids) for out in outs)
        for parts in ([whole, *whole["choices"]], [*chunks, *streamed]):
            ids = {each.get("index", 0): each["prompt_token_ids"] for each in parts if "prompt_token_ids" in each}
            assert [ids[i] for i in sorted(ids)] == [prompts[i // params.n] for i in range(len(ids))] and ids
        assert [choice["index"] for choice in whole["choices"]] == list(range(len(outs)))
        for index, (choice, out) in enumerate(zip(whole["choices"], outs, strict=True)):
            echo, drafted = echoes[index // params.n], out.text if isinstance(body["speculation"], dict) else ""
            scores = [*((out.prompt_logprobs or ()) if echo else ()), *(out.logprobs or ())]
            values = [one and one.logprob for one in scores]
            named = [one and [*one.top.values(), *[one.logprob] * (path == "completions")] for one in scores]
            for choices in ([choice], [each for each in streamed if each["index"] == index]):
                found, (tokens, offsets, said, best) = read(choices)
                assert found == (echo + out.text, out.finish_reason, out.token_ids, drafted), body
                if params.logprobs is not None:
                    assert [tokens, offsets] == scores_of(choice)[:2]
                    plain = [(token, at) for token, at in zip(tokens, offsets, strict=False) if token[:1].isalpha()]
                    assert all(found[0].startswith(token, at) for token, at in plain)
                    assert said == near(values) and best == near(max(each) if each else None for each in named)
