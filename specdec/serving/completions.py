"""POST /v1/completions: texts or token ids continued as they are, whole or as they come."""

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
from specdec.serving.protocol import CompletionRequest
from specdec.serving.reply import Reply, Wanted
from specdec.serving.sampling_fields import blaming, sampling_params
from specdec.serving.state import ServeState, State
from specdec.serving.usage import completion_logprobs, so_far, totals

router = APIRouter()
MAX_TOKENS = 16
"""Where a request says nothing: OpenAI's."""


@router.post("/v1/completions", response_model=None)
async def completions(body: CompletionRequest, request: Request, state: State) -> Response:
    try:
        return await while_connected(request.receive, Completion(body, state).answer())
    except ConfigError as error:
        raise blaming(error, body) from error


class Completion:
    """One request. Choice number i is sample i % n of prompt i // n."""

    def __init__(self, body: CompletionRequest, state: ServeState) -> None:
        self.body = body
        self.engine = state.engine
        self.settings = state.settings
        self.tokenizer = state.engine.engine.tokenizer
        self.prompts: list[list[int]] = []
        self.echoes: list[str] = []  # of each prompt; empty without `echo`
        self.n = 1 if body.n is None else body.n
        self.head = state.head("cmpl", "text_completion", body.model)

    async def answer(self) -> Response:
        """The response, whole or begun."""
        params = self._params()
        await self._read_prompts()
        wanted = Wanted(self.tokenizer, params.stop_strings, self.body.show_drafts)
        streams = await self.engine.submit(self.prompts, params, priority=self.body.priority)
        if self.body.stream:
            return EventStream(streams, self._events(streams, wanted))
        async with streams:
            return JSONResponse(self._whole(await streams.outputs(), wanted))

    def _params(self) -> SamplingParams:
        body = self.body
        if body.best_of not in (None, self.n):
            raise ApiError(
                400, f"best_of={body.best_of}: all n={self.n} samples are returned; leave it out", param="best_of"
            )
        if body.echo and body.logprobs is not None:
            raise ApiError(
                400, "echo=true goes without logprobs: those of a prompt are not kept; leave one out", param="echo"
            )
        max_new_tokens = MAX_TOKENS if body.max_tokens is None else body.max_tokens
        return sampling_params(body, self.engine, self.settings, max_new_tokens, body.logprobs)

    async def _read_prompts(self) -> None:
        if not self.body.prompt:
            raise ApiError(400, "prompt=[]: at least one prompt is wanted", param="prompt")
        for prompt in self.body.prompt:
            ids = await self.engine.encode(prompt) if isinstance(prompt, str) else list(prompt)
            self.prompts.append(ids)
            if not self.body.echo:
                self.echoes.append("")
            else:
                self.echoes.append(prompt if isinstance(prompt, str) else self.engine.engine.decode(ids))

    def _whole(self, outputs: list[GenerationOutput], wanted: Wanted) -> dict[str, Any]:
        answer = self.head | {"choices": [self._choice(i, output, wanted) for i, output in enumerate(outputs)]}
        return answer | totals(self.body, self.prompts, [output.stats for output in outputs])

    def _choice(self, index: int, output: GenerationOutput, wanted: Wanted) -> dict[str, Any]:
        reply = Reply(wanted)
        said = reply.read_whole(output)
        choice = _choice(index, self.echoes[index // self.n] + said.content, reply.finish_reason(output))
        if output.logprobs is not None:
            choice["logprobs"], _ = completion_logprobs(self.tokenizer, output.logprobs, 0)
        if said.drafted is not None:
            choice["drafted"] = said.drafted
        return choice

    async def _events(self, streams: Streams, wanted: Wanted) -> AsyncIterator[dict[str, Any]]:
        """Chunks: the prompt if it is wanted, what follows it, why that ends; then usage."""
        head = self.head | ({"usage": None} if self.body.include_usage else {})
        replies = [Reply(wanted) for _ in streams.samples]
        count = len(replies)
        offsets = [0] * count
        for index in range(count if self.body.echo else 0):
            yield head | {"choices": [_choice(index, self.echoes[index // self.n])]}
        async for index, delta in streams:
            said = replies[index].read(delta)
            reason = None if delta.output is None else replies[index].finish_reason(delta.output)
            if not (said.content or delta.logprobs or reason):
                continue
            choice = _choice(index, said.content, reason)
            if delta.logprobs is not None:
                choice["logprobs"], offsets[index] = completion_logprobs(self.tokenizer, delta.logprobs, offsets[index])
            if said.drafted is not None:
                choice["drafted"] = said.drafted
            prompt = self.prompts[index // self.n]
            yield head | {"choices": [choice]} | so_far(self.body, prompt, streams.stats(index))
        if self.body.include_usage or self.body.show_drafts:
            stats = [streams.stats(index) for index in range(count)]
            yield head | {"choices": []} | totals(self.body, self.prompts, stats)


def _choice(index: int, text: str, reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "finish_reason": reason, "logprobs": None}
