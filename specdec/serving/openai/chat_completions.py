"""POST /v1/chat/completions: answers messages through the model's chat template, whole or streamed."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from specdec.config import SamplingParams
from specdec.runtime.request_output import GenerationOutput, StreamDelta
from specdec.sampling.log_probs import TokenLogprob
from specdec.serving.http.bodies import BodyRoute
from specdec.serving.http.faults import refused
from specdec.serving.openai import answer_models as answers
from specdec.serving.openai.chat_message import MessageBuilder, whole_message
from specdec.serving.openai.chat_template import chat_prompt
from specdec.serving.openai.logprob_shapes import chat_logprobs
from specdec.serving.openai.protocol import ChatRequest
from specdec.serving.openai.sampling_fields import require_logprobs, sampling_params, truncate_prompt
from specdec.serving.openai.text_answer import TextAnswer, whole_delta
from specdec.serving.state import ServeState, StateDep
from specdec.serving.tools.answer_parser import AnswerParser, AnswerReader
from specdec.serving.tools.reasoning_formats import reasoning_format
from specdec.serving.tools.tool_choice import ToolChoice

router = APIRouter(route_class=BodyRoute)
PROMPT_END = 64
"""Tokens at the end of a prompt in which a template may open an answer, and a thought in it."""


@router.post("/v1/chat/completions", response_model=answers.ChatCompletion, responses=answers.ASKING | answers.STREAMED)
async def chat_completions(body: ChatRequest, state: StateDep) -> Response:
    return await ChatTextAnswer(body, state).respond()


class ChatTextAnswer(TextAnswer):
    body: ChatRequest
    chunk_kind = "chat.completion.chunk"
    scored = False
    """Are log-probabilities returned for texts only, not for thoughts and calls?"""

    def __init__(self, body: ChatRequest, state: ServeState) -> None:
        self.choice = ToolChoice(body, getattr(state.tokenizer, "chat_template", None), state.tool_parser)
        super().__init__(body, state, "chatcmpl", "chat.completion")

    @cached_property
    def _builders(self) -> list[MessageBuilder]:
        """A builder per choice. Made after the number of choices was checked."""
        return [MessageBuilder(thoughts=self.body.include_reasoning is not False) for _ in self.readers]

    async def read_request(self) -> SamplingParams:
        self.engine.require_places(max(1, self.n))
        return await self.engine.off_loop(self._read)

    def _read(self) -> SamplingParams:
        prompt = chat_prompt(self.body, self.state, self.choice.tools)
        params = self._make_params(len(prompt))
        if self.body.truncate_prompt_tokens is not None:
            prompt = truncate_prompt(self.body, self.engine, prompt, params.max_new_tokens)
            params = self._make_params(len(prompt))
        self.prompts = [prompt]
        if params.stop and self._may_think:
            params = replace(params, thought_marks=self._make_parser(params).thought_marks)
        return params

    @property
    def _may_think(self) -> bool:
        """May the answer have thoughts, marked as the server was told or as its tool format does?"""
        native = self.state.tool_parser
        return reasoning_format(self.settings.reasoning_parser) is not None or (native is not None and native.thinks)

    def make_reader(self) -> AnswerReader:
        return AnswerReader(
            self.tokenizer,
            self._make_parser(self.params),
            self.params.stop_strings,
            max_calls=self.choice.max_calls,
            show_drafts=self.body.show_drafts,
            scored=self.scored and bool(self.body.logprobs),
        )

    def _make_parser(self, params: SamplingParams) -> AnswerParser:
        """Make the parser of an answer, which has read what the prompt has begun."""
        body, thoughts = self.body, reasoning_format(self.settings.reasoning_parser)
        kind, native = self.choice.parser, self.state.tool_parser
        if params.grammar is not None:  # a grammar leaves no room for thoughts
            thoughts = None
        elif kind is None and native is not None and native.thinks:
            kind = native
        parser = (kind or AnswerParser)(self.choice.parameters, thoughts)
        prompt_end = self.tokenizer.decode(self.prompts[0][-PROMPT_END:], skip_special_tokens=False)
        last = body.messages[-1].content if body.continue_final_message else ""
        parser.prime(parser.begun_by(prompt_end, last if isinstance(last, str) else prompt_end))
        return parser

    def _make_params(self, prompt_len: int) -> SamplingParams:
        body = self.body
        asked = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
        if body.max_completion_tokens not in (None, asked):
            message = (
                f"max_tokens={asked} and max_completion_tokens={body.max_completion_tokens} differ; give one of them"
            )
            raise refused("max_completion_tokens", message)
        if body.top_logprobs and not body.logprobs:
            message = f"top_logprobs={body.top_logprobs} goes with logprobs=true; set that too"
            raise refused("top_logprobs", message)
        max_new_tokens = self.engine.most_new_tokens(prompt_len) if asked is None else asked
        top = require_logprobs(body.top_logprobs or 0, "top_logprobs") if body.logprobs else None
        return sampling_params(body, self.state, max_new_tokens, top, self.choice.grammar)

    def _whole_answer(self, outputs: list[GenerationOutput]) -> dict[str, Any]:
        return super()._whole_answer(outputs) | self._prompt_ids(0) | self._prompt_scores(outputs[0])

    def _usage_and_drafts(self, samples: Sequence[int], *, usage: bool) -> dict[str, Any]:
        found = super()._usage_and_drafts(samples, usage=usage)
        if usage:
            thoughts = sum(self.readers[index].thought_tokens for index in samples)
            found["usage"]["completion_tokens_details"] = {"reasoning_tokens": thoughts}
        return found

    def _choice(self, index: int, output: GenerationOutput) -> dict[str, Any]:
        delta, reader = whole_delta(output), self.readers[index]
        message: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None}
        message |= whole_message(self._builders[index].deltas(reader.read(delta)))
        if "tool_calls" in message:
            message["content"] = message["content"] or None
        choice = {"index": index, "message": message, "finish_reason": reader.finish_reason(output)}
        return choice | self._extra_fields(index, delta)

    async def _opening(self, index: int) -> dict[str, Any]:
        return {"choices": [_chunk(index, {"role": "assistant", "content": ""})]} | self._prompt_ids(index)

    def _delta_choices(self, index: int, delta: StreamDelta, *, first: bool) -> list[dict[str, Any]]:
        """The first has the details next to the text."""
        deltas = self._builders[index].deltas(self.readers[index].read(delta))
        details = self._extra_fields(index, delta)
        if not deltas and (details.get("drafted") or delta.logprobs or details.get("token_ids")):
            deltas.append({"content": ""})
        return [_chunk(index, fields) | (details if at == 0 else {}) for at, fields in enumerate(deltas)]

    def _end_choices(self, index: int, delta: StreamDelta) -> list[dict[str, Any]]:
        assert delta.output is not None
        return [_chunk(index, {}, self.readers[index].finish_reason(delta.output))]

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        return chat_logprobs(self.tokenizer, logprobs)


def _chunk(index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": reason, "logprobs": None}
