"""Errors in the form of OpenAI's clients: {"error": {"message", "type", "param", "code"}} and an HTTP status.

All failures of a request end here, so that no error of another shape leaves the server. Each route declares its
refusals (`refusals`); `Answer` is the base of all models of answers.
"""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.routing import Match

from specdec.errors import (
    ENGINE_CLOSED,
    CapacityError,
    ConfigError,
    QueueFullError,
    SpecDecError,
    StoppingError,
    UnsupportedModelError,
    clipped,
    shown,
)

logger = logging.getLogger(__name__)

TYPES = ("str", "constrained-str", "int", "float", "bool", "none", "dict", "list")
"""Parts of pydantic's location that name a member of a union, not a field."""
EXPECTED = {
    "a string": "string_type",
    "a string of whole characters": "string_unicode",
    "an integer": "int_type int_from_float int_parsing",
    "an integer of fewer digits": "int_parsing_size",
    "a number": "float_type float_parsing",
    "a finite number": "finite_number",
    "true or false": "bool_type bool_parsing",
    "an object": "dict_type model_type model_attributes_type dataclass_type mapping_type dict_attributes_type",
    "a list": "list_type tuple_type",
    "null": "none_required",
}
"""Expected values, each with pydantic's types of its error. Pydantic's own messages are not meant for clients."""
LITERALS = {"True": "true", "False": "false", "None": "null"}


ANSWERS: dict[type[Exception], tuple[int, str | None]] = {
    QueueFullError: (429, "queue_full"),
    CapacityError: (400, "context_length_exceeded"),
    ConfigError: (400, "invalid_value"),
    UnsupportedModelError: (400, "invalid_value"),
    StoppingError: (503, "stopping"),
    SpecDecError: (500, None),  # such as a failed round
}
"""Status and code of the product's errors; the first match counts."""
STOPPING = "the server is stopping; ask another one"


class ApiError(Exception):
    """A refusal or failure as its HTTP answer: status, body in OpenAI's shape, and headers."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_body(status, message, param, code)
        self.headers = dict(headers or {})

    def response(self) -> Response:
        # ASCII: a message may contain a lone surrogate
        return Response(json.dumps(self.body), self.status, self.headers, media_type="application/json")


def refused(param: str, message: str, code: str | None = None) -> ApiError:
    """The error 400 for an invalid field of a body."""
    return ApiError(400, message, param=param, code=code)


def error_body(status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def as_api_error(error: Exception) -> ApiError:
    """Convert any error of the product to an answer."""
    if isinstance(error, ApiError):
        return error
    for kind, (status, code) in ANSWERS.items():
        if isinstance(error, kind):
            message = str(error).replace("max_new_tokens", "max_tokens").replace(ENGINE_CLOSED, STOPPING)
            # named as in the Python API: top_p=2
            setting = re.match(r"(\w+)(=| holds token id )", message) if status == 400 else None
            param = setting and setting[1]
            headers = {"Retry-After": "1"} if status in (429, 503) else None
            return ApiError(status, message, param=param, code=code, headers=headers)
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed to answer this request; its log says why")


def invalid_body(errors: Sequence[Any]) -> ApiError:
    """The error for one of pydantic's findings in a JSON body: a wrong `type`, on which an object's fields depend, else
    an unknown field, else the first."""
    types = [error for error in errors if error["type"] == "literal_error" and error["loc"][-1:] == ("type",)]
    unknown = [error for error in errors if error["type"] == "extra_forbidden"]
    error = (types or unknown or _within_objects(errors))[0]
    param = _place(error["loc"])
    if error["type"] == "extra_forbidden":
        return ApiError(
            400, f"{param} is not a field of this server; leave it out", param=param, code="unknown_parameter"
        )
    if error["type"] == "missing":
        return ApiError(400, f"{param} is missing; it is required", param=param, code="missing_required_parameter")
    here = [each for each in errors if _place(each["loc"]) == param]
    message = f"{param or 'the body'}={shown(error.get('input'))}: {sentence(here)}"
    return ApiError(400, message, param=param, code="invalid_type")


def _within_objects(errors: Sequence[Any]) -> Sequence[Any]:
    """The errors from the first on; those within its value, if that is an object which a field may have."""
    place = _place(errors[0]["loc"])
    inner = [error for error in errors if str(_place(error["loc"])).startswith(f"{place}.")]
    return inner if inner and isinstance(errors[0].get("input"), dict) else errors


def expected(error: Mapping[str, Any]) -> str:
    """The value that a pydantic error expected, in words: "a number"."""
    kind, context = error["type"], error.get("ctx", {})
    for words, kinds in EXPECTED.items():
        if kind in kinds.split():
            return words
    if kind in ("literal_error", "enum"):
        expected = str(context.get("expected", ""))
        return LITERALS.get(expected, expected)
    if kind in ("too_short", "too_long", "string_too_short", "string_too_long"):
        least, most = context.get("min_length"), context.get("max_length")
        what = "characters" if kind.startswith("string") else "item"
        limit = f"at least {least}" if least is not None else f"at most {most}"
        return f"{limit} {what}" + ("s" if what == "item" and limit[-2:] != " 1" else "")
    return ""


def sentence(errors: Sequence[Mapping[str, Any]]) -> str:
    """All values that one place may have, in words: "a number or null is expected"; or the reason of our own check."""
    wanted = list(dict.fromkeys(filter(None, map(expected, errors))))
    if wanted:
        return f"{' or '.join(wanted)} is expected"
    said = str(errors[0].get("ctx", {}).get("error", ""))
    # some begin with the value, under another name than the field's
    return said.partition(f"={shown(errors[0].get('input'))}: ")[2] or said or "this value is not allowed"


class Answer(BaseModel):
    """Base of answer models. A field with a default is present only if a request asks for it."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ErrorDetail(Answer):
    """An error in OpenAI's shape. param: the faulty field of the body. code: kind of error, for programs."""

    message: str
    type: Literal[
        "invalid_request_error", "authentication_error", "not_found_error", "rate_limit_error", "server_error"
    ]
    param: str | None
    code: str | None


