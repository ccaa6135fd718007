"""Bodies of requests: bounded before they are parsed, parsed off the event loop, refused at their first mistake.

    raw bytes -> shape (depth, containers, values), counted without building anything -> JSON -> model

Small bodies are read on the event loop, larger ones on a thread for bodies, one at a time. A route whose router has
`route_class=BodyRoute` declares its body as usual: `async def route(body: Model, ...)`. When its client leaves,
whatever is done for it is cancelled, from the parsing on, and nothing keeps the body.
"""

import json
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from specdec.serving.fair_pool import FairPool
from specdec.serving.http.events import while_connected
from specdec.serving.http.faults import ApiError, invalid_body
from specdec.serving.server_settings import ServeSettings

Model = TypeVar("Model", bound=BaseModel)

MAX_DEPTH = 200
MAX_CONTAINERS = 1 << 15
"""Objects and arrays of a body: each takes up to 232 bytes."""
MAX_MEMBERS = 1 << 16
"""Members of all objects of a body together: each has a key of its own."""
BYTES_PER_VALUE = 8
"""A body may hold at most `max_body_bytes` / BYTES_PER_VALUE values."""
MIN_VALUES = 1 << 16
SMALL = 1 << 15
"""Bytes that are parsed on the loop: in less time than a thread takes to begin."""
WINDOW = 1 << 16
"""Bytes looked at between two moments at which other threads may run."""

_parser = FairPool(1, "specdec-bodies", spares=0)


@dataclass(slots=True)
class JsonCounts:
    """Counts of the JSON text outside of its strings."""

    containers: int = 0
    members: int = 0
    values: int = 0
    depth: int = 0


def shape_of(raw: bytes) -> Iterator[JsonCounts]:
    """The shape of UTF-8 JSON so far, after each window; any numbers for text that is no JSON."""
    shape, inside, escaped, depth = JsonCounts(), False, False, 0
    for at in range(0, len(raw), WINDOW):
        window = raw[at : at + WINDOW]
        if escaped:
            window = b"__" + window[1:]
        # an escaped quote or backslash ends nothing; a lone one at the end goes on in the next window
        window = window.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        escaped = window.endswith(b"\\")
        parts = window.split(b'"')
        outside = b" ".join(parts[1::2] if inside else parts[::2])
        inside ^= not len(parts) % 2
        opened = outside.count(b"{") + outside.count(b"[")
        shape.containers += opened
        shape.members += outside.count(b":")
        shape.values += outside.count(b",") + opened
        if shape.containers <= MAX_CONTAINERS:
            steps = np.frombuffer(outside.translate(_STEPS, _NO_BRACKETS), dtype=np.int8)
            if len(steps):
                depths = depth + np.cumsum(steps, dtype=np.int64)
                shape.depth = max(shape.depth, int(depths.max()))
                depth = int(depths[-1])
        yield shape


_STEPS = bytes.maketrans(b"{[}]", b"\x01\x01\xff\xff")
"""Brackets as int8: a level more, or less."""
_NO_BRACKETS = bytes(char for char in range(256) if char not in b"{}[]")


def require_shape(raw: bytes, max_values: int) -> None:
    """Raise ApiError for a body whose parsing would take more than in proportion to its length."""
    for shape in shape_of(raw):
        for count, most, what in (
            (shape.depth, MAX_DEPTH, "levels"),
            (shape.containers, MAX_CONTAINERS, "objects and arrays"),
            (shape.members, MAX_MEMBERS, "members of objects"),
            (shape.values, max_values, "values"),
        ):
            if count > most:
                message = f"there was an error parsing the body: it has {count} {what} or more, and {most} are allowed"
                raise ApiError(400, message, code="invalid_json")


def parse(raw: bytes, model: type[Model], max_values: int, unknown_fields: str = "refuse") -> Model:
    """The body as a model says. Raises ApiError with the first thing that is wrong with it.

    An error lives until it is answered, seconds later where refusals wait, and so does what the frames that it came
    through hold: none of these holds the values of the body, which may take tens of megabytes."""
    require_shape(raw, max_values)
    found = _parsed(raw, model, unknown_fields)
    if isinstance(found, ApiError):
        raise found
    return found


def _parsed(raw: bytes, model: type[Model], unknown_fields: str) -> Model | ApiError:
    try:
        value = json.loads(raw.decode())
    except RecursionError:
        return ApiError(400, "there was an error parsing the body: it is nested too deep", code="invalid_json")
    except ValueError as error:  # bytes that are no UTF-8 among them, and numbers of thousands of digits
        reason = getattr(error, "msg", None) or str(error).partition(";")[0]
        return ApiError(400, f"the body is not JSON: {reason}", code="invalid_json")
    try:
        return model.model_validate(value, context={"unknown_fields": unknown_fields})
    except ValidationError as error:
        return invalid_body(error.errors(include_url=False))


async def read_body(request: Request) -> bytes:
    """The body of a request, which keeps no copy of it. Raises ApiError."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        raw = b"".join([piece async for piece in request.stream()])
    except ClientDisconnect:
        raise ApiError(400, "the body ended before its end", code="invalid_json") from None
    if not raw:
        message = "the body is missing; a JSON object is expected"
        raise ApiError(400, message, code="missing_required_parameter")
    if not (kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))):
        said = f"Content-Type is {kind[:80]!r}" if kind else "there is no Content-Type"
        raise ApiError(415, f"{said}; application/json is read", code="unsupported_media_type")
    return raw


async def parse_body(raw: bytes, model: type[Model], settings: ServeSettings) -> Model:
    """`parse`, on the thread for bodies where it takes long; dropped when its task is cancelled before it begins."""
    max_values = max(MIN_VALUES, settings.max_body_bytes // BYTES_PER_VALUE)
    how = partial(parse, raw, model, max_values, settings.unknown_fields)
    small = len(raw) <= SMALL
    del raw
    return how() if small else await _parser.wait_for(_parser.submit(how))


class ParsedRequest(Request):
    """A request whose body has been read: FastAPI finds the model in the place of JSON, and takes it as it is."""

    parsed: BaseModel

    async def body(self) -> bytes:
        return b"{}"

    async def json(self) -> Any:
        return self.parsed


class BodyRoute(APIRoute):
    """Reads and checks bodies as this module does, not on the loop as FastAPI does."""

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
            return await while_connected(request.receive, respond(request, await read_body(request)))

        return handler
