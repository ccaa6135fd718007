"""GET /openapi.json: what may be asked, as FastAPI reads it off the routes, and all that may be answered.

FastAPI knows bodies and paths. Here are statuses, content types, answers, headers, the API key, and bounds of values
that the Python API checks. Every operation has its line in OPERATIONS.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from specdec.config import MAX_PRIORITY, MAX_SALT, MAX_STOP_CHARS, MAX_STOP_TOKENS, MAX_STOPS
from specdec.serving.http.client_limits import GUARDED
from specdec.serving.openai import documented_answers as answers
from specdec.serving.openai.protocol import MAX_BIASES, MAX_MESSAGES
from specdec.serving.openai.sampling_fields import MAX_LOGPROBS
from specdec.serving.server_settings import ServeSettings
from specdec.settings.sampling_numbers import NUMBERS, Number

JSON, EVENTS, METRICS = "application/json", "text/event-stream", "text/plain"
STATUSES = {
    400: "What is asked for is wrong, or not possible; `param` says which field.",
    401: "No API key, or a wrong one.",
    404: "There is no such model, or no such response.",
    408: "The request did not come in time.",
    413: "The body is too large.",
    415: "The body is not said to be JSON.",
    429: "Too many requests wait, or this client asks too much; Retry-After says when to ask again.",
    500: "This request failed within the server; its log says why.",
    503: "The server is stopping, or takes no request now.",
}
ASKING = (400, 404, 408, 413, 415, 429, 500, 503)


@dataclass(frozen=True, slots=True)
class Operation:
    """answer: its JSON with status 200. refusals: statuses of errors, in addition to 401 of a missing API key."""

    answer: type[answers.Answer] | None
    refusals: tuple[int, ...] = ()
    kinds: tuple[str, ...] = (JSON,)


OPERATIONS = {
    ("post", "/v1/chat/completions"): Operation(answers.ChatCompletion, ASKING, (JSON, EVENTS)),
    ("post", "/v1/completions"): Operation(answers.Completion, ASKING, (JSON, EVENTS)),
    ("post", "/v1/responses"): Operation(answers.ResponseAnswer, ASKING, (JSON, EVENTS)),
    ("get", "/v1/responses/{response_id}"): Operation(answers.ResponseAnswer, (404,)),
    ("delete", "/v1/responses/{response_id}"): Operation(answers.DeletedResponse, (404,)),
    ("get", "/v1/responses/{response_id}/input_items"): Operation(answers.InputItems, (404,)),
    ("get", "/v1/models"): Operation(answers.ModelList),
    ("get", "/v1/models/{name}"): Operation(answers.ModelCard, (404,)),
    ("post", "/tokenize"): Operation(answers.Tokenized, ASKING),
    ("post", "/detokenize"): Operation(answers.Detokenized, ASKING),
    **{("get", path): Operation(answers.Health, (503,)) for path in ("/live", "/ready", "/health", "/ping")},
    ("get", "/version"): Operation(answers.Version),
    ("get", "/metrics"): Operation(None, (500,), (METRICS,)),
}

_TOKEN = {"type": "integer", "minimum": 0, "maximum": 1 << 40}
_TOKENS = {"type": "array", "items": _TOKEN, "minItems": 1}
_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}


def _span(number: Number) -> dict[str, Any]:
    low, high = ("exclusiveMinimum" if number.open_low else "minimum", number.low), ("maximum", number.high)
    return {name: bound for name, bound in (low, high) if math.isfinite(bound)}


BOUNDS: dict[str, dict[str, Any]] = {
    "max_tokens": {"minimum": 0, "maximum": 1 << 30},
    "max_completion_tokens": {"minimum": 1, "maximum": 1 << 30},
    "max_output_tokens": {"minimum": 1, "maximum": 1 << 30},
    **{name: _span(number) for name, number in NUMBERS.items()},
    "top_k": {"minimum": -1, "maximum": NUMBERS["top_k"].high},
    "seed": {"minimum": 0, "maximum": (1 << 63) - 1},
    "n": {"minimum": 1, "maximum": 1 << 16},
    "best_of": {"minimum": 1, "maximum": 1 << 16},
    "stop": {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}, {"type": "null"}]},
    "stop_token_ids": {"maxItems": MAX_STOP_TOKENS, "items": _TOKEN},
    "allowed_token_ids": {"minItems": 1, "items": _TOKEN},
    "min_tokens": {"minimum": 0, "maximum": 1 << 30},
    "truncate_prompt_tokens": {"minimum": -1, "not": {"const": 0}},
    "prompt_logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
    "top_logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
    "logit_bias": {
        "maxProperties": MAX_BIASES,
        "propertyNames": {"pattern": "^[0-9]{1,12}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
    "cache_salt": {"minLength": 1, "maxLength": MAX_SALT},
    "messages": {"maxItems": MAX_MESSAGES},
    "length_penalty": {"const": 1},
}
"""Bounds of fields by their name, in whatever body they are."""
_ONE_PROMPT = [{"type": "string"}, _TOKENS]
PROMPTS = {"anyOf": [*_ONE_PROMPT, {"type": "array", "items": {"anyOf": _ONE_PROMPT}, "minItems": 1}]}
"""A text, token ids, or a list of these."""


def install(app: FastAPI, settings: ServeSettings) -> None:
    """The application describes itself as this module does."""
    app.openapi = functools.cache(lambda: described(app, settings))  # type: ignore[method-assign]


def described(app: FastAPI, settings: ServeSettings) -> dict[str, Any]:
    """The document of an application with these settings."""
    found = get_openapi(title=app.title, version=app.version, routes=app.routes)
    if settings.root_path:
        found["servers"] = [{"url": settings.root_path}]
    keys = bool(settings.api_keys or settings.named_keys)
    schemas = found["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):  # of FastAPI, which never leave this server
        schemas.pop(name, None)
    for schema in schemas.values():
        _bound(schema, settings)
    schemas["CompletionRequest"]["properties"]["prompt"] = {"title": "Prompt"} | PROMPTS
    kinds = {operation.answer for operation in OPERATIONS.values() if operation.answer is not None} | {answers.Error}
    named = [(kind, "validation") for kind in sorted(kinds, key=lambda kind: kind.__name__)]
    _, made = models_json_schema(named, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    assert not schemas.keys() & made["$defs"].keys(), "a body and an answer have one name"
    schemas.update(made["$defs"])
    for path, methods in found["paths"].items():
        for method, entry in methods.items():
            entry["responses"] = _responses(OPERATIONS[method, path], keys and path.startswith(GUARDED))
            if keys and path.startswith(GUARDED):
                entry["security"] = [{"bearer": []}]
    if keys:
        found["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    return found


def _bound(schema: Mapping[str, Any], settings: ServeSettings) -> None:
    """Add what the Python API allows to the properties of a body."""
    for name, value in schema.get("properties", {}).items():
        value.update(BOUNDS.get(name, {}))
        if name == "model":
            value["enum"] = [*settings.model_names, None]
        elif name == "priority":
            most = MAX_PRIORITY if settings.allow_priority else 0
            value |= {"minimum": -most, "maximum": most}


def _responses(operation: Operation, guarded: bool) -> dict[str, Any]:
    schema = {} if operation.answer is None else _ref(operation.answer)
    schemas = {JSON: {"schema": schema}, METRICS: {"schema": {"type": "string"}}, EVENTS: {}}
    content = {kind: schemas[kind] for kind in operation.kinds}
    found = {"200": {"description": "The answer.", "content": content, "headers": _headers()}}
    for status in sorted((*operation.refusals, *((401,) if guarded else ()))):
        kind = operation.answer if operation.answer is answers.Health else answers.Error
        assert kind is not None
        headers = {401: ["WWW-Authenticate"], 429: ["Retry-After"]}.get(status, [])
        found[str(status)] = {
            "description": STATUSES[status],
            "content": {JSON: {"schema": _ref(kind)}},
            # who is not let in is answered before there is an id
            "headers": {} if status in (408, 503) else _headers(*headers),
        }
    return found


def _headers(*names: str) -> dict[str, Any]:
    return {name: {"required": True, "schema": {"type": "string"}} for name in ("X-Request-Id", *names)}


def _ref(kind: type[answers.Answer]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}
