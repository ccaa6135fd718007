"""Hostile single fields of a request: stop strings, and grammars that reach a dead end."""

import asyncio
import time

import pytest
from pydantic import ValidationError

from specdec import SamplingParams
from specdec.config import MAX_STOP_CHARS, MAX_STOP_TOKENS, MAX_STOPS
from specdec.errors import ConfigError, QueueFullError
from specdec.sampling.grammars.grammar import GrammarState
from specdec.serving.async_engine import AsyncEngine
from specdec.serving.engine_thread import EngineThread
from specdec.serving.fair_pool import CLIENT
from specdec.serving.http.faults import as_api_error
from specdec.serving.openai.protocol import Body
from specdec.serving.streams import tell_readers


@pytest.fixture(scope="module")
def engine(make_target, make_engine, byte_tokenizer):
    return make_engine(make_target("gemma4-e2b", vocab_size=300), tokenizer=byte_tokenizer)


def test_stop_strings_are_bounded_in_number_and_length(engine):
    """465,000 of them in one request slowed everybody: each is looked for after every token."""
    for stop in ([f"s{i}" for i in range(465_000)], ["x" * (MAX_STOP_CHARS + 1)], ["a"] * (MAX_STOPS + 1)):
        with pytest.raises(ConfigError, match=f"at most {MAX_STOPS} of {MAX_STOP_CHARS} characters"):
            engine.generate([1, 2], SamplingParams(max_new_tokens=2, stop=stop))
    with pytest.raises(ConfigError, match=f"at most {MAX_STOP_TOKENS}"):
        engine.submit([1, 2], SamplingParams(max_new_tokens=2, stop_token_ids=[3] * (MAX_STOP_TOKENS + 1)))
    most = SamplingParams(max_new_tokens=2, stop=["x" * MAX_STOP_CHARS] * MAX_STOPS, stop_token_ids=[3])
    assert len(engine.generate([1, 2], most)) == 1


def bodies(kind: type[Body] = Body) -> list[type[Body]]:
    return [kind, *(below for each in kind.__subclasses__() for below in bodies(each))]


@pytest.mark.parametrize("kind", bodies(), ids=lambda kind: kind.__name__)
def test_no_list_of_any_body_makes_an_error_of_each_member(kind):
    """`allowed_token_ids` and `prediction.content` made half a million error objects of half a million mistakes."""
    for name, field in kind.model_fields.items():
        with pytest.raises(ValidationError) as error:
            kind.model_validate({field.alias or name: [None] * 3000})
        assert error.value.error_count() < 20, name


@pytest.mark.parametrize("is_early", [False, True])
def test_a_grammar_with_no_way_on_is_a_mistake_of_the_request_and_no_503(is_early, engine, monkeypatch):
    """Early readers look between the step that ended it and the report of that step: they got a whole answer."""
    after, report = GrammarState.after, EngineThread._report_news

    def report_late(thread):
        tell_readers(thread.open)
        time.sleep(0.03)
        report(thread)

    if is_early:
        monkeypatch.setattr(EngineThread, "_report_news", report_late)
    monkeypatch.setattr(
        GrammarState, "after", lambda place, token: None if token == ord("c") - 33 else after(place, token)
    )

    async def run():
        async with AsyncEngine(engine) as served:
            with pytest.raises(ConfigError, match="regex cannot be followed any further: after 2 tokens") as error:
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
