"""POST /tokenize and /detokenize: texts and chats as token ids, and token ids as text, as vLLM has them."""

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field

from specdec.errors import ConfigError
from specdec.serving.http.bodies import BodyRoute
from specdec.serving.http.faults import ApiError
from specdec.serving.openai.messages import template_messages
from specdec.serving.openai.protocol import MAX_MESSAGES, Body, ChatRequest, Message, Tool, at_most
from specdec.serving.openai.template_options import template_options
from specdec.serving.state import ServeState, State

router = APIRouter(route_class=BodyRoute)


class TokenizeRequest(Body):
    """A prompt, or messages with the fields of a chat that go to its template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True), at_most(MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, state: State) -> dict[str, Any]:
    """{"count", "max_model_len", "tokens", "token_strs"}"""
    state.model_name(body.model)
    engine, tokenizer = state.engine, state.tokenizer
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "either prompt or messages is expected; give one of them", param="prompt")
    if body.messages is not None:
        tokens = await _chat_tokens(body, state)
    elif body.add_special_tokens is False:
        text = body.prompt or ""
        tokens = await engine.off_loop(lambda: list(tokenizer(text, add_special_tokens=False)["input_ids"]))
    else:
        tokens = await engine.encode(body.prompt or "")
    written = tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
    return {
        "count": len(tokens),
        "max_model_len": engine.max_model_len,
        "tokens": tokens,
        "token_strs": written,
    }


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, state: State) -> dict[str, Any]:
    """{"prompt"}: the text, special tokens written out."""
    state.model_name(body.model)
    vocab_size, tokenizer = state.engine.vocab_size, state.tokenizer
    outside = next((token for token in body.tokens if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise ApiError(
            400, f"tokens holds {outside}; token ids from 0 to {vocab_size - 1} are expected", param="tokens"
        )
    text = await state.engine.off_loop(lambda: tokenizer.decode(body.tokens, skip_special_tokens=False))
    return {"prompt": text}


async def _chat_tokens(body: TokenizeRequest, state: ServeState) -> list[int]:
    if body.add_special_tokens:
        raise ApiError(
            400, "add_special_tokens=true: a chat's tokens are those of its template", param="add_special_tokens"
        )
    options = dict(body.chat_template_kwargs or {})
    for name in ("chat_template", "special_tokens_in_content"):
        if name in options:
            raise ApiError(400, f"chat_template_kwargs holds {name}; leave it out", param="chat_template_kwargs")
    assert body.messages is not None
    chat = ChatRequest(
        messages=body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
    )
    options = template_options(chat, getattr(state.tokenizer, "chat_template", None)) | options
    if body.tools:
        options["tools"] = [
            {"type": "function", "function": tool.function.model_dump(exclude_none=True)} for tool in body.tools
        ]
    try:
        return await state.engine.chat_prompt(
            template_messages(body.messages),
            special_tokens_in_content=state.settings.special_tokens_in_content,
            **options,
        )
    except ConfigError as error:
        raise ApiError(400, str(error), param="messages", code="invalid_value") from error
