"""GET /metrics: figures of requests, rounds and pools for Prometheus, with vLLM's names if the meaning is the same.

Counters are summed at each scrape over ended and running requests, so they never fall.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client import generate_latest as as_text
from prometheus_client.core import Metric

from specdec.runtime.engine_stats import EngineStats
from specdec.runtime.request_output import RequestStats
from specdec.serving.async_engine import AsyncEngine
from specdec.serving.engine_thread import OpenSample
from specdec.serving.http.clients import in_whole_blocks
from specdec.serving.http.faults import refusals

router = APIRouter()

# seconds
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40)
WHOLE = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
Samples = list[tuple[dict[str, str], float]]
"""Labels and value of each."""
REASONS = ("stop", "length", "abort", "error")


@dataclass(frozen=True)
class Snapshot:
    """State of the engine between two steps, and the sums over all requests, ended or not."""

    engine: EngineStats
    requests: RequestStats


class MetricsCollector:
    """Observes an engine's requests, and collects the metrics of `/metrics`."""

    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name
        self._ended = RequestStats()
        self._snapshot = Snapshot(EngineStats(), RequestStats())
        self.registry = CollectorRegistry()

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            made = Histogram(f"vllm:{name}_seconds", text, ("model_name",), registry=self.registry, buckets=buckets)
            return made.labels(model_name)

        rounds = "Time between two rounds in which a request got tokens, however many."
        later = "Mean time per token after a request's first."
        self._first = histogram("time_to_first_token", "Time from a request's arrival to its first token.", FIRST_TOKEN)
        self._between = histogram("inter_token_latency", rounds, BETWEEN)
        self._per_token = histogram("request_time_per_output_token", later, BETWEEN)
        self._whole = histogram("e2e_request_latency", "Time from a request's arrival to its end.", WHOLE)
        self._queue = histogram("request_queue_time", "Time from a request's arrival until it has a row.", FIRST_TOKEN)
        labels = ("model_name", "finished_reason")
        ended = Counter("vllm:request_success", "Requests that ended.", labels, registry=self.registry)
        self._reasons = {reason: ended.labels(model_name, reason) for reason in REASONS}
        self._first_at: dict[OpenSample, float] = {}  # time of the first token of samples that have not ended
        self._lock = threading.Lock()  # a sample is in `_first_at` or in `_ended`, so no sum falls
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        engine.observe(self)

    def gained(self, sample: OpenSample, now: float) -> None:
        """On the engine's thread."""
        if sample.num_reported:
            self._between.observe(now - sample.last_news)
            return
        self._first.observe(now - sample.owner.submitted)
        with self._lock:
            self._first_at[sample] = now

    def ended(self, sample: OpenSample, now: float) -> None:
        """On the engine's thread."""
        reason = "error" if sample.failure is not None else sample.handle.finish_reason
        self._reasons[reason].inc()
        with self._lock:
            first_at = self._first_at.pop(sample, now)
            if sample.handle.num_output == 0 and reason in ("abort", "error"):  # its prompt may not have been read
                return
            self._add_to_sum(self._ended, sample)
        stats = sample.handle.stats
        self._whole.observe(now - sample.owner.submitted)
        self._queue.observe(stats.queue_seconds)
        if stats.output_tokens > 1:
            self._per_token.observe((now - first_at) / (stats.output_tokens - 1))

    async def text(self) -> bytes:
        """The metrics page, with figures of at most one round from now."""
        self._snapshot = await self.snapshot()
        return as_text(self.registry)

    async def snapshot(self) -> Snapshot:
        stats = await self._engine.stats()
        stats.waiting = max(stats.waiting, len(self._engine.samples) - stats.running)  # some wait in the inbox
        with self._lock:
            total = self._ended.copy()
            for sample in self._first_at:
                self._add_to_sum(total, sample)
        return Snapshot(stats, total)

    def collect(self) -> Iterator[Metric]:
        """Metrics of the engine's state, collected at each scrape; other metrics are counted by event."""
        for kind, name, text, values in figures(self._snapshot):
            if values is None:
                continue
            made = Metric(name, text, kind)
            for labels, value in values if isinstance(values, list) else [({}, values)]:
                labels = {"model_name": self._model_name} | labels
                made.add_sample(f"{name}_total" if kind == "counter" else name, labels, value)
            yield made

    def _add_to_sum(self, total: RequestStats, sample: OpenSample) -> None:
        stats = sample.handle.stats.copy()
        stats.cached_tokens = in_whole_blocks(stats.cached_tokens, self._engine.config.page_size)
        total.add(stats)


