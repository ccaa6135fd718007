"""Answers common to all routes: errors, and the declaration of a route's refusals."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


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
    400: "What is asked for is wrong, or not possible; `param` says which field.",
    401: "No API key, or a wrong one.",
    404: "There is no such model, or no such response.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    415: "The body is not said to be JSON.",
    429: "Too many requests wait, or this client asks too much; Retry-After says when to ask again.",
    500: "This request failed within the server; its log says why.",
    503: "The server is stopping, or takes no request now.",
}


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Refusals with these statuses, for a route's `responses`."""
    return {status: {"model": Error, "description": REFUSED[status]} for status in statuses}
