"""Bodies of requests: they are read within limits of size and time, values are counted before parsing, they are parsed
off the event loop, and the first mistake is reported.

    raw bytes -> counts (containers, members, values), without building anything -> JSON -> model

Small bodies are parsed on the event loop, larger ones on a thread for bodies, one at a time. A route whose router has
`route_class=BodyRoute` declares its body as usual: `async def route(body: Model, ...)`. If its client leaves, all work
for it is cancelled, from parsing on, and the body is released.
"""

import asyncio
import codecs
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from specdec.serving.fair_pool import FairPool, wait_for
from specdec.serving.http.events import while_connected
from specdec.serving.http.faults import STOPPING, ApiError, invalid_body
from specdec.serving.server_settings import ServeSettings

Model = TypeVar("Model", bound=BaseModel)

MAX_CONTAINERS = 1 << 15
"""Most objects and arrays in a body: each takes up to 232 bytes."""
MAX_MEMBERS = 1 << 16
"""Most members of all objects of a body together: each has its own key."""
BYTES_PER_VALUE = 8
"""A body may hold at most `max_body_bytes` / BYTES_PER_VALUE values."""
MIN_VALUES = 1 << 16
SMALL = 1 << 15
"""Bodies up to this many bytes are parsed on the loop, in less time than a thread takes to start."""
WINDOW = 1 << 16
"""Bytes that are scanned before other threads may run."""
DISCARDED_BYTES = 16 << 20
"""Most bytes of a refused request's body that are read before the answer."""
DISCARD_SECONDS = 1.0
"""Most seconds for reading them."""
CLOSE = {"Connection": "close"}  # the rest of a large or late body is not read

_parser = FairPool(1, "specdec-bodies")


def json_counts(raw: bytes) -> Iterator[tuple[int, int, int]]:
    """Yields the containers, members and values of UTF-8 JSON so far, after each window; arbitrary numbers for text
    that is not JSON."""
    containers, members, commas, inside, escaped = 0, 0, 0, False, False
    for at in range(0, len(raw), WINDOW):
        window = raw[at : at + WINDOW]
        if escaped:
            window = b"__" + window[1:]
        # an escaped quote or backslash ends no string; a backslash at the end belongs to the next window
        window = window.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        escaped = window.endswith(b"\\")
        parts = window.split(b'"')
        outside = b" ".join(parts[1::2] if inside else parts[::2])
        inside ^= not len(parts) % 2
        containers += outside.count(b"{") + outside.count(b"[")
        members += outside.count(b":")
        commas += outside.count(b",")
        yield containers, members, commas + containers


def require_few_values(raw: bytes, max_values: int) -> None:
    """Raise ApiError if parsing a body would take more than proportional time or memory."""
    kinds, limits = ("objects and arrays", "members of objects", "values"), (MAX_CONTAINERS, MAX_MEMBERS, max_values)
    for counts in json_counts(raw):
        for kind, count, most in zip(kinds, counts, limits, strict=True):
            if count > most:
                message = f"there was an error parsing the body: it has {count} {kind} or more, and {most} are allowed"
                raise ApiError(400, message, code="invalid_json")


def parse(raw: bytes, model: type[Model], max_values: int, unknown_fields: str = "refuse") -> Model:
    """Parse the body as a model. Raises ApiError for the first mistake.

    An error may live until Python collects cycles, and it keeps the frames that it passed through. So none of these
    frames holds the body's values, which may take many megabytes."""
    require_few_values(raw, max_values)
    found = _parse_or_refuse(raw, model, unknown_fields)
    if isinstance(found, ApiError):
        raise found
    return found


def _parse_or_refuse(raw: bytes, model: type[Model], unknown_fields: str) -> Model | ApiError:
    try:
        value = from_json(raw.removeprefix(codecs.BOM_UTF8))  # some editors begin a file with it
    except ValueError as error:  # also for 200 levels, numbers of thousands of digits and half a surrogate pair
        return ApiError(400, f"the body cannot be read as JSON: {error}", code="invalid_json")
    try:
        return model.model_validate(value, context={"unknown_fields": unknown_fields})
    except ValidationError as error:
        return invalid_body(error.errors(include_url=False))


