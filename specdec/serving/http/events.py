"""Answers on their way out: server-sent events, and work that ends when its client goes away.

A client that goes away, streaming or not, cancels the task of its request:

    `while_connected`  ->  `Streams.abort`  ->  `EngineThread.abort`  ->  `Inbox.abort`: the next step frees its slots

A failure after the first event is an event of its own, in the shape of an error, since the status has been sent.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from specdec.serving.http.faults import as_api_error
from specdec.serving.streams import Streams

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
CLIENT_GONE = 499
"""Status in the log for a request whose client went away; it is not sent."""


class ClientGoneError(Exception):
    """The client closed the connection before it had its answer."""


MANY_TOKENS = 64
"""Tokens of one delta, which a slow reader gets, that a thread puts into words: it takes longer than a thread takes to
begin."""


def json_bytes(data: Any) -> bytes:
    """JSON as it is sent. Half a surrogate pair, which a model may write, is escaped: UTF-8 has none."""
    try:
        return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(data, separators=(",", ":")).encode()


class JsonResponse(JSONResponse):
    """Any data as JSON."""

    def render(self, content: Any) -> bytes:
        return json_bytes(content)


async def off_loop(tokens: int, work: Callable[[], T]) -> T:
    """Returns the result of `work`, which runs on another thread if it is about many tokens."""
    return work() if tokens < MANY_TOKENS else await asyncio.to_thread(work)


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + json_bytes(data) + b"\n\n"


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`; if the client goes away first, cancels it and raises ClientGoneError."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


class EventStream(Response):
    """The events of one submission; sent as fast as the client reads, with nothing piled up."""

    last = DONE
    encode = staticmethod(event)

    def __init__(self, streams: Streams, events: AsyncIterator[dict[str, Any]]) -> None:
        super().__init__(media_type="text/event-stream; charset=utf-8")
        del self.headers["content-length"]
        self.headers["Cache-Control"] = "no-cache"
        self.headers["X-Accel-Buffering"] = "no"  # nginx would hold events back
        self._streams = streams
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["events"] = True  # a comment may stand between any two writes
        async with self._streams:
            try:
                await while_connected(receive, self._send(send))
            except ClientGoneError:
                scope.setdefault("state", {})["client_gone"] = True

    def failure(self, error: Exception) -> bytes:
        """The last event of a stream that cannot go on."""
        return self.encode(as_api_error(error).body)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for data in self._events:
                await send({"type": "http.response.body", "body": self.encode(data), "more_body": True})
            last = self.last
        except Exception as error:  # the status is sent: whatever fails, the client is told
            last = self.failure(error)
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
