"""What a server says of itself: /metrics, between two steps of an engine and with a tape in the place of graphs, its
log and its traces."""

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from server_process import running_server
from starlette.testclient import TestClient
from test_captures import GREEDY, WeighedTape

import specdec.engine
from specdec import Engine, EngineConfig, SamplingParams, SpecConfig
from specdec.gpu.captures import CaptureStats
from specdec.runtime.engine_stats import EngineStats, PoolStats
from specdec.runtime.request import Request
from specdec.serving.async_engine import AsyncEngine
from specdec.serving.http import middleware
from specdec.serving.logs import traffic_line
from specdec.serving.metrics import MetricsCollector, Snapshot, figures

from engine_internals import RequestStats, record_round
from marks import deep_cases, examples
from served_engine import served, until
from tiny_families import build_target


def metrics_after(engine: Engine, *calls: list[list[int]], params: Any = GREEDY) -> tuple[list[Sample], EngineStats]:
    """The samples that /metrics has after the engine was called with these prompts, and its own figures then."""

    async def ask() -> tuple[bytes, EngineStats]:
        async with AsyncEngine(engine) as running:
            metrics = MetricsCollector(running, "m")
            for prompts in calls:
                await running.generate(prompts, params)
            return await metrics.text(), await running.stats()

    text, stats = asyncio.run(ask())
    return [each for family in text_string_to_metric_families(text.decode()) for each in family.samples], stats


def test_only_a_stream_that_shows_figures_sums_them_for_each_chunk(
    make_target, make_engine, pair_tokenizer, monkeypatch
):
    engine = make_engine(make_target("llama"), None, tokenizer=pair_tokenizer)
    read, own = [], Request.stats.fget
    monkeypatch.setattr(Request, "stats", property(lambda request: read.append(1) or own(request)))
    reads = {}
    with served(engine) as (url, _, _):
        for continuous in (False, True):
            # a busy machine sends several tokens in a chunk, so there are many of them
            asked = {"prompt": "a1b2", "max_tokens": 100, "ignore_eos": True, "stream": True}
            asked["stream_options"] = {"include_usage": continuous, "continuous_usage_stats": continuous}
            before = len(read)
            text = httpx.post(f"{url}/v1/completions", json=asked, timeout=60).text
            reads[continuous] = (len(read) - before) / text.count("data: {")
    assert reads[False] < 0.5 < 1 <= reads[True]


def test_the_gauge_and_the_log_have_one_acceptance_length_which_leaves_out_rounds_without_drafts():
    """They differed where some requests were sent with `speculation: false`: 1.21 in the one, 1.57 in the other."""
    stats = RequestStats(prompt_tokens=9, output_tokens=23)
    record_round(stats, 5, 4, 4)
    record_round(stats, 2, 1, 4)
    for _ in range(16):
        record_round(stats, 1, 0, 0)
    snapshot = Snapshot(EngineStats(), stats)
    [gauge] = [value for _, name, _, value in figures(snapshot) if name == "specdec:acceptance_length"]
    assert gauge == 3.5
    assert "acceptance length 3.50, 62.5 % of drafts" in traffic_line(None, snapshot, 10.0)


def captured(samples: list[Sample]) -> CaptureStats:
    """The figures of captures, in the form in which the engine has them."""
    names = {
        "captured": "captures",
        "made": "captures_made_total",
        "evicted": "captures_evicted_total",
        "refused": "captures_refused_total",
        "bytes": "capture_bytes",
        "budget_bytes": "capture_budget_bytes",
        "uncaptured_rounds": "uncaptured_rounds_total",
        "uncaptured_prompts": "uncaptured_prompts_total",
    }
    values = {each.name: each.value for each in samples}
    return CaptureStats(**{field: values.get(f"specdec:{name}") for field, name in names.items()})  # type: ignore[arg-type]


@deep_cases("230-evicted")
@pytest.mark.parametrize(("budget", "grows"), [(230, "evicted"), (50, "refused")])
def test_metrics_say_what_is_captured_and_what_ran_without(
    make_target: Any, make_engine: Any, random_prompt: Any, monkeypatch: pytest.MonkeyPatch, budget: int, grows: str
) -> None:
    """A budget of a few captures, and one in which none fits."""
    monkeypatch.setattr(specdec.engine, "capture_for", lambda device, setting: WeighedTape())
    sizes = {"max_batch_size": examples(2, 4), "max_model_len": 64, "device": "cpu", "max_capture_bytes": budget}
    engine = make_engine(make_target("gemma4-e2b"), None, prefix_cache=False, **sizes)
    store = type(engine.steps.store)
    monkeypatch.setattr(store, "shared_bytes", property(lambda self: 0, lambda self, _: None), raising=False)
    samples, stats = metrics_after(engine, *[[random_prompt(n) for n in (5, 9, 3)]] * 2)
    use = stats.captures
    assert captured(samples) == use
    assert use.budget_bytes == budget and getattr(use, grows) > 0


def test_no_budget_is_shown_where_nothing_is_captured(make_target: Any, make_engine: Any, random_prompt: Any) -> None:
    engine = make_engine(make_target("gemma4-e2b"), None, max_batch_size=4, max_model_len=64, device="cpu")
    samples, stats = metrics_after(engine, [random_prompt(5)])
    found = captured(samples)
    assert found == stats.captures and found.budget_bytes is None
    assert found.captured == found.made == 0


