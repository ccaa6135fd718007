"""Middleware around all routes: request ids, the access log and traces. API keys: clients.py.

It is plain ASGI: nothing is buffered, and a client's disconnect is noticed at once. If OpenTelemetry is installed,
each request has a span, which continues the caller's `traceparent` header. Spans go to the provider that
`opentelemetry-instrument` or the program has set, or to `--otlp-traces-endpoint`.
"""

import logging
import random
import re
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.errors import ConfigError
from specdec.serving.http.bodies import BodyReader
from specdec.serving.http.clients import OVER_LIMIT, ClientLimits, Guard, route_path
from specdec.serving.http.events import CLIENT_GONE
from specdec.serving.server_settings import ServeSettings

try:
    from opentelemetry import propagate
    from opentelemetry import trace as found
except ImportError:
    found = None  # type: ignore[assignment]
trace: Any = found  # None where the package is not installed

logger = logging.getLogger("specdec.serving")
QUIET = ("/health", "/live", "/ready", "/ping", "/metrics")
"""Paths that monitoring requests often."""


def with_own_path(app: ASGIApp, root_path: str) -> ASGIApp:
    """Reduces the target of a request to its path if a client sends it with the server's address, as to a proxy. Names
    the prefix that a proxy adds for this server (empty: none), so that routes ignore it whether or not it is there."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        scope = {**scope, "root_path": root_path} if root_path else scope
        if scope["type"] == "http" and (found := re.match(r"https?://[^/]*", scope["path"], re.IGNORECASE)):
            scope = {**scope, "path": scope["path"][found.end() :] or "/"}
        await app(scope, receive, send)

    return answer


def head_as_get(app: ASGIApp) -> ASGIApp:
    """Handles HEAD as GET if the path has GET; the server then sends no body."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        asks_head = scope["type"] == "http" and scope["method"] == "HEAD"
        await app({**scope, "method": "GET"} if asks_head else scope, receive, send)

    return answer


def printable(path: str) -> str:
    """A path for the log, with line ends and terminal escapes replaced."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in path[:2048])


class RequestLog:
    """Outermost middleware: takes or makes the id, returns it as X-Request-Id, and logs one line after each answer. A
    request's span is current while it is answered, and ends with the last byte."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._tracer: Any = None if trace is None else trace.get_tracer("specdec")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if re.fullmatch(r"[\w.:-]{1,128}", given, re.ASCII) else f"{random.getrandbits(128):032x}"
        scope.setdefault("state", {})["request_id"] = request_id
        began, status = time.perf_counter(), CLIENT_GONE

        async def with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        with self._span(scope, headers) as span:
            try:
                await self.app(scope, receive, with_id)
            finally:
                self._write(scope, status, time.perf_counter() - began)
                if span is not None:
                    self._end_span(span, scope["state"], status)

    def _span(self, scope: Scope, headers: Headers) -> AbstractContextManager[Any]:
        if self._tracer is None:
            return nullcontext()
        attributes = {"http.request.method": scope["method"], "url.path": scope["path"]}
        attributes["specdec.request_id"] = scope["state"]["request_id"]
        caller, name = propagate.extract(dict(headers)), f"{scope['method']} {scope['path']}"
        span: AbstractContextManager[Any] = self._tracer.start_as_current_span(
            name, context=caller, kind=trace.SpanKind.SERVER, attributes=attributes
        )
        return span

    def _end_span(self, span: Any, state: dict[str, Any], status: int) -> None:
        if status != CLIENT_GONE:
            span.set_attribute("http.response.status_code", status)
        if status >= 500:
            span.set_status(trace.StatusCode.ERROR)
        span.set_attribute("specdec.client", state.get("client") or "")
        span.set_attribute("specdec.client_gone", bool(state.get("client_gone")))

    def _write(self, scope: Scope, status: int, seconds: float) -> None:
        # a client over its own limits is counted at the refusal
        level = logging.DEBUG if route_path(scope) in QUIET or OVER_LIMIT in scope["state"] else logging.INFO
        if not logger.isEnabledFor(level):
            return
        state, method, path = scope["state"], printable(scope["method"]), printable(scope["path"])
        gone = " (client gone)" if state.get("client_gone") else ""
        fields = {"method": scope["method"], "path": path, "status": status, "seconds": round(seconds, 6)}
        fields |= {"request_id": state["request_id"], "client": state.get("client"), "client_gone": bool(gone)}
        values = method, path, status, gone, seconds, state["request_id"]
        logger.log(level, "%s %s %d%s in %.3f s, id %s", *values, extra={"fields": fields})


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


def install_middleware(app: FastAPI, settings: ServeSettings) -> None:
    """Add all middleware; the last one added is the outermost."""
    app.add_middleware(head_as_get)
    app.state.body_reader = BodyReader(settings.max_body_bytes, settings.timeout_body)
    limits = ClientLimits(per_minute=settings.client_requests_per_minute, at_a_time=settings.client_concurrency)
    app.add_middleware(Guard, api_keys=settings.api_keys, limits=limits)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],  # all requested ones: OpenAI's client sends a dozen
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(RequestLog)
    app.add_middleware(with_own_path, root_path=settings.root_path)
