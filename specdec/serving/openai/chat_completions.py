"""POST /v1/chat/completions: messages through the model's chat template, answered whole or as they come."""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from specdec.config import SamplingParams
from specdec.runtime.request import GenerationOutput, StreamDelta
from specdec.sampling.log_probs import TokenLogprob
from specdec.serving.http.bodies import BodyRoute
from specdec.serving.http.events import off_loop
from specdec.serving.openai.logprob_shapes import chat_logprobs
from specdec.serving.openai.protocol import ChatRequest, Message, refused
from specdec.serving.openai.reply import MakeReply, Reply, ReplyDelta
from specdec.serving.openai.sampling_fields import require_logprobs, sampling_params, shortened
from specdec.serving.openai.text_answer import TextAnswer
from specdec.serving.state import ServeState, State
from specdec.serving.streams import Streams
from specdec.serving.tools.reasoning import opened_by, reasoning_format
from specdec.serving.tools.tool_choice import ToolChoice
from specdec.text.prompts import template_text

router = APIRouter(route_class=BodyRoute)
PROMPT_END = 16
"""Tokens in which a template opens a thought, and closes an empty one."""


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(body: ChatRequest, request: Request, state: State) -> Response:
    return await Chat(body, state).respond(request)


class Chat(TextAnswer):
    """One request."""

    body: ChatRequest
    chunk_kind = "chat.completion.chunk"

    def __init__(self, body: ChatRequest, state: ServeState) -> None:
        self.choice = ToolChoice(body, getattr(state.tokenizer, "chat_template", None), state.tool_parser)
        super().__init__(body, state, "chatcmpl", "chat.completion")

    async def submit(self) -> tuple[Streams, MakeReply]:
        self.engine.require_places(max(1, self.n))
        prompt = await chat_prompt(self.body, self.state, self.choice.template_kwargs)
        params = await self.engine.off_loop(partial(self._params, len(prompt)))
        if self.body.truncate_prompt_tokens is not None:
            prompt = shortened(self.body, self.engine, prompt, params.max_new_tokens)
            params = await self.engine.off_loop(partial(self._params, len(prompt)))
        self.prompts = [prompt]
        thoughts = reasoning_format(self.settings.reasoning_parser)
        if params.grammar is not None:  # it leaves no room for thoughts
            thoughts = None
        end = self.tokenizer.decode(prompt[-PROMPT_END:], skip_special_tokens=False) if thoughts else ""
        make_reply = partial(
            Reply,
            self.tokenizer,
            params.stop_strings,
            self.body.show_drafts,
            self.choice.parser,
            self.choice.parameter_types,
            self.choice.max_calls,
            thoughts,
            opened=thoughts is not None and opened_by(end, thoughts),
        )
        return await self.engine.submit(self.prompts, params, priority=self.body.priority), make_reply

    def _params(self, prompt_len: int) -> SamplingParams:
        body = self.body
        asked = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
        if body.max_completion_tokens not in (None, asked):
            said = f"max_tokens={asked} and max_completion_tokens={body.max_completion_tokens} differ; give one of them"
            raise refused("max_completion_tokens", said)
        if body.top_logprobs is not None and not body.logprobs:
            message = f"top_logprobs={body.top_logprobs} goes with logprobs=true; set that too"
            raise refused("top_logprobs", message)
        max_new_tokens = self.engine.most_new_tokens(prompt_len) if asked is None else asked
        top = require_logprobs(body.top_logprobs or 0, "top_logprobs") if body.logprobs else None
        return sampling_params(body, self.state, max_new_tokens, top, self.choice.grammar)

    def _whole(self, outputs: list[GenerationOutput], make_reply: MakeReply) -> dict[str, Any]:
        return super()._whole(outputs, make_reply) | self._prompt_ids(0) | self._prompt_scores(outputs[0])

    def _thought(self, said: ReplyDelta) -> dict[str, Any]:
        shown = said.reasoning and self.body.include_reasoning is not False
        return {"reasoning_content": said.reasoning} if shown else {}

    def _choice(self, index: int, output: GenerationOutput, reply: Reply) -> dict[str, Any]:
        said = reply.read_whole(output)
        message: dict[str, Any] = {"role": "assistant", "content": said.content, "refusal": None}
        if said.tool_calls:
            message |= {"content": said.content or None, "tool_calls": said.tool_calls}
        choice = {
            "index": index,
            "message": message | self._thought(said),
            "finish_reason": reply.finish_reason(output),
        }
        return choice | self._details(index, output, said)

    def _opening(self, index: int) -> dict[str, Any]:
        return {"choices": [_chunk(index, {"role": "assistant", "content": ""})]} | self._prompt_ids(index)

    async def _grown(
        self, index: int, delta: StreamDelta, reply: Reply, streams: Streams
    ) -> AsyncIterator[dict[str, Any]]:
        choice = await off_loop(len(delta.token_ids), partial(self._added, index, delta, reply))
        if choice is not None:
            yield {"choices": [choice]}
        if delta.output is not None:
            yield {"choices": [_chunk(index, {}, reply.finish_reason(delta.output))]}

    def _added(self, index: int, delta: StreamDelta, reply: Reply) -> dict[str, Any] | None:
        """The choice of a chunk; None where it would say nothing."""
        said = reply.read(delta)
        fields = self._thought(said) | ({"tool_calls": said.tool_calls} if said.tool_calls else {})
        if said.content or not fields:
            fields["content"] = said.content
        details = self._details(index, delta, said)
        if not (any(fields.values()) or said.drafted or delta.logprobs or details.get("token_ids")):
            return None
        return _chunk(index, fields) | details

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        return chat_logprobs(self.tokenizer, logprobs)


