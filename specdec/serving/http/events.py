"""Sending answers: server-sent events, and work that is cancelled when its client disconnects.

When a client leaves in the middle of a stream, in this order:

    event loop      1. `while_connected` receives "http.disconnect", cancels `EventStream._send` and raises
                       ClientGoneError, which `EventStream.__call__` catches
                    2. leaving `async with Streams` calls `EngineThread.abort`: `Inbox.abort_later` queues the number of
                       each unfinished sample, the engine's thread is woken, and nothing waits for a step
    engine thread   3. `Engine.step` calls `Inbox.process` before its round; a step that runs already, after it (or a
                       thread that submits a prompt calls it, between two steps):
                         `Request.end("abort")`         the request ends with the tokens it has
                         `Scheduler.release_requests`   caches its whole committed pages, frees its row and slots, and
                                                        increments its `row_epoch` (`Request.lose_row`)
                         `Steps.drop_lost`              drops a divided prompt forward that has its row
                         `Inbox.remove_ended`           counts it
                    4. a round in flight still has its row: `RequestBatch.present` leaves the request out when the round
                       settles, and the freed slots are overwritten only by later launches
                    5. after the step `EngineThread._report_news` tells the observers; `Admission.ended` returns its
                       place

Before an answer has begun, or if it is no stream, the route's handler (`bodies.py`) runs `while_connected` around the
whole task, which then leaves `async with Streams`; the rest is the same. Prompts that are still being read are aborted
when they are submitted (`AsyncEngine.submit`).

The log has such a stream with "(client gone)", and any other such request with status 499.

A failure after the first event is sent as an error event, since the status has been sent already.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from specdec.serving.engine_thread import Streams
from specdec.serving.http.faults import as_api_error

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
LINE_ENDS = {"\x85".encode(): b"\\u0085", "\u2028".encode(): b"\\u2028", "\u2029".encode(): b"\\u2029"}
"""Line ends that JSON does not escape, with their escapes."""
CLIENT_GONE = 499
"""Status in the log for a request whose client disconnected; it is never sent."""


class ClientGoneError(Exception):
    """The client closed the connection before it got its answer."""


MANY_TOKENS = 64
"""A delta with at least this many tokens (for a slow reader) is converted on a thread: it takes longer than starting
the thread."""


as_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def json_bytes(data: Any) -> bytes:
    """JSON to send. Lone surrogates, which a model may write, are escaped, since UTF-8 cannot encode them."""
    try:
        return as_json(data).encode()
    except UnicodeEncodeError:
        return json.dumps(data, separators=(",", ":")).encode()


class JsonResponse(JSONResponse):
    """A response with any data as JSON."""

    def render(self, content: Any) -> bytes:
        return json_bytes(content)


async def off_loop(tokens: int, work: Callable[[], T]) -> T:
    """Returns the result of `work`, run on another thread if there are many tokens."""
    return work() if tokens < MANY_TOKENS else await asyncio.to_thread(work)


def event(data: dict[str, Any]) -> bytes:
    """An event of one line, also for clients that take Unicode's line ends for ends of lines."""
    line = json_bytes(data)
    for char, escape in {} if line.isascii() else LINE_ENDS.items():
        line = line.replace(char, escape)
    return b"data: " + line + b"\n\n"


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `work`. If the client disconnects first, cancels it and raises ClientGoneError."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_wait_until_gone(receive))
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
    """The events of one submission, sent as fast as the client reads, without a queue."""

    last = DONE
    encode = staticmethod(event)

    def __init__(self, streams: Streams, events: AsyncIterator[dict[str, Any]]) -> None:
        super().__init__(media_type="text/event-stream; charset=utf-8")
        del self.headers["content-length"]
        self.headers["Cache-Control"] = "no-cache"
        self.headers["X-Accel-Buffering"] = "no"  # otherwise nginx buffers events
        self._streams = streams
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._streams:
            try:
                await while_connected(receive, self._send(send))
            except ClientGoneError:
                scope.setdefault("state", {})["client_gone"] = True

    def failure(self, error: Exception) -> bytes:
        """The last event of a stream that cannot continue."""
        return self.encode(as_api_error(error).body)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for data in self._events:
                await send({"type": "http.response.body", "body": self.encode(data), "more_body": True})
            last = self.last
        except Exception as error:  # the status has been sent: report any failure as an event
            last = self.failure(error)
        await send({"type": "http.response.body", "body": last, "more_body": False})


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