def figures(snapshot: Snapshot) -> list[tuple[str, str, str, float | Samples | None]]:
    """(kind, name, meaning, value) of each metric; None: no value on this device."""
    engine, requests = snapshot.engine, snapshot.requests
    use, pool = engine.captures, engine.full_slots
    used = pool.held / pool.capacity if pool.capacity else 0.0
    accepted, drafted = requests.accepted_counts, requests.drafted_counts
    draft, length = "vllm:spec_decode_num", requests.acceptance_length

    def by_device(attribute: str) -> Samples:
        uses = enumerate(engine.devices)
        return [({"device": use.device, "rank": str(rank)}, getattr(use, attribute)) for rank, use in uses]

    def by_position(counts: Sequence[int]) -> Samples:
        return [({"position": str(position)}, count) for position, count in enumerate(counts)]

    def by_draft(counts: Sequence[int]) -> Samples | None:  # None if drafts are fixed
        shapes = zip(engine.drafts.shapes, counts, strict=True)
        return [({"draft": str(shape)}, count) for shape, count in shapes] or None

    return [
        ("gauge", "vllm:num_requests_running", "Requests that have a row.", engine.running),
        ("gauge", "vllm:num_requests_waiting", "Requests that wait for a row.", engine.waiting),
        ("gauge", "vllm:kv_cache_usage_perc", "Share of the KV slots that requests hold, 0 to 1.", used),
        ("counter", "vllm:prompt_tokens", "Tokens of prompts.", requests.prompt_tokens),
        ("counter", "vllm:generation_tokens", "Tokens of outputs.", requests.output_tokens),
        ("counter", "vllm:prefix_cache_queries", "Prompt tokens looked up in the cache.", requests.prompt_tokens),
        ("counter", "vllm:prefix_cache_hits", "Prompt tokens found in the cache.", requests.cached_tokens),
        ("counter", "vllm:num_preemptions", "Preemptions of requests.", requests.preemptions),
        ("counter", f"{draft}_drafts", "Rounds with drafts, counted per request.", requests.drafted_rounds),
        ("counter", f"{draft}_draft_tokens", "Depths of the drafts, summed.", requests.draft_tokens),
        ("counter", f"{draft}_accepted_tokens", "Drafts that were accepted.", sum(accepted)),
        ("gauge", "specdec:acceptance_length", "Tokens per round with drafts, bonus included.", length),
        ("gauge", "specdec:round_milliseconds", "Mean time of a round on the device.", engine.batch_milliseconds),
        ("gauge", "specdec:captures", "Rounds and prompt forwards that can be replayed now.", use.captured),
        ("gauge", "specdec:capture_bytes", "Device memory of captures, in bytes.", use.bytes),
        ("gauge", "specdec:capture_budget_bytes", "Upper bound on the bytes of captures.", use.budget_bytes),
        ("counter", "specdec:captures_made", "Captures made.", use.made),
        ("counter", "specdec:captures_evicted", "Captures dropped to make room for others.", use.evicted),
        ("counter", "specdec:captures_refused", "Captures that failed.", use.refused),
        ("counter", "specdec:uncaptured_rounds", "Rounds launched kernel by kernel.", use.uncaptured_rounds),
        ("counter", "specdec:uncaptured_prompts", "Prompt forwards launched kernel by kernel.", use.uncaptured_prompts),
        ("gauge", "specdec:device_kv_bytes", "Bytes of the K/V pools on a device.", by_device("kv_bytes")),
        ("gauge", "specdec:device_free_bytes", "Free bytes of a device.", by_device("free_bytes")),
        ("gauge", "specdec:device_total_bytes", "Total bytes of a device.", by_device("total_bytes")),
        ("counter", f"{draft}_accepted_tokens_per_pos", "Drafts accepted, by position.", by_position(accepted)),
        ("counter", "specdec:draft_tokens_per_pos", "Drafts made, by position.", by_position(drafted)),
        ("counter", "specdec:draft_rounds", "Rounds that had this draft.", by_draft(engine.drafts.rounds)),
        ("counter", "specdec:draft_rounds_tried", "Rounds that only tried this draft.", by_draft(engine.drafts.tried)),
    ]


@router.get("/metrics", response_class=PlainTextResponse, responses=refusals(500))
async def read_metrics(request: Request) -> Response:
    found: MetricsCollector = request.app.state.metrics
    return Response(await found.text(), media_type=CONTENT_TYPE_LATEST)
