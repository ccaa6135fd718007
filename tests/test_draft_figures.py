"""Counts of drafts in answers, under the names that vLLM's and llama.cpp's tools read, against the engine's own."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from specdec import Engine, EngineConfig
from specdec.errors import ConfigError
from specdec.runtime.draft_reports import llama_timings, vllm_figures
from specdec.serving.application import create_app
from specdec.serving.async_engine import AsyncEngine
from specdec.serving.server_settings import ServeSettings

from inside import RequestStats, record_round
from marks import usual_cases

QUESTION = "Tom has 3 apples and buys 5 more. How many apples does he have?"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 12}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("chat/completions", CHAT),
    "chat of two": ("chat/completions", CHAT | {"n": 2, "temperature": 1, "seed": 3}),
    "completion": ("completions", {"prompt": [QUESTION, "Ann has"], "temperature": 0, "max_tokens": 12}),
    "response": ("responses", {"input": QUESTION, "temperature": 0, "max_output_tokens": 12}),
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    config = EngineConfig(max_batch_size=4, max_model_len=256)
    with Engine.from_pretrained("tiny-gemma4", "tiny-gemma4-mtp", config=config) as engine:
        yield engine


@pytest.fixture(scope="module")
def client(engine: Engine) -> Iterator[TestClient]:
    with TestClient(create_app(AsyncEngine(engine), ServeSettings(model_names=["m"]))) as client:
        yield client


pytestmark = pytest.mark.usefixtures("shallow_pair", "bundled_once")


def events(text: str) -> list[dict[str, Any]]:
    found = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in found if line != "[DONE]"]


def answered(client: TestClient, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The answer, or the last event of a stream; and the events before it."""
    said = client.post(f"/v1/{path}", json=body)
    assert said.status_code == 200, said.text
    if not body.get("stream"):
        return said.json(), []
    *before, last = events(said.text)
    return last.get("response", last), before


def gained(engine: Engine, before: RequestStats) -> RequestStats:
    now = engine.stats()
    now.add(before, sign=-1)
    return now


@usual_cases("chat-stream1", "chat of two-stream2", "completion-stream0", "response-stream1")
@pytest.mark.parametrize("stream", [{}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}])
@pytest.mark.parametrize("name", ASKED)
def test_answers_and_last_chunks_count_drafts_as_the_engine_does(name, stream, client, engine):
    path, body = ASKED[name]
    if path == "responses":
        stream = {key: value for key, value in stream.items() if key == "stream"}
    begun = engine.stats()
    last, before = answered(client, path, body | stream | {"timings_per_token": True})
    stats = gained(engine, begun)
    assert stats.drafted_rounds and sum(stats.accepted_counts)
    assert last["metrics"] == {"speculative_decoding": vllm_figures(stats, engine.spec.num_steps)}
    assert not any("metrics" in event or "timings" in event for event in before)
    found, expected = last["timings"], llama_timings(stats)
    assert {key for key in found if key.endswith("_n")} < found.keys() == expected.keys()
    assert all(found[key] == expected[key] for key in ("prompt_n", "predicted_n", "draft_n", "draft_n_accepted"))


def test_a_request_that_does_not_speculate_has_no_figures_of_drafts(client):
    last, _ = answered(client, "chat/completions", CHAT | {"speculation": False})
    assert "metrics" not in last and "timings" not in last
    shallow, _ = answered(client, "chat/completions", CHAT | {"speculation": {"num_steps": 2}})
    assert shallow["metrics"]["speculative_decoding"]["num_spec_tokens"] == 2


@pytest.mark.parametrize(
    ("switch", "fields"), [("none", set()), ("vllm", {"metrics"}), ("all", {"metrics", "timings"})]
)
def test_the_server_says_which_figures_answers_have(switch, fields, engine):
    settings = ServeSettings(model_names=["m"], draft_figures=switch)
    with TestClient(create_app(AsyncEngine(engine), settings)) as client:
        for path, body in [*ASKED.values()][: None if switch == "all" else 1]:
            last, _ = answered(client, path, body)
            assert {"metrics", "timings"} & last.keys() == fields
    with pytest.raises(ConfigError, match="draft_figures"):
        ServeSettings(model_names=["m"], draft_figures="sglang")


def test_a_histogram_has_a_place_for_every_length():
    stats = RequestStats(prompt_tokens=9, cached_tokens=4, output_tokens=8, first_token_seconds=0.5, decode_seconds=2)
    for accepted, depth in ((3, 4), (0, 4), (0, 2), (2, 2), (0, 0)):
        record_round(stats, accepted + 1, accepted, depth)
    assert vllm_figures(stats, 4) == {
        "mean_acceptance_length": 1 + 5 / 4,
        "draft_acceptance_rate": 5 / 12,
        "acceptance_histogram": [2, 0, 1, 1, 0],
        "num_spec_steps": 4,
        "num_accepted_draft_tokens": 5,
        "num_draft_tokens": 12,
        "num_spec_tokens": 4,
    }
    assert vllm_figures(RequestStats(), 3)["acceptance_histogram"] == [0] * 4
    timings = llama_timings(stats)
    assert (timings["cache_n"], timings["prompt_n"], timings["prompt_ms"]) == (4, 5, 500)
    assert (timings["predicted_per_second"], timings["predicted_per_token_ms"]) == (4, 250)
