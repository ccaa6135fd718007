"""An OpenTelemetry span for each request, if that package is installed.

Spans go to the provider that `opentelemetry-instrument` or the program has set, or to `--otlp-traces-endpoint`. A span
continues the caller's `traceparent` header.
"""

from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.errors import ConfigError

try:
    from opentelemetry import propagate
    from opentelemetry import trace as found
except ImportError:
    found = None  # type: ignore[assignment]
trace: Any = found  # None where the package is not installed


class Tracing:
    """Middleware that makes a span current while routes answer, and ends it with the last byte."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._tracer: Any = trace.get_tracer("specdec") if trace is not None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._tracer is None:
            await self.app(scope, receive, send)
            return
        attributes = {
            "http.request.method": scope["method"],
            "url.path": scope["path"],
            "specdec.request_id": scope.get("state", {}).get("request_id", ""),
        }
        caller = propagate.extract(dict(Headers(scope=scope)))
        name = f"{scope['method']} {scope['path']}"
        with self._tracer.start_as_current_span(
            name, context=caller, kind=trace.SpanKind.SERVER, attributes=attributes
        ) as span:

            async def noting(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        span.set_status(trace.StatusCode.ERROR)
                await send(message)

            try:
                await self.app(scope, receive, noting)
            finally:
                state = scope.get("state", {})
                span.set_attribute("specdec.client", state.get("client") or "")
                span.set_attribute("specdec.client_gone", bool(state.get("client_gone")))


def send_traces_to(endpoint: str) -> None:
    """Export spans to this endpoint by OTLP over HTTP. Raises ConfigError if the packages are missing."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"otlp_traces_endpoint={endpoint!r} needs {error.name}, which is not installed; "
            "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        ) from None
    provider = TracerProvider(resource=Resource.create({"service.name": "specdec"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    trace.set_tracer_provider(provider)
