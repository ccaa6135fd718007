"""`specdec serve` as a process, asked by the official client: a test per feature."""

import httpx
import openai
import pytest
from server_process import ServerProcess, running_server

from specdec import Engine, SamplingParams

QUESTION = "Tom has 3 apples and buys 5 more. How many apples does he have?"
CHAT = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def server():
    with running_server() as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServerProcess):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def engine():
    with Engine.from_pretrained("tiny-gemma4", "tiny-gemma4-mtp") as engine:
        yield engine


def ask(client: openai.OpenAI, **options):
    return client.chat.completions.create(**({"model": "tiny-gemma4", "messages": CHAT, "temperature": 0} | options))


def test_a_chat_is_answered_as_the_python_api_does(client, engine):
    answer = ask(client, max_tokens=24)
    [out] = engine.generate(engine.chat_prompt(QUESTION), SamplingParams(max_new_tokens=24))
    [choice] = answer.choices
    assert (choice.message.content, choice.finish_reason) == (out.text, out.finish_reason)
    assert answer.usage.prompt_tokens == len(out.prompt_token_ids)
    assert answer.usage.completion_tokens == len(out.token_ids)


def test_a_stream_is_the_same_text_and_ends_with_usage(client, engine):
    chunks = list(ask(client, max_tokens=24, stream=True, stream_options={"include_usage": True}))
    [out] = engine.generate(engine.chat_prompt(QUESTION), SamplingParams(max_new_tokens=24))
    deltas = [chunk.choices[0] for chunk in chunks[:-1]]
    assert deltas[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for choice in deltas) == out.text
    assert [choice.finish_reason for choice in deltas] == [None] * (len(deltas) - 1) + [out.finish_reason]
    assert len(deltas) > 4, "as it comes, not all at once"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == len(out.token_ids)


def test_it_is_well_and_says_what_it_serves(server, client):
    assert httpx.get(server.url + "/health").json() == {"status": "ok"}
    assert [model.id for model in client.models.list()] == ["tiny-gemma4"]
    assert client.models.retrieve("tiny-gemma4").owned_by == "specdec"
