"""GET /openapi.json: FastAPI's description of bodies and answers, plus parts that depend on settings (model names, the
API key), headers, and bounds that the Python API checks."""

import asyncio
import functools
import math
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from specdec.config import MAX_PRIORITY, MAX_SALT, MAX_STOP_CHARS, MAX_STOP_TOKENS, MAX_STOPS
from specdec.serving.http.clients import GUARDED
from specdec.serving.http.events import JsonResponse
from specdec.serving.http.faults import REFUSED
from specdec.serving.openai import answer_models
from specdec.serving.openai.protocol import MAX_BIASES, MAX_MESSAGES, MAX_TOOLS
from specdec.serving.openai.sampling_fields import MAX_LOGPROBS
from specdec.serving.server_settings import ServeSettings
from specdec.settings.declared_fields import Number
from specdec.settings.sampling_numbers import NUMBERS

ERROR = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
HEADERS = {"401": ["WWW-Authenticate"], "429": ["Retry-After"]}
"""Headers of an answer besides its id, by status."""
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
    "seed": {"minimum": -(1 << 63), "maximum": (1 << 63) - 1},
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
    "tools": {"maxItems": MAX_TOOLS},
    "length_penalty": {"const": 1},
}
"""Bounds of fields by name, in any body."""
_ONE_PROMPT = [{"type": "string"}, _TOKENS]
PROMPTS = {"anyOf": [*_ONE_PROMPT, {"type": "array", "items": {"anyOf": _ONE_PROMPT}, "minItems": 1}]}
"""A text, token ids, or a list of these."""


def install_openapi(app: FastAPI, settings: ServeSettings) -> None:
    document = functools.cache(functools.partial(openapi_document, app, settings))

    @app.get("/openapi.json", include_in_schema=False)
    async def read_document() -> JsonResponse:
        return JsonResponse(await asyncio.to_thread(document))  # the first takes most of a second


def openapi_document(app: FastAPI, settings: ServeSettings) -> dict[str, Any]:
    """The OpenAPI document of an application with these settings."""
    found = get_openapi(title=app.title, version=app.version, routes=app.routes, separate_input_output_schemas=False)
    if settings.root_path:
        found["servers"] = [{"url": settings.root_path}]
    schemas = found["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's errors, which this server never sends
        schemas.pop(name, None)
    most = MAX_PRIORITY if settings.allow_priority else 0
    bounds = BOUNDS | {
        "model": {"enum": [*settings.model_names, None]},
        "priority": {"minimum": -most, "maximum": most},
    }
    for kind, schema in schemas.items():
        if not hasattr(answer_models, kind):  # a part of a body
            for name, value in schema.get("properties", {}).items():
                value.update(bounds.get(name, {}))
    schemas["CompletionRequest"]["properties"]["prompt"] = {"title": "Prompt"} | PROMPTS
    for path, methods in found["paths"].items():
        for entry in methods.values():
            answers = entry["responses"]
            answers.pop("422", None)
            if settings.api_keys and path.startswith(GUARDED):
                answers["401"] = {"description": REFUSED[401], "content": ERROR}
                entry["security"] = [{"bearer": []}]
            for status, answer in answers.items():
                names = ["X-Request-Id", *HEADERS.get(status, [])]
                answer["headers"] = {name: {"required": True, "schema": {"type": "string"}} for name in names}
    if settings.api_keys:
        found["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    return found
