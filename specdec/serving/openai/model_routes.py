"""The served model and its tokenizer: GET /v1/models and /version, POST /tokenize and /detokenize (as in vLLM).

For health see probes.py.
"""

from typing import Any

from fastapi import APIRouter

from specdec import __version__
from specdec.errors import ConfigError
from specdec.serving.http.bodies import BodyRoute
from specdec.serving.http.events import JsonResponse
from specdec.serving.http.faults import refusals, refused
from specdec.serving.openai.answer_models import ASKING, Detokenized, ModelCard, ModelList, Tokenized, Version
from specdec.serving.openai.chat_template import chat_prompt
from specdec.serving.openai.protocol import Body, ChatRequest, Messages, TokenIds, Tools
from specdec.serving.state import ServeState, StateDep

router = APIRouter(route_class=BodyRoute)


@router.get("/v1/models", response_model=ModelList)
async def list_models(state: StateDep) -> JsonResponse:
    return JsonResponse({"object": "list", "data": [_model_card(state, name) for name in state.settings.model_names]})


@router.get("/v1/models/{name:path}", response_model=ModelCard, responses=refusals(404))
async def one_model(name: str, state: StateDep) -> JsonResponse:
    return JsonResponse(_model_card(state, state.model_name(name)))


@router.get("/version", response_model=Version)
async def read_version() -> JsonResponse:
    return JsonResponse({"version": __version__})


def _model_card(state: ServeState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.started,
        "owned_by": "specdec",
        "max_model_len": state.engine.max_model_len,
    }


class TokenizeRequest(Body):
    """A prompt, or messages with a chat's template fields."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Tools | None = None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: TokenIds


@router.post("/tokenize", response_model=Tokenized, responses=ASKING)
async def tokenize(body: TokenizeRequest, state: StateDep) -> JsonResponse:
    state.model_name(body.model)
    engine, tokenizer = state.engine, state.tokenizer
    if (body.prompt is None) == (body.messages is None):
        raise refused("prompt", "either prompt or messages is expected; give one of them")
    if body.messages is not None:
        tokens = await _chat_tokens(body, body.messages, state)
    else:
        tokens = await engine.encode(body.prompt or "", special_tokens=body.add_special_tokens is not False)
    written = tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
    answer = {"count": len(tokens), "max_model_len": engine.max_model_len, "tokens": tokens, "token_strs": written}
    return JsonResponse(answer)


@router.post("/detokenize", response_model=Detokenized, responses=ASKING)
async def detokenize(body: DetokenizeRequest, state: StateDep) -> JsonResponse:
    """Convert token ids to text, including special tokens."""
    state.model_name(body.model)
    vocab_size, tokenizer = state.engine.vocab_size, state.tokenizer

    def text() -> str:
        outside = next((token for token in body.tokens if not 0 <= token < vocab_size), None)
        if outside is not None:
            raise refused("tokens", f"tokens holds {outside}; token ids from 0 to {vocab_size - 1} are expected")
        return str(tokenizer.decode(body.tokens, skip_special_tokens=False))

    return JsonResponse({"prompt": await state.engine.off_loop(text)})


async def _chat_tokens(body: TokenizeRequest, messages: Messages, state: ServeState) -> list[int]:
    if body.add_special_tokens:
        raise refused("add_special_tokens", "add_special_tokens=true: a chat's tokens are those of its template")
    chat = ChatRequest(
        messages=messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    try:
        return await state.engine.off_loop(lambda: chat_prompt(chat, state, body.tools or ()))
    except ConfigError as error:
        raise refused("messages", str(error), "invalid_value") from error