class Error(Answer):
    error: ErrorDetail


REFUSED = {
    400: "The request is invalid or cannot be served; `param` names the field.",
    401: "The API key is missing or wrong.",
    404: "Unknown model or response.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The Content-Type is not JSON, or the body is compressed.",
    429: "The queue is full, or this client exceeds its limits; Retry-After says when to retry.",
    500: "The server failed to answer this request; its log says why.",
    503: "The server is stopping, or accepts no requests now.",
}


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Refusals with these statuses, for a route's `responses`."""
    return {status: {"model": Error, "description": REFUSED[status]} for status in statuses}


def allowed_methods(request: Request) -> list[str]:
    """Methods of all routes of the request's path (the router names only those of the first)."""

    def taken(method: str) -> bool:
        scope = dict(request.scope) | {"method": method}
        return any(route.matches(scope)[0] == Match.FULL for route in request.app.routes)

    found = [method for method in ("DELETE", "GET", "PATCH", "POST", "PUT") if taken(method)]
    return sorted({*found, "HEAD"} if "GET" in found else found)


def install_error_handlers(app: FastAPI) -> None:
    """Convert every exception of a route to this shape."""

    async def as_answer(request: Request, error: Exception) -> Response:
        if isinstance(error, RequestValidationError):
            return invalid_body([{**each, "loc": each["loc"][1:]} for each in error.errors()]).response()
        if isinstance(error, HTTPException):
            messages = {
                404: f"there is nothing at {request.url.path}; /openapi.json lists what there is",
                405: f"{request.method} is not allowed here",
            }
            message = messages.get(error.status_code, str(error.detail))
            headers = dict(error.headers or {})
            if error.status_code == 405:
                headers["Allow"] = ", ".join(allowed_methods(request))
            return ApiError(error.status_code, message, headers=headers).response()
        return as_api_error(error).response()

    for kind in (RequestValidationError, HTTPException, ApiError, SpecDecError):
        app.add_exception_handler(kind, as_answer)
    # innermost: a handler of `Exception` would answer outside of the middleware that counts, names and logs answers
    app.add_middleware(ExceptionMiddleware, handlers={Exception: as_answer})


def _place(loc: Sequence[Any]) -> str | None:
    """("messages", 0, "content", "str") -> messages[0].content"""
    place = ""
    for part in loc:
        if isinstance(part, int):
            place += f"[{part}]"
        elif part in TYPES or "[" in part or part[:1].isupper():
            continue
        else:
            name = clipped(part, 80)
            place += f".{name}" if place else name
    return place or None
