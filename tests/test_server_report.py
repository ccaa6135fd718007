"""A server's log and traces."""

import httpx
import pytest
from server_process import running_server
from starlette.testclient import TestClient

from specdec.runtime.engine_stats import EngineStats, PoolStats
from specdec.runtime.request_output import RequestStats
from specdec.serving.http import middleware
from specdec.serving.logs import traffic_line
from specdec.serving.metrics import Snapshot

from served_engine import until


def test_throughput_and_acceptance_are_those_between_two_looks_and_nothing_is_said_without_traffic():
    before = Snapshot(EngineStats(), RequestStats(prompt_tokens=100, output_tokens=50, accepted_counts=[5]))
    after = RequestStats(prompt_tokens=300, output_tokens=150, cached_tokens=50)
    after.drafted_rounds, after.drafted_round_tokens, after.draft_tokens = 40, 100, 160
    after.accepted_counts = [35, 30]
    pool = PoolStats(held=50, peak=50, cached=0, capacity=200)
    line = traffic_line(before, Snapshot(EngineStats(running=3, waiting=2, full_slots=pool), after), 10.0)
    assert line == (
        "prompts 20.0 tokens/s, outputs 10.0 tokens/s, 3 requests running, 2 waiting, KV slots 25.0 % in use, "
        "25.0 % of prompts cached, acceptance length 2.50, 37.5 % of drafts"
    )
    assert traffic_line(before, before, 10.0) is None


@pytest.mark.usefixtures("shallow_pair")
def test_the_start_says_what_is_served_and_traffic_is_reported():
    with running_server("--stats-seconds", "0.2", "--served-model-name", "a", "--served-model-name", "b") as server:
        fields = {"prompt": "a", "max_tokens": 8}

        def told() -> bool:
            assert httpx.post(server.url + "/v1/completions", json=fields, timeout=60).status_code == 200
            return "acceptance length" in server.log()

        until(told)
        log = server.log()
    assert "serving a, b: weights in float32 (" in log and "context " in log
    assert "8 requests at a time" in log and "drafter " in log
    assert "KV slots" in log and "GB)" in log and "tool parser" in log
    assert "tokens/s" in log


@pytest.mark.skipif(middleware.trace is None, reason="needs opentelemetry-api")
def test_a_request_is_one_span_with_its_id_and_status(monkeypatch):
    spans = []

    class Span:
        def __init__(self, name, attributes):
            self.name, self.attributes = name, dict(attributes)

        def set_attribute(self, name, value):
            self.attributes[name] = value

        def __enter__(self):
            return self

        def __exit__(self, *_):
            spans.append(self)

    class Tracer:
        def start_as_current_span(self, name, *, context, kind, attributes):
            return Span(name, attributes)

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    traced = middleware.Tracing(app)
    traced._tracer = Tracer()
    assert TestClient(traced).get("/v1/models").status_code == 201
    [span] = spans
    assert span.name == "GET /v1/models" and span.attributes["http.response.status_code"] == 201
    monkeypatch.setattr(middleware, "trace", None)  # as where the package is not installed
    assert TestClient(middleware.Tracing(app)).get("/v1/models").status_code == 201
    assert len(spans) == 1
