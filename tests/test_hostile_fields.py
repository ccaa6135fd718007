"""Single fields of a request that mean harm: stop strings, grammars with no way on."""

import asyncio

import httpx
import pytest
from pydantic import ValidationError

from specdec import SamplingParams
from specdec.config import MAX_STOP_CHARS, MAX_STOP_TOKENS, MAX_STOPS
from specdec.errors import ConfigError, QueueFullError
from specdec.sampling.grammars.grammar import Place
from specdec.serving.async_engine import AsyncEngine
from specdec.serving.fair_pool import CLIENT
from specdec.serving.http.faults import as_api_error
from specdec.serving.openai.response_input import ResponsesRequest

from served_engine import served


@pytest.fixture(scope="module")
def engine(make_target, make_engine, byte_tokenizer):
    return make_engine(make_target("gemma4-e2b", vocab_size=300), tokenizer=byte_tokenizer)


def test_stop_strings_are_bounded_in_number_and_length(engine):
    """465,000 of them in one request slowed everybody: each is looked for behind every token."""
    for stop in ([f"s{i}" for i in range(465_000)], ["x" * (MAX_STOP_CHARS + 1)], ["a"] * (MAX_STOPS + 1)):
        with pytest.raises(ConfigError, match=f"at most {MAX_STOPS} of {MAX_STOP_CHARS} characters"):
            engine.generate([1, 2], SamplingParams(max_new_tokens=2, stop=stop))
    with pytest.raises(ConfigError, match=f"at most {MAX_STOP_TOKENS}"):
        engine.submit([1, 2], SamplingParams(max_new_tokens=2, stop_token_ids=[3] * (MAX_STOP_TOKENS + 1)))
    most = SamplingParams(max_new_tokens=2, stop=["x" * MAX_STOP_CHARS] * MAX_STOPS, stop_token_ids=[3])
    assert len(engine.generate([1, 2], most)) == 1


@pytest.mark.parametrize("field", ["stop", "tools", "include", "input"])
def test_two_million_zeros_in_a_field_of_a_response_are_one_error_and_no_error_each(field, engine):
    """Chats and completions had bounds for these; a body of /v1/responses made two million error objects."""
    body = {"input": "hi", field: [0] * 2_000_000}
    with pytest.raises(ValidationError) as error:
        ResponsesRequest.model_validate(body)
    count = error.value.error_count()
    assert count == (2 if field == "input" else 1)  # text or items: one of each kind
    with served(engine, max_body_bytes=32 << 20) as (url, _, _):
        answer = httpx.post(f"{url}/v1/responses", json=body, timeout=20)
    refusal = answer.json()["error"]
    assert answer.status_code == 400 and refusal["param"].startswith(field) and len(refusal["message"]) < 500


def test_a_grammar_with_no_way_on_is_a_mistake_of_the_request_and_no_503(engine, monkeypatch):
    after = Place.after
    monkeypatch.setattr(Place, "after", lambda place, token: None if token == ord("c") - 33 else after(place, token))

    async def run():
        async with AsyncEngine(engine) as served:
            with pytest.raises(ConfigError, match="regex cannot be followed any further: behind 2 tokens") as error:
                await served.generate([1, 2, 3], SamplingParams(regex="abc", max_new_tokens=9))
            with pytest.raises(ConfigError, match="regex cannot be followed any further"):
                async for _ in served.stream([1, 2, 3], SamplingParams(regex="abc", max_new_tokens=9)):
                    pass
            [fine] = await served.generate([1, 2, 3], SamplingParams(regex="abd", max_new_tokens=9))
        return as_api_error(error.value), fine

    refusal, fine = asyncio.run(run())
    assert refusal.status == 400 and refusal.body["error"]["param"] is None and fine.text == "abd"


def test_samples_of_one_client_count_each_so_none_takes_every_row_with_one_request(engine):
    """`n` and a list of prompts counted as one request: one key with --client-concurrency 8 held 64 places."""

    async def run():
        async with AsyncEngine(engine, max_waiting=20, per_client=3) as served:
            many = SamplingParams(n=2, max_new_tokens=40, temperature=1.0, ignore_eos=True)
            with pytest.raises(ConfigError, match="4 samples at once are more than the 3 that one client may have"):
                await served.generate([[1, 2], [3, 4]], many)
            CLIENT.set("a")
            async with await served.submit([[1, 2]], many):
                for refused in (
                    lambda: served.submit([[1, 2]], many),
                    lambda: served.submit([[1, 2]], many, wait=True),
                ):
                    with pytest.raises(QueueFullError, match="2 of your samples are open, and 2 more") as error:
                        await refused()
                with pytest.raises(QueueFullError, match="2 of your samples are open"):
                    served.require_places(2)
                CLIENT.set("b")
                assert len(await served.generate([[1, 2]], many)) == 2
            CLIENT.set("a")
            await served.close(None)
            assert not served._admission._of
        return as_api_error(error.value).status

    assert asyncio.run(run()) == 429
