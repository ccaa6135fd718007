"""POST /v1/chat/completions: messages through the model's chat template, answered whole or as they come."""

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from specdec.config import SamplingParams
from specdec.errors import ConfigError
from specdec.request import GenerationOutput
from specdec.serving.async_engine import Streams
from specdec.serving.events import EventStream, while_connected
from specdec.serving.faults import ApiError
from specdec.serving.messages import template_messages
from specdec.serving.protocol import ChatRequest
from specdec.serving.reply import Reply, Wanted
from specdec.serving.sampling_fields import blaming, require_logprobs, sampling_params
from specdec.serving.state import ServeState, State
from specdec.serving.tool_choice import ToolChoice
from specdec.serving.usage import chat_logprobs, so_far, totals

router = APIRouter()


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(body: ChatRequest, request: Request, state: State) -> Response:
    try:
        return await while_connected(request.receive, Chat(body, state).answer())
    except ConfigError as error:
        raise blaming(error, body) from error


class Chat:
    """One request."""

    def __init__(self, body: ChatRequest, state: ServeState) -> None:
        self.body = body
        self.engine = state.engine
        self.settings = state.settings
        self.tokenizer = state.engine.engine.tokenizer
        self.choice = ToolChoice(body, getattr(self.tokenizer, "chat_template", None), state.tool_parser)
        self.prompt: list[int] = []
        self.head = state.head("chatcmpl", "chat.completion", body.model)

    async def answer(self) -> Response:
        """The response, whole or begun."""
        self.prompt = await self._read_prompt()
        params = self._params()
        wanted = Wanted(
            self.tokenizer, params.stop_strings, self.body.show_drafts, self.choice.parser, self.choice.parameter_types
        )
        streams = await self.engine.submit([self.prompt], params, priority=self.body.priority)
        if self.body.stream:
            return EventStream(streams, self._events(streams, wanted))
        async with streams:
            return JSONResponse(self._whole(await streams.outputs(), wanted))

    async def _read_prompt(self) -> list[int]:
        options = dict(self.body.chat_template_kwargs or {})
        for name in ("chat_template", "tools"):
            if name in options:
                said = "a template is a program, and this server runs its own" if name != "tools" else "tools say it"
                raise ApiError(
                    400, f"chat_template_kwargs holds {name}: {said}; leave it out", param="chat_template_kwargs"
                )
        options |= self.choice.template_kwargs
        return await self.engine.chat_prompt(template_messages(self.body.messages), **options)

    def _params(self) -> SamplingParams:
        body = self.body
        if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
            raise ApiError(
                400,
                f"max_tokens={body.max_tokens} and max_completion_tokens={body.max_completion_tokens} differ; "
                "give one of them",
                param="max_completion_tokens",
            )
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(
                400, f"top_logprobs={body.top_logprobs} goes with logprobs=true; set that too", param="top_logprobs"
            )
        asked = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
        most = self.engine.most_new_tokens(len(self.prompt)) if asked is None else asked
        top = require_logprobs(body.top_logprobs or 0, "top_logprobs") if body.logprobs else None
        return sampling_params(body, self.engine, self.settings, most, top, self.choice.grammar)

    def _whole(self, outputs: list[GenerationOutput], wanted: Wanted) -> dict[str, Any]:
        answer = self.head | {"choices": [self._choice(i, output, wanted) for i, output in enumerate(outputs)]}
        return answer | totals(self.body, [self.prompt], [output.stats for output in outputs])

    def _choice(self, index: int, output: GenerationOutput, wanted: Wanted) -> dict[str, Any]:
        reply = Reply(wanted)
        said = reply.read_whole(output)
        message: dict[str, Any] = {"role": "assistant", "content": said.content, "refusal": None}
        if said.tool_calls:
            message |= {"content": said.content or None, "tool_calls": said.tool_calls}
        choice = {"index": index, "message": message, "finish_reason": reply.finish_reason(output), "logprobs": None}
        if output.logprobs is not None:
            choice["logprobs"] = chat_logprobs(self.tokenizer, output.logprobs)
        if said.drafted is not None:
            choice["drafted"] = said.drafted
        return choice

    async def _events(self, streams: Streams, wanted: Wanted) -> AsyncIterator[dict[str, Any]]:
        """Chunks: who speaks, what is said, why it ends, each of every choice; then usage."""
        head = self.head | {"object": "chat.completion.chunk"}
        if self.body.include_usage:
            head["usage"] = None
        replies = [Reply(wanted) for _ in streams.samples]
        for index in range(len(replies)):
            yield head | {"choices": [_chunk(index, {"role": "assistant", "content": ""})]}
        async for index, delta in streams:
            said = replies[index].read(delta)
            fields: dict[str, Any] = {"content": said.content} if said.content or not said.tool_calls else {}
            if said.tool_calls:
                fields["tool_calls"] = said.tool_calls
            if said.content or said.tool_calls or said.drafted or delta.logprobs:
                choice = _chunk(index, fields)
                if delta.logprobs is not None:
                    choice["logprobs"] = chat_logprobs(self.tokenizer, delta.logprobs)
                if said.drafted is not None:
                    choice["drafted"] = said.drafted
                yield head | {"choices": [choice]} | so_far(self.body, self.prompt, streams.stats(index))
            if delta.output is not None:
                yield head | {"choices": [_chunk(index, {}, replies[index].finish_reason(delta.output))]}
        if self.body.include_usage or self.body.show_drafts:
            stats = [streams.stats(index) for index in range(len(replies))]
            yield head | {"choices": []} | totals(self.body, [self.prompt], stats)


def _chunk(index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": reason, "logprobs": None}
