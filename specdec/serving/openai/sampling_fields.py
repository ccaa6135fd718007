"""Converts the fields of a body to `SamplingParams`: names and defaults only. `SamplingParams` checks ranges."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from specdec.config import GRAMMARS, MAX_SALT, SamplingParams, SpecConfig
from specdec.errors import CapacityError, ConfigError
from specdec.serving.async_engine import AsyncEngine
from specdec.serving.http.clients import require_priority, salt_for
from specdec.serving.http.faults import ApiError, as_api_error, refused
from specdec.serving.openai.protocol import ChatRequest, SamplingFields, Speculation
from specdec.serving.state import ServeState

MAX_LOGPROBS = 20
MAX_SEED = (1 << 63) - 1
TRANSLATED = {"logprobs", "logit_bias", "prompt_logprobs", "cache_salt", "speculation"}
"""Fields of a body that `sampling_params` converts individually."""
SAME = {each.name for each in fields(SamplingParams)} & SamplingFields.model_fields.keys() - TRANSLATED
"""Fields with the same name in `SamplingParams`; None means not set."""
GUIDED = {"guided_json": "json_schema", "guided_regex": "regex", "guided_choice": "choice"}


def sampling_params(
    body: SamplingFields,
    state: ServeState,
    max_new_tokens: int,
    logprobs: int | None,
    calls: dict[str, Any] | None = None,
    echoed: int | None = None,
) -> SamplingParams:
    """Make the parameters. calls: the grammar of an answer that may or must call tools. echoed: alternatives per token
    of an echoed prompt with log-probabilities. Raises ConfigError or ApiError for an invalid field."""
    if body.stream_options is not None and not body.stream:
        raise refused("stream_options", "stream_options goes with stream=true; set that too")
    given: dict[str, Any] = dict(state.settings.defaults)
    given |= {name: value for name in SAME if (value := getattr(body, name)) is not None}
    if given.get("top_k") == -1:  # like 0: all tokens
        given["top_k"] = 0
    if (seed := given.get("seed")) is not None and not -MAX_SEED - 1 <= seed <= MAX_SEED:
        raise refused(
            "seed", f"seed={seed}: an integer from {-MAX_SEED - 1} to {MAX_SEED} is expected", "invalid_value"
        )
    if seed is not None and seed < 0:  # -1, of llama.cpp and vLLM: a random one
        given["seed"] = None if seed == -1 else seed & ((1 << 62) - 1)
    if body.logit_bias:
        given["logit_bias"] = {_token_id(token): bias for token, bias in body.logit_bias.items()}
    if logprobs is not None:
        given["logprobs"] = require_logprobs(logprobs)
    if body.prompt_logprobs is not None:
        if body.stream:
            raise refused("prompt_logprobs", "prompt_logprobs goes without stream=true; leave one of them out")
        require_logprobs(body.prompt_logprobs, "prompt_logprobs")
    scored = [count for count in (body.prompt_logprobs, echoed) if count is not None]
    if scored:
        given["prompt_logprobs"] = max(scored)
    asked = _requested_grammars(body)
    constraints = asked.keys() - {"response_format"}  # that is for texts only
    if calls is not None and constraints:
        raise refused("tool_choice", f"tool_choice and {constraints.pop()} are both given; leave one out")
    given |= next(iter(asked.values()), {}) if calls is None else calls
    require_priority(body.priority or 0, state.settings)
    if body.cache_salt is not None and not 0 < len(body.cache_salt) <= MAX_SALT:
        message = f"cache_salt has {len(body.cache_salt)} characters; 1 to {MAX_SALT} are allowed"
        raise refused("cache_salt", message, "invalid_value")
    given["cache_salt"] = salt_for(state.client, body.cache_salt, state.settings)
    return SamplingParams(max_new_tokens=max_new_tokens, speculation=_speculation(body, state.engine.spec), **given)


def truncate_prompt(body: SamplingFields, engine: AsyncEngine, ids: list[int], max_new_tokens: int) -> list[int]:
    """The last `truncate_prompt_tokens` tokens of a prompt; -1: as many as leave room for the output."""
    most, longest = body.truncate_prompt_tokens, engine.max_model_len
    if most is None:
        return ids
    if not (most == -1 or 1 <= most <= longest):
        allowed = f"from 1 to {longest} tokens, or -1 for as many as there is room for, is expected"
        raise refused("truncate_prompt_tokens", f"truncate_prompt_tokens={most}: {allowed}")
    return ids[-(max(1, longest - max_new_tokens) if most == -1 else most) :]


def require_logprobs(count: int, param: str = "logprobs") -> int:
    if not 0 <= count <= MAX_LOGPROBS:
        raise refused(param, f"{param}={count}: from 0 to {MAX_LOGPROBS} alternatives are given")
    return count


def with_client_names(
    error: ConfigError | CapacityError, body: SamplingFields, renamed: Mapping[str, str]
) -> ConfigError | CapacityError | ApiError:
    """Returns the error with the client's names of a grammar's field, of the prompt's field, and of the field that
    limits the output."""
    field, message = next(iter(_requested_grammars(body)), None), str(error)
    if not message.startswith(GRAMMARS):
        limit = "max_tokens" if getattr(body, "max_completion_tokens", None) is None else "max_completion_tokens"
        named = as_api_error(type(error)(message.replace("max_new_tokens", renamed.get(limit, limit))))
        if isinstance(error, CapacityError) or message.startswith("prompt "):
            prompt = "messages" if isinstance(body, ChatRequest) else "prompt"
            named.body["error"]["param"] = renamed.get(prompt, prompt)
        return named
    if isinstance(body, ChatRequest) and body.forced_tools:
        names = ", ".join(tool.name for tool in body.forced_tools)
        message = message.replace("json_schema", f"the schema of a tool that must be called ({names})", 1)
        return refused("tools", message, "invalid_value")
    if field is None:
        return error
    return refused(renamed.get(field, field), message, "invalid_value")


def _speculation(body: SamplingFields, own: SpecConfig) -> SpecConfig | bool | None:
    """Draft settings of one request; numbers that the body leaves out are the engine's."""
    if not isinstance(body.speculation, Speculation):
        return False if body.speculation is False else None
    given = body.speculation.model_dump(exclude={"show_drafts"}, exclude_none=True)
    if not given:
        return None
    wanted = replace(own, **{"num_draft_tokens": None} | given)
    if wanted.num_draft_tokens is None and wanted.num_nodes > own.num_nodes:
        return replace(wanted, num_draft_tokens=own.num_nodes)
    return wanted


