"""Around every route: a request id, a line in the log, the API key, and the size of bodies.

Plain ASGI: nothing is buffered, and a client that goes away is noticed at once.
"""

import hmac
import logging
import re
import time
import uuid
from collections.abc import Sequence

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.serving.events import CLIENT_GONE
from specdec.serving.faults import ApiError
from specdec.serving.settings import ServeSettings

logger = logging.getLogger("specdec.serving")
QUIET = ("/health", "/metrics")
"""What machines ask for over and over."""
GUARDED = "/v1/"
"""Paths behind the API key; whether it is well, and its figures, anybody may ask who reaches it."""


class RequestLog:
    """Outermost: takes or makes the id, returns it as X-Request-Id, and writes one line behind each answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if re.fullmatch(r"[\w.:-]{1,128}", given, re.ASCII) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        began, status = time.perf_counter(), CLIENT_GONE

        async def with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            await self.app(scope, receive, with_id)
        finally:
            gone = " (client gone)" if scope["state"].get("client_gone") else ""
            seconds = time.perf_counter() - began
            line = "%s %s %d%s in %.3f s, id %s"
            level = logging.DEBUG if scope["path"] in QUIET else logging.INFO
            logger.log(level, line, scope["method"], scope["path"], status, gone, seconds, request_id)


class Guard:
    """The API key first, then the size of the body, by its header and as it comes."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], max_body_bytes: int) -> None:
        self.app = app
        self.api_keys = [key.encode() for key in api_keys]
        self.max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = self._refusal(scope["path"], headers)
        if refusal is not None:
            await refusal.response()(scope, receive, send)
            return
        size, refused = 0, False

        async def counted() -> Message:
            nonlocal size, refused
            message = await receive()
            size += len(message.get("body", b""))
            if size > self.max_body_bytes and not refused:
                refused = True
                await self._too_large().response()(scope, receive, send)
            return {"type": "http.disconnect"} if refused else message

        async def unless_refused(message: Message) -> None:
            if not refused:
                await send(message)

        await self.app(scope, counted, unless_refused)

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        if self.api_keys and path.startswith(GUARDED):
            kind, _, key = headers.get("authorization", "").partition(" ")
            given = key.strip().encode() if kind.lower() == "bearer" else b""
            # all are compared, in constant time, so that time tells nothing of any
            if not sum(hmac.compare_digest(given, known) for known in self.api_keys):
                said = "the API key is wrong" if given else "no API key was given"
                message = f"{said}; send 'Authorization: Bearer KEY'"
                return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self.max_body_bytes:
            return self._too_large()
        return None

    def _too_large(self) -> ApiError:
        message = f"the body is larger than the {self.max_body_bytes} bytes that this server takes; send less"
        return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})


def install(app: FastAPI, settings: ServeSettings) -> None:
    """The last added is the outermost."""
    app.add_middleware(Guard, api_keys=settings.api_keys, max_body_bytes=settings.max_body_bytes)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
            expose_headers=["X-Request-Id"],
        )
    app.add_middleware(RequestLog)
