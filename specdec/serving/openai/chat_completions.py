"""POST /v1/chat/completions: messages through the model's chat template, answered whole or as they come."""

import asyncio
import functools
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from specdec.config import SamplingParams
from specdec.errors import ConfigError
from specdec.runtime.request import GenerationOutput
from specdec.serving.http.bodies import BodyRoute
from specdec.serving.http.events import EventStream, json_response, off_loop, while_connected
from specdec.serving.http.faults import ApiError
from specdec.serving.openai.messages import template_messages
from specdec.serving.openai.prompt_logprobs import vllm_prompt_logprobs
from specdec.serving.openai.protocol import ChatRequest
from specdec.serving.openai.reply import Reply, ReplyFormat
from specdec.serving.openai.sampling_fields import blaming, require_logprobs, sampling_params, shortened
from specdec.serving.openai.template_options import template_options
from specdec.serving.openai.usage import chat_logprobs, so_far, totals
from specdec.serving.state import ServeState, State
from specdec.serving.streams import Streams
from specdec.serving.tools.reasoning import opened_by, reasoning_format
from specdec.serving.tools.tool_choice import ToolChoice

router = APIRouter(route_class=BodyRoute)
PROMPT_END = 16
"""Tokens in which a template opens a thought, and closes an empty one."""


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
        self.state = state
        self.engine = state.engine
        self.settings = state.settings
        self.tokenizer = state.tokenizer
        self.template = getattr(self.tokenizer, "chat_template", None)
        self.choice = ToolChoice(body, self.template, state.tool_parser)
        self.prompt: list[int] = []
        self.head = state.head("chatcmpl", "chat.completion", body.model)

    async def answer(self) -> Response:
        """The response, whole or begun."""
        streams, reply_format = await self.submit()
        if self.body.stream:
            return EventStream(streams, self._events(streams, reply_format))
        async with streams:
            outputs = await streams.outputs()
            return await asyncio.to_thread(lambda: json_response(self._whole(outputs, reply_format)))

    async def submit(self) -> tuple[Streams, ReplyFormat]:
        """Hand it in. -> what it brings, and how that is read"""
        self.engine.require_places(self.body.n if isinstance(self.body.n, int) and self.body.n > 0 else 1)
        self.prompt = await self._read_prompt()
        params = await asyncio.to_thread(self._params)
        if self.body.truncate_prompt_tokens is not None:
            self.prompt = shortened(self.body, self.engine, self.prompt, params.max_new_tokens)
            params = await asyncio.to_thread(self._params)
        reply_format = ReplyFormat(
            self.tokenizer,
            params.stop_strings,
            self.body.show_drafts,
            self.choice.parser,
            self.choice.parameter_types,
            self.choice.max_calls,
        )
        format = reasoning_format(self.settings.reasoning_parser)
        if format is not None and params.grammar is None:  # a grammar leaves no room for thoughts
            end = self.tokenizer.decode(self.prompt[-PROMPT_END:], skip_special_tokens=False)
            reply_format = replace(reply_format, reasoning=format, opened=opened_by(end, format))
        return await self.engine.submit([self.prompt], params, priority=self.body.priority), reply_format

    async def _read_prompt(self) -> list[int]:
        body = self.body
        options = dict(body.chat_template_kwargs or {})
        for name, said in (
            ("chat_template", "a template is a program, and this server runs its own"),
            ("tools", "tools say it"),
            ("special_tokens_in_content", "the server's own setting says it"),
        ):
            if name in options:
                raise ApiError(
                    400, f"chat_template_kwargs holds {name}: {said}; leave it out", param="chat_template_kwargs"
                )
        messages = await asyncio.to_thread(template_messages, body.messages)
        return await self.engine.chat_prompt(
            messages,
            special_tokens_in_content=self.settings.special_tokens_in_content,
            **template_options(body, self.template) | options | self.choice.template_kwargs,
        )

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
        return sampling_params(
            body, self.engine, self.settings, most, top, self.choice.grammar, client=self.state.client
        )

    def _whole(self, outputs: list[GenerationOutput], reply_format: ReplyFormat) -> dict[str, Any]:
        answer = self.head | {"choices": [self._choice(i, output, reply_format) for i, output in enumerate(outputs)]}
        if self.body.prompt_logprobs is not None:
            scores = outputs[0].prompt_logprobs or ()
            answer["prompt_logprobs"] = vllm_prompt_logprobs(self.tokenizer, scores, self.body.prompt_logprobs)
        if self.body.return_token_ids:
            answer["prompt_token_ids"] = self.prompt
        return answer | totals(self.body, [self.prompt], [output.stats for output in outputs], self.state)

    def _choice(self, index: int, output: GenerationOutput, reply_format: ReplyFormat) -> dict[str, Any]:
        reply = Reply(reply_format)
        said = reply.read_whole(output)
        message: dict[str, Any] = {"role": "assistant", "content": said.content, "refusal": None}
        if said.tool_calls:
            message |= {"content": said.content or None, "tool_calls": said.tool_calls}
        if said.reasoning and self.body.include_reasoning is not False:
            message["reasoning_content"] = said.reasoning
        choice = {"index": index, "message": message, "finish_reason": reply.finish_reason(output), "logprobs": None}
        if self.body.return_token_ids:
            choice["token_ids"] = output.token_ids
        if output.logprobs is not None:
            choice["logprobs"] = chat_logprobs(self.tokenizer, output.logprobs)
        if said.drafted is not None:
            choice["drafted"] = said.drafted
        return choice

    async def _events(self, streams: Streams, reply_format: ReplyFormat) -> AsyncIterator[dict[str, Any]]:
        """Chunks: who speaks, what is said, why it ends, each of every choice; then usage."""
        head = self.head | {"object": "chat.completion.chunk"}
        if self.body.include_usage:
            head["usage"] = None
        replies = [Reply(reply_format) for _ in streams.samples]
        for index in range(len(replies)):
            first = {"prompt_token_ids": self.prompt} if self.body.return_token_ids else {}
            yield head | {"choices": [_chunk(index, {"role": "assistant", "content": ""})]} | first
        async for index, delta in streams:
            said = await off_loop(len(delta.token_ids), functools.partial(replies[index].read, delta))
            thought = said.reasoning if self.body.include_reasoning is not False else ""
            fields: dict[str, Any] = (
                {"content": said.content} if said.content or not (said.tool_calls or thought) else {}
            )
            if thought:
                fields["reasoning_content"] = thought
            if said.tool_calls:
                fields["tool_calls"] = said.tool_calls
            ids = delta.token_ids if self.body.return_token_ids else None
            if said.content or thought or said.tool_calls or said.drafted or delta.logprobs or ids:
                choice = _chunk(index, fields)
                if ids is not None:
                    choice["token_ids"] = ids
                if delta.logprobs is not None:
                    shape = functools.partial(chat_logprobs, self.tokenizer, delta.logprobs)
                    choice["logprobs"] = await off_loop(len(delta.logprobs), shape)
                if said.drafted is not None:
                    choice["drafted"] = said.drafted
                yield head | {"choices": [choice]} | so_far(self.body, self.prompt, streams.stats(index), self.state)
            if delta.output is not None:
                yield head | {"choices": [_chunk(index, {}, replies[index].finish_reason(delta.output))]}
        if self.body.include_usage or self.body.show_drafts:
            stats = [streams.stats(index) for index in range(len(replies))]
            yield head | {"choices": []} | totals(self.body, [self.prompt], stats, self.state)


def _chunk(index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": reason, "logprobs": None}