def _chunk(index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": reason, "logprobs": None}


ROLES = {"developer": "system"}
"""Roles that OpenAI renamed; templates know the old name."""
NOT_OPTIONS = {
    "chat_template": "a template is a program, and this server runs its own",
    "tools": "tools say it",
    "special_tokens_in_content": "the server's own setting says it",
}
"""What `chat_template_kwargs` may not hold, and why."""


async def chat_prompt(body: ChatRequest, state: ServeState, tools: dict[str, Any]) -> list[int]:
    """The token ids of a chat. tools: what its template is told of them."""
    options = body.chat_template_kwargs or {}
    for name, said in NOT_OPTIONS.items():
        if name in options:
            raise refused("chat_template_kwargs", f"chat_template_kwargs holds {name}: {said}; leave it out")
    plain = (_plain(f"messages[{index}]", message) for index, message in enumerate(body.messages))
    messages = await state.engine.off_loop(lambda: list(plain))
    return await state.engine.chat_prompt(
        messages,
        special_tokens_in_content=state.settings.special_tokens_in_content,
        **_options(body, getattr(state.tokenizer, "chat_template", None)) | options | tools,
    )


def _options(body: ChatRequest, template: Any) -> dict[str, Any]:
    """What fields of a chat tell its template: efforts and verbosity to one that reads them, a hint elsewhere."""
    options: dict[str, Any] = {}
    if body.continue_final_message:
        goes_on = "continue_final_message=true goes on with the last message"
        if body.add_generation_prompt:
            message = f"{goes_on}, add_generation_prompt=true begins another; leave one out"
            raise refused("continue_final_message", message)
        if not body.messages[-1].content:
            raise refused("continue_final_message", f"{goes_on}, and that has no text; give it some")
        options["continue_final_message"] = True
    elif body.add_generation_prompt is False:
        options["add_generation_prompt"] = False
    text = template_text(template)
    for name in ("reasoning_effort", "verbosity"):
        if (value := getattr(body, name)) is not None and name in text:
            options[name] = value
    if body.reasoning_effort == "none" and "enable_thinking" in text:
        options["enable_thinking"] = False
    return options


def _plain(place: str, message: Message) -> dict[str, Any]:
    """Parts of text are joined by line ends, arguments of calls are objects, what is not said is left out. Raises
    ApiError for parts that are no text, with their place."""
    plain = message.model_dump(exclude_none=True, exclude={"annotations", "type"})
    plain["role"] = ROLES.get(message.role, message.role)
    if isinstance(message.content, list):
        plain["content"] = "\n".join(_part_text(f"{place}.content", part) for part in message.content)
    elif message.content is None:
        if not message.tool_calls:
            raise refused(f"{place}.content", f"{place}.content is missing; text is expected")
        plain["content"] = ""  # templates add it to other text
    for number, call in enumerate(plain.get("tool_calls", ())):
        call.pop("index", None)
        try:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
        except (ValueError, RecursionError):
            param = f"{place}.tool_calls[{number}].function.arguments"
            raise refused(param, f"{param} is not JSON; an object is expected") from None
    return plain


def _part_text(place: str, part: Mapping[str, Any]) -> str:
    """The text of one part of a message."""
    if part.get("type") != "text":
        what = f"a part of type {part.get('type')!r:.80}"
    elif part.keys() != {"type", "text"}:
        what = "a text part with other fields"
    elif not isinstance(part["text"], str):
        what = "a part whose text is no string"
    else:
        return part["text"]
    raise refused(place, f'{place} holds {what}; only {{"type": "text", "text": ...}} is read')
