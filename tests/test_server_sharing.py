"""Effects of one client on another through shared state: cached prompts, and the order of service."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from specdec import Engine, EngineConfig, SamplingParams
from specdec.config import MAX_PRIORITY
from specdec.errors import ConfigError
from specdec.serving.application import create_app
from specdec.serving.async_engine import AsyncEngine
from specdec.serving.http.clients import salt_for
from specdec.serving.server_settings import ServeSettings

from marks import deep_cases

pytestmark = pytest.mark.usefixtures("shallow_pair", "bundled_once")
NEW = 2


@contextmanager
def asking(**settings: Any) -> Iterator[Any]:
    """ask(key, path, **body) -> response, of an application in this process, and its engine."""
    config = EngineConfig(max_batch_size=4, max_model_len=512, **settings.pop("config", {}))
    with Engine.from_pretrained("tiny-gemma4", config=config) as engine:
        settings = {"model_names": ["tiny"], "api_keys": {"a": "alice", "b": "bob"}} | settings
        with TestClient(create_app(AsyncEngine(engine), ServeSettings(**settings))) as client:

            def ask(key: str, path: str = "completions", **body: Any) -> httpx.Response:
                body = {"max_tokens": NEW, "temperature": 0} | body
                return client.post(f"/v1/{path}", json=body, headers={"Authorization": f"Bearer {key}"})

            ask.engine = engine  # type: ignore[attr-defined]
            yield ask


def cached(response: httpx.Response) -> int:
    assert response.status_code == 200, response.text
    found: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def test_keys_share_no_cached_page_and_the_same_key_does():
    with asking() as ask:
        prompt = list(range(20, 80))
        assert cached(ask("alice", prompt=prompt)) == 0
        assert cached(ask("bob", prompt=prompt)) == 0
        assert cached(ask("alice", prompt=prompt)) == cached(ask("bob", prompt=prompt)) == 48
        chat = {"path": "chat/completions", "messages": [{"role": "user", "content": "x " * 60}]}
        assert cached(ask("alice", **chat)) < 16 * 2
        assert cached(ask("bob", **chat)) < 16 * 2
        assert cached(ask("alice", **chat)) > 16 * 2


def test_a_salt_in_the_body_separates_requests_of_one_key():
    with asking() as ask:
        prompt = list(range(20, 80))
        ask("alice", prompt=prompt, cache_salt="one")
        assert cached(ask("alice", prompt=prompt)) == cached(ask("alice", prompt=prompt, cache_salt="two")) == 0
        assert cached(ask("bob", prompt=prompt, cache_salt="one")) == 0
        assert cached(ask("alice", prompt=prompt, cache_salt="one")) == 48


def test_keys_share_cached_prompts_where_the_server_was_told_to():
    with asking(share_prefix_cache=True) as ask:
        prompt = list(range(20, 80))
        ask("alice", prompt=prompt)
        assert cached(ask("bob", prompt=prompt)) == 48
        assert cached(ask("bob", prompt=prompt, cache_salt="mine")) == 0


@deep_cases("1-16", "32-32")
@pytest.mark.parametrize(("page_size", "block"), [(1, 16), (4, 16), (32, 32)])
def test_cached_tokens_are_told_in_blocks(page_size: int, block: int):
    with asking(config={"page_size": page_size}) as ask:
        prompt = list(range(20, 120))
        ask("alice", prompt=prompt)
        figures = {cached(ask("alice", prompt=[*prompt[:common], 9, 9])) for common in range(30, 70, 3)}
        assert figures == {n for n in (16, 32, 48, 64) if n % block == 0} | ({0} if block == 32 else set())


def test_the_figure_and_the_cache_can_be_switched_off():
    prompt = list(range(20, 80))
    with asking(show_cached_tokens=False) as ask:
        for _ in range(2):
            assert ask("alice", prompt=prompt).json()["usage"]["prompt_tokens_details"] is None
    with asking(config={"prefix_cache": False}) as ask:
        for _ in range(2):
            assert cached(ask("alice", prompt=prompt)) == 0


# who goes first


def test_a_priority_is_refused_unless_the_server_allows_it():
    with asking() as ask:
        assert ask("alice", prompt="a", priority=0).status_code == 200  # vLLM's clients always send it
        for priority in (-(2**31), -1, 1, 2**31):
            answer = ask("alice", prompt="a", priority=priority)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "priority"
            assert "--allow-priority" in answer.json()["error"]["message"]
    with asking(allow_priority=True) as ask:
        assert ask("alice", prompt="a", priority=-MAX_PRIORITY).status_code == 200
        for priority in (-(2**31), MAX_PRIORITY + 1):
            answer = ask("alice", prompt="a", priority=priority)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")
            assert f"from {-MAX_PRIORITY} to {MAX_PRIORITY}" in answer.json()["error"]["message"]


def test_a_priority_that_ageing_never_reaches_is_refused_in_python_too():
    with Engine.from_pretrained("tiny-gemma4", config=EngineConfig(max_batch_size=1, max_model_len=64)) as engine:
        for priority in (-(2**31), -MAX_PRIORITY - 1, MAX_PRIORITY + 1):
            with pytest.raises(ConfigError, match=f"^priority={priority}: an integer from -{MAX_PRIORITY} to"):
                engine.submit([5], SamplingParams(max_new_tokens=2), priority=priority)


def test_no_name_of_a_key_with_a_salt_makes_the_salt_of_another():
    settings = ServeSettings(["tiny"])
    asked = [("a", None), ("a", ""), ("a", "b"), ("a=b", None), ("a=", "b"), ("", "b"), ("", "a=b"), ("", "1:a2:=b")]
    assert len({salt_for(*each, settings) for each in asked}) == len(asked)
    assert salt_for("", None, settings) is None