async def discard_body(request: Request) -> None:
    """Read a refused body for a while: closing the connection would reset a client that is still sending, and it would
    not see the answer. A client that expects 100-continue waits before it sends the body."""
    left, more = DISCARDED_BYTES, "100-continue" not in request.headers.get("expect", "").lower()
    with suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_SECONDS):
            while more and left > 0:
                message = await request.receive()
                left -= len(message.get("body", b""))
                more = message.get("more_body", False)


class BodyReader:
    """Reads the bodies that one server awaits. It belongs to the server's event loop."""

    def __init__(self, max_bytes: int, seconds: float) -> None:
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._stopping = False
        self._awaited: set[asyncio.Timeout] = set()

    def stop(self, seconds: float) -> None:
        """From now on, wait at most `seconds` for any body."""
        self._stopping = True
        self._seconds = min(self._seconds, seconds)
        latest = asyncio.get_running_loop().time() + seconds
        for timeout in self._awaited:
            timeout.reschedule(min(latest, timeout.when() or latest))

    async def read(self, request: Request) -> bytes:
        """Read the body of a request, which must be said to be JSON; it keeps no copy. Raises ApiError if it is late,
        too large (by its header or by what has arrived), cut off or missing."""
        stated, size, pieces = request.headers.get("content-length", ""), 0, list[bytes]()
        too_large = stated.isdigit() and int(stated) > self._max_bytes
        timeout = asyncio.timeout(self._seconds)
        self._awaited.add(timeout)
        try:
            async with timeout:
                stream = request.stream()
                while not too_large and (piece := await anext(stream, None)) is not None:
                    pieces.append(piece)
                    size += len(piece)
                    too_large = size > self._max_bytes
                if too_large:
                    await discard_body(request)
        except TimeoutError:
            if self._stopping:
                raise ApiError(503, STOPPING, code="stopping", headers=CLOSE) from None
            message = f"the body did not arrive within {self._seconds:g} s; send it faster"
            raise ApiError(408, message, code="timeout", headers=CLOSE) from None
        except ClientDisconnect:
            raise ApiError(400, "the body ended before its end", code="invalid_json") from None
        finally:
            self._awaited.discard(timeout)
        if too_large:
            message = f"the body is larger than the {self._max_bytes} bytes that this server takes; send less"
            raise ApiError(413, message, code="body_too_large", headers=CLOSE)
        if not size:
            message = "the body is missing; a JSON object is expected"
            raise ApiError(400, message, code="missing_required_parameter")
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if not (kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))):
            problem = f"Content-Type is {kind[:80]!r}" if kind else "there is no Content-Type"
            raise ApiError(415, f"{problem}; application/json is read", code="unsupported_media_type")
        coding = request.headers.get("content-encoding", "identity").strip().lower()
        if coding != "identity":
            message = f"Content-Encoding is {coding[:80]!r}, and compressed bodies are not read; send it as it is"
            raise ApiError(415, message, code="unsupported_media_type")
        return b"".join(pieces)


async def parse_body(raw: bytes, model: type[Model], settings: ServeSettings) -> Model:
    """`parse`, on the thread for bodies if it takes long. It is dropped if the task is cancelled before it begins."""
    max_values = max(MIN_VALUES, settings.max_body_bytes // BYTES_PER_VALUE)
    how = partial(parse, raw, model, max_values, settings.unknown_fields)
    small = len(raw) <= SMALL
    del raw
    return how() if small else await wait_for(_parser.submit(how))


class ParsedRequest(Request):
    """A request whose body is parsed already: FastAPI gets the model instead of JSON and uses it unchanged."""

    parsed: BaseModel

    async def body(self) -> bytes:
        return b"{}"

    async def json(self) -> Any:
        return self.parsed


class BodyRoute(APIRoute):
    """A route that reads and checks bodies by this module, not on the loop like FastAPI."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()
        if self.body_field is None:
            return answer
        model: Any = self.body_field.field_info.annotation

        async def respond(request: Request, raw: bytes) -> Response:
            parsing = parse_body(raw, model, request.app.state.serve.settings)
            del raw  # an answer may take minutes
            again = ParsedRequest(request.scope, request.receive)
            again.parsed = await parsing
            return await answer(again)

        async def handler(request: Request) -> Response:
            reader: BodyReader = request.app.state.body_reader
            return await while_connected(request.receive, respond(request, await reader.read(request)))

        return handler