def test_every_device_has_its_memory():
    """Ranks on a CPU are one device each: the K/V of both are as many bytes."""
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
    config = EngineConfig(fused=True, tensor_parallel=2, max_model_len=64, device="cpu")
    engine = Engine.from_pretrained(build_target("llama", **sizes), config=config)
    devices = engine.stats().devices
    assert [use.device for use in devices] == ["cpu", "cpu"]
    assert devices[0].kv_bytes == devices[1].kv_bytes > 0
    assert sum(use.kv_bytes for use in devices) == sum(engine.cache.bytes_by_group().values())
    assert 0 < devices[0].free_bytes < devices[0].total_bytes
    kept = [each for each in metrics_after(engine)[0] if each.name == "specdec:device_kv_bytes"]
    assert [(each.labels["rank"], each.value) for each in kept] == [(rank, devices[0].kv_bytes) for rank in "01"]


def test_bytes_of_a_device_are_counted_with_kv_of_8_bits(make_target, make_engine):
    """Their pools once made `stats`, and so /metrics, raise."""
    engine = make_engine(make_target("llama"), None, max_batch_size=2, kv_dtype="fp8")
    [use] = engine.stats().devices
    assert use.kv_bytes == engine.kv_bytes > 0


def test_metrics_count_rounds_by_the_draft_that_was_chosen(
    make_target: Any, make_engine: Any, random_prompt: Any
) -> None:
    """One sample a draft there is, none included, and of a plain engine no such figure."""
    sizes = {"max_batch_size": 4, "max_model_len": 64, "device": "cpu"}
    for drafter, num_drafts in (("ngram", 2), (None, 0)):  # none and the whole one: nothing is captured
        engine = make_engine(make_target("gemma4-e2b"), drafter, spec=SpecConfig(num_steps=4, adaptive=True), **sizes)
        samples, stats = metrics_after(engine, [random_prompt(n) for n in (5, 9)])
        for kind, counts in (("draft_rounds", stats.drafts.rounds), ("draft_rounds_tried", stats.drafts.tried)):
            found = {s.labels["draft"]: s.value for s in samples if s.name == f"specdec:{kind}_total"}
            assert list(found.values()) == list(counts)
            assert len(found) == len(stats.drafts.shapes) == num_drafts
        assert (sum(stats.drafts.rounds) > 0) == (drafter is not None)


class Sampled:
    """A sample of a request that was submitted at 1.0, as the engine's thread has it."""

    num_reported, last_news, failure, owner = 0, 0.0, None, SimpleNamespace(submitted=1.0)

    def __init__(self, output_tokens: int) -> None:
        stats = RequestStats(output_tokens=output_tokens, queue_seconds=0.25)
        reason = "length" if output_tokens else "abort"
        self.handle = SimpleNamespace(finish_reason=reason, num_output=output_tokens, stats=stats)


def test_times_of_requests_are_counted_from_their_arrival_their_first_token_and_the_round_before() -> None:
    """One aborted before its first token has a reason and no times; one of a single token has no time per token."""
    engine = MagicMock(samples=[1, 2, 3], config=EngineConfig(), stats=AsyncMock(return_value=EngineStats(running=1)))
    metrics, (many, one, none) = MetricsCollector(engine, "m"), map(Sampled, (5, 1, 0))
    metrics.gained(many, 1.5)
    many.num_reported, many.last_news = 1, 1.5
    metrics.gained(many, 1.75)
    metrics.gained(one, 1.5)
    snapshots = [asyncio.run(metrics.snapshot()) for _ in range(2)]
    assert [(each.requests.output_tokens, each.engine.waiting) for each in snapshots] == [(6, 2)] * 2
    for sample in (many, one, none):
        metrics.ended(sample, 3.5)
    assert asyncio.run(metrics.snapshot()).requests.output_tokens == 6
    expected = {
        "time_to_first_token": [1.0, 2],
        "inter_token_latency": [0.25, 1],
        "request_time_per_output_token": [0.5, 1],  # 2 s for the four tokens after the first
        "e2e_request_latency": [5.0, 2],
        "request_queue_time": [0.5, 2],
    }
    for name, values in expected.items():
        of_name = [f"vllm:{name}_seconds_{kind}" for kind in ("sum", "count")]
        assert [metrics.registry.get_sample_value(each, {"model_name": "m"}) for each in of_name] == values, name


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
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    traced = middleware.RequestLog(app)
    traced._tracer = tracer = MagicMock()
    assert TestClient(traced).get("/v1/models").status_code == 201
    begin = tracer.start_as_current_span
    assert begin.call_args.args == ("GET /v1/models",)
    begin.return_value.__enter__.return_value.set_attribute.assert_any_call("http.response.status_code", 201)
    monkeypatch.setattr(middleware, "trace", None)  # as where the package is not installed
    assert TestClient(middleware.RequestLog(app)).get("/v1/models").status_code == 201
    begin.assert_called_once()


def test_a_prompt_that_is_only_scored_is_counted(make_target, make_engine, random_prompt):
    """Requests for no token counted as ended ones, but had no prompt tokens, no latency and no line in the log."""
    engine = make_engine(make_target("llama"), None)
    scoring = SamplingParams(max_new_tokens=0, prompt_logprobs=0)
    found = {each.name: each.value for each in metrics_after(engine, [random_prompt(5)], params=scoring)[0]}
    assert found["vllm:prompt_tokens_total"] == 5 and found["vllm:generation_tokens_total"] == 0
    assert found["vllm:e2e_request_latency_seconds_count"] == found["vllm:request_queue_time_seconds_count"] == 1
    assert found["vllm:time_to_first_token_seconds_count"] == 0