def _requested_grammars(body: SamplingFields) -> dict[str, dict[str, Any]]:
    """The grammar that the body asks for, keyed by field: one or none."""
    asked: dict[str, dict[str, Any]] = {}
    if (form := body.response_format) is not None:
        schema = form.schema_of_text
        if form.type == "text":
            if form.json_schema is not None or schema is not None:
                raise refused("response_format", "response_format.json_schema is for type='json_schema'")
        elif form.type == "json_object" and not schema:
            asked["response_format"] = {"json_object": True}
        elif schema is not None:
            asked["response_format"] = {"json_schema": schema}
        else:
            raise refused("response_format", "response_format.json_schema.schema is missing; it is required")
    if (outputs := body.structured_outputs) is not None:
        for name, value in outputs:
            if value is not None and value is not False:
                asked[f"structured_outputs.{name.removesuffix('_schema')}"] = {name: value}
    asked |= {field: {name: value} for field, name in GUIDED.items() if (value := getattr(body, field)) is not None}
    if len(asked) > 1:
        named = list(asked)
        raise refused(named[0], f"{' and '.join(named)} are both given; one is allowed, so leave one out")
    return asked


def _token_id(token: str) -> int:
    if not token.isascii() or not token.isdigit() or len(token) > 18:
        raise refused("logit_bias", f"logit_bias holds {token!r:.40}; its keys are token ids")
    return int(token)
